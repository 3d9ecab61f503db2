"""Prefix caching under the engine: cases 5, 25, 34, 90, 105, 106, 109 and 110.

Beneath every rig the runner checks, slot by slot, that a row reads its own tokens and nobody else's.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from batchkit import ChunkedPrefillScheduler, PagedScheduler, PriorityScheduler
from unit.helpers import POLICIES, PREEMPTING, Pieces, Rig, eager, tokens

everywhere = pytest.mark.parametrize("policy", [*POLICIES, PriorityScheduler])
ways = pytest.mark.parametrize("host_blocks", [0, 16], ids=["recompute", "swap"])


def caching(policy: type, **options) -> Rig:
    return Rig(policy, prefix_caching=True, **eager(policy), **options)


def cached(rig: Rig, name: str) -> int:
    return rig.finals[name].timings.cached_tokens


@everywhere
def test_two_that_compute_one_prompt_in_one_step_do_not_share_what_each_has_written(policy) -> None:
    """Case 5: one's copy was given up for the other's, and its table still named it."""
    rig = caching(policy, blocks=24, seats=4)
    prompt = tokens("same", 8)
    rig.add("a", prompt, max_tokens=12)
    rig.add("b", prompt, max_tokens=12)
    for _ in range(4):
        rig.step()
        rig.engine.wait()
    for name in "cde":  # they write into whatever was given up
        rig.add(name, 12, max_tokens=4)
    rig.finish()
    assert cached(rig, "a") == 0


@pytest.mark.parametrize("policy", [*PREEMPTING, PriorityScheduler])
@pytest.mark.parametrize("num_output", [1, 2, 3, 5])
def test_one_that_finds_its_own_blocks_again_counts_what_is_left_after_the_hit(policy, num_output: int) -> None:
    """Case 25: what to compute was counted before the hit was found, and positions ran past the block table."""
    rig = caching(policy)
    rig.add("a", 13, max_tokens=8)
    while len(rig.seq("a").output) < num_output:
        rig.step()
    rig.scheduler._evict(rig.seq("a"))
    rig.step()
    row = rig.runner.outs[-1].rows[0]
    known = 13 + num_output
    assert row.start == (known - 1) // 4 * 4  # all its full blocks but what holds the last token
    assert row.start + row.num_tokens == known <= len(row.blocks) * 4
    rig.finish()


@pytest.mark.parametrize("ending", ["abort", "preempt"])
@ways
def test_of_a_prompt_that_was_computed_in_part_only_that_part_is_found(ending: str, host_blocks: int) -> None:
    """Case 34: blocks that had never been written were found by a later request, until the cache was flushed."""
    rig = caching(ChunkedPrefillScheduler, blocks=16, host_blocks=host_blocks, budget=8, seats=4)
    prompt = tokens("same", 24)
    rig.add("a", prompt, max_tokens=2)
    rig.step()
    rig.step()
    assert rig.history == ["a8", "a8"]
    if ending == "abort":
        rig.engine.abort("a")
    else:
        rig.scheduler._evict(rig.seq("a"))
    rig.add("b", prompt, max_tokens=2)
    rig.add("other", 20, max_tokens=2)
    rig.finish(but=["a"] if ending == "abort" else ())
    assert cached(rig, "b") == (16 if ending == "abort" else 20)  # preempted ones go first, and compute all of it


@everywhere
@pytest.mark.parametrize("prompt_length", [3, 4, 5, 9])
def test_scores_of_a_prompt_are_computed_and_not_found(policy, prompt_length: int) -> None:
    """Case 90: with a hit, the numbers of what was found were missing, or another's."""
    rig = caching(policy)
    prompt = tokens("same", prompt_length)
    finals = []
    for name in ("a", "b"):
        rig.add(name, prompt, max_tokens=2, prompt_logprobs=1)
        before = rig.engine.stats().computed_tokens
        finals.append(rig.run()[name])
        assert rig.engine.stats().computed_tokens - before == prompt_length + 1
    assert finals[0].prompt_logprobs == finals[1].prompt_logprobs
    assert len(finals[1].prompt_logprobs) == prompt_length and finals[1].timings.cached_tokens == 0
    rig.add("c", prompt, max_tokens=2)
    rig.finish()
    assert cached(rig, "c") == (prompt_length - 1) // 4 * 4  # what they computed can be found by others


def test_a_hit_that_is_next_to_be_evicted_is_held_first() -> None:
    """Case 105: the blocks of a hit were given to the same request once more, as new ones."""
    rig = caching(PagedScheduler, blocks=4, watermark_blocks=0)
    prompt = tokens("same", 9)
    rig.add("a", prompt, max_tokens=1)
    rig.run()
    rig.add("other", 5, max_tokens=1)
    rig.run()
    assert rig.engine.stats().num_cached_blocks == 3
    rig.add("b", prompt, max_tokens=8)  # four blocks in all
    rig.finish()
    assert cached(rig, "b") == 8
    assert all(len(set(row.blocks)) == len(row.blocks) for out in rig.runner.outs for row in out.rows)


@everywhere
def test_what_was_evicted_is_computed_again(policy) -> None:
    """Case 106: an evicted block was still found, when somebody else had written into it."""
    rig = caching(policy, blocks=4, **({"watermark_blocks": 0} if policy is PagedScheduler else {}))
    prompt = tokens("same", 13)
    hits = []
    for name, ids in (("a", prompt), ("b", prompt), ("other", tokens("other", 16)), ("c", prompt)):
        rig.add(name, ids, max_tokens=1)
        rig.run()
        hits.append(cached(rig, name))
    rig.finish()
    assert hits == [0, 12, 0, 0]


@everywhere
@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"max_tokens": 6}, {"max_tokens": 3, "n": 2, "temperature": 1}])
def test_of_a_prompt_that_is_cached_in_whole_the_last_block_is_computed(policy, num_blocks: int, params) -> None:
    """Case 109: a prompt of whole blocks was found to its last token, and there was nothing to compute."""
    rig = caching(policy, blocks=24)
    prompt = tokens("same", 4 * num_blocks)
    outputs = []
    for name in ("a", "b"):
        rig.add(name, prompt, **params, seed=3)
        outputs.append([sample.token_ids for sample in rig.run()[name].outputs])
    assert outputs[0] == outputs[1]
    first = next(row for out in rig.runner.outs for row in out.rows if row.request.id == "b")
    assert (first.start, first.num_tokens) == (4 * num_blocks - 4, 4)
    rig.finish()


MODES = ["plain", "chunked", "stop string", "abort", "error"]


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        *product([*POLICIES, PriorityScheduler], MODES),
        *product([*PREEMPTING, PriorityScheduler], ["preempted"]),
    ],
)
def test_the_cache_is_hit_in_every_mode(policy, mode: str) -> None:
    """Case 110: on one path nothing was ever put into the cache, which only the clock could tell."""
    rig = caching(
        policy,
        blocks=16,
        seats=2,
        budget=3 if mode == "chunked" else 64,
        vocab=4,
        script={name: [1, 2, 3] if mode == "stop string" else [1, 2, 1, 2, 1, 2] for name in "abc"},
        tokenizer=Pieces(["<eos>", "a", "b", "stop"]),
    )
    prompt = [1, 2, 3, 0, 1, 1, 2, 2, 3, 3]
    hits = []
    for name in "abc":
        rig.add(name, prompt, max_tokens=6, stop="stop" if mode == "stop string" else ())
        while len(rig.seq(name).output) < 2:
            rig.step()
            rig.engine.wait()
        hits.append(rig.seq(name).num_cached)
        if mode == "preempted":
            rig.scheduler._evict(rig.seq(name))
        elif mode == "abort":
            rig.engine.abort(name)
        elif mode == "error":
            rig.runner.script = {**rig.runner.script, name: [1, 2, 99]}
        rig.run()
        assert cached(rig, name) == hits[-1]
    assert hits == [0, 8, 8]
    rig.assert_empty()


@pytest.mark.parametrize("policy", PREEMPTING)
def test_a_system_prompt_of_a_thousand_tokens_is_computed_once_for_all(policy) -> None:
    computed = {}
    for prefix_caching in (False, True):
        rig = Rig(
            policy, prefix_caching=prefix_caching, blocks=2100, block_size=16, model_len=1100, seats=32, **eager(policy)
        )
        system = tokens("system", 1000)
        for number in range(32):
            rig.add(str(number), [*system, *tokens(str(number), 20)], max_tokens=2)
            if not number:
                rig.run()  # it has been computed when the others come
        rig.finish()
        computed[prefix_caching] = rig.engine.stats().computed_tokens - 32  # but for one generated token of each
    assert computed == {False: 32 * 1020, True: 1020 + 31 * (8 + 20)}  # 62 blocks are 992 tokens


@everywhere
def test_after_a_loss_of_the_cache_nothing_of_it_is_found(policy) -> None:
    rig = caching(policy, blocks=24, seats=2)
    prompt = tokens("same", 9)
    rig.add("a", prompt, max_tokens=4)
    rig.run()
    rig.add("b", prompt, max_tokens=9)
    for _ in range(3):
        rig.step()
        rig.engine.wait()
    rig.runner.lose_kv()
    rig.engine.weights_changed()
    rig.add("c", prompt, max_tokens=4)
    rig.finish()
    assert [cached(rig, name) for name in "ab"] == [0, 8]


@pytest.mark.parametrize("policy", [*POLICIES, PriorityScheduler])
@ways
@pytest.mark.parametrize("seed", range(2))
def test_texts_that_begin_alike_give_what_they_give_alone(policy, host_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    rig = caching(policy, blocks=20, host_blocks=host_blocks, seats=5, budget=rng.choice([8, 24, 80]))
    systems = [tokens(str(number), 12) for number in range(2)]
    for number in range(40):
        prompt = rng.choice(systems)[: rng.randint(1, 12)] + rng.choices(range(3), k=rng.randint(0, 6))
        rig.add(
            str(number),
            prompt,
            max_tokens=rng.randint(1, 16),
            n=rng.choice([1, 1, 2]),
            cache_salt=rng.choice([None, None, "tenant"]),
            priority=rng.randint(0, 1),
            temperature=1,
            seed=number,
        )
        for _ in range(rng.randint(0, 3)):
            rig.step()
            rig.engine.wait()
    rig.finish()
    assert rig.engine.stats().cached_tokens > 0
