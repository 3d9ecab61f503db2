"""The 2023 experiment on continuous batching, simulated: its systems and loads, beside every number that is known.

"How continuous batching enables 23x throughput in LLM inference while reducing p50 latency", Anyscale, 2023; its code,
with the settings of every system, is in anyscale/llm-continuous-batching-benchmarks. OPT-13B in float16 on one A100 of
40 GB; 1,000 prompts of 512 tokens at once; the outputs are the very lists of the authors. Bandwidth and FLOP/s are the
device's; each system has one fixed cost per step, the same at all caps, and FasterTransformer's server sleeps for a
second before each batch. Those costs are all that is fitted:

* naive, 19 ms: to the 81 tokens per second at cap 1536; FasterTransformer, 3 ms: to 4 times that; text-generation-
  inference, 50 ms: to 8 times; vLLM of mid-2023, 24 ms: to 23 times.

    python benchmarks/original.py [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from batchkit import (
    ChunkedPrefillScheduler,
    RooflineCost,
    StaticScheduler,
    WaitingServedScheduler,
)
from batchkit.costs import DEVICES
from batchkit.experiment.compare import FIGURES, Comparison, Run, compare
from batchkit.experiment.loads import Requests, Workload, all_at_once, fixed, open_loop, original, poisson, uniform
from batchkit.experiment.plots import throughput_plot
from batchkit.experiment.policies import Policy, System
from batchkit.experiment.targets import SimulatedTarget
from batchkit.hf.shape import model_shape

CAPS = {32: 16, 128: 12, 512: 8, 1536: 4}
"""Cap of the output length -> the batch size that the authors gave the static systems."""
TOKEN_BUDGETS = {32: 8700, 128: 7500, 512: 8100, 1536: 8100}
"""Of the naive continuous systems: all tokens that their requests may reach; of vLLM: tokens in a step."""
KV_TOKENS = 15_744
"""KV slots that vLLM had beside the weights on that card: 984 blocks of 16."""

NAIVE = System(overhead_s=0.019, padded=True)
FASTER_TRANSFORMER = System(overhead_s=0.003, batch_overhead_s=1.0, padded=True)
TGI = System(overhead_s=0.050, padded=True)
VLLM = System(overhead_s=0.024)

KNOWN = {
    "naive static": "81 tok/s at cap 1536",
    "FasterTransformer": "4x",
    "naive continuous": "8x",
    "vLLM": "up to 23x, about 1,860 tok/s",
}
"""What is known of the original; at cap 1536, in multiples of naive static."""


class WholePrompts(ChunkedPrefillScheduler):
    """vLLM of mid-2023: whole prompts join steps that decode, KV blocks just in time, the newest preempted."""

    chunked: ClassVar[bool] = False


def systems(cap: int) -> list[Policy]:
    """The systems of the original, in its order."""
    batch, budget = CAPS[cap], TOKEN_BUDGETS[cap]
    whole = 512 * batch  # a batch is prefilled in one step
    return [
        Policy(
            name="naive static",
            scheduler=StaticScheduler,
            pad_to_longest=True,
            max_num_seqs=batch,
            max_tokens_per_step=whole,
            system=NAIVE,
        ),
        Policy(
            name="FasterTransformer",
            scheduler=StaticScheduler,
            max_num_seqs=batch,
            max_tokens_per_step=whole,
            system=FASTER_TRANSFORMER,
        ),
        Policy(
            name="naive continuous",
            scheduler=WaitingServedScheduler,
            arguments={"waiting_served_ratio": 1.2, "max_waiting_steps": 7},
            kv_tokens=budget,
            max_tokens_per_step=budget,
            system=TGI,
        ),
        Policy(name="vLLM", scheduler=WholePrompts, max_tokens_per_step=budget, system=VLLM),
    ]


def chain(cap: int) -> list[Policy]:
    """From naive static to vLLM by one change at a time; each is named by what it changes."""
    naive, faster, continuous, vllm = systems(cap)
    roomy = replace(continuous, kv_tokens=None)
    awake = replace(FASTER_TRANSFORMER, batch_overhead_s=0.0)
    return [
        naive,
        replace(faster, name="pad to the batch's longest", system=NAIVE),
        replace(faster, name="FasterTransformer's costs"),
        replace(faster, name="no sleep before a batch", system=awake),
        replace(continuous, name="join in groups, by a token budget", system=awake),
        replace(continuous, name="naive continuous's costs"),
        replace(roomy, name="vLLM's memory"),
        replace(roomy, name="no padding", system=replace(TGI, padded=False)),
        replace(roomy, name="vLLM's costs", system=VLLM),
        replace(vllm, name="join at every step, blocks just in time"),
    ]


def throughput(target: SimulatedTarget, plot: Path | None) -> dict[str, Any]:
    """The table of caps and systems, printed and returned; and the picture of it."""
    print(
        f"\n{'cap':>5}  {'system':<20}{'prompt/s':>9}{'gen./s':>8}{'both/s':>8}{'factor':>8}"
        f"{'rows':>6}{'steps':>9}  known"
    )
    result: dict[str, Any] = {}
    runs: dict[int, list[Run]] = {cap: [] for cap in CAPS}
    for cap, batch in CAPS.items():
        for policy in systems(cap):
            # The static systems were given whole batches.
            count = -(-1000 // batch) * batch if policy.scheduler is StaticScheduler else 1000
            found = compare([policy], load(cap, count), target=target)
            runs[cap] += found.runs
            one = means(found, policy.name)
            result[f"{cap} {policy.name}"] = one
            factor = one["tokens_per_s"] / result[f"{cap} naive static"]["tokens_per_s"]
            print(
                f"{cap:>5}  {policy.name:<20}{one['prompt_per_s']:>9.0f}{one['generated_per_s']:>8.0f}"
                f"{one['tokens_per_s']:>8.0f}{factor:>7.1f}x{one['mean_rows']:>6.1f}{one['steps']:>9,.0f}  "
                f"{KNOWN[policy.name] if cap == 1536 else ''}"
            )
    if plot is not None:
        cells: dict[float, Comparison] = {
            cap: Comparison(workload=f"cap {cap}", runs=tuple(some), is_simulated=True) for cap, some in runs.items()
        }
        throughput_plot(plot, cells, over="cap of the output lengths, tokens")
    return result


def means(found: Comparison, policy: str) -> dict[str, float]:
    """Every figure of a policy that there is: what comes all at once keeps up with no rate."""
    figures = {name: found.figure(policy, name).mean for name in FIGURES}
    return {name: figure for name, figure in figures.items() if math.isfinite(figure)}


def load(cap: int, count: int) -> Workload:
    """Prompts of 512 tokens at once; outputs as the authors drew them, declared truly."""
    return all_at_once(Requests(prompts=fixed(512), outputs=original(cap)), num_requests=count)


def attribution(target: SimulatedTarget, cap: int = 1536) -> list[dict[str, Any]]:
    """Where the factor between naive static and vLLM comes from."""
    found = compare(chain(cap), load(cap, 1000), target=target)
    print(f"\nFrom naive static to vLLM at cap {cap}, one change at a time:")
    rates = [found.figure(name, "tokens_per_s").mean for name in found.policies]
    steps = []
    for name, before, after in zip(found.policies, [rates[0], *rates], rates, strict=False):
        steps.append({"change": name, "tokens_per_s": after, "factor": after / before})
        print(f"  {name:<42}{after:>8.0f} tok/s{after / before:>8.2f}x")
    print(f"  {'in all':<42}{rates[-1]:>8.0f} tok/s{rates[-1] / rates[0]:>8.2f}x")
    return steps


def saturation(target: SimulatedTarget, count: int = 1000) -> dict[str, Any]:
    """vLLM's throughput and latency over the rate of arrivals: prompts of 128 to 384 tokens, outputs as at cap 1536."""
    print(f"\nvLLM, {count:,} Poisson arrivals: prompts of 128 to 384 tokens, outputs Exp(128) <= 1536")
    print(f"{'rate':>6}{'served/s':>10}{'both/s':>8}{'e2e p50':>9}{'p99':>7}{'per token p50':>15}{'p99':>7}")
    result = {}
    outputs = original(1536)
    for rate in (1, 4, 6, 8, 12, 16, 32):
        requests = Requests(prompts=uniform(128, 384), outputs=outputs)
        workload = open_loop(requests, num_requests=count, arrivals=poisson(rate))
        found: Comparison = compare([systems(1536)[-1]], workload, target=target)
        one = result[str(rate)] = means(found, "vLLM")
        print(
            f"{rate:>6}{one['requests_per_s']:>10.2f}{one['tokens_per_s']:>8.0f}{one['e2e_p50']:>9.1f}"
            f"{one['e2e_p99']:>7.1f}{one['normalised_p50']:>15.3f}{one['normalised_p99']:>7.3f}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="The 2023 experiment, simulated.")
    parser.add_argument("--model", default="benchmarks/models/opt-13b", help="a folder with OPT-13B's config.json")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/original.json"))
    parser.add_argument("--plot", type=Path, help="gets a picture of the throughput; needs matplotlib")
    args = parser.parse_args()
    model = model_shape(args.model, dtype="float16")
    cost = RooflineCost.of(model, DEVICES["a100-40"])
    target = SimulatedTarget(cost=cost, kv_tokens=KV_TOKENS, max_model_len=model.max_model_len)
    print(
        f"SIMULATED: no model ran. {model.num_params / 1e9:.2f}e9 parameters, {model.kv_bytes_per_token:,} bytes of KV "
        f"per token; a100-40: {cost.bandwidth / 1e9:,.0f} GB/s, {cost.flops / 1e12:.0f} TFLOP/s at {cost.efficiency:g}"
    )
    record = {
        "throughput": throughput(target, args.plot),
        "attribution": attribution(target),
        "saturation": saturation(target),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
