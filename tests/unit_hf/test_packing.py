"""Packed weights: the order of the kernels, who has them, and that nothing is lost by it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import hashlib
import logging
import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import PreTrainedTokenizerFast

import batchkit.hf.fused as fused
from batchkit import Engine, OutOfKVMemory, SamplingParams
from batchkit.hf.attention import bind
from batchkit.hf.backends.native import BuildError, kernels
from batchkit.hf.fused import optimized
from batchkit.hf.layer_kernels import Packed, linear
from batchkit.hf.packing import is_given_up, pack, pack_again, unpack
from batchkit.hf.runner import TransformersRunner
from tiny_models import tiny


def _why_not() -> str | None:
    try:
        kernels("linear")
    except BuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=f"no kernels here: {_why_not()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 11], [40] * 50, [1], list(range(3, 40))]


@pytest.fixture(autouse=True)
def _is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_is_ours", lambda dtype, **_: True)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def generated(engine: Engine) -> list[list[int]]:
    return [list(out.token_ids) for out in engine.generate(PROMPTS, GREEDY)]


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("dtype", DTYPES)
class TestPacked:
    @pytest.mark.parametrize("inputs", [1, 7, 8, 9, 64, 300])
    @pytest.mark.parametrize("outputs", [1, 31, 32, 33, 64, 200])
    def test_there_and_back(self, dtype: torch.dtype, inputs: int, outputs: int) -> None:
        weight = random(outputs, inputs, dtype=dtype)
        packed = Packed(weight)
        assert packed.shape == (outputs, inputs) and torch.equal(packed.unpacked(), weight)
        indices = torch.tensor([[outputs - 1, 0], [outputs // 2, outputs - 1]])
        assert torch.equal(packed.rows(indices), weight[indices])
        other = random(outputs, inputs, dtype=dtype, seed=1)
        packed.fill(other)
        assert torch.equal(packed.unpacked(), other)

    def test_in_place(self, dtype: torch.dtype) -> None:
        weight = random(256, 40, dtype=dtype)
        before = weight.clone()
        packed = Packed.within(weight)
        assert packed is not None and packed.numbers is weight
        assert torch.equal(packed.undone(), before)  # nothing has been done
        packed.fill(packed.numbers)
        assert not torch.equal(weight, before) and torch.equal(packed.unpacked(), before)
        for _ in range(2):
            assert torch.equal(packed.undone(), before) and packed.undone().data_ptr() == weight.data_ptr()
        assert Packed.within(random(200, 40, dtype=dtype)) is None
        assert Packed.within(random(40, 256, dtype=dtype).t()) is None

    def test_undone(self, dtype: torch.dtype) -> None:
        weight = random(201, 37, dtype=dtype)
        packed = Packed(weight)
        assert torch.equal(packed.undone(), weight) and packed.undone().data_ptr() == packed.numbers.data_ptr()

    def test_indices_that_do_not_fit(self, dtype: torch.dtype) -> None:
        packed = Packed(random(33, 4, dtype=dtype))
        for index in (33, -1):
            with pytest.raises(IndexError, match="and there are 33 rows"):
                packed.rows(torch.tensor([0, index]))
        assert packed.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 4)

    @pytest.mark.parametrize("inputs", [1, 5, 64, 255, 600])
    @pytest.mark.parametrize("outputs", [1, 31, 32, 33, 100])
    def test_products(self, dtype: torch.dtype, inputs: int, outputs: int) -> None:
        weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
        packed = Packed(weight)
        for rows in (1, 2, 3, 5, 6, 7, 13, 48, 49, 240, 241, 300):
            x = random(rows, inputs, dtype=dtype)
            truth = x.double() @ weight.double().T
            slack = 1e-6 * inputs * (1 + float(truth.abs().max()))
            for given, want in ((None, truth), (bias, truth + bias.double())):
                got = linear(x, packed, given)
                assert got.dtype == dtype
                torch.testing.assert_close(got.double(), want, rtol=0.51 * torch.finfo(dtype).eps, atol=slack)

    def test_a_row_gives_the_same_whatever_is_beside_it(self, dtype: torch.dtype) -> None:
        x, packed = random(300, 600, dtype=dtype), Packed(random(333, 600, dtype=dtype, seed=1))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            want = linear(x, packed)
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 47, 48, 49, 239, 240, 241, 300):
                    assert torch.equal(linear(x[-rows:], packed), want[-rows:])
        finally:
            torch.set_num_threads(before)

    def test_what_is_not_a_number_stays_in_its_row_and_output(self, dtype: torch.dtype) -> None:
        x, weight = random(12, 64, dtype=dtype), random(50, 64, dtype=dtype, seed=1)
        want = linear(x, Packed(weight))
        x[5, 10] = torch.nan
        weight[49, 3] = torch.nan
        got = linear(x, Packed(weight))
        assert got[5].isnan().all() and got[:, 49].isnan().all()
        got[5], got[:, 49] = want[5], want[:, 49]
        assert torch.equal(got, want)


class TestMove:
    def test_weights_are_where_they_were(self) -> None:
        model = tiny("llama", hidden_size=64, intermediate_size=96, vocab_size=128)
        before = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
        runner = TransformersRunner(model, num_kv_blocks=4, pack_weights="move")
        found = runner._bound.fused
        assert found is not None and found.packed == (15, 15)
        for name, module in runner._bound.model.named_modules():
            packed = vars(module).get("packed")
            if packed is not None:
                where, weight = before[f"{name}.weight"]
                assert torch.equal(packed.unpacked(), weight)
                assert (packed.numbers.data_ptr() == where) == (len(weight) % kernels("linear").batchkit_panel() == 0)
                assert module.weight.shape == weight.shape and module.weight.isnan().all()
        assert model.lm_head.weight.isnan().all() and model.lm_head.weight.untyped_storage().nbytes() <= 4

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "olmo2", "phi3", "gpt_neox", "mixtral"])
    @pytest.mark.parametrize("is_tied", [True, False])
    def test_outputs_are_those_of_a_copy(self, family: str, is_tied: bool) -> None:
        """The very same: both are computed by the same kernels."""
        found = []
        for how in ("copy", "move"):
            model = tiny(family, tie_word_embeddings=is_tied)
            with Engine.from_model(model, num_kv_blocks=64, pack_weights=how) as engine:
                found.append([(o.token_ids, o.outputs[0].logprobs) for o in engine.generate(PROMPTS, GREEDY)])
        assert found[0] == found[1]

    def test_tied_embeddings(self) -> None:
        model = tiny("llama", tie_word_embeddings=True, vocab_size=128)
        want = model.get_input_embeddings().weight.clone()
        where = model.lm_head.weight.data_ptr()
        bound = optimized(bind(model), "move")
        embeddings = bound.model.get_input_embeddings()
        assert vars(embeddings)["packed"] is vars(bound.model.lm_head)["packed"]
        assert torch.equal(embeddings(torch.arange(128)), want)
        if 128 % kernels("linear").batchkit_panel() == 0:
            assert vars(embeddings)["packed"].numbers.data_ptr() == where
        with pytest.raises(IndexError):
            embeddings(torch.tensor([128]))

    def test_memory_that_others_use_is_left_alone(self) -> None:
        """Two parameters may be one piece of memory, or parts of each other."""
        model = tiny(
            vocab_size=128, hidden_size=64, intermediate_size=64, num_attention_heads=8, tie_word_embeddings=False
        )
        embeddings, head = model.model.embed_tokens, model.lm_head
        head.weight = nn.Parameter(embeddings.weight.data)
        first, second = (layer.mlp for layer in model.model.layers)
        first.up_proj.weight = nn.Parameter(first.gate_proj.weight.data)
        whole = torch.cat((second.gate_proj.weight.data, second.up_proj.weight.data))
        second.gate_proj.weight, second.up_proj.weight = (nn.Parameter(part) for part in whole.split(64))
        second.down_proj.weight = nn.Parameter(whole[32:96])
        want = bind(model).run_alone()
        before = embeddings.weight.clone()
        bound = optimized(bind(model), "move")
        assert bound.fused is not None and bound.fused.packed == (15, 15)
        assert torch.equal(embeddings.weight, before)
        torch.testing.assert_close(bound.run_alone(), want, rtol=1e-5, atol=1e-6)

    def test_weights_that_others_use_are_copied(self) -> None:
        """Embeddings of Gemma are scaled: what they read is left to them."""
        model = tiny("gemma2", tie_word_embeddings=True)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        model.lm_head.weight.data_ptr()
        model.model.embed_tokens.max_norm = 100.0
        want = model.lm_head.weight.clone()
        bound = optimized(bind(model), "move")
        assert bound.fused is not None and bound.fused.packed == (15, 15)
        assert torch.equal(model.lm_head.weight, want)
        assert model.model.layers[0].mlp.up_proj.weight.isnan().all()

    def test_a_model_that_comes_out_otherwise_gets_its_weights_back(self, caplog: Any) -> None:
        class Reader(nn.Module):
            """Uses a weight behind its layer's back."""

            def __init__(self, layer: nn.Linear) -> None:
                super().__init__()
                self.layer = [layer]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(x, self.layer[0].weight)

        model = tiny(tie_word_embeddings=True)
        attention = model.model.layers[1].self_attn
        attention.q_proj, attention.spare = Reader(attention.q_proj), attention.q_proj
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        want = bind(model).run_alone()
        with caplog.at_level(logging.WARNING, logger="batchkit"):
            bound = optimized(bind(model), "move")
        assert "weights are not packed" in caplog.text
        assert bound.fused is not None and bound.fused.linear == (15, 15) and bound.fused.packed == (0, 0)
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert not any("packed" in vars(module) for module in bound.model.modules())
        torch.testing.assert_close(bound.run_alone(), want)

    def test_a_model_that_no_kernel_computes_right_stays_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        monkeypatch.setattr(fused, "_is_alike", lambda after, before: False)
        model = tiny(tie_word_embeddings=True)
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        want = bind(model).run_alone()
        with caplog.at_level(logging.WARNING, logger="batchkit"):
            bound = optimized(bind(model), "move")
        assert bound.fused is None and "left as they are" in caplog.text
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert not any({"packed", "forward"} & vars(module).keys() for module in bound.model.modules())
        assert torch.equal(bound.run_alone(), want)

    @pytest.mark.parametrize("how", ["copy", "move", None])
    def test_a_model_that_has_given_up_its_weights_is_refused(self, how: Any) -> None:
        model = tiny()
        with (
            Engine.from_model(model, num_kv_blocks=8, pack_weights="move"),
            pytest.raises(ValueError, match='moved into another engine, by pack_weights="move"'),
        ):
            Engine.from_model(model, num_kv_blocks=8, pack_weights=how)

    @pytest.mark.parametrize("tied", [False, True])
    def test_closing_gives_the_weights_back_to_whoever_has_the_model(self, tied: bool) -> None:
        model = tiny(tie_word_embeddings=tied)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(2):
            with Engine.from_model(model, num_kv_blocks=8, pack_weights="move"):
                assert model.lm_head.weight.isnan().all()
            assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize(
        "mistake",
        [
            {"attention": "nosuch"},
            {"kv_memory": "abc"},
            {"num_kv_blocks": 10**12},
            {"max_model_len": 10**6},
            {"max_num_seqs": 0},
            {"swap_memory": "1XB"},
            {"trace": "/nonexistent/trace"},
        ],
        ids=str,
    )
    def test_an_engine_that_cannot_be_made_leaves_the_weights(self, mistake: dict[str, Any]) -> None:
        model = tiny()
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises((ValueError, OSError, OutOfKVMemory)):
            Engine.from_model(
                model, pack_weights="move", **({} if "kv_memory" in mistake else {"num_kv_blocks": 8}) | mistake
            )
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("how", ["copy", "move"])
    @pytest.mark.parametrize("change", [torch.nn.utils.weight_norm, partial(prune.random_unstructured, amount=0.5)])
    @pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
    def test_a_weight_that_is_no_parameter_is_not_packed(self, change: Any, how: Any) -> None:
        model = tiny()
        layer = model.model.layers[0].mlp.up_proj
        change(layer, name="weight")
        with Engine.from_model(model, num_kv_blocks=8, optimize=False, attention="reference") as plain:
            want = generated(plain)
        with Engine.from_model(model, num_kv_blocks=8, pack_weights=how) as engine:
            assert generated(engine) == want
            engine.weights_changed()
            assert generated(engine) == want

    @pytest.mark.parametrize("how", [None, "copy", "move"])
    def test_a_weight_of_which_torch_keeps_the_negative(self, how: Any) -> None:
        model = tiny()
        layer = model.model.layers[0].mlp.up_proj
        layer.weight = nn.Parameter(torch._neg_view(layer.weight.data.clone()))
        with Engine.from_model(model, num_kv_blocks=8, optimize=False, attention="reference") as plain:
            want = generated(plain)
        with Engine.from_model(model, num_kv_blocks=8, pack_weights=how) as engine:
            assert engine._runner._bound.fused is not None  # type: ignore[attr-defined]
            assert generated(engine) == want

    @pytest.mark.parametrize("when", range(8))
    @pytest.mark.parametrize("what", ["_call", "undone"])
    def test_closing_that_is_interrupted_can_be_done_again(
        self, what: str, when: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also right after the kernel is done, when nothing in Python knows of it."""
        model = tiny(tie_word_embeddings=True)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        engine = Engine.from_model(model, num_kv_blocks=8, pack_weights="move")
        own, count = getattr(Packed, what), 0

        def interrupted(packed: Packed, *args: Any) -> Any:
            nonlocal count
            count += 1
            result = own(packed, *args)
            if count == when + 1:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(Packed, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        assert model.model.layers[-1].mlp.down_proj.weight.isnan().all()
        assert engine.close() == [] and count > when + 1
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("when", range(15))
    def test_making_that_is_interrupted_leaves_the_weights(self, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny(hidden_size=64, intermediate_size=64)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        own, count = Packed.fill, 0

        def interrupted(packed: Packed, weight: torch.Tensor) -> None:
            nonlocal count
            own(packed, weight)
            if packed.numbers.shape[0] in (64, 32, 97 + 31):  # one of the model's, and not of a trial
                count += 1
                if count == when + 1:
                    raise KeyboardInterrupt

        monkeypatch.setattr(Packed, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Engine.from_model(model, num_kv_blocks=8, pack_weights="move")
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("made_in", [True, False])
    @pytest.mark.parametrize("closed_in", [True, False])
    def test_inference_mode_is_not_that_of_the_weights(self, made_in: bool, closed_in: bool) -> None:
        model = tiny()
        with torch.inference_mode(made_in):
            engine = Engine.from_model(model, num_kv_blocks=8, pack_weights="move")
        with torch.inference_mode(closed_in):
            engine.close()
        ids = torch.tensor([[1, 2, 3]])
        model(ids, labels=ids).loss.backward()
        assert model.lm_head.weight.grad is not None

    def test_a_model_made_in_inference_mode(self) -> None:
        with torch.inference_mode():
            model = tiny()
            want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(OutOfKVMemory):
            Engine.from_model(model, num_kv_blocks=10**12, pack_weights="move")
        with Engine.from_model(model, num_kv_blocks=8, pack_weights="move") as engine:
            assert len(generated(engine)) == len(PROMPTS)
            engine.weights_changed()
        with torch.inference_mode():
            assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())

    def test_another_dtype_meanwhile(self) -> None:
        model = tiny()
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with Engine.from_model(model, num_kv_blocks=8, pack_weights="move"):
            model.double()
        assert all(torch.equal(tensor, want[name].double()) for name, tensor in model.state_dict().items())

    def test_a_state_dict_from_before_is_right_again(self) -> None:
        model = tiny(hidden_size=64, intermediate_size=96)
        before = model.state_dict()
        want = {name: tensor.clone() for name, tensor in before.items()}
        with Engine.from_model(model, num_kv_blocks=8, pack_weights="move"):
            assert not torch.equal(
                before["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight
            )
        assert all(torch.equal(tensor, want[name]) for name, tensor in before.items())

    @pytest.mark.parametrize("other", [torch.float64, torch.float32, "inputs", "outputs", "far fewer outputs"])
    def test_one_layer_that_becomes_another_ends_requests(self, other: Any) -> None:
        """With an error, and not with what happens to lie behind its weights."""
        model = tiny("qwen2").bfloat16()
        with Engine.from_model(model, num_kv_blocks=40, pack_weights="copy") as engine:
            generated(engine)
            weight = model.model.layers[1].mlp.up_proj.weight
            if isinstance(other, torch.dtype):
                weight.data = weight.data.to(other)
            elif other == "inputs":
                weight.data = weight.data.repeat(1, 2)
            else:
                weight.data = weight.data.repeat(2, 1) if other == "outputs" else weight.data[:1].clone()
            engine.weights_changed()
            out = engine.generate([[5, 6]], GREEDY, on_error="return")[0]
        # One output is a factor for all, in torch as well.
        assert (out.finish_reason == "error") == (other != "far fewer outputs")

    @pytest.mark.parametrize("moves", [True, False])
    def test_whoever_else_has_the_weight_is_left_alone(self, moves: bool) -> None:
        class Other(nn.Module):
            """Has a layer's weight under another name."""

            def __init__(self, weight: nn.Parameter) -> None:
                super().__init__()
                self.table = weight

        layer = nn.Linear(8, 32, bias=False)
        model = nn.ModuleList([layer, Other(layer.weight)])
        before = layer.weight.detach().clone()
        pack(model, [layer], moves=moves)
        assert "packed" in vars(layer) and "packed" not in vars(model[1])
        assert torch.equal(layer.weight, before)
        unpack(model)
        assert torch.equal(model[1].table, before) and "packed" not in vars(layer)

    def test_one_number_that_is_nan_is_not_a_weight_that_was_moved(self) -> None:
        assert not is_given_up(torch.full((1, 1), math.nan))
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        pack(model, [model[0]], moves=True)
        assert is_given_up(model[0].weight)

    def test_undone(self) -> None:
        model = tiny(tie_word_embeddings=True)
        want = model.state_dict()
        want = {name: tensor.clone() for name, tensor in want.items()}
        pack(model, linear_layers(model), moves=True)
        assert model.lm_head.weight.isnan().all()
        unpack(model)
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_nothing_is_held_after_the_end(self) -> None:
        engine = Engine.from_model(tiny(vocab_size=128), num_kv_blocks=8, pack_weights="move")
        modules = engine._runner._bound.model.modules()  # type: ignore[attr-defined]
        held = [weakref.ref(vars(module)["packed"].numbers) for module in modules if "packed" in vars(module)]
        assert len(held) == 15
        gc.collect()
        gc.disable()
        try:
            engine.close()
            del engine, modules
            assert not [ref for ref in held if ref() is not None]
        finally:
            gc.enable()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_from_pretrained_leaves_files_alone(self, dtype: str, tmp_path: Path) -> None:
        """Weights may be mapped from the file that they were read from."""
        model = tiny(vocab_size=128).to(getattr(torch, dtype))
        model.save_pretrained(tmp_path)
        _tokenizer().save_pretrained(tmp_path)

        def digest() -> str:
            return hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()

        before = digest()
        with Engine.from_pretrained(str(tmp_path), num_kv_blocks=64) as engine:
            found = engine._runner._bound.fused  # type: ignore[attr-defined]
            assert found.packed == (15, 15)
            got = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        with Engine.from_model(model, num_kv_blocks=64, pack_weights="copy") as engine:
            assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == got
        assert digest() == before
        with Engine.from_pretrained(str(tmp_path), num_kv_blocks=64, pack_weights=None) as engine:
            assert engine._runner._bound.fused.packed == (0, 0)  # type: ignore[attr-defined]


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))


class TestCopy:
    def test_the_callers_model_is_left_alone(self) -> None:
        model = tiny()
        before = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
        TransformersRunner(model, num_kv_blocks=4, pack_weights="copy")
        for name, weight in model.named_parameters():
            assert weight.data_ptr() == before[name][0] and torch.equal(weight, before[name][1])
        assert not any("packed" in vars(module) for module in model.modules())

    def test_tied_weights_are_packed_once(self) -> None:
        model = tiny()
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        bound = optimized(bind(model), "copy")
        first, second = (vars(layer.mlp.up_proj)["packed"] for layer in bound.model.model.layers)
        assert first is second

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_weights_that_change_are_used_once_that_is_said(self, dtype: torch.dtype) -> None:
        model = tiny().to(dtype)
        with Engine.from_model(model, num_kv_blocks=64, pack_weights="copy") as engine:
            before = engine.generate(PROMPTS, GREEDY)
            with torch.no_grad():
                for layer in linear_layers(model):
                    layer.weight.mul_(-1.5)
            head = model.lm_head.weight
            head.data = (head.data * 2).t().contiguous().t()  # another place, and another layout
            assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == [o.token_ids for o in before]
            engine.weights_changed()
            after = [(o.token_ids, o.outputs[0].logprobs) for o in engine.generate(PROMPTS, GREEDY)]
        with Engine.from_model(model, num_kv_blocks=64, pack_weights="copy") as engine:
            assert [(o.token_ids, o.outputs[0].logprobs) for o in engine.generate(PROMPTS, GREEDY)] == after
        assert [ids for ids, _ in after] != [o.token_ids for o in before]

    def test_weights_of_another_dtype(self) -> None:
        model = tiny().bfloat16()
        bound = optimized(bind(model), "copy")
        model.float()
        pack_again(bound.model)
        want = bind(model).run_alone()
        assert float((bound.run_alone() - want).norm() / want.norm()) < 1e-5
        model.double()
        pack_again(bound.model)
        assert not any("packed" in vars(module) for module in bound.model.modules())
        torch.testing.assert_close(bound.run_alone(), bind(model).run_alone())

    def test_without_the_kernel_nothing_is_packed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused, "_is_ours", lambda dtype, **_: False)
        model = tiny()
        runner = TransformersRunner(model, num_kv_blocks=4, pack_weights="move")
        assert runner._bound.fused is not None and runner._bound.fused.packed == (0, 0)
        assert not any(weight.isnan().any() for weight in model.parameters())
        TransformersRunner(model, num_kv_blocks=4, pack_weights="move", optimize=False)
        assert not any(weight.isnan().any() for weight in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_request_gives_the_same_whatever_is_beside_it(family: str, dtype: torch.dtype) -> None:
    """Bit for bit, since neither attention nor a product looks at how many rows there are."""
    with Engine.from_model(tiny(family).to(dtype), num_kv_blocks=64, attention="cpu", pack_weights="copy") as engine:
        together = [(o.token_ids, o.outputs[0].logprobs) for o in engine.generate(PROMPTS, GREEDY)]
        alone = [(o.token_ids, o.outputs[0].logprobs) for prompt in PROMPTS for o in engine.generate([prompt], GREEDY)]
    assert together == alone


def test_what_cannot_be_meant() -> None:
    for value in ("yes", True, ""):
        with pytest.raises(ValueError, match='pack_weights must be None, "copy" or "move", got'):
            TransformersRunner(tiny(), num_kv_blocks=4, pack_weights=value)
