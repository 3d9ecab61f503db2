"""What else a request may ask for: an end in time, prefixes of its own, words that are not to come; and callbacks."""

import math
from fractions import Fraction

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    Engine,
    OrcaScheduler,
    PagedAllocator,
    RequestError,
    SamplingParams,
    TrueLengths,
)
from unit.helpers import PAIRS, Bytes, Pieces, Rig, eager, tokens

# ---- timeouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "allocator"), PAIRS)
def test_a_timeout_ends_a_request_wherever_it_is(policy, allocator) -> None:
    """The clock passes by 1 s a step; one seat, so that the second waits."""
    rig = Rig(policy, allocator=allocator, seats=1, **eager(policy))
    rig.add("a", 4, max_tokens=20, timeout_s=5)
    rig.add("b", 4, max_tokens=20, timeout_s=3)
    rig.add("c", 4, max_tokens=3, timeout_s=100)
    finals = rig.finish(but=["a", "b"])
    assert finals["a"].finish_reason == "timeout" and len(finals["a"].token_ids) == 5
    assert finals["b"].finish_reason == "timeout" and finals["b"].token_ids == ()
    assert finals["b"].timings.finished == 3.0
    assert rig.engine.stats().finished == {"timeout": 2, "length": 1}


def test_a_timeout_wakes_an_engine_that_waits() -> None:
    rig = Rig(DynamicScheduler, min_batch=4, max_wait_s=60.0)
    rig.add("a", 4, timeout_s=7)
    rig.step()
    assert rig.engine.wait_until == 7.0
    rig.engine.wait()
    assert rig.clock() == 7.0
    (output,) = rig.step()
    assert output.finish_reason == "timeout"
    rig.assert_empty()


def test_all_samples_end_with_their_request() -> None:
    rig = Rig(script={"x/1": [7]}, eos=(7,))
    rig.add("x", 4, n=3, max_tokens=20, timeout_s=4)
    final = rig.run()["x"]
    assert [c.finish_reason for c in final.outputs] == ["timeout", "stop", "timeout"]
    rig.assert_empty()


def test_of_abort_and_timeout_the_first_counts() -> None:
    rig = Rig()
    rig.add("x", 4, timeout_s=2)
    rig.step()
    rig.clock.advance(5)
    assert rig.engine.abort("x")
    assert rig.run()["x"].finish_reason == "abort"
    rig.add("y", 4, timeout_s=2)
    rig.add("z", 4, max_tokens=20)
    rig.clock.advance(5)
    rig.step()
    assert rig.finals["y"].finish_reason == "timeout" and not rig.engine.abort("y")
    rig.finish(but=["x", "y"])


def test_timeouts_of_requests_that_have_ended_are_forgotten() -> None:
    rig = Rig()
    for i in range(500):
        rig.add(str(i), 2, max_tokens=1, timeout_s=1e9)
        rig.run()
        rig.outputs.clear()
    assert len(rig.engine._timeouts) < 100


@pytest.mark.parametrize(
    ("value", "error"), [(0, RequestError), (-1, RequestError), (math.inf, RequestError), (10**400, RequestError)]
)
def test_a_timeout_that_is_no_time(value, error) -> None:
    rig = Rig()
    with pytest.raises(error, match=f"timeout_s must be finite and above 0 seconds, got {value}"):
        rig.engine.add_request([1], timeout_s=value)
    with pytest.raises(TypeError, match="timeout_s must be a time in seconds, got '3'"):
        rig.engine.add_request([1], timeout_s="3")
    assert not rig.engine.has_unfinished()


# ---- prefixes ------------------------------------------------------------------------------------------------------


def test_stats_tell_of_the_cache() -> None:
    rig = Rig(OrcaScheduler, prefix_caching=True, blocks=16, block_size=4)
    prompt = tokens("same", 10)
    cached = []
    for name in "abc":
        rig.add(name, prompt, max_tokens=2)
        cached.append(rig.run()[name].timings.cached_tokens)
    assert cached == [0, 8, 8]
    stats = rig.engine.stats()
    assert (stats.cached_tokens, stats.computed_tokens) == (16, 11 + 3 + 3)
    assert stats.num_cached_blocks == 2 and stats.num_free_blocks == 16
    rig.engine.weights_changed()
    assert rig.engine.stats().num_cached_blocks == 0
    rig.add("d", prompt, max_tokens=2)
    assert rig.finish()["d"].timings.cached_tokens == 0


def test_salts_keep_tenants_apart() -> None:
    rig = Rig(prefix_caching=True)
    cached = []
    for i, salt in enumerate([None, "", "s", "t", None, "", "s", "t"]):
        rig.add(str(i), tokens("same", 9), max_tokens=1, cache_salt=salt)
        cached.append(rig.run()[str(i)].timings.cached_tokens)
    assert cached == [0, 0, 0, 0, 8, 8, 8, 8]
    with pytest.raises(TypeError, match="cache_salt must be a string, got 3"):
        rig.engine.add_request([1], cache_salt=3)


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """NANO-211: what is to be computed is counted after the hit was looked up."""
    rig = Rig(ChunkedPrefillScheduler, prefix_caching=True, block_size=4)
    rig.add("x", 12, max_tokens=10)
    for _ in range(3):
        rig.step()
    rig.scheduler._evict(rig.seq("x"))
    rig.finish()
    again = next(row for out in rig.runner.outs for row in out.rows if row.num_output == 3)
    assert (again.start, again.num_tokens) == (12, 3)
    assert rig.finals["x"].timings.cached_tokens == 0  # it found nothing when it came


# ---- words that are not to come ------------------------------------------------------------------------------------


class WithSpecials(Bytes):
    """Token 1 before every text, token 2 behind it."""

    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text), 2]


@pytest.mark.parametrize("tokenizer", [Bytes(), WithSpecials()])
def test_bad_words_become_tokens_without_special_ones(tokenizer) -> None:
    rig = Rig(vocab=Bytes.vocab, tokenizer=tokenizer)
    rig.add("x", "text", bad_words=["ab", " ab", "c"])
    assert rig.seq("x").request.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))


def test_bad_words_need_a_tokenizer_that_can() -> None:
    with pytest.raises(RequestError, match="the bad word 'ab' needs a tokenizer, and this engine has none"):
        Rig().add("x", 3, bad_words=["ab"])
    with pytest.raises(RequestError, match="the tokenizer cannot encode the bad word"):
        Rig(tokenizer=Pieces(["a", " "]), vocab=2).add("x", [0], bad_words=["b"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [5, 1000]}, "allowed token id 1000 is not in the vocabulary of 1000"),
        ({"logit_bias": {-1: 3.0}}, "logit_bias token id -1 is not in the vocabulary of 1000"),
    ],
)
def test_tokens_outside_of_the_vocabulary(params, message) -> None:
    with pytest.raises(RequestError, match=message):
        Rig().add("x", 3, **params)


def test_a_runner_may_refuse_a_request() -> None:
    rig = Rig()

    def refuse(request):
        raise RequestError("not with this runner")

    rig.runner.check_request = refuse
    with pytest.raises(RequestError, match="not with this runner"):
        rig.engine.add_request([1, 2], request_id="x")
    assert not rig.engine.has_unfinished()
    del rig.runner.check_request
    rig.add("x", 2)
    rig.finish()


# ---- callbacks -----------------------------------------------------------------------------------------------------


def test_finished_results_are_handed_over_as_they_come() -> None:
    rig = Rig()
    seen = []
    params = [SamplingParams(max_tokens=m, temperature=0) for m in (9, 2, 5)]
    results = rig.engine.generate([[1], [2], [3]], params, on_output=lambda output: seen.append(output))
    assert [output.position for output in seen] == [1, 2, 0]
    assert [output.position for output in results] == [0, 1, 2]


def test_a_callback_that_raises_fails_its_own_result_alone() -> None:
    rig = Rig()

    def complain(output):
        if output.position == 1:
            raise OSError("disk full")

    results = rig.engine.generate([[1], [2], [3]], SamplingParams(max_tokens=3, n=2), on_output=complain)
    assert [output.finish_reason for output in results] == ["length", "error", "length"]
    assert results[1].error == "on_output raised OSError: disk full"
    assert [len(c.token_ids) for c in results[1].outputs] == [3, 3]
    with pytest.raises(TypeError, match="on_output must be a function"):
        rig.engine.generate([[1]], on_output=3)


# ---- parameters as they come ---------------------------------------------------------------------------------------


class Whole(int):
    """Stands for the integers of other libraries."""


def test_what_clients_pass_through_is_taken() -> None:
    params = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logits_processors=None)
    assert params == SamplingParams()
    params = SamplingParams(n=Whole(2), seed=Whole(5), top_k=Whole(3), logprobs=Whole(0), temperature=Fraction(1, 2))
    assert all(type(getattr(params, name)) is int for name in ("n", "seed", "top_k", "logprobs"))


def test_true_lengths_hands_on_checks_and_scores() -> None:
    rig = Rig(eos=(7,))
    rig.runner.check_request = lambda request: (_ for _ in ()).throw(RequestError("not this one"))
    runner = TrueLengths(rig.runner, lambda request: 3)
    with pytest.raises(RequestError, match="not this one"):
        runner.check_request(None)
    del rig.runner.check_request
    engine = Engine(runner, OrcaScheduler(PagedAllocator(64, 4)))
    (output,) = engine.generate([[1, 2]], SamplingParams(max_tokens=9, logprobs=0))
    assert output.finish_reason == "stop" and len(output.token_ids) == 3
    *known, last = output.outputs[0].logprobs
    assert all(entry[token].rank == 1 for entry, token in zip(known, output.token_ids, strict=False))
    assert math.isnan(last[7].logprob)


def test_an_allocator_that_shares_nothing_gets_no_hit() -> None:
    class Alone(PagedAllocator):
        shares_blocks = False

    rig = Rig(OrcaScheduler, allocator=Alone, prefix_caching=True)
    for name in "ab":
        rig.add(name, tokens("same", 9), n=2)
        rig.run()
    rig.finish()
