"""What the parts of `gpu_check.py` share: the time, what was found, models, runners, and steps to measure."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typing_extensions import override

from batchkit import ModelRunner, SamplingParams, UnsupportedModel
from batchkit.hf.batch import row_of
from batchkit.hf.runner import TransformersRunner
from batchkit.types import Request, SchedulerOutput

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"tests": 0.38, "device": 0.02, "decode": 0.28, "throughput": 0.32}
"""Shares of the time; what a part leaves goes to those after it."""
SHAPES = ("opt-13b", "llama-3-8b")
BACKENDS = ("xformers", "varlen", "reference")
LAYERS = 10
"""Of the model under the experiment."""
WARM_STEPS, STEPS, STEPS_S = 3, 20, 2.0
TINY = {
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""What of a configuration is made small, where it has it."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches, context: rows of a decode step, and tokens of each, the new one among them.
        block_size: of a decode step's KV; all backends can have it.
        copied: bytes.
        product: rows and columns of a matrix.
        pools, prompt, caps: tokens of the KV memory and of a prompt, and caps of the output, of the experiment.
        counts: requests of its loads; the most for which there is time.
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    block_size: int = 256
    copied: int = 4 << 30
    product: int = 8192
    pools: tuple[int, ...] = (15_700, 8_100)
    prompt: int = 512
    caps: tuple[int, ...] = (32, 128, 512, 1536)
    counts: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128)


SMALL = Sizes(
    batches=(1, 4),
    context=64,
    block_size=64,
    copied=1 << 22,
    product=128,
    pools=(600,),
    prompt=16,
    caps=(32,),
    counts=(8, 16),
)
"""For a rehearsal."""


class Check:
    """What was found so far, and how much time is left."""

    def __init__(
        self, device: torch.device, *, tiny: bool, skip: Sequence[str], budget_s: float, layers: int = LAYERS
    ) -> None:
        self.device = device
        self.sizes = SMALL if tiny else Sizes()
        self.layers = layers
        self.tiny = tiny
        self.errors: dict[str, str] = {}
        self.missing: list[str] = []
        self.cut: list[str] = []
        self.found: dict[str, Any] = {}
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._parts = {name: share for name, share in PARTS.items() if name not in skip}

    @property
    def is_rehearsal(self) -> bool:
        """Whether nothing here says anything about a GPU."""
        return self.tiny or self.device.type != "cuda"

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of those that are run."""
        return tuple(self._parts)

    def left_s(self, part: str) -> float:
        """Seconds until a part must have ended."""
        names = list(self._parts)
        share = sum(self._parts[name] for name in names[: names.index(part) + 1]) / sum(self._parts.values())
        return self._started + share * self._budget_s - time.monotonic()

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after whatever goes wrong inside."""
        try:
            yield
        except Exception as error:
            self.errors[what] = f"{type(error).__name__}: {error}"
            say(f"FAILED: {what}\n{traceback.format_exc()}")
        # Out here, where no traceback holds on to the tensors of a part that failed.
        self.tidy()

    def tidy(self) -> None:
        """Give the memory of what is gone back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lacks(self, what: str) -> None:
        """Note what is missing, once."""
        if what not in self.missing:
            self.missing.append(what)
            say(f"missing: {what}")

    def leave_out(self, what: str) -> None:
        """Note what there was no time for."""
        self.cut.append(what)
        say(f"left out: {what}")

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "rehearsal": self.is_rehearsal,
            **self.found,
            "errors": self.errors,
            "missing": self.missing,
            "cut": self.cut,
            "seconds": time.monotonic() - self._started,
        }


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(text, file=sys.stderr, flush=True)


def median_s(check: Check, act: Callable[[], Any]) -> float:
    """Seconds that something takes, from an idle device until it is idle again."""
    for _ in range(WARM_STEPS):
        act()
    samples: list[float] = []
    while len(samples) < STEPS and (len(samples) < 3 or sum(samples) < STEPS_S):
        check.wait()
        began = time.perf_counter()
        act()
        check.wait()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def shape_folder(check: Check, name: str, scratch: Path, *, layers: int | None = None) -> Path:
    """A folder with the configuration of a model, or of one with fewer layers; for a rehearsal with that of a tiny one.

    Args:
        check: says whether this is a rehearsal.
        name: of the model.
        scratch: for configurations that are changed.
        layers: as many. Default: the model's.
    """
    folder = ROOT / "benchmarks" / "models" / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if check.tiny:
        config |= {key: value for key, value in TINY.items() if key in config}
        config |= {"bos_token_id": 1, "eos_token_id": 2}
    elif layers is not None:
        config |= {"num_hidden_layers": layers}
    made = scratch / f"{layers or ''}" / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def build(check: Check, folder: Path) -> Any:
    """A model with random weights, made where it is to run."""
    torch.manual_seed(0)
    with torch.device(check.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return model.eval()


def weights_read(model: Any) -> int:
    """Bytes of the weights that every step reads: all but tables in which tokens and positions are looked up."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    return sum(weights.nbytes for weights in model.parameters() if weights is head or id(weights) not in tables)


class Warnings(logging.Handler):
    """What the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @property
    def fallback(self) -> str | None:
        """Why steps run without graphs, if they were to have them."""
        return next((message for message in self.messages if "CUDA graphs" in message), None)


@contextlib.contextmanager
def warned() -> Iterator[Warnings]:
    """Collect warnings."""
    handler = Warnings()
    logger = logging.getLogger("batchkit")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def make_runner(check: Check, model: Any, attention: str, **options: Any) -> TransformersRunner | None:
    """A runner, or None, with the reasons noted, where this backend cannot run."""
    try:
        return TransformersRunner(model, attention=attention, **options)
    except UnsupportedModel as error:
        check.lacks(" ".join(str(error).split()))
        return None


def make_step(batch: int, context: int, block_size: int, *, new: int = 1, contiguous: bool = False) -> SchedulerOutput:
    """A step of rows that each compute the last tokens of their context, by default one, which is to decode."""
    each = -(-context // block_size)
    blocks = list(range(batch * each))
    random.Random(0).shuffle(blocks)
    request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(temperature=0), max_tokens=1)
    rows = tuple(
        row_of(
            request,
            index,
            start=context - new,
            token_ids=(5,) * new,
            blocks=range(first, first + each) if contiguous else tuple(blocks[first : first + each]),
        )
        for index, first in enumerate(range(0, batch * each, each))
    )
    return SchedulerOutput(rows, num_tokens=batch * new)


def execute(runner: ModelRunner, step: SchedulerOutput) -> None:
    """Compute a step, whose rows all must do."""
    for result in runner.execute(step).rows:
        if result.error is not None:
            raise RuntimeError(result.error)
