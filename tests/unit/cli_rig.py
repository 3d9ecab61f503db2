"""The command line over an engine without a model, put in place of `batchkit.cli.make_engine`."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from batchkit import Engine, KVGeometry, PagedAllocator, RowResult, SamplerOutput, SimulatedRunner, cli

GEOMETRY = KVGeometry(num_blocks=64, block_size=4, max_model_len=64, vocab_size=1000)


class Letters:
    """A tokenizer: one token for each character, with a token 1 in front, and a chat template."""

    eos_token_id = None
    bos = ()

    def encode(self, text):
        if "\ud800" in text:
            raise RuntimeError("half a character")
        return [*self.bos, *(ord(letter) % 1000 for letter in text)]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(chr(0x3B1 + token % 25) for token in token_ids)

    def apply_chat_template(self, messages, *, opening="", **kwargs):
        if kwargs:
            raise TypeError(f"no such thing: {sorted(kwargs)}")
        return self.encode(opening + "".join(f"<{m['role']}>{m['content']}" for m in messages))


class WithBOS(Letters):
    """Puts a token 1 in front of every text."""

    bos = (1,)


class Runner(SimulatedRunner):
    """Calls `before` with the rows of each step; fails the requests whose prompt begins with an exclamation mark."""

    def __init__(self, before=lambda out: None, geometry=GEOMETRY):
        super().__init__(geometry)
        self.before = before

    def execute(self, out):
        self.before(out)
        got = super().execute(out)
        rows = [
            RowResult(error="the device is on fire") if row.request.prompt_token_ids[0] == ord("!") else result
            for row, result in zip(out.rows, got.rows, strict=True)
        ]
        return SamplerOutput(tuple(rows))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``command(lines, *options)`` runs ``batchkit generate`` in an empty folder; gives exit code and records.

    `before` and `on_step` are the runner's and the engine's; `prompts` is filled with the prompts of all requests.
    The records are in the order of the rows, unless `keep_order` is False, and without their keys.
    """
    monkeypatch.chdir(tmp_path)

    def run(
        lines,
        *options,
        before=lambda out: None,
        on_step=None,
        source="in.jsonl",
        target="out.jsonl",
        tokenizer=Letters,
        prompts=None,
        keep_order=True,
    ):
        def make_engine(args):
            policy = args.scheduler.policy(
                PagedAllocator(GEOMETRY.num_blocks, GEOMETRY.block_size),
                max_model_len=GEOMETRY.max_model_len,
                max_num_seqs=args.max_num_seqs,
                **args.scheduler.arguments,
            )
            if prompts is not None:
                add = policy.add
                policy.add = lambda seq, **options: (
                    prompts.append(list(seq.request.prompt_token_ids)),
                    add(seq, **options),
                )[1]
            return Engine(Runner(before), policy, tokenizer=tokenizer(), on_step=on_step)

        monkeypatch.setattr(cli, "make_engine", make_engine)
        if lines is not None:
            data = lines if isinstance(lines, bytes) else jsonl(lines)
            Path(source).write_bytes(gzip.compress(data) if source.endswith(".gz") else data)
        code = cli.main(["generate", source, "-o", target, "--model", "toy", *["--keep-order"] * keep_order, *options])
        return code, read(target) if Path(target).is_file() else None

    return run


def jsonl(rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def read(path):
    """The records of a file, each without its key, which is checked."""
    records = read_whole(path)
    for record in records:
        assert re.fullmatch("[0-9a-f]{32}", record.pop("key", "0" * 32))
    return records


def read_whole(path):
    data = Path(path).read_bytes()
    if str(path).endswith(".gz"):
        data = gzip.decompress(data)
    assert not data or data.endswith(b"\n"), "the last line is torn"
    return [json.loads(line) for line in data.decode().splitlines()]


def num_written():
    path = Path("out.jsonl")
    return path.read_bytes().count(b"\n") if path.exists() else 0


def prompt(text="abc", **params):
    return {"prompt": text, "params": {"max_tokens": 4, "temperature": 0, **params}}


LETTERS = "".join(chr(97 + i % 26) for i in range(80))


def ids(text):
    return [ord(letter) for letter in text]


def one_line(capsys):
    """The one line that stderr has, and nothing on stdout."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("batchkit: ") and shown.err.count("\n") == 1, shown.err
    return shown.err
