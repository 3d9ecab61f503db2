"""What may be said on the command line, and what of it is wrong before any file is opened."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, get_args

from typing_extensions import override

from ..params import SamplingParams
from ..sizes import parse_bytes
from .fit import OnTooLong
from .records import FIELDS
from .rows import Shard
from .specs import SCHEDULERS, parse_policy, try_policy
from .templates import Template

__all__ = [
    "ATTENTION",
    "DONE",
    "DTYPES",
    "FAILED_ROWS",
    "INTERRUPTED",
    "NOT_DONE",
    "STOPPED",
    "AddCommand",
    "add_attention",
    "parse",
    "said",
    "whole_number",
]

DONE, NOT_DONE, USAGE, FAILED_ROWS, STOPPED, INTERRUPTED = 0, 1, 2, 3, 4, 130

_EXIT_CODES = (
    "exit codes: 0 done; 1 not done; 2 wrong usage; 3 done, and some rows have failed; 4 stopped by SIGTERM or Ctrl-C, "
    "what ran is finished; 130 stopped at once"
)
ATTENTION = ("xformers", "varlen", "cpu", "reference")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_DEFAULTS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
_T = TypeVar("_T")
AddCommand = Callable[["argparse._SubParsersAction[Any]"], None]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of forty options would hide it."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"batchkit: {message} ({self.prog} --help says more)\n")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Say that these are none of its own, and which option the first one may be."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            self.error(f"unexpected: {' '.join(words)}")
        near = difflib.get_close_matches(option.replace("_", "-"), self._option_string_actions, n=1)
        self.error(f"there is no option {option}" + (f"; is it {near[0]}?" if near else ""))


def parse(argv: Sequence[str] | None, more: Iterable[AddCommand] = ()) -> argparse.Namespace:
    """The options, checked. Wrong usage ends the program with exit code 2.

    Args:
        argv: default: the program's.
        more: each adds a command whose parser has the default ``run``, a function of the options.
    """
    parser = _Parser(prog="batchkit", description="Continuous batching of LLM inference.")
    version = sys.modules["batchkit"].__version__  # imported by now, since this is a part of it
    parser.add_argument("--version", action="version", version=f"batchkit {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    generate = commands.add_parser(
        "generate",
        help="answer the prompts of a file",
        description="Answer the prompts of a file. A line is a JSON object with `prompt` (text or token ids) or "
        "`messages` (objects with role and content, for the model's chat template; `chat_template_kwargs` go to "
        "that), or whatever --template asks for; and, if wanted, `id` (text or an integer; else the line's number) "
        "and `params` (fields of SamplingParams). Other keys are ignored, and so are empty lines. OpenAI batch files "
        "are taken too, and answered in their own form. Each row gives one record, when it is there: `id`, `text`, "
        "`finish_reason` and `usage`, or `id` and `error`; and a `key`, by which --resume knows the row.",
        epilog=_EXIT_CODES,
    )
    _add_generate(generate)
    commands.add_parser(
        "env",
        help="versions, devices, and what attention would run on",
        description="Print what a report of a fault should say: versions, devices, and the attention backend.",
    )
    doctor = commands.add_parser(
        "doctor",
        help="check that a model comes out right",
        description="Bind a model and compare its logits with those of plain transformers (eager attention) on random "
        "tokens, in random pieces over scattered KV blocks.",
        epilog="exit codes: 0 it comes out right; 1 it does not, or cannot be bound or loaded; 2 wrong usage",
    )
    doctor.add_argument("model", metavar="MODEL", help="a folder, or a name on the hub")
    doctor.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="default: float32; in half precision only gross faults show"
    )
    doctor.add_argument("--device", help="such as cpu or cuda:0; default: the accelerator, if there is one")
    add_attention(doctor)
    doctor.add_argument("--seed", metavar="N", type=int, default=0, help="of the tokens and the pieces; default: 0")

    for add in more:
        add(commands)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices[args.command].unknown(unknown)
    if args.command == "generate":
        _check(args, generate)
    return args


def _add_generate(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("input", metavar="IN", help="JSONL or text in UTF-8, .gz too; - for stdin")
    generate.add_argument("-o", "--output", metavar="OUT", help="JSONL in UTF-8, .gz too; - for stdout")
    generate.add_argument("--overwrite", action="store_true", help="replace an output file that is not empty")
    generate.add_argument(
        "--resume", action="store_true", help="go on where an earlier run stopped: do the rows without a record in OUT"
    )
    generate.add_argument(
        "--retry-errors", action="store_true", help="with --resume: do rows whose record is an error again"
    )
    generate.add_argument(
        "--redo-changed",
        action="store_true",
        help="with --resume: do rows again whose prompt or parameters have changed; else they stop the command",
    )
    generate.add_argument(
        "--keep-order",
        action="store_true",
        help="records in the order of the rows; a record waits until all before it are there",
    )
    generate.add_argument(
        "--shard",
        metavar="I/N",
        type=said(_shard),
        help="only the I-th of N parts; OUT becomes OUT.I-of-N, or has {shard} where that is to stand",
    )
    generate.add_argument(
        "--max-first-failures",
        metavar="N",
        type=_count_or_none,
        default=100,
        help="stop if the first N rows all fail; 0: go on; default: 100",
    )
    generate.add_argument("--quiet", action="store_true", help="no progress, no warnings, no figures")
    generate.add_argument(
        "--dry-run", action="store_true", help="compute nothing; print the lengths, what is wrong and what would run"
    )

    rows = generate.add_argument_group("rows")
    rows.add_argument(
        "--format",
        choices=("jsonl", "text", "openai"),
        help="text: a line is a prompt; openai: a batch file of that API; default: text for .txt, else what the first "
        "good line looks like",
    )
    rows.add_argument(
        "--template",
        metavar="TEXT",
        type=said(Template),
        help="makes the prompt of columns, like 'Summarise: {body}'; {{ and }} are braces",
    )
    rows.add_argument("--chat", action="store_true", help="a prompt is a user's message, for the model's chat template")
    rows.add_argument(
        "--keep",
        metavar="COL[=AS],...",
        action="append",
        default=[],
        help="copy columns to the record, under another name if wanted",
    )
    rows.add_argument("--limit", metavar="N", type=whole_number, help="only the first N rows")
    rows.add_argument(
        "--on-too-long",
        choices=get_args(OnTooLong),
        default="error",
        help="a prompt that leaves no room for max_tokens fails, or loses its beginning (left) or its end (right); "
        "default: error",
    )
    rows.add_argument(
        "--window",
        metavar="N",
        type=whole_number,
        help="most rows in the engine at a time; default: 1024, or four a seat",
    )

    model = generate.add_argument_group("model")
    model.add_argument("--model", metavar="PATH", required=True, help="a folder, or a name on the hub")
    model.add_argument("--dtype", choices=DTYPES, default="auto", help="default: auto, the one it is stored in")
    model.add_argument("--device", help="such as cpu or cuda:0; default: the accelerator, if there is one")
    add_attention(model)
    model.add_argument("--cuda-graphs", action="store_true", help="decode by CUDA graphs, where the model allows it")
    model.add_argument(
        "--max-model-len", metavar="N", type=whole_number, help="most tokens of prompt and output together"
    )

    engine = generate.add_argument_group("scheduling and memory")
    engine.add_argument(
        "--scheduler",
        metavar="POLICY[,key=value...]",
        type=said(parse_policy),
        default="chunked",
        help=f"{', '.join(SCHEDULERS)}, or module:Class for one of your own; default: chunked",
    )
    engine.add_argument("--max-num-seqs", metavar="N", type=whole_number, help="most sequences that run at a time")
    engine.add_argument("--max-tokens-per-step", metavar="N", type=whole_number, help="token budget of a step")
    size = engine.add_mutually_exclusive_group()
    size.add_argument("--kv-memory", metavar="SIZE", help="KV cache in bytes or like 2GiB; default: what is useful")
    size.add_argument("--num-kv-blocks", metavar="N", type=whole_number, help="KV cache in blocks")
    engine.add_argument("--block-size", metavar="N", type=whole_number, help="tokens in a KV block")
    engine.add_argument("--swap-memory", metavar="SIZE", help="host memory for preempted sequences; default: none")
    engine.add_argument(
        "--prefix-caching", action="store_true", help="compute the beginning that prompts have in common once"
    )

    defaults = generate.add_argument_group("sampling, where a row's `params` do not say")
    defaults.add_argument(
        "--max-tokens", metavar="N", type=int, help="most tokens to generate; default: up to the model's length"
    )
    defaults.add_argument("--temperature", metavar="T", type=float, help="0 is greedy; default: 1")
    defaults.add_argument("--top-k", metavar="N", type=int, help="keep the N most probable tokens; default: all")
    defaults.add_argument(
        "--top-p", metavar="P", type=float, help="keep the most probable tokens that make up P together; default: 1"
    )
    defaults.add_argument(
        "--min-p", metavar="P", type=float, help="drop tokens less probable than P times the likeliest; default: 0"
    )
    defaults.add_argument("--seed", metavar="N", type=int, help="default: a fresh one for each row")
    defaults.add_argument(
        "--stop", metavar="TEXT", action="append", help="ends the answer where it appears; may be given several times"
    )


def add_attention(parser: argparse._ActionsContainer) -> None:
    """What computes attention, for commands that load a model."""
    parser.add_argument(
        "--attention",
        choices=ATTENTION,
        help="what computes attention; default: the first of these that computes the model right where it is",
    )


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """What no option shows alone. Adds what follows from them: `is_text`, `is_batch`, `maybe_text`, `defaults`..."""
    if args.output is None and not args.dry_run:
        parser.error("-o OUT is required, except with --dry-run")
    if args.resume:
        for wrong, what in (
            (args.overwrite, "--overwrite, which begins anew"),
            (args.dry_run, "--dry-run, which looks at every row"),
            (args.input == "-", "stdin, which cannot be read twice"),
            (args.output == "-", "stdout, which cannot be read"),
        ):
            if wrong:
                parser.error(f"--resume does not go with {what}")
    elif args.retry_errors or args.redo_changed:
        parser.error(f"--{'retry-errors' if args.retry_errors else 'redo-changed'} needs --resume")
    if args.format == "openai" and (args.template is not None or args.chat):
        parser.error(f"--{'chat' if args.chat else 'template'} is not for OpenAI batch files, whose lines say it all")
    if args.shard is not None and args.output not in (None, "-"):
        args.output = _with_shard(args.output, args.shard)
    args.backend = "unknown"
    file_name = args.input.removesuffix(".gz")
    args.is_text = args.format == "text" or (args.format is None and file_name.endswith(".txt"))
    args.is_batch = args.format == "openai" or (
        None if args.format is None and not args.is_text and args.template is None and not args.chat else False
    )
    args.maybe_text = args.format is None and not file_name.endswith((".jsonl", ".json"))
    args.defaults = {name: value for name in _DEFAULTS if (value := getattr(args, name)) is not None}
    try:
        SamplingParams(**args.defaults)
        for name in ("kv_memory", "swap_memory"):
            if (size := getattr(args, name)) is not None:
                parse_bytes(name, size)
        args.keep = _columns(args.keep)
        try_policy(
            args.scheduler,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_tokens_per_step=args.max_tokens_per_step,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def _shard(text: str) -> Shard:
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return Shard(int(index), int(count))
    raise ValueError(f"must be I/N with I from 1 to N, such as 1/4, got {text!r}")


def _with_shard(path: str, shard: Shard) -> str:
    """The name of the output of one part.

    >>> _with_shard("out/all.jsonl.gz", Shard(1, 4)), _with_shard("part-{shard}.jsonl", Shard(1, 4))
    ('out/all.1-of-4.jsonl.gz', 'part-1-of-4.jsonl')
    """
    if "{shard}" in path:
        return path.replace("{shard}", str(shard))
    folder, name = os.path.split(path)
    stem, dot, ending = name.partition(".")
    return os.path.join(folder, f"{stem}.{shard}{dot}{ending}")


def _columns(given: list[str]) -> dict[str, str]:
    """The columns to keep, by the name that each gets.

    >>> _columns(["lang,url", "text=source"])
    {'lang': 'lang', 'url': 'url', 'source': 'text'}
    """
    keep: dict[str, str] = {}
    for part in ",".join(given).split(",") if given else ():
        column, renamed, name = (text.strip() for text in part.partition("="))
        name = name if renamed else column
        if not column or not name:
            raise ValueError(f"--keep takes columns with commas between them, got {','.join(given)!r}")
        if name in FIELDS:
            raise ValueError(
                f"a record has a field {name!r} of its own; --keep {column}=my_{name} copies the column as my_{name}"
            )
        if name in keep:
            raise ValueError(f"--keep names {name!r} twice")
        keep[name] = column
    return keep


def said(make: Callable[[str], _T]) -> Callable[[str], _T]:
    """A type for argparse that says what `make` says."""

    def convert(text: str) -> _T:
        try:
            return make(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _count_or_none(text: str) -> Any:
    return 0 if text == "0" else whole_number(text)


def whole_number(text: str) -> Any:
    """A type for argparse: a count of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value
