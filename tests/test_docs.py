"""Runs what README.md and docs/*.md tell the reader to run.

The blocks of a file run in order, in an empty folder with links to the demo model and the examples:

* python: in one namespace for the whole file.
* bash (all lines) and console (lines that begin with ``$``): by bash. Set-up commands (make, pip, git, activate) are
  not run; the targets of make must exist.

Above a block, ``<!-- test: fresh -->`` empties the namespace first, and ``<!-- test: skip WHY -->`` leaves the block
out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.is_file()]
MODEL = ".cache/smollm2"
LINKED = ("examples", "benchmarks")
SETUP = {"make", "pip", "git", "source", "."}
TIMEOUT_S = 300

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```\s*$", re.M | re.S)
DIRECTIVE = re.compile(r"<!-- test: (?P<verb>fresh|skip)(?P<reason>[^>]*)-->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of the file where the text begins, and what is said of it."""

    language: str
    code: str
    line: int
    verb: str = ""


def blocks_of(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        said = DIRECTIVE.search(text[: match.start()].rstrip())
        if said and said["verb"] == "skip":
            assert said["reason"].strip(), f"line {text.count(chr(10), 0, said.start()) + 1}: a skip needs a reason"
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["code"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(match["language"], code, line, said["verb"] if said else "")


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def script_of(block: Block) -> str:
    """What bash is to run: the commands without those of the set-up, which are only checked."""
    script = ["set -euo pipefail", f'batchkit() {{ {shlex.quote(sys.executable)} -m batchkit "$@"; }}']
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    document_ends = ""
    for line in lines:
        if document_ends:  # inside of a here-document everything is text
            document_ends = "" if line == document_ends else document_ends
        else:
            line = line.replace(".venv/bin/", "")
            first, *others = line.partition("#")[0].split() or [""]
            if first == "make":
                unknown = {word for word in others if re.fullmatch(r"[\w-]+", word) and word[0] != "-"} - make_targets()
                assert not unknown, f"the Makefile has no target {sorted(unknown)}"
            if first in SETUP or [first, *others[:2]] == ["python", "-m", "pip"]:
                continue
            if opened := re.search(r"<<-?\s*(['\"]?)(\w+)\1", line):
                document_ends = opened[2]
        script.append(line)
    return "\n".join(script)


def run_shell(block: Block, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-c", script_of(block)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"the commands at line {block.line} failed:\n{done.stdout}{done.stderr}"


def run_blocks(path: Path, text: str, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(text):
        if block.verb == "skip":
            continue
        if block.verb == "fresh":
            namespace = {"__name__": "__main__"}
        if block.language == "python":
            # Empty lines in front, so that a traceback shows the line of the document.
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)
        elif block.language in ("bash", "console"):
            run_shell(block, folder)


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCS, ids=[str(path.relative_to(ROOT)) for path in DOCS])
def test_document(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    text = path.read_text(encoding="utf-8")
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    if MODEL in text:
        (tmp_path / MODEL).parent.mkdir()
        (tmp_path / MODEL).symlink_to(request.getfixturevalue("smollm2"))
    monkeypatch.chdir(tmp_path)
    run_blocks(path, text, tmp_path)


SAMPLE = """
```python
x = 1
```
<!-- test: skip needs a GPU -->
```python
raise AssertionError
```
1. In a list:
   ```python
   assert x == 1
   with open("seen", "w") as f:
       f.write("yes")
   ```

<!-- test: fresh -->

```python
assert "x" not in globals()
```
```console
$ test "$(cat seen)" = yes
yes, this is output
$ make test PYTEST_ARGS=-x
```
```bash
pip install nothing-of-this-name
FILE=from-bash
echo $(( 6 \\
  * 7 )) > $FILE
cat > document <<'END'
make tea  # isn't run

END
test "$(wc -l < document)" = 2
```
"""


def test_blocks_run_in_order_in_one_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(tmp_path / "sample.md", SAMPLE, tmp_path)
    assert (tmp_path / "from-bash").read_text() == "42\n"


def test_a_failing_command_a_missing_target_and_a_skip_without_reason_are_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="line 1 failed"):
        run_shell(Block("bash", "false", 1), tmp_path)
    with pytest.raises(AssertionError, match="no target"):
        script_of(Block("bash", "make tea", 1))
    with pytest.raises(AssertionError, match="needs a reason"):
        list(blocks_of("<!-- test: skip -->\n```python\n```\n"))


def test_a_traceback_shows_the_line_of_the_document(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(tmp_path / "sample.md", "text\n\n```python\n\n1 / 0\n```\n", tmp_path)
    assert caught.traceback[-1].lineno + 1 == 5
