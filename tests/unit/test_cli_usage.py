"""Wrong calls of the command line, each one line that names the thing; and what options reach the engine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from batchkit import Engine, Scheduler, cli
from unit.cli_rig import jsonl, prompt

ALL = ["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy"]
WRONG = {
    "nothing": ([], "required: COMMAND"),
    "no such command": (["nonsense"], "invalid choice: 'nonsense'"),
    "no input": (["generate"], "IN"),
    "no model": (["generate", "in.jsonl", "-o", "out.jsonl"], "--model"),
    "no output": (["generate", "in.jsonl", "--model", "toy"], "-o OUT is required, except with --dry-run"),
    "no model to examine": (["doctor"], "MODEL"),
    "unknown option": ([*ALL, "--unknown"], "there is no option --unknown (batchkit generate --help says more)"),
    "option with an underscore": (
        [*ALL, "--max_tokens", "8"],
        "no option --max_tokens; is it --max-tokens? (batchkit generate --help says more)",
    ),
    "option without its dash": ([*ALL, "--maxtokens=8"], "no option --maxtokens; is it --max-tokens?"),
    "short option with an underscore": ([*ALL, "--top_p", "0.5"], "no option --top_p; is it --top-p?"),
    "unknown option of doctor": (["doctor", "toy", "--sed", "1"], "is it --seed? (batchkit doctor --help"),
    "two inputs": ([*ALL, "more.jsonl"], "unexpected: more.jsonl (batchkit generate --help says more)"),
    "no seats": ([*ALL, "--max-num-seqs", "0"], "must be a whole number of at least 1, got '0'"),
    "seats of a wrong type": ([*ALL, "--max-num-seqs", "many"], "must be a whole number of at least 1, got 'many'"),
    "no window": ([*ALL, "--window", "0"], "argument --window"),
    "limit": ([*ALL, "--limit", "-1"], "argument --limit"),
    "two sizes": ([*ALL, "--kv-memory", "1GiB", "--num-kv-blocks", "8"], "not allowed with argument --kv-memory"),
    "size": ([*ALL, "--kv-memory", "much"], "kv_memory must be a number of bytes or text such as"),
    "size of the host's": ([*ALL, "--swap-memory", "0"], "swap_memory must be at least 1 byte, got '0'"),
    "temperature": ([*ALL, "--temperature", "-1"], "temperature must be finite and at least 0, got -1.0"),
    "temperature NaN": ([*ALL, "--temperature", "nan"], "temperature must be a number, got NaN"),
    "top-k": ([*ALL, "--top-k", "-2"], "top_k must be at least 1, or 0 or -1 to keep all tokens, got -2"),
    "top-p": ([*ALL, "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
    "min-p": ([*ALL, "--min-p", "1.5"], "min_p must be in [0, 1], got 1.5"),
    "empty stop string": ([*ALL, "--stop", "a", "--stop", ""], "a stop string must not be empty"),
    "max_tokens": ([*ALL, "--max-tokens", "-1"], "max_tokens must be at least 1, or 0 to generate nothing, got -1"),
    "dtype": ([*ALL, "--dtype", "flot32"], "invalid choice: 'flot32'"),
    "too long": ([*ALL, "--on-too-long", "cut"], "invalid choice: 'cut'"),
    "format": ([*ALL, "--format", "csv"], "invalid choice: 'csv'"),
    "column of the record": ([*ALL, "--keep", "a,text"], "'text' of its own; --keep text=my_text copies the column"),
    "no column": ([*ALL, "--keep", "a,,b"], "--keep takes columns with commas between them, got 'a,,b'"),
    "no new name": ([*ALL, "--keep", "a="], "--keep takes columns with commas between them, got 'a='"),
    "column twice": ([*ALL, "--keep", "a", "--keep", "b=a"], "--keep names 'a' twice"),
    "template without columns": ([*ALL, "--template", "Hello {{body}}"], "names no column"),
    "template with an open brace": ([*ALL, "--template", "{body"], "a brace itself is {{ or }}"),
    "template with an attribute": ([*ALL, "--template", "{body.__class__}"], "plain column names in braces"),
    "template with an index": ([*ALL, "--template", "{body[0]}"], "plain column names in braces"),
    "template with a width": ([*ALL, "--template", "{body:>99999999}"], "plain column names in braces"),
    "template with a conversion": ([*ALL, "--template", "{body!r}"], "plain column names in braces"),
    "template with a position": ([*ALL, "--template", "{}"], "plain column names in braces"),
    "seats over budget": ([*ALL, "--max-num-seqs", "9", "--max-tokens-per-step", "8"], "max_tokens_per_step (8)"),
    "no such policy": ([*ALL, "--scheduler", "pagd"], "there is no policy 'pagd'; is it paged?"),
    "no such class": ([*ALL, "--scheduler", "ChunkedScheduler"], "is it ChunkedPrefillScheduler?"),
    "a dot for the colon": ([*ALL, "--scheduler", "pack.own.Own,x=1"], "no policy 'pack.own.Own'; is it pack.own:Own?"),
    "a file's name alone": ([*ALL, "--scheduler", "own.py"], "there are static, dynamic, orca,"),
    "no policy like it": ([*ALL, "--scheduler", "best"], "there are static, dynamic, orca,"),
    "no key": ([*ALL, "--scheduler", "orca,pow2"], "'pow2' is not key=value; OrcaScheduler takes reserve"),
    "unknown key": ([*ALL, "--scheduler", "orca,reserves=pow2"], "takes no 'reserves'; it takes reserve"),
    "key of a class without": (
        [*ALL, "--scheduler", "own:Plain,x=1"],
        "'x'; it takes no arguments of its own",
    ),
    "key of a base class": (
        [*ALL, "--scheduler", "dynamic,x=1"],
        "takes min_batch, max_wait_s, drop_finished, pad_to",
    ),
    "key twice": ([*ALL, "--scheduler", "orca,reserve=pow2,reserve=pow2"], "reserve is given twice"),
    "key with an option": ([*ALL, "--scheduler", "orca,max_num_seqs=3"], "not given here but by --max-num-seqs"),
    "value": (
        [*ALL, "--scheduler", "orca,reserve=all"],
        "must be one of max_tokens, pow2, model_len, got 'all'",
    ),
    "value of a wrong type": (
        [*ALL, "--scheduler", "static,pad_to=x"],
        "StaticScheduler cannot be made with pad_to='x': pad_to must be a whole number, got 'x'",
    ),
    "value that a class of the user's cannot take": (
        [*ALL, "--scheduler", "own:Picky,gain=x"],
        "Picky cannot be made with gain='x': ",
    ),
    "no module": ([*ALL, "--scheduler", "nowhere.at_all:Own"], "there is no module 'nowhere', neither in this folder"),
    "no module in a package": ([*ALL, "--scheduler", "batchkit.nowhere:Own"], "there is no module 'batchkit.nowhere'"),
    "a file's name": ([*ALL, "--scheduler", "own.py:Own"], "'own.py:Own' must be module:Class"),
    "no class's name": ([*ALL, "--scheduler", "json:"], "'json:' must be module:Class"),
    "no class": ([*ALL, "--scheduler", "json:Own"], "there is no Own; schedulers there: none"),
    "another class": (
        [*ALL, "--scheduler", "own:Other"],
        "it is no Scheduler: Other; schedulers there: Own, Picky, Plain, Abstract",
    ),
    "no class in a module that has some": ([*ALL, "--scheduler", "own:Ow"], "there is no Ow; schedulers there: Own"),
    "not a policy yet": ([*ALL, "--scheduler", "own:Abstract"], "Abstract cannot be made: Can't instantiate abstract"),
    "a module that raises": ([*ALL, "--scheduler", "raises:Own"], "raises cannot be imported: ZeroDivisionError"),
    "a module with a slip": ([*ALL, "--scheduler", "slip:Own"], "slip.py, line 2)"),
    "a module that needs another": (
        [*ALL, "--scheduler", "needs:Own"],
        "needs cannot be imported: ModuleNotFound",
    ),
}

OWN = """
from batchkit import PagedScheduler, Scheduler

class Own(PagedScheduler):
    def __init__(self, allocator, *, names=(), gain=1.0, word=None, **options):
        super().__init__(allocator, **options)
        self.told = names, gain, word

class Picky(Own):
    def __init__(self, allocator, *, gain=1.0, **options):
        super().__init__(allocator, **options)
        self.gain = 2 / gain

class Plain(Scheduler):
    schedule = PagedScheduler.schedule

class Abstract(Scheduler):
    pass

class Other:
    pass
"""


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """A current folder with modules of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, source in {"own": OWN, "raises": "1 / 0", "slip": "\ndef", "needs": "import nowhere_to_be_found"}.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "in.jsonl").write_bytes(jsonl([prompt()]))


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_one_line_before_anything_is_loaded(own_modules, monkeypatch, capsys, options, message):
    monkeypatch.setattr(cli, "make_engine", lambda args: pytest.fail("the model is loaded"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(options)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("batchkit: ") and shown.err.count("\n") == 1
    assert message in shown.err
    assert "--help says more" in shown.err


def engine_options(monkeypatch, *options):
    """What `Engine.from_pretrained` gets."""
    got = {}

    def from_pretrained(name, **options):
        got.update(options, name=name)
        raise OSError("that will do")

    monkeypatch.setattr(Engine, "from_pretrained", from_pretrained)
    no_torch = SimpleNamespace(limit_threads=lambda: None)  # its threads are not to be changed, nor need it be there
    monkeypatch.setitem(sys.modules, "batchkit.hf.environment", no_torch)
    assert cli.main([*ALL, *options]) == 1
    return got


def test_options_reach_the_engine(own_modules, monkeypatch):
    words = (
        "--dtype float32 --device cpu --kv-memory 2GiB --block-size 32 --swap-memory 1GiB "
        "--prefix-caching --max-model-len 512 --max-num-seqs 8 "
        "--max-tokens-per-step 64 --attention varlen --cuda-graphs --scheduler waiting-served,max_waiting_steps=3"
    )
    assert engine_options(monkeypatch, *words.split()) == {
        "name": "toy",
        "dtype": "float32",
        "device": "cpu",
        "kv_memory": "2GiB",
        "num_kv_blocks": None,
        "block_size": 32,
        "swap_memory": "1GiB",
        "prefix_caching": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_tokens_per_step": 64,
        "attention": "varlen",
        "cuda_graphs": True,
        "scheduler": cli.SCHEDULERS["waiting-served"],
        "max_waiting_steps": 3,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("0.5", 0.5),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ('"1"', "1"),
        ("'a b'", "a b"),
        ("pow2", "pow2"),
        ("", ""),
        ("a=b", "a=b"),
        ("[1,2]", [1, 2]),
        ("(1, 2)", (1, 2)),
        ("2GiB", "2GiB"),
        ("1,2", (1, 2)),
    ],
)
def test_values_are_json_or_python_or_text(own_modules, monkeypatch, text, value):
    got = engine_options(monkeypatch, "--scheduler", f"own:Own,word={text}, gain=2")
    assert (got["word"], got["gain"]) == (value, 2)
    assert type(got["word"]) is type(value)


def test_a_policy_of_the_current_folder_answers_a_file(own_modules, command):
    code, records = command([prompt(), prompt("b")], "--scheduler", "own:Own,names=['x']")
    assert code == 0 and len(records) == 2


def test_every_short_name_is_a_policy_that_can_be_made_without_arguments():
    for name, policy in cli.SCHEDULERS.items():
        assert issubclass(policy, Scheduler)
        cli.options.parse([*ALL, "--scheduler", name])


def test_class_names_are_names_too():
    for policy in cli.SCHEDULERS.values():
        args = cli.options.parse([*ALL, "--scheduler", policy.__name__])
        assert args.scheduler.policy is policy


def test_the_help_says_how_long_an_answer_may_be(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "default: up to the model's length" in " ".join(capsys.readouterr().out.split())


def test_a_policy_that_raises_is_one_line_with_the_place(own_modules, command, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.py").write_text(OWN + "class Late(Own):\n    def schedule(self, step):\n        self.nothing\n")
    code, records = command([prompt()], "--scheduler", "own:Late", "--quiet")
    assert code == 1 and records == []
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "AttributeError: 'Late' object has no attribute 'nothing'" in shown
    assert "own.py, line 24)" in shown


def test_env_says_what_is_missing(tmp_path):
    """In a process of its own, where torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None; from batchkit.cli import main; code = main(['env']); "
        "assert 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["batchkit", sys.modules["batchkit"].__version__]
    assert any(line.startswith("models            cannot run: ") and "torch" in line for line in lines)
    assert any(line.startswith("CPU ") and "cores usable" in line for line in lines)
    assert done.stderr == ""


def test_doctor_without_torch_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "batchkit.hf.doctor", None)
    assert cli.main(["doctor", "toy"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("batchkit: cannot load the model toy: ") and shown.count("\n") == 1
