"""`Engine.stream`, and what it shares with `Engine.generate`: many prompts, outputs as they come, a bounded window."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    Engine,
    EngineClosed,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    PromptsFailed,
    RequestError,
    RequestOutput,
    SamplingParams,
    SimulatedRunner,
)
from unit.helpers import POLICIES, Bytes, Rig, eager, tokens


def params(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def collected(outputs: list[RequestOutput]) -> dict[int, list[RequestOutput]]:
    lives: dict[int, list[RequestOutput]] = {}
    for output in outputs:
        assert output.position is not None
        lives.setdefault(output.position, []).append(output)
    return lives


# ---- outputs as they come ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_joined_deltas_are_the_final_output(policy) -> None:
    rig = Rig(policy, blocks=24, seats=4, budget=32, vocab=257, tokenizer=Bytes(), **eager(policy))
    prompts = [tokens(f"p{i}", 1 + i % 5, 257) for i in range(15)]
    lengths = [1 + (7 * i) % 10 for i in range(15)]
    lives = collected(list(rig.engine.stream(prompts, [params(length) for length in lengths])))
    assert sorted(lives) == list(range(15))
    for position, life in lives.items():
        final = life[-1]
        assert [output.finished for output in life] == [False] * (len(life) - 1) + [True]
        assert final.prompt_token_ids == tuple(prompts[position])
        assert "".join(output.new_text for output in life) == final.text
        assert tuple(token for output in life for token in output.new_token_ids) == final.token_ids
        assert len(final.token_ids) == lengths[position]
        if rig.scheduler.streams and lengths[position] > 1:
            # The first delta is there when the request has only begun.
            assert life[0].new_token_ids == final.token_ids[:1] and not life[0].finished
    rig.assert_empty()


def test_a_delta_is_given_before_the_next_step() -> None:
    rig = Rig(OrcaScheduler)
    outputs = rig.engine.stream([[1]], params(5))
    assert rig.runner.outs == []  # nothing happens before it is asked for
    for number, output in enumerate(outputs, 1):
        assert len(output.token_ids) == len(rig.runner.outs) == number


def test_the_order_is_that_of_the_ends() -> None:
    rig = Rig(OrcaScheduler)
    outputs = rig.engine.stream([[1], [2], [3]], [params(6), params(2), params(4)])
    assert [output.position for output in outputs if output.finished] == [1, 2, 0]


def test_generate_is_the_same_in_the_order_of_the_prompts() -> None:
    prompts = [[1], [2] * 20, [3]]
    rig = Rig(PagedScheduler)
    streamed = {o.position: o.token_ids for o in rig.engine.stream(prompts, params()) if o.finished}
    outputs = rig.engine.generate(prompts, params())
    assert [output.position for output in outputs] == [0, 1, 2]
    assert [output.token_ids for output in outputs] == [streamed[i] for i in range(3)]


def test_requests_that_are_added_have_no_position() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("other", 3, max_tokens=2)
    assert [output.position for output in rig.step()] == [None]


def test_others_keep_their_outputs() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("before", max_tokens=3)
    rig.add("beyond", max_tokens=20)
    assert len([output for output in rig.engine.stream([[1], [2]], params(5)) if output.finished]) == 2
    rig.finish()


def test_leaving_early_aborts_what_runs() -> None:
    rig = Rig(OrcaScheduler, seats=2)
    rig.add("other", max_tokens=9)
    outputs = rig.engine.stream(([i] for i in range(100)), params(5), window=4)
    for output in outputs:
        if output.finished:
            break
    outputs.close()
    assert [seq.request.id for queue in (rig.scheduler.waiting, rig.scheduler.running) for seq in queue] == ["other"]
    rig.finish()


def test_a_stream_is_read_beside_another() -> None:
    rig = Rig(OrcaScheduler)
    first, second = rig.engine.stream([[1], [2]], params(3)), rig.engine.stream([[3]], params(5))
    got: dict[str, list[RequestOutput]] = {"first": [], "second": []}
    got["first"].append(next(first))
    got["second"].append(next(second))
    got["second"] += second
    assert got["second"][-1].finished and len(got["second"][-1].token_ids) == 5
    got["first"] += first
    assert [o.position for o in got["first"] if o.finished] == [0, 1]


@pytest.mark.parametrize("window", [1, 2, None])
def test_streams_are_read_in_turn_to_their_ends(window) -> None:
    rig = Rig(OrcaScheduler)
    streams = {name: rig.engine.stream([[1], [2], [3]], params(4), window=window) for name in "abc"}
    got: dict[str, list[RequestOutput]] = {name: [] for name in streams}
    while streams:
        for name, outputs in list(streams.items()):
            output = next(outputs, None)
            if output is None:
                del streams[name]
            else:
                got[name].append(output)
    for outputs in got.values():
        lives = collected(outputs)
        assert sorted(lives) == [0, 1, 2]
        for life in lives.values():
            assert life[-1].finished and sum(len(o.new_token_ids) for o in life) == len(life[-1].token_ids) == 4
    rig.assert_empty()


def test_each_gets_its_own_outputs_whoever_steps() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("other", max_tokens=6)
    outputs = rig.engine.stream([[1], [2]], params(9))
    got = [next(outputs)]
    while not rig.finals:
        rig.step()
    assert [output.position for output in rig.engine.generate([[3], [4], [5]], params(2))] == [0, 1, 2]
    got += outputs
    assert [len(life[-1].token_ids) for _, life in sorted(collected(got).items())] == [9, 9]
    rig.finish()


def test_a_closed_engine_gives_what_neither_step_nor_stream_has_given() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("short", max_tokens=1)
    rig.add("long", max_tokens=99)
    outputs = rig.engine.stream([[1], [2]], params(99))
    for _ in range(5):
        next(outputs)
    left = rig.engine.close()
    assert {o.request_id: o.finish_reason for o in left if o.finished} == {
        "short": "length",
        "long": "abort",
        "request-1": "abort",
        "request-2": "abort",
    }
    assert sum(len(o.new_token_ids) for o in left if o.request_id == "long") == len(left[-3].token_ids)
    outputs.close()


def test_a_stream_that_is_left_does_not_abort_another_request_of_the_same_name() -> None:
    rig = Rig(OrcaScheduler)
    outputs = rig.engine.stream([[1]], params(2))
    next(outputs)
    assert rig.engine.step() == []  # the stream's request has ended, and its name is free
    rig.add("request-1", max_tokens=3)
    outputs.close()
    rig.finish()


def test_a_stream_that_is_thrown_away_in_the_middle_of_a_step() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("other", max_tokens=5)
    cycle = [rig.engine.stream([[1], [2]], params(50))]
    next(cycle[0])
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    rig.runner.before = lambda out: gc.collect()
    rig.finish()
    rig.assert_empty()


def test_a_policy_that_waits_is_slept_for_also_while_others_have_outputs() -> None:
    rig = Rig(DynamicScheduler, seats=4, min_batch=4, max_wait_s=5.0)
    rig.add("other", max_tokens=1)
    for output in rig.engine.stream(([i] for i in range(1, 3)), params(2), window=1):
        assert len(rig.runner.outs) <= 4, output
    assert rig.clock() >= 10.0
    rig.finish()


# ---- what cannot be taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", ["text", b"bytes", 5, None, {"role": "user", "content": "Hi"}])
def test_the_call_itself_raises(prompts) -> None:
    with pytest.raises(TypeError, match=r"for a single one, \[prompt\]"):
        Rig().engine.stream(prompts)


@pytest.mark.parametrize("window", ["3", 2.5, True])
def test_a_window_that_is_no_number(window) -> None:
    with pytest.raises(TypeError, match="window must be a whole number, got"):
        Rig().engine.stream([[1]], window=window)


def test_params_may_be_left_to_the_default() -> None:
    outputs = Rig(model_len=8).engine.generate([[1], [2], [3]], iter([None, params(2), None]))
    assert [len(output.token_ids) for output in outputs] == [7, 2, 7]


def test_a_prompt_that_raises_when_it_is_read() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("gone")

    outputs = Rig().engine.generate([[1], broken(), range(1, 4)], params(), on_error="return")
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "the prompt cannot be read: KeyError: 'gone'"
    assert outputs[2].prompt_token_ids == (1, 2, 3)


def test_a_closed_engine() -> None:
    rig = Rig()
    outputs = rig.engine.stream([[1], [2]], params())
    next(outputs)
    rig.engine.close()
    with pytest.raises(EngineClosed):
        list(outputs)
    with pytest.raises(EngineClosed):
        rig.engine.stream([[1]])


def test_bad_prompts_among_good_ones() -> None:
    rig = Rig(OrcaScheduler, vocab=100)
    prompts = [[1], [100], [2], 5]
    finals = {o.position: o for o in rig.engine.stream(prompts, params(), on_error="return") if o.finished}
    assert [finals[i].finish_reason for i in range(4)] == ["length", "error", "length", "error"]
    assert "100 is not in the vocabulary" in (finals[1].error or "")
    with pytest.raises(RequestError, match=r"prompt 1: .* vocabulary"):
        list(rig.engine.stream(prompts, params()))
    rig.assert_empty()


def failing(count: int) -> Iterator[list[int]]:
    for i in range(count):
        yield [i]
    raise OSError("the database is gone")


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_iterable_that_raises_in_the_middle(policy, count: int) -> None:
    rig = Rig(policy, seats=2, **eager(policy))
    rig.add("other", max_tokens=30)
    with pytest.raises(PromptsFailed, match=f"after {count} of them, OSError: the database is gone") as caught:
        rig.engine.generate(failing(count), params(), window=4)
    assert isinstance(caught.value.__cause__, OSError)
    assert [output.position for output in caught.value.outputs] == list(range(count))
    assert all(output.finish_reason == "length" for output in caught.value.outputs)
    rig.finish()

    seen = []
    with pytest.raises(PromptsFailed):
        for output in rig.engine.stream(failing(count), params(), window=4):
            seen += [output.position] if output.finished else []
    assert sorted(seen) == list(range(count))
    rig.assert_empty()


def test_params_that_raise_in_the_middle() -> None:
    def each() -> Iterator[SamplingParams]:
        yield params()
        SamplingParams(max_tokens=-1)

    with pytest.raises(PromptsFailed, match=r"after 1 of them, ValueError: max_tokens must be .* got -1") as caught:
        Rig().engine.generate([[1], [2]], each())
    assert [output.position for output in caught.value.outputs] == [0]


# ---- however many --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_prompts() -> None:
    geometry = KVGeometry(num_blocks=64, block_size=8, max_model_len=64, vocab_size=1000)
    runner = SimulatedRunner(geometry, check_kv=False)
    runner._max_hashes = 256  # what it remembers is not the engine's
    engine = Engine(runner, ChunkedPrefillScheduler(PagedAllocator(64, 8)))
    most = {"early": 0, "late": 0}
    num_done = 0
    tracemalloc.start()
    try:
        for output in engine.stream(([i % 1000, 7] for i in range(4000)), params(2), window=64):
            num_done += output.finished
            # Over some windows: how much is held depends on how far the present one has been given out.
            part = "early" if 500 <= num_done < 900 else "late" if num_done >= 3600 else None
            if output.finished and part and not num_done % 10:
                gc.collect()
                most[part] = max(most[part], tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert num_done == 4000
    assert most["late"] < 1.1 * most["early"]
