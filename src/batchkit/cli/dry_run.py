"""``batchkit generate --dry-run``: what would become of a file, without computing anything.

Every row goes through the same checks as in earnest: it is added to an engine and aborted again. The engine has the
real tokenizer and the real scheduler over as many KV blocks as there would be, and no weights.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from ..allocators import PagedAllocator
from ..engine import Engine
from ..errors import RequestTooLong
from ..simulate import SimulatedRunner
from ..types import Request
from .faults import RowFaults
from .fit import most_tokens, prompt_ids, submit
from .progress import Progress
from .rows import BadRow, RowReader, Rows

__all__ = ["dry_run", "preview_engine"]


def preview_engine(args: argparse.Namespace) -> Engine:
    """An engine that takes requests as the real one would, and cannot run them. Sets ``args.backend``."""
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
        attention=args.attention,
        cuda_graphs=args.cuda_graphs,
    )
    args.backend = found.attention
    geometry = found.geometry
    policy = args.scheduler.policy(
        PagedAllocator(geometry.num_blocks, geometry.block_size),
        max_model_len=geometry.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_tokens_per_step=args.max_tokens_per_step,
        **args.scheduler.arguments,
    )
    runner = _Weightless(geometry, check_kv=False)
    runner.check = found.grammars.check
    return Engine(runner, policy, tokenizer=found.tokenizer)


class _Weightless(SimulatedRunner):
    """Takes the requests that the real runner takes."""

    check: Callable[[Request], None]

    @override
    def check_request(self, request: Request) -> None:
        self.check(request)


def dry_run(engine: Engine, rows: Rows, reader: RowReader, args: argparse.Namespace) -> bool:
    """Print the report. Returns whether any row would fail."""
    lengths: Counter[int] = Counter()
    limits: set[int] = set()
    unlimited: Counter[int] = Counter()
    num_long = num_cut = 0
    faults = RowFaults()
    progress = Progress(shown=not args.quiet)
    while (row := rows.get(wait=True)) is not None:
        if progress.is_due():
            progress.show(num_done=rows.num - 1, num_failed=faults.num, total=rows.estimate())
        if isinstance(row, BadRow):
            faults.add(str(row))
            continue
        try:
            token_ids = prompt_ids(engine, row)
            lengths[len(token_ids)] += 1
            counted = replace(row, ask=row.ask._replace(prompt=list(token_ids), chat_template_kwargs=None))
            request_id, num_dropped = submit(engine, counted, args.on_too_long)
            num_cut += num_dropped > 0
            engine.abort(request_id)
            engine.step()  # takes the output of what was aborted
            if row.ask.params.max_tokens is None:
                unlimited[len(token_ids)] += 1
            else:
                limits.add(row.ask.params.max_tokens)
        except RequestTooLong as error:
            num_long += 1
            faults.add(f"line {row.number}: {error}")
        except Exception as error:  # a tokenizer may raise anything over a text
            faults.add(f"line {row.number}: {error}")

    progress.close(num_done=rows.num, total=rows.num)
    stats = engine.stats()
    for name, text in (
        ("rows", f"{rows.num:,}"),
        ("bad rows", f"{faults.num - num_long:,}"),
        ("too long", f"{num_long:,}" + (f", and {num_cut:,} would be cut" if num_cut else "")),
        ("prompt tokens", _summary(lengths)),
        ("max_tokens", _limits(limits, unlimited, most_tokens(engine))),
        ("model length", f"{stats.max_model_len:,} tokens of prompt and answer together"),
        ("scheduler", stats.scheduler + "".join(f", {k}={v}" for k, v in args.scheduler.arguments.items())),
        ("seats", f"{stats.max_num_seqs:,}"),
        ("token budget", f"{stats.max_tokens_per_step:,} in a step"),
        ("KV cache", f"{stats.num_blocks:,} blocks of {stats.block_size} tokens"),
        ("attention", args.backend),
    ):
        print(f"{name:<18}{text}")
    faults.print(reader.absent())
    return faults.num > 0


def _limits(limits: set[int], unlimited: Counter[int], room: int) -> str:
    """The `max_tokens` of rows; for those without, given by the lengths of their prompts, how many tokens may come.

    >>> _limits({32, 8}, Counter({20: 1, 10: 2}), 100)
    '8 to 32, none for 3 rows: up to 90 each'
    """
    parts = [" to ".join(f"{limit:,}" for limit in sorted({min(limits), max(limits)}))] if limits else []
    if count := unlimited.total():
        parts.append(f"none for {count:,} row{'s' * (count > 1)}: up to {room - min(unlimited):,} each")
    return ", ".join(parts) or "none"


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
