"""Writes docs/supported-models.md: every family of the parity tests, examined once more as `batchkit doctor` does it.

    python tools/supported_models.py [OUT]

Models are tiny and random: what is tried is an architecture, not a checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]

import torch
import transformers
from test_families import FAMILIES, REFUSED, tiny

from batchkit import UnsupportedModel
from batchkit.hf.doctor import examine

HEAD = """# Supported models

Any causal language model of transformers runs if it computes attention through transformers' `AttentionInterface`, once
for each layer, causally, and mixes tokens nowhere else. Nobody keeps a list of names: a model is **probed** when it is
bound, with a pass over two tokens, and one that would come out wrong is refused with every reason
(`UnsupportedModel.reasons`). So a family that is not below may well run.

```bash
batchkit doctor .cache/smollm2   # binds a model, and compares its logits with plain eager attention
```

`doctor` takes a folder or a name on the hub. It feeds random tokens in random pieces over scattered KV blocks, and ends
with exit code 0 if the logits are those of transformers alone.

## Families that are tested

Each was made tiny and random, in float32 on the CPU, and examined by `batchkit doctor`'s own code. The difference is
the largest over all positions: the root mean square over the logits, as a part of their spread. The tests hold them to
1e-5 under preemption and swapping too (`tests/parity/test_families.py`).

| model type | attention layers | difference |
| --- | --- | --- |
"""
MIDDLE = """
## Families that are refused

| model type | reasons |
| --- | --- |
"""
TAIL = """
Encoder-decoder models, and models without a head for logits, are refused too. Of RoPE types `dynamic` and `longrope`,
which depend on the longest sequence in a batch, only lengths up to the original one are taken. What else does not run
today is in [limits](limits.md).

Written by `python tools/supported_models.py` with transformers {transformers} and torch {torch}.
"""


def supported() -> list[str]:
    lines = []
    for name, (model_type, changes) in FAMILIES.items():
        found = examine(tiny(model_type, changes))
        if not found.is_right:
            raise SystemExit(f"{name} comes out wrong: {found}")
        lines.append(f"| {name} | {found.layers} | {found.worst:.0e} |")
        print(lines[-1], file=sys.stderr)
    return lines


def refused() -> list[str]:
    lines = []
    for model_type, changes, _ in REFUSED.values():
        try:
            examine(tiny(model_type, changes))
        except UnsupportedModel as error:
            reasons = "; ".join(error.reasons).replace("|", "\\|")
            lines.append(f"| {model_type} | {reasons} |")
        else:
            raise SystemExit(f"{model_type} is not refused")
    return lines


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "supported-models.md"
    tail = TAIL.format(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])
    out.write_text(HEAD + "\n".join(supported()) + "\n" + MIDDLE + "\n".join(refused()) + "\n" + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
