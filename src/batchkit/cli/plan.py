"""``batchkit plan``: what of a model fits on a device, and how fast it decodes, by arithmetic."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from ..costs import DEVICES, Device, ModelShape
from ..experiment.plan import MEMORY_FRACTION, RESERVATIONS, Load, Plan, plan
from ..experiment.tables import table
from ..sizes import parse_bytes
from .faults import NotDone, one_line
from .options import DONE

__all__ = ["add_plan"]

_NAMES: dict[str, str] = dict(
    zip(RESERVATIONS, ("model length", "power of two", "as declared", "just in time"), strict=True)
)


def add_plan(commands: argparse._SubParsersAction[Any]) -> None:
    """The command ``plan``."""
    parser = commands.add_parser(
        "plan",
        help="what of a model fits on a device, and how fast it is, by arithmetic",
        description="Compute from a model's configuration and a device's data sheet what fits and how fast it is. "
        "Nothing is loaded, run or measured. A sequence reserves KV memory for the model's length, for its prompt and "
        "the next power of two of its declared output, for exactly what it declares, or takes blocks just in time.",
    )
    parser.add_argument("model", metavar="CONFIG_OR_MODEL_DIR", help="a config.json, or a folder with one")
    parser.add_argument("--dtype", default="auto", help="of weights and KV; default: auto, the configuration's")
    parser.add_argument("--json", action="store_true", help="print exact numbers as JSON")

    device = parser.add_argument_group("device", "A preset, or all three numbers, or some of them in place of its own.")
    device.add_argument("--device", choices=tuple(DEVICES), help="from NVIDIA's data sheets")
    device.add_argument("--memory", metavar="SIZE", type=_bytes("memory"), help="such as 40GB or 39.4GiB")
    device.add_argument("--bandwidth", metavar="B/S", type=_positive, help="of its memory, such as 1.555e12")
    device.add_argument("--flops", metavar="N", type=_positive, help="dense FLOP/s at half precision, such as 312e12")
    device.add_argument("--efficiency", metavar="F", type=_part, default=0.6, help="reached part of them; default: 0.6")
    device.add_argument(
        "--overhead-ms", metavar="MS", type=_not_negative, default=2.0, help="each step costs beyond; default: 2"
    )

    memory = parser.add_argument_group("KV memory")
    memory.add_argument("--block-size", metavar="N", type=_count, default=16, help="tokens in a block; default: 16")
    size = memory.add_mutually_exclusive_group()
    size.add_argument(
        "--memory-fraction",
        metavar="F",
        type=_part,
        default=MEMORY_FRACTION,
        help=f"of the memory, for weights and KV together; default: {MEMORY_FRACTION:g}. Presets have the data sheet's "
        "GB; a card reports more bytes (one of 40 GB has 42.3e9), so that 0.95 of these is 0.9 of those, which servers "
        "commonly take; give 0.9 beside a --memory that the device itself reports",
    )
    size.add_argument("--kv-memory", metavar="SIZE", type=_bytes("kv_memory"), help="as many bytes for KV instead")

    load = parser.add_argument_group("load", "All sequences have the mean lengths; a varied load fits fewer.")
    load.add_argument(
        "--lengths",
        metavar="N,...",
        type=_lengths,
        help="prompt and output together, to count the sequences of, divided as --prompt and --output are; "
        "default: 512,2048, or the model's length where that is less",
    )
    load.add_argument(
        "--prompt", metavar="N", type=_count, help="tokens in the mean; default: 512, at most 4/5 of the model's length"
    )
    load.add_argument(
        "--output", metavar="N", type=_count, help="tokens in the mean; default: 128, at most 1/5 of the model's length"
    )
    load.add_argument("--cap", metavar="N", type=_count, help="output each request declares; default: what comes")
    load.add_argument(
        "--max-num-seqs", metavar="N", type=_count, help="most sequences that run at a time; default: memory decides"
    )
    parser.set_defaults(run=lambda args: _plan(args, parser))


def _bytes(name: str) -> Any:
    def convert(text: str) -> int:
        try:
            return parse_bytes(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _part(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _device(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Device:
    names = {"memory": "memory_bytes", "bandwidth": "bandwidth", "flops": "flops"}
    given: dict[str, Any] = {
        field: getattr(args, name) for name, field in names.items() if getattr(args, name) is not None
    }
    if args.device is not None:
        if given:
            changed = " and ".join(name for name, field in names.items() if field in given)
            given["name"] = f"{args.device} with another {changed}"
        return replace(DEVICES[args.device], **given)
    missing = [f"--{name}" for name, field in names.items() if field not in given]
    if missing:
        parser.error(f"--device (one of {', '.join(DEVICES)}) is missing, or {' and '.join(missing)} in its place")
    return Device(name="the device", host_bandwidth=float("inf"), **given)


def _plan(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device = _device(args, parser)
    model = _shape(args.model, args.dtype)
    try:
        found = plan(
            model,
            device,
            block_size=args.block_size,
            lengths=args.lengths,
            prompt=args.prompt,
            output=args.output,
            cap=args.cap,
            max_num_seqs=args.max_num_seqs,
            memory_fraction=args.memory_fraction,
            kv_memory=args.kv_memory,
            efficiency=args.efficiency,
            overhead_s=args.overhead_ms / 1e3,
        )
    except ValueError as error:
        raise NotDone(one_line(error)) from None
    print(_json(found) if args.json else _text(found, args))
    return DONE


def _shape(path: str, dtype: str) -> ModelShape:
    from ..hf.shape import model_shape

    try:
        return model_shape(path, dtype=dtype)
    except Exception as error:  # the libraries below raise whatever they like over a configuration
        raise NotDone(f"cannot read the model {path}: {one_line(error)}") from None


def _json(found: Plan) -> str:
    record = asdict(found)
    del record["device"]["host_bandwidth"]  # nothing is computed with it
    return json.dumps(record, indent=1, allow_nan=False)


def _text(found: Plan, args: argparse.Namespace) -> str:
    return "\n\n".join([_memory(found, args), _lengths_table(found), _load_table(found), _speed_table(found)])


def _memory(found: Plan, args: argparse.Namespace) -> str:
    model, device = found.model, found.device
    if args.kv_memory is None:
        rule = f"{1 - args.memory_fraction:.3g} of the memory kept for activations, the runtime and the allocator"
    else:
        rule = "not in weights or KV"
    lines = [
        ("memory", f"{device.memory_bytes:,.0f} bytes" + (", by its data sheet" if args.memory is None else "")),
        ("weights", f"{found.weight_bytes:,.0f} bytes: {model.num_params:,} parameters of {model.bytes_per_param:g}"),
        ("other", f"{found.other_bytes:,.0f} bytes: {rule}"),
        ("KV memory", f"{found.kv_bytes:,} bytes"),
        ("KV per token", f"{model.kv_bytes_per_token:,} bytes"),
        ("KV tokens", f"{found.kv_tokens:,}, in {found.num_blocks:,} blocks of {found.block_size}"),
    ]
    head = f"{model.name} on {device.name}: arithmetic, nothing was run or measured"
    return "\n".join([head, "", *(f"{name:<14}{text}" for name, text in lines)])


def _lengths_table(found: Plan) -> str:
    heads = [f"{load.prompt:,} + {load.output:,}" for load in found.lengths]
    rows = [
        [name, *(f"{load.holdings[number].num_seqs:,}" for load in found.lengths)]
        for number, name in enumerate(_NAMES.values())
    ]
    lengths = ", ".join(f"{load.prompt + load.output:,}" for load in found.lengths)
    head = (
        f"Sequences of {lengths} tokens that fit, prompt + output, by reservation. Just in time counts sequences that "
        "are\nevenly spread over their steps: more are there than would fit at their full lengths"
    )
    return f"{head}\n{table(['', *heads], rows)}"


def _declaring(load: Load) -> str:
    return "" if load.declared == load.output else f", {load.declared:,} declared"


def _load_table(found: Plan) -> str:
    load = found.mean
    rows = [
        [
            _NAMES[one.reservation],
            f"{one.blocks:,.1f}",
            f"{one.used_slots:,.1f}",
            f"{one.wasted_slots:,.1f}",
            f"{one.wasted_blocks:,.1f}",
            f"{one.used_slots / (one.used_slots + one.wasted_slots):.1%}",
            f"{one.num_seqs:,}",
        ]
        for one in load.holdings
    ]
    head = f"One sequence of {load.prompt:,} + {load.output:,} tokens{_declaring(load)}, in the mean over its steps"
    heads = ["", "blocks", "used slots", "wasted slots", "wasted blocks", "used", "sequences that fit"]
    return f"{head}\n{table(heads, rows)}"


def _speed_table(found: Plan) -> str:
    rows = []
    for one in found.speeds:
        rates = [(r.generated_per_s, r.tokens_per_s, r.requests_per_s) for r in (one.alone, one.mixed)]
        cells = [cell for gen, both, requests in rates for cell in (f"{gen:,.0f}", f"{both:,.0f}", f"{requests:.3g}")]
        rows.append([_NAMES[one.reservation], f"{one.num_seqs:,}", f"{one.decode_step_s * 1e3:.1f}", *cells])
    load, device = found.mean, found.device
    head = (
        f"Saturated with them: prompts in steps of their own, {found.speeds[0].prefill_step_s * 1e3:.1f} ms each, or "
        f"mixed, spread evenly over the decode steps;\n"
        f"both = {load.prompt + load.output:,} prompt and generated tokens of a request. Roofline: "
        f"{device.bandwidth / 1e9:,.0f} GB/s, {found.efficiency:g} of {device.flops / 1e12:,.0f} TFLOP/s, "
        f"{found.overhead_s * 1e3:g} ms a step"
    )
    heads = ["", "rows", "decode step ms", "gen./s", "both/s", "requests/s", "mixed gen./s", "both/s", "requests/s"]
    return f"{head}\n{table(heads, rows)}"
