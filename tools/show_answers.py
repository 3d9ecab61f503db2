"""Print prompts beside their answers: python tools/show_answers.py PROMPTS.jsonl ANSWERS.jsonl."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any


def read(path: str) -> dict[str, dict[str, Any]]:
    """The lines of a JSONL file by their id."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return {record["id"]: record for record in map(json.loads, filter(None, lines))}


def last_user_turn(prompt: str) -> str:
    """What the user asked, without the chat markup."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def main() -> None:
    prompts, answers = (read(path) for path in sys.argv[1:3])
    for key, record in prompts.items():
        answer = answers[key]
        text = answer.get("text") or f"error: {answer.get('error')}"
        print(f"\n[{key}] {last_user_turn(record['prompt'])}")
        for line in text.strip().splitlines():
            print(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    main()
