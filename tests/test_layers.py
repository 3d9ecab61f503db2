"""Who may import whom, read from the source: a row may import the rows above it and its own, never in a circle.

Imports inside functions count like any other, except the few that `LAZY` allows. What stands under
``if TYPE_CHECKING:`` counts too: knowing a lower row's types is knowing that row.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"

# The first entry that matches a module, or a package around it, gives its row.
ROWS: dict[str, int] = {
    "batchkit.errors": 0,
    "batchkit.params": 0,
    "batchkit.types": 0,
    "batchkit.clocks": 0,
    "batchkit.machine": 0,
    "batchkit.sizes": 0,
    "batchkit.costs": 1,
    "batchkit.sequence": 1,
    "batchkit.queues": 1,
    "batchkit.allocators": 1,
    "batchkit.preemption": 2,
    "batchkit.scheduler": 2,
    "batchkit.runner": 2,
    "batchkit.stopping": 2,
    "batchkit.text": 2,
    "batchkit.schedulers": 3,
    "batchkit.simulate": 3,
    "batchkit.trace": 3,
    "batchkit.workload": 3,
    "batchkit.metrics": 3,
    "batchkit.intake": 3,
    "batchkit.openai": 3,
    "batchkit.live": 3,
    "batchkit.engine": 4,
    "batchkit.threads": 5,
    "batchkit.aio": 5,
    "batchkit.testing": 5,
    "batchkit.experiment": 5,
    "batchkit.show": 5,
    "batchkit.cli": 6,
    "batchkit.__main__": 6,
    "batchkit.__init__": 7,
}
HF = "batchkit.hf"
HF_MAY_IMPORT_UP_TO = 2

# What else may be imported, by row. typing_extensions is everywhere.
EVERYWHERE = {"typing_extensions"}
HF_THIRD_PARTY = {"torch", "transformers", "safetensors", "numpy"}
ONE_FILE_ONLY = {
    "xformers": "batchkit.hf.backends.xformers",
    "triton": "batchkit.hf.backends.kv_write_kernel",
    "tokenizers": "batchkit.hf.tokenizer",
    "llguidance": "batchkit.hf.grammar",
}

# What a module may import only inside a function, so that importing the module does not.
LAZY: dict[str, set[str]] = {
    "batchkit.engine": {HF, "tqdm"},
    "batchkit.testing": {HF},
    "batchkit.cli": {HF, "tqdm"},
    "batchkit.experiment": {HF, "matplotlib"},
    "batchkit.__init__": {HF},
}


@dataclass(frozen=True)
class Import:
    """One import statement's target: a module of batchkit, or the top name of somebody else's."""

    importer: str
    target: str
    line: int
    inside_function: bool
    type_checking: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def plain(module: str) -> str:
    """A package's own name for its __init__."""
    return module.removesuffix(".__init__")


PLAIN = {plain(module): module for module in MODULES}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def targets(node: ast.Import | ast.ImportFrom, importer: str) -> list[str]:
    """The modules that a statement names, submodules named by ``from package import module`` among them."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        package = importer.split(".")[: -node.level] if node.level else []
        base = ".".join([*package, *(node.module or "").split(".")]).strip(".")
        names = [f"{base}.{a.name}" if f"{base}.{a.name}" in PLAIN else base for a in node.names]
    return sorted({PLAIN.get(n, n) if n.split(".")[0] == "batchkit" else n.split(".")[0] for n in names})


def imports_of(importer: str, source: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool, checking: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.extend(Import(importer, t, node.lineno, inside, checking) for t in targets(node, importer))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            for child in node.body:
                visit(child, inside, True)
            for child in node.orelse:
                visit(child, inside, checking)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inside, checking)

    visit(ast.parse(source), False, False)
    return found


IMPORTS = [found for module, path in MODULES.items() for found in imports_of(module, path.read_text(encoding="utf-8"))]


def is_hf(module: str) -> bool:
    return module == HF or module.startswith(HF + ".")


def row(module: str) -> int:
    name = module
    while name:
        if name in ROWS:
            return ROWS[name]
        name = name.rpartition(".")[0]
    raise AssertionError(f"{module} has no row: add it to ROWS in {Path(__file__).name}, as high up as it can stand")


def may(found: Import) -> bool:
    """Whether the import table allows it."""
    importer, target = found.importer, found.target
    ours = target.split(".")[0] == "batchkit"
    if not ours and (target in sys.stdlib_module_names or target in EVERYWHERE):
        return True
    if found.inside_function or found.type_checking:
        allowed = LAZY.get(importer, LAZY.get(".".join(importer.split(".")[:2]), set()))
        if target in allowed or (is_hf(target) and HF in allowed):
            return True
    if is_hf(importer):
        if ours:
            return is_hf(target) or row(target) <= HF_MAY_IMPORT_UP_TO
        return target in HF_THIRD_PARTY or ONE_FILE_ONLY.get(target) == importer
    return ours and not is_hf(target) and row(target) <= row(importer)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_only_what_its_row_may(module: str) -> None:
    if not is_hf(module):
        row(module)
    wrong = [str(found) for found in IMPORTS if found.importer == module and not may(found)]
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if found.target in graph and not found.inside_function and not found.type_checking:
            graph[found.importer].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(
    ("importer", "source", "allowed"),
    [
        ("batchkit.types", "from .errors import BatchkitError", True),
        ("batchkit.types", "from .sequence import Sequence", False),
        ("batchkit.types", "def f():\n    from . import sequence", False),
        ("batchkit.types", "import typing_extensions, dataclasses", True),
        ("batchkit.scheduler", "import numpy", False),
        ("batchkit.schedulers.paged", "from ..scheduler import Scheduler", True),
        ("batchkit.schedulers.paged", "from ..engine import Engine", False),
        ("batchkit.engine", "import tqdm", False),
        ("batchkit.engine", "def f():\n    from tqdm import tqdm", True),
        ("batchkit.engine", "def f():\n    from .hf import runner", True),
        ("batchkit.engine", "from .hf import runner", False),
        ("batchkit.engine", "def f():\n    import torch", False),
        ("batchkit.hf.runner", "import torch\nfrom ..runner import ModelRunner", True),
        ("batchkit.hf.runner", "from ..engine import Engine", False),
        ("batchkit.hf.runner", "from ..schedulers import PagedScheduler", False),
        ("batchkit.hf.runner", "import xformers", False),
        ("batchkit.hf.backends.xformers", "from xformers.ops import fmha", True),
    ],
)
def test_the_table_itself(importer: str, source: str, allowed: bool) -> None:
    needed = {"batchkit.types", "batchkit.sequence", "batchkit.scheduler", "batchkit.engine", "batchkit.hf.runner"}
    missing = needed - set(PLAIN)
    assert not missing, f"this test speaks of modules that are gone: {missing}"
    assert all(may(found) for found in imports_of(importer, source)) is allowed


def test_importing_batchkit_imports_nobody_elses_packages() -> None:
    code = (
        "import json, sys; before = set(sys.modules); import batchkit;"
        "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    foreign = set(json.loads(shown)) - set(sys.stdlib_module_names) - EVERYWHERE - {"batchkit"}
    assert not foreign, f"`import batchkit` also imports {sorted(foreign)}"
