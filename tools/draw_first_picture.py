"""Draw the first picture of the docs, from runs of the engine: python tools/draw_first_picture.py [first.svg]."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from batchkit import (
    Engine,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    SamplingParams,
    Scheduler,
    SimulatedRunner,
    StaticScheduler,
    TrueLengths,
    VirtualClock,
)
from batchkit.show import View, picture, view
from batchkit.trace import read_trace

BLOCKS, BLOCK_SIZE, PROMPT, DECLARED = 8, 4, 4, 12
LENGTHS = {"A": 3, "B": 10, "C": 4, "D": 6}  # what each really gives; each declares DECLARED
POLICIES: dict[str, type[Scheduler]] = {
    "Static": StaticScheduler,
    "Orca: join at every step": OrcaScheduler,
    "Paged: blocks as tokens come": PagedScheduler,
}
DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "first.svg"


def run(policy: type[Scheduler], trace: Path) -> View:
    """Four requests through eight blocks under a policy."""
    clock = VirtualClock()
    geometry = KVGeometry(num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_model_len=32, vocab_size=100)
    runner = TrueLengths(SimulatedRunner(geometry, clock=clock))
    with Engine(runner, policy(PagedAllocator(BLOCKS, BLOCK_SIZE)), clock=clock, trace=trace) as engine:
        for name, length in LENGTHS.items():
            params = SamplingParams(max_tokens=DECLARED, temperature=0, stop_token_ids=(0,))
            engine.add_request(
                range(1, PROMPT + 1), params, request_id=name, arrival=0.0, metadata={"output_tokens": length}
            )
        while engine.has_unfinished():
            engine.step()
    return view(read_trace(trace), trace.name)


def first_picture() -> str:
    """The SVG."""
    with tempfile.TemporaryDirectory() as folder:
        views = [run(policy, Path(folder) / f"{policy.__name__}.jsonl") for policy in POLICIES.values()]
    label = (
        f"Four requests of {PROMPT} prompt tokens, each declaring {DECLARED} more and giving fewer, and {BLOCKS} KV "
        f"blocks of {BLOCK_SIZE} tokens, under static, Orca and paged batching"
    )
    return picture(views, list(POLICIES), label=label)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(first_picture(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
