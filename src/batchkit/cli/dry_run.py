"""``batchkit generate --dry-run``: what would become of a file, without computing anything.

Every row goes through the same checks as in earnest: it is added to an engine and aborted again. The engine has the
real tokenizer and the real scheduler over as many KV blocks as there would be, and no weights.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace

from ..allocators import PagedAllocator
from ..engine import Engine
from ..errors import RequestTooLong
from ..simulate import SimulatedRunner
from .fit import prompt_ids, submit
from .lines import Lines
from .progress import Progress
from .rows import BadRow, RowReader

__all__ = ["dry_run", "preview_engine"]

_SHOWN = 5
"""As many bad rows are named."""


def preview_engine(args: argparse.Namespace) -> Engine:
    """An engine that takes requests as the real one would, and cannot run them. Sets ``args.attention``."""
    from ..hf.preview import preview

    found = preview(
        args.model,
        device=args.device,
        dtype=args.dtype,
        kv_memory=args.kv_memory,
        num_kv_blocks=args.num_kv_blocks,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs or args.scheduler.policy.default_max_num_seqs,
    )
    args.attention = found.attention
    geometry = found.geometry
    policy = args.scheduler.policy(
        PagedAllocator(geometry.num_blocks, geometry.block_size),
        max_model_len=geometry.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_tokens_per_step=args.max_tokens_per_step,
        **args.scheduler.arguments,
    )
    return Engine(SimulatedRunner(geometry, check_kv=False), policy, tokenizer=found.tokenizer)


def dry_run(engine: Engine, lines: Lines, reader: RowReader, args: argparse.Namespace) -> bool:
    """Print the report. Returns whether any row would fail."""
    lengths: Counter[int] = Counter()
    num_long = num_cut = num_bad = 0
    faults: list[str] = []
    progress = Progress(shown=not args.quiet)
    while (line := lines.get(wait=True)) is not None:
        number, data = line
        if progress.is_due():
            num_failed = num_bad + num_long
            progress.show(num_done=lines.num_rows - 1, num_failed=num_failed, total=lines.estimate())
        try:
            row = reader.read(number, data)
            token_ids = prompt_ids(engine, row)
            lengths[len(token_ids)] += 1
            request_id, num_dropped = submit(
                engine, replace(row, prompt=list(token_ids), chat_template_kwargs=None), args.on_too_long
            )
            num_cut += num_dropped > 0
            engine.abort(request_id)
            engine.step()  # takes the output of what was aborted
            continue
        except RequestTooLong as error:
            num_long += 1
            fault = f"line {number}: {error}"
        except BadRow as error:
            num_bad += 1
            fault = str(error)
        except Exception as error:  # a tokenizer may raise anything over a text
            num_bad += 1
            fault = f"line {number}: {error}"
        if len(faults) < _SHOWN:
            faults.append(fault)

    progress.close(num_done=lines.num_rows, total=lines.num_rows)
    stats = engine.stats()
    for name, text in (
        ("rows", f"{lines.num_rows:,}"),
        ("bad rows", f"{num_bad:,}"),
        ("too long", f"{num_long:,}" + (f", and {num_cut:,} would be cut" if num_cut else "")),
        ("prompt tokens", _summary(lengths)),
        ("model length", f"{stats.max_model_len:,} tokens of prompt and answer together"),
        ("scheduler", stats.scheduler + "".join(f", {k}={v}" for k, v in args.scheduler.arguments.items())),
        ("seats", f"{stats.max_num_seqs:,}"),
        ("token budget", f"{stats.max_tokens_per_step:,} in a step"),
        ("KV cache", f"{stats.num_blocks:,} blocks of {stats.block_size} tokens"),
        ("attention", args.attention),
    ):
        print(f"{name:<18}{text}")
    for fault in faults:
        print(f"batchkit: {' '.join(fault.split())}", file=sys.stderr)  # a tokenizer's error may have several lines
    if (num_more := num_bad + num_long - len(faults)) > 0:
        print(f"batchkit: and {num_more:,} more", file=sys.stderr)
    return bool(num_bad or num_long)


def _summary(lengths: Counter[int]) -> str:
    """Least, mean, percentiles (nearest rank) and most.

    >>> _summary(Counter({1: 9, 100: 1}))
    'min 1, mean 10.9, p50 1, p90 1, max 100, 109 in all'
    """
    count = lengths.total()
    if not count:
        return "none"
    ordered = sorted(lengths)
    total = sum(length * times for length, times in lengths.items())

    def percentile(part: int) -> int:
        rank, seen = -(-count * part // 100), 0
        for length in ordered:
            seen += lengths[length]
            if seen >= rank:
                return length
        raise AssertionError("the counts do not add up")

    return (
        f"min {ordered[0]:,}, mean {total / count:,.1f}, p50 {percentile(50):,}, p90 {percentile(90):,}, "
        f"max {ordered[-1]:,}, {total:,} in all"
    )
