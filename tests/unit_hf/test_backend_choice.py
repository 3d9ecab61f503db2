"""Which backend is used: the trial that each has to pass, and the automatic choice."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import logging
import re
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

import batchkit.hf.backends as backends
import batchkit.hf.backends.trial as trial
from batchkit import cli
from batchkit.cli import options
from batchkit.errors import UnsupportedModel
from batchkit.hf.backends import choose_backend
from batchkit.hf.backends.base import AttentionBackend, LayerSpec
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.backends.trial import faults, make_step
from batchkit.hf.backends.varlen import VarlenBackend
from batchkit.hf.runner import TransformersRunner
from tiny_models import tiny
from unit_hf.test_doctor import saved
from unit_hf.varlen_rig import on_the_cpu  # noqa: F401 - a fixture

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SIZE = 64
PLAIN = LayerSpec(0, 4, 2, 32, 32, torch.bfloat16, CPU)
LAYERS = {
    "plain": PLAIN,
    "float16": replace(PLAIN, dtype=torch.float16),
    "float32": replace(PLAIN, dtype=torch.float32),
    "one head": replace(PLAIN, num_heads=1, num_kv_heads=1, key_dim=64, value_dim=64),
    "all heads": replace(PLAIN, num_kv_heads=4),
    "long window": replace(PLAIN, window=4096),
    "short window": replace(PLAIN, window=5),
    "window of one": replace(PLAIN, window=1),
    "everything": replace(PLAIN, value_dim=20, window=9, softcap=2.0, has_sinks=True),
}


class Own(AttentionBackend):
    """A user's backend, right unless a subclass says otherwise: the reference does what it is asked."""

    name = "own"
    default_block_size = SIZE
    block_size_multiple = 1
    captures_decodes = False

    def __init__(self) -> None:
        self._inner = ReferenceBackend()

    def unsupported_reasons(self, layers):
        return []

    def plan(self, batch):
        return self._inner.plan(batch)

    def attend(self, layer, kv, plan, query, key, value, *, scaling, sinks):
        return self._inner.attend(layer, kv, plan, query, key, value, scaling=scaling, sinks=sinks)

    def drop_caches(self) -> None:
        self._inner.drop_caches()


class InFloat32(Own):
    """Other rounding than the reference's."""

    def attend(self, layer, kv, plan, query, key, value, *, scaling, sinks):
        kv = replace(kv, key=kv.key.float(), value=kv.value.float())
        inputs = [tensor if tensor is None else tensor.float() for tensor in (query, key, value, sinks)]
        layer = replace(layer, dtype=torch.float32)
        out = super().attend(layer, kv, plan, *inputs[:3], scaling=scaling, sinks=inputs[3])
        return out.to(query.dtype)


class IgnoresWindows(Own):
    def attend(self, layer, *rest, **more):
        return super().attend(replace(layer, window=None), *rest, **more)


class WindowOffByOne(Own):
    def attend(self, layer, *rest, **more):
        window = None if layer.window is None else layer.window + 1
        return super().attend(replace(layer, window=window), *rest, **more)


class IgnoresGroups(Own):
    """All query heads look at the first KV head."""

    def attend(self, layer, kv, plan, query, key, value, **more):
        first = replace(kv, key=kv.key[:1].contiguous(), value=kv.value[:1].contiguous())
        layer = replace(layer, num_kv_heads=1)
        return super().attend(layer, first, plan, query, key[:, :1], value[:, :1], **more)


class GroupsTheOtherWay(Own):
    """Query head h looks at KV head ``h % num_kv_heads``."""

    def attend(self, layer, kv, plan, query, key, value, **more):
        order = torch.arange(layer.num_heads).view(-1, layer.num_kv_heads).T.ravel()
        out = super().attend(layer, kv, plan, query[:, order], key, value, **more)
        return out[:, order.argsort()]


class Shifted(Own):
    """Rows of several tokens see one key less, as under a causal mask that is shifted."""

    def attend(self, layer, kv, plan, query, key, value, **more):
        out = super().attend(layer, kv, plan, query, key, value, **more)
        for first, end in itertools.pairwise(plan.batch.query_starts.tolist()):
            out[first + 1 : end] = out[first : end - 1].clone()
        return out


class TopLeft(Own):
    """Query i of a row sees keys up to i, wherever the row begins."""

    def plan(self, batch):
        lens = np.where(batch.query_lens > 1, batch.query_lens, batch.kv_lens)
        return super().plan(replace(batch, kv_lens=lens))


class ReadsUnwritten(Own):
    """Takes the keys of a row's last block to be all there."""

    def plan(self, batch):
        size = batch.block_size
        grown = -(-batch.kv_lens // size) * size
        return super().plan(replace(batch, kv_lens=np.where(batch.query_lens == 1, grown, batch.kv_lens)))


class DropsTheLastKey(Own):
    """Of rows of one token that have more than a block."""

    def plan(self, batch):
        fewer = (batch.query_lens == 1) & (batch.kv_lens > batch.block_size + 1)
        return super().plan(replace(batch, kv_lens=batch.kv_lens - fewer))


class TakesTablesForRanges(Own):
    def plan(self, batch):
        tables = batch.tables.copy()
        for first, end in itertools.pairwise(batch.table_starts.tolist()):
            tables[first:end] = (tables[first] + np.arange(end - first)) % tables.max()
        return super().plan(replace(batch, tables=tables))


class WrongScale(Own):
    def attend(self, layer, *rest, scaling, sinks):
        return super().attend(layer, *rest, scaling=1.1 * layer.key_dim**-0.5, sinks=sinks)


class IgnoresScaling(Own):
    def attend(self, layer, *rest, scaling, sinks):
        return super().attend(layer, *rest, scaling=None, sinks=sinks)


class Raises(Own):
    def attend(self, *inputs, **more):
        raise NotImplementedError("No operator found\n   not built with CUDA support")


class GivesNaN(Own):
    def attend(self, *inputs, **more):
        out = super().attend(*inputs, **more)
        out[-1, -1, -1] = float("nan")
        return out


class WritesAlong(Own):
    """Into the slot behind the last one as well."""

    def write(self, kv, slots, key, value):
        more = torch.cat([slots, slots[-1:] + 1])
        super().write(kv, more, torch.cat([key, key[-1:]]), torch.cat([value, value[-1:]]))


class WritesKeysAlone(Own):
    def write(self, kv, slots, key, value):
        kv.key[:, slots] = key.transpose(0, 1)


class TestTrial:
    @pytest.mark.parametrize("backend", [Own, InFloat32])
    @pytest.mark.parametrize("kind", LAYERS)
    @pytest.mark.parametrize("size", [16, SIZE, 256])
    def test_what_is_right_passes(self, size: int, kind: str, backend: type[Own]) -> None:
        assert faults(backend(), [LAYERS[kind]], size) == []

    @pytest.mark.parametrize("size", [SIZE, 256])
    @pytest.mark.parametrize(
        ("backend", "kind"),
        [
            (IgnoresWindows, "short window"),
            (IgnoresWindows, "long window"),
            (WindowOffByOne, "short window"),
            (WindowOffByOne, "long window"),
            (WindowOffByOne, "window of one"),
            (IgnoresGroups, "plain"),
            (GroupsTheOtherWay, "plain"),
            (Shifted, "plain"),
            (Shifted, "one head"),
            (TopLeft, "plain"),
            (ReadsUnwritten, "plain"),
            (DropsTheLastKey, "plain"),
            (DropsTheLastKey, "all heads"),
            (DropsTheLastKey, "one head"),
            (TakesTablesForRanges, "plain"),
            (WrongScale, "plain"),
            (IgnoresScaling, "plain"),
            (GivesNaN, "plain"),
        ],
    )
    def test_what_is_wrong_does_not(self, backend: type[Own], kind: str, size: int) -> None:
        with pytest.raises(
            UnsupportedModel, match=r"attention backend own: it is wrong, on cpu in bfloat16 with .* is off"
        ):
            choose_backend(backend(), [LAYERS[kind]], "Any", block_size=size)

    @pytest.mark.parametrize("backend", [WritesAlong, WritesKeysAlone])
    def test_what_writes_wrong_does_not(self, backend: type[Own]) -> None:
        (*_, last) = found = faults(backend(), [PLAIN], SIZE)
        assert len(found) == 4
        assert last == (
            "it writes keys or values wrong, on cpu in bfloat16 with 4 heads of 32 over 2 KV heads: "
            "prompts, chunks and decoding together"
        )

    def test_the_smallest_fault_shows_in_every_step(self) -> None:
        """One key of 131, and one head to show it."""
        for what, step, scaling in trial._steps(LAYERS["one head"], SIZE):
            off = trial._distance(step.run(DropsTheLastKey(), scaling), step.run(ReferenceBackend(), scaling))
            assert (off > 0.025) == (what != "prompts"), (what, off)

    def test_what_it_says(self) -> None:
        layers = [PLAIN, replace(PLAIN, index=1, window=5), replace(PLAIN, index=2, window=7), replace(PLAIN, index=3)]
        found = faults(IgnoresWindows(), layers, SIZE)
        kind = r"it is wrong, on cpu in bfloat16 with 4 heads of 32 over 2 KV heads, a window of \d: "
        assert found and all(re.match(kind, fault) for fault in found)
        assert any("decoding over scattered blocks is off by " in fault for fault in found)
        assert all("of a result's length, and rounding explains 0.016" in fault for fault in found)

    def test_failures_are_faults_of_each_kind(self) -> None:
        assert faults(Raises(), [PLAIN, replace(PLAIN, index=1), replace(PLAIN, index=2, window=5)], SIZE) == [
            f"it failed when it was tried, on cpu in bfloat16 with 4 heads of 32 over 2 KV heads{more}: "
            "NotImplementedError: No operator found not built with CUDA support"
            for more in ("", ", a window of 5")
        ]

    def test_each_kind_is_tried_once(self) -> None:
        seen = []

        class Watched(Own):
            def attend(self, layer, *rest, **more):
                seen.append(layer)
                return super().attend(layer, *rest, **more)

        layers = [replace(PLAIN, index=index, window=window) for index, window in enumerate([None, 4096, None, 8192])]
        assert faults(Watched(), layers, SIZE) == []
        assert {layer.window for layer in seen} == {None, SIZE + 5}
        assert len(seen) <= 12

    def test_it_leaves_no_trace(self) -> None:
        kept = []

        class Watched(Own):
            def attend(self, layer, kv, *rest, **more):
                kept.append(weakref.ref(kv.key))
                return super().attend(layer, kv, *rest, **more)

        torch.manual_seed(1)
        before = torch.get_rng_state()
        backend = Watched()
        assert faults(backend, [PLAIN], SIZE) == []
        assert torch.equal(torch.get_rng_state(), before)
        assert kept and not any(key() is not None for key in kept)
        assert not backend._inner._scratch

    def test_it_is_not_under_the_callers_autocast(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert faults(Own(), [replace(PLAIN, dtype=torch.float32)], SIZE) == []

    def test_it_is_not_on_the_callers_default_device(self) -> None:
        with torch.device("meta"):
            assert faults(Own(), [PLAIN], SIZE) == []

    def test_it_is_over_blocks_of_the_size_that_is_asked_for(self) -> None:
        sizes = set()

        class Watched(Own):
            block_size_multiple = 32

            def attend(self, layer, kv, *rest, **more):
                sizes.add(kv.block_size)
                return super().attend(layer, kv, *rest, **more)

        for asked, tried in ((None, SIZE), (96, 96), (40, SIZE)):
            sizes.clear()
            choose_backend(Watched(), [PLAIN], "Any", block_size=asked)
            assert sizes == {tried}

    def test_what_the_backend_itself_objects_to_is_not_tried(self) -> None:
        class Objects(Raises):
            def unsupported_reasons(self, layers):
                return ["no"]

        with pytest.raises(UnsupportedModel) as caught:
            choose_backend(Objects(), [PLAIN], "Any")
        assert caught.value.reasons == ("attention backend own: no",)

    def test_what_is_made_of_the_reference_is_not_tried(self) -> None:
        """It would be compared with itself, and doctor finds what is wrong with it."""

        class Made(ReferenceBackend):
            attend = Raises.attend

        assert isinstance(choose_backend(Made(), [PLAIN], "Any"), Made)

    def test_contiguous_rows_have_gaps_and_no_order(self) -> None:
        batch = make_step(PLAIN, [(3, 2), (0, 9), (0, 1)], block_size=4, scattered=False).batch
        assert batch.tables.tolist() == [7, 8, 3, 4, 5, 1] and batch.contiguous.all()

    def test_slots_that_nobody_wrote_hold_nan(self) -> None:
        step = make_step(PLAIN, [(3, 2), (0, 1)], block_size=4)
        assert step.kv.key.isnan().sum() == (step.kv.key.shape[1] - 4 - 6) * 2 * 32
        assert (step.kv.key[:, step.kv.zero_block * 4 :] == 0).all()


def backend_named(called: str, *, refuses: str | None = None, wrong: bool = False, multiple: int = 1) -> type[Own]:
    class Made(Raises if wrong else Own):
        name = called
        block_size_multiple = multiple
        default_block_size = max(SIZE, multiple)

        def unsupported_reasons(self, layers):
            return [] if refuses is None else [refuses]

    return Made


@pytest.fixture
def automatic(monkeypatch):
    """Says which backends there are to choose from, on layers that are taken to be on CUDA."""

    def there_are(*kinds: type[Own]) -> list[LayerSpec]:
        monkeypatch.setattr(backends, "ON_CUDA", kinds)
        monkeypatch.setattr(backends, "faults", lambda one, layers, size: faults(one, [PLAIN], size))
        return [replace(PLAIN, device=CUDA)]

    return there_are


class TestAutomaticChoice:
    def test_the_order(self) -> None:
        assert [kind.name for kind in backends.ON_CUDA] == ["xformers", "varlen"]
        assert [kind.name for kind in backends.ON_CPU] == ["cpu"]
        assert sorted(backends.NAMES) == ["cpu", "reference", "varlen", "xformers"]

    @pytest.mark.parametrize(
        ("first", "second", "chosen"),
        [
            ({}, {}, "first"),
            ({"refuses": "width"}, {}, "second"),
            ({"wrong": True}, {}, "second"),
            ({"multiple": 64}, {"multiple": 96}, "second"),
            ({"refuses": "width"}, {"wrong": True}, "reference"),
            ({"multiple": 64}, {"multiple": 256}, "reference"),
        ],
    )
    def test_the_first_that_qualifies(self, automatic, first, second, chosen) -> None:
        layers = automatic(backend_named("first", **first), backend_named("second", **second))
        assert choose_backend(None, layers, "M", block_size=96).name == chosen

    def test_without_a_block_size_each_has_its_own(self, automatic) -> None:
        backend = choose_backend(None, automatic(backend_named("first", multiple=128)), "M")
        assert (backend.name, backend.default_block_size) == ("first", 128)

    def test_it_says_which_one_and_why_not_the_others(self, automatic, caplog) -> None:
        layers = automatic(
            backend_named("first", multiple=64),
            backend_named("second", refuses="no"),
            backend_named("third", wrong=True),
        )
        with caplog.at_level(logging.DEBUG, logger="batchkit"):
            choose_backend(None, layers, "M", block_size=96)
        *why, which = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert which == ("INFO", "M: attention backend reference")
        assert [level for level, _ in why] == ["DEBUG"] * 3
        assert why[0][1] == "M: not attention backend first: blocks of 96 tokens, and it needs a multiple of 64"
        assert why[1][1] == "M: not attention backend second: no"
        assert why[2][1].startswith("M: not attention backend third: it failed when it was tried, on cpu")

    def test_all_layers_must_be_supported(self, automatic) -> None:
        class OnCuda(Own):
            name = "on cuda"

            def unsupported_reasons(self, layers):
                return [f"the model is on {layer.device}" for layer in layers if layer.device.type != "cuda"]

        layers = automatic(OnCuda)
        assert choose_backend(None, layers, "M").name == "on cuda"
        assert choose_backend(None, [*layers, PLAIN], "M").name == "reference"

    def test_each_device_has_its_own(self, automatic, monkeypatch) -> None:
        on_cuda = automatic(backend_named("first"))
        monkeypatch.setattr(backends, "ON_CPU", (backend_named("second"),))
        assert choose_backend(None, on_cuda, "M").name == "first"
        assert choose_backend(None, [PLAIN], "M").name == "second"
        assert choose_backend(None, [replace(PLAIN, device=torch.device("mps"))], "M").name == "reference"
        assert choose_backend(None, [], "M").name == "reference"

    @pytest.mark.usefixtures("on_the_cpu")
    def test_the_runner_follows_it(self, automatic, monkeypatch) -> None:
        """As on a CUDA device, where xformers would refuse the block size."""
        real = backends.choose_backend
        automatic(backend_named("first", multiple=512), VarlenBackend)

        def on_cuda(wanted, layers, model, *, block_size):
            return real(wanted, [replace(layer, device=CUDA) for layer in layers], model, block_size=block_size)

        monkeypatch.setattr("batchkit.hf.runner.choose_backend", on_cuda)
        monkeypatch.setattr("batchkit.hf.backends.varlen._DEVICES", frozenset({"cuda"}))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        model = tiny(head_dim=16).half()
        choices = {256: ("varlen", 256), 512: ("first", 512), None: ("first", 512), 16: ("reference", 16)}
        for given, chosen in choices.items():
            runner = TransformersRunner(model, num_kv_blocks=2, block_size=given)
            assert (runner._backend.name, runner.geometry.block_size) == chosen
            runner.close()
        with pytest.raises(ValueError, match="must be a multiple of 256 for attention backend varlen, got 48"):
            TransformersRunner(model, num_kv_blocks=2, block_size=48, attention="varlen")

    def test_nobody_pays_for_xformers_on_a_cpu(self) -> None:
        code = (
            "import sys, torch; from batchkit.hf.backends import choose_backend\n"
            "from batchkit.hf.backends.base import LayerSpec\n"
            "layer = LayerSpec(0, 4, 2, 32, 32, torch.float16, torch.device('cpu'))\n"
            "assert choose_backend(None, [layer], 'M').name in ('cpu', 'reference')\n"
            "found = {'xformers', 'triton', 'torch.nn.attention.varlen'} & set(sys.modules)\n"
            "assert not found, found\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("model"))


class TestCommandLine:
    def test_it_knows_every_backend(self) -> None:
        assert options.ATTENTION == backends.NAMES

    @pytest.mark.parametrize(
        "command",
        [
            ["generate", "{rows}", "-o", "-", "--model", "{folder}"],
            ["generate", "{rows}", "--dry-run", "--model", "{folder}"],
            ["bench", "variance", "{folder}", "--policies", "chunked", "--n", "2", "--prompt", "8", "--caps", "4"],
            ["doctor", "{folder}"],
        ],
        ids=["generate", "dry-run", "bench", "doctor"],
    )
    def test_commands_pass_it_on(self, command, folder, tmp_path, capsys) -> None:
        rows = tmp_path / "in.jsonl"
        rows.write_text('{"prompt": "w5 w6", "params": {"max_tokens": 2}}\n')
        command = [word.format(rows=rows, folder=folder) for word in command]
        assert cli.main([*command, "--device", "cpu", "--attention", "varlen"]) == 1
        said = "".join(capsys.readouterr())
        assert "attention backend varlen: it needs a CUDA device, and the model is on cpu" in said
        assert cli.main([*command, "--device", "cpu", "--attention", "reference"]) == 0

    def test_a_block_size_that_it_cannot_have_shows_in_a_dry_run(self, folder, tmp_path, capsys, on_the_cpu) -> None:  # noqa: F811
        rows = tmp_path / "in.jsonl"
        rows.write_text('{"prompt": "w5 w6", "params": {"max_tokens": 2}}\n')
        command = ["generate", str(rows), "--dry-run", "--model", folder, "--dtype", "float16", "--attention", "varlen"]
        assert cli.main(command) == 0
        assert "blocks of 256 tokens\nattention         varlen\n" in capsys.readouterr().out
        assert cli.main([*command, "--block-size", "16"]) == 1
        assert "must be a multiple of 256 for attention backend varlen, got 16" in capsys.readouterr().err
