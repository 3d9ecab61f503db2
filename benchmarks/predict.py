"""How well a cost model that is fitted to step traces predicts what was measured: the wall time of each policy.

Takes what ``batchkit bench variance --json MEASURED --trace-folder TRACES`` wrote, fits the cost of a step to the
traces, and lets ``batchkit simulate variance --calibration`` repeat the experiment: once with a fit to all traces, and
once for each policy with a fit that saw none of that policy's.

    python benchmarks/predict.py MEASURED TRACES [--json FILE] [--calibration FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from batchkit import cli
from batchkit.experiment.calibrate import Calibration, calibrate
from batchkit.experiment.policies import POLICIES
from batchkit.trace import Trace, read_trace

Place = tuple[str, str, int]
"""A run: the cell, the policy, the seed."""
SECONDS = ("measured_s", "fitted_s", "unseen_s")


def wall_times(experiment: dict[str, Any]) -> dict[Place, float]:
    """Seconds from the first request to the last token of each run."""
    return {
        (cell["cell"], run["policy"], run["seed"]): run["figures"]["window_s"]
        for cell in experiment["cells"]
        for run in cell["runs"]
    }


def error(row: dict[str, Any], name: str) -> float:
    """How much too long a time is, as a share of the measured one."""
    return float(row[name]) / float(row["measured_s"]) - 1


def options(settings: dict[str, Any], policies: Iterable[str]) -> list[str]:
    """The same experiment, as options of ``batchkit simulate variance``."""
    names = ["n", "mean", "fixed", "kv_tokens", "kv_sequences", "block_size", "allocator", "declared", "dtype"]
    if settings["fixed"] is not None or settings["original"]:
        names.remove("mean")
    if settings["kv_tokens"] is not None:
        names.remove("kv_sequences")
    lists = {"caps": settings["caps"], "seeds": settings["seeds"], "policies": policies}
    given = {
        **{name: settings[name] for name in names if settings[name] is not None},
        "prompt": ":".join(map(str, settings["prompt"])),
        **{name: ",".join(map(str, values)) for name, values in lists.items()},
    }
    texts = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    return [*texts, *(["--original"] if settings["original"] else [])]


def measurement(path: Path) -> dict[str, Any]:
    """What was measured, if it can be predicted: of ``bench variance``, with policies that a name makes again."""
    try:
        experiment = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        sys.exit(f"{path} cannot be read: {fault}")
    if not isinstance(experiment, dict) or experiment.get("command") != "bench variance":
        command = experiment.get("command") if isinstance(experiment, dict) else None
        sys.exit(f"{path} must be of bench variance, and its command is {command!r}")
    policies = {run["policy"] for cell in experiment["cells"] for run in cell["runs"]}
    if strangers := sorted(policies - POLICIES.keys()):
        sys.exit(f"{path} has {', '.join(strangers)}: only policies of --policies are simulated, {', '.join(POLICIES)}")
    if len(policies) < 2:
        sys.exit(f"{path} has {len(policies)} policy: a fit that saw none of a policy's steps needs another policy's")
    return experiment


def simulated(settings: dict[str, Any], found: Calibration, policies: Iterable[str]) -> dict[Place, float]:
    """The wall times by a cost model."""
    with tempfile.TemporaryDirectory() as folder:
        cost, result = Path(folder) / "cost.json", Path(folder) / "result.json"
        found.save(cost)
        command = ["simulate", "variance", settings["model"], "--calibration", str(cost), "--json", str(result)]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = cli.main([*command, *options(settings, policies)])
        if code:
            sys.exit(f"{said.getvalue()}\nthe simulation ended with {code}")
        return wall_times(json.loads(result.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted beside measured wall times.")
    parser.add_argument("measured", type=Path, help="what bench variance wrote with --json")
    parser.add_argument("traces", type=Path, help="its --trace-folder")
    parser.add_argument("--json", type=Path, help="gets the figures")
    parser.add_argument("--calibration", type=Path, help="gets the cost model that is fitted to all traces")
    args = parser.parse_args()
    experiment = measurement(args.measured)
    settings, measured = experiment["settings"], wall_times(experiment)
    try:
        traces: dict[Place, Trace] = {
            place: read_trace(args.traces / place[0].replace(" ", "-") / f"{place[1]}-{place[2]}.jsonl")
            for place in measured
        }
    except (OSError, ValueError) as fault:
        sys.exit(f"a run of {args.measured} has no trace: {fault}")
    policies = list(dict.fromkeys(policy for _, policy, _ in measured))

    everything = calibrate(traces.values(), about={"traces": len(traces)})
    if args.calibration is not None:
        everything.save(args.calibration)
    fitted = simulated(settings, everything, policies)
    unseen: dict[Place, float] = {}
    for policy in policies:
        others = [trace for (_, name, _), trace in traces.items() if name != policy]
        its_own = [trace for (_, name, _), trace in traces.items() if name == policy]
        found = calibrate(others, about={"without": policy}, held_out=its_own)
        unseen |= simulated(settings, found, [policy])

    rows: list[dict[str, Any]] = [
        {"cell": cell, "policy": policy, "seed": seed, "measured_s": seconds}
        | {"fitted_s": fitted[cell, policy, seed], "unseen_s": unseen[cell, policy, seed]}
        for (cell, policy, seed), seconds in measured.items()
    ]
    totals = [
        {"cell": "all", "policy": policy, "seed": "all"}
        | {name: sum(row[name] for row in rows if row["policy"] == policy) for name in SECONDS}
        for policy in policies
    ]
    print(f"{'':<9}{'policy':<16}{'seed':>5}{'measured':>10}{'fitted':>10}{'error':>8}{'unseen':>10}{'error':>8}")
    for row in rows + totals:
        cells = "".join(f"{row[name]:>9.1f}s{error(row, name):>+8.1%}" for name in SECONDS[1:])
        print(f"{row['cell']:<9}{row['policy']:<16}{row['seed']:>5}{row['measured_s']:>9.1f}s{cells}")
    for kind, some in (("one run", rows), ("a policy's runs together", totals)):
        for name in SECONDS[1:]:
            errors = [error(row, name) for row in some]
            mean = sum(map(abs, errors)) / len(errors)
            print(f"{name.removesuffix('_s')}, {kind}: {mean:.1%} off in the mean, {max(errors, key=abs):+.1%} at most")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
