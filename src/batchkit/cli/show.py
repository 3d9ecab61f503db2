"""``batchkit show`` and ``batchkit replay``: a step trace as a picture, and its scheduler stepped once more."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..show import Replayed, View, chrome_trace, drawing, page, view
from ..show import replay as play_again
from ..show.model import cut, figure_rows, stats_of
from ..trace import Trace, read_trace
from .faults import NotDone, one_line, say, with_place
from .options import DONE
from .specs import OPTIONS, SCHEDULERS, Policy, parse_policy, try_policy

__all__ = ["add_replay", "add_show"]


def add_show(commands: argparse._SubParsersAction[Any]) -> None:
    """The command ``show``."""
    parser = commands.add_parser(
        "show",
        help="step traces as a picture",
        description="Draw step traces: requests by steps, and what the KV blocks held.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a file that an engine wrote with trace=")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="the HTML page (default: the first trace's name + .html)"
    )
    parser.add_argument("--text", action="store_true", help="draw in the terminal; no page unless -o is given")
    parser.add_argument("--perfetto", metavar="FILE", help="write a JSON trace that ui.perfetto.dev opens")
    parser.add_argument("--steps", type=_steps, metavar="A:B", help="only the steps A to B, both included")
    parser.set_defaults(run=_show)


def add_replay(commands: argparse._SubParsersAction[Any]) -> None:
    """The command ``replay``."""
    parser = commands.add_parser(
        "replay",
        help="step a trace's scheduler once more, without the model",
        description="Step the scheduler of a trace once more, without the model, or another one over its requests.",
    )
    parser.add_argument("trace", metavar="TRACE", help="a file that an engine wrote with trace=")
    parser.add_argument(
        "--scheduler",
        type=_policy,
        metavar="NAME|module:Class[,key=value...]",
        help="the recorded policy with its arguments, which a trace does not hold, or another one "
        "(default: the recorded one, with its defaults)",
    )
    parser.add_argument("-o", "--output", metavar="TRACE", help="write the trace of the replay")
    parser.set_defaults(run=_replay)


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError
        bounds = (int(first) if first else None, int(last) if last else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, numbers of the first and the last step") from None
    if None not in bounds and bounds[0] > bounds[1]:  # type: ignore[operator]
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return bounds


def _policy(spec: str) -> Policy:
    try:
        return parse_policy(spec, elsewhere=dict.fromkeys(OPTIONS, "the trace"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _read(path: str) -> Trace:
    try:
        trace = read_trace(path)
    except UnicodeDecodeError:
        raise NotDone(f"{path} is no trace: it is not text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise NotDone(one_line(error)) from None
    if not trace.steps:
        raise NotDone(f"{path}, line 1: a trace of zero steps, there is nothing to show")
    return trace


def _show(args: argparse.Namespace) -> int:
    output = args.output
    if output is None and not args.text and args.perfetto is None:
        output = os.path.splitext(args.traces[0])[0] + ".html"
    for path in (output, args.perfetto):
        _check_is_no_trace(path, args.traces)
    if output is not None and args.perfetto is not None and _is_same_file(output, args.perfetto):
        raise NotDone(f"{output} cannot be both the page and the trace for Perfetto")
    views = [_view(path, args.steps) for path in args.traces]
    if args.text:
        width = shutil.get_terminal_size((100, 24)).columns
        _print("\n\n".join(drawing(one, width=width) for one in views))
    if args.perfetto is not None:
        _write(args.perfetto, json.dumps(chrome_trace(views), separators=(",", ":")) + "\n")
    if output is not None:
        _write(output, page(views))
    return DONE


def _check_is_no_trace(output: str | None, traces: Sequence[str]) -> None:
    if output is not None and any(_is_same_file(output, trace) for trace in traces):
        raise NotDone(f"{output} is the trace itself, and would be overwritten")


def _is_same_file(one: str, two: str) -> bool:
    if os.path.exists(one) and os.path.exists(two):
        return os.path.samefile(one, two)
    return os.path.realpath(one) == os.path.realpath(two)


def _view(path: str, bounds: tuple[int | None, int | None] | None) -> View:
    trace = _read(path)
    try:
        whole = view(trace, path)
        return whole if bounds is None else cut(whole, *bounds)
    except ValueError as error:
        raise NotDone(one_line(error)) from None


def _print(text: str) -> None:
    """Print what may have ids and file names in it, with characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"  # a StringIO has none
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise NotDone(f"{path or 'a file without a name'} cannot be written: {error.strerror}") from None
    say(f"batchkit: wrote {path}")


def _replay(args: argparse.Namespace) -> int:
    trace = _read(args.trace)
    _check_is_no_trace(args.output, [args.trace])
    try:
        recorded_name = stats_of(trace, args.trace)["scheduler"]
    except ValueError as error:
        raise NotDone(one_line(error)) from None
    policy = args.scheduler or _recorded(recorded_name)
    is_another = policy.policy.__name__ != recorded_name
    try:
        try_policy(policy)
        with _place(args.output) as output:
            result = play_again(
                trace, args.trace, policy.policy, policy.arguments, output=output, is_another=is_another
            )
    except (OSError, ValueError) as error:
        raise NotDone(one_line(error)) from None
    except Exception as error:  # the policy may be the user's
        raise NotDone(with_place(error)) from None
    _report(result, policy.policy.__name__, is_another)
    return DONE


def _recorded(name: str) -> Policy:
    for policy in SCHEDULERS.values():
        if policy.__name__ == name:
            return Policy(policy, {})
    raise NotDone(f"the trace was made by {name}, which is none of batchkit's: say --scheduler module:{name}")


@contextmanager
def _place(output: str | None) -> Iterator[str]:
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="batchkit-") as folder:
        yield os.path.join(folder, "replay.jsonl")


def _report(result: Replayed, name: str, is_another: bool) -> None:
    recorded, replayed = result.recorded, result.replayed
    if result.cost is not None:
        print(
            f"{name} in place of {recorded.stats['scheduler']}: a step takes {result.cost.fixed_s * 1e3:.4g} ms and "
            f"{result.cost.token_s * 1e6:.4g} us per token,\nthe least-squares line over the recorded steps"
        )
    elif result.difference is None:
        print(f"{name}: the same decisions in all {len(recorded.steps):,} steps")
    else:
        print(f"{name}: the same decisions up to step {result.difference.step}, where the first difference is")
        _print(f"  recorded: {result.difference.recorded or 'no such step'}")
        _print(f"  replayed: {result.difference.replayed or 'no such step'}")
        print("  (a trace holds no arguments of the policy, deadlines, length hints or metadata)")
    print()
    print(f"{'':<14}{'recorded':>18}{'replayed':>18}")
    for (label, one), (_, two) in zip(figure_rows(recorded.figures), figure_rows(replayed.figures), strict=True):
        print(f"{label:<14}{one:>18}{two:>18}")
