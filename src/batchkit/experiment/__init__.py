"""Experiments: policies side by side on one workload, simulated or measured, with the gain attributed."""
