"""Figures of every step for Prometheus, by way of `on_step`.

    pip install prometheus-client
    python examples/prometheus_metrics.py MODEL [--port 9100]

It answers a few prompts, and shows what Prometheus then reads at http://localhost:9100/metrics.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from urllib.request import urlopen

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from batchkit import Engine, SamplingParams, StepReport


def step_metrics(registry: CollectorRegistry = REGISTRY) -> Callable[[StepReport], None]:
    """What to give an engine as `on_step`."""
    steps = Histogram("batchkit_step_seconds", "Seconds of a step", ["part"], registry=registry)
    tokens = Counter("batchkit_tokens", "Tokens computed, and tokens generated", ["kind"], registry=registry)
    events = Counter("batchkit_events", "Preemptions, requests ended, failed steps", ["kind"], registry=registry)
    now = Gauge("batchkit_now", "Sequences that wait and run, KV blocks in use", ["what"], registry=registry)

    def observe(report: StepReport) -> None:
        steps.labels("schedule").observe(report.schedule_s)
        steps.labels("execute").observe(report.execute_s)
        steps.labels("sample").observe(report.sample_s)
        tokens.labels("computed").inc(report.output.num_tokens)
        tokens.labels("generated").inc(report.num_new_tokens)
        events.labels("preempted").inc(len(report.output.preempted))
        events.labels("finished").inc(report.num_finished)
        events.labels("failed step").inc(report.error is not None)
        now.labels("waiting").set(report.num_waiting)
        now.labels("running").set(report.num_running)
        now.labels("KV blocks").set(report.num_used_blocks)

    return observe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--dtype", default="auto", help="such as float32, faster on a CPU without bf16 units")
    args = parser.parse_args()

    server, thread = start_http_server(args.port)
    with Engine.from_pretrained(args.model, dtype=args.dtype, kv_memory="256MiB", on_step=step_metrics()) as engine:
        engine.generate([f"{i} plus {i} is" for i in range(8)], SamplingParams(temperature=0, max_tokens=8))
    with urlopen(f"http://localhost:{server.server_port}/metrics") as page:
        print("".join(line for line in page.read().decode().splitlines(keepends=True) if line.startswith("batchkit_")))
    server.shutdown()
    server.server_close()
    thread.join()


if __name__ == "__main__":
    main()
