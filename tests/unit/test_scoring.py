"""Log-probabilities through the engine, and prompts that are scored without generating."""

import pytest

from batchkit import ChunkedPrefillScheduler, PagedScheduler, RequestTooLong, SamplerOutput
from unit.helpers import PAIRS, PREEMPTING, Rig, eager, tokens, told


@pytest.mark.parametrize(("policy", "allocator"), PAIRS)
@pytest.mark.parametrize("prompt", [1, 2, 9])
@pytest.mark.parametrize("score", [{}, {"prompt_logprobs": 0}])
def test_vllm_24485_nothing_is_generated_and_nothing_hangs(policy, allocator, prompt, score) -> None:
    rig = Rig(policy, allocator=allocator, blocks=24, budget=4, seats=4, **eager(policy))
    rig.add("other", 6)
    rig.add("x", prompt, max_tokens=0, **score)
    final = rig.finish()["x"]
    assert (final.token_ids, final.text, final.finish_reason) == ((), "", "length")
    assert final.timings.first_token is None and final.timings.finished is not None
    if score:
        assert len(final.prompt_logprobs) == prompt and final.prompt_logprobs[0] is None
        for token, entry in zip(final.prompt_token_ids[1:], final.prompt_logprobs[1:], strict=True):
            assert token in entry
    else:
        assert final.prompt_logprobs is None


@pytest.mark.parametrize(("model_len", "blocks"), [(16, 8), (64, 4)])
def test_a_prompt_to_score_may_fill_the_model_or_the_pool(model_len, blocks) -> None:
    rig = Rig(model_len=model_len, blocks=blocks, block_size=4)
    rig.add("x", 16, max_tokens=0, prompt_logprobs=1)
    with pytest.raises(RequestTooLong, match="17 tokens and 0 to generate"):
        rig.add("y", 17, max_tokens=0)
    rig.finish()
    assert max(row.start + row.num_tokens for out in rig.runner.outs for row in out.rows) == 16


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
@pytest.mark.parametrize("host_blocks", [0, 20])
def test_vllm_29216_scores_do_not_depend_on_chunks_nor_preemption(chunk, host_blocks) -> None:
    rig = Rig(ChunkedPrefillScheduler, blocks=9, block_size=2, seats=1 if chunk == 1 else 3, budget=max(chunk, 3))
    rig.add("a", 11, prompt_logprobs=2, logprobs=2)
    rig.add("b", 8, prompt_logprobs=2, logprobs=2, n=2)
    rig.add("c", 12, prompt_logprobs=2, max_tokens=0)
    rig.finish()


@pytest.mark.parametrize("outputs", range(4))
@pytest.mark.parametrize("policy", PREEMPTING)
@pytest.mark.parametrize("host_blocks", [0, 20])
def test_sgl_20724_lists_of_tokens_are_as_long_as_they_are_after_preemption(policy, outputs, host_blocks) -> None:
    rig = Rig(policy, host_blocks=host_blocks)
    rig.add("x", 6, logprobs=1, prompt_logprobs=1)
    for _ in range(outputs + 1):
        rig.step()
    preempt_all(rig)
    rig.finish()
    assert rig.outputs["x"][-1].timings.num_preemptions == 1


def preempt_all(rig: Rig) -> None:
    """A step in which everybody loses its blocks before the policy is asked."""
    plan = rig.scheduler.schedule

    def schedule(step):
        for seq in list(rig.scheduler.running):
            step.preempt(seq)
        rig.scheduler.schedule = plan
        step.wait_until(step.now + 1)

    rig.scheduler.schedule = schedule
    rig.step()


def test_scores_come_with_the_first_output() -> None:
    rig = Rig(ChunkedPrefillScheduler, budget=4, seats=1)
    rig.add("x", 10, prompt_logprobs=0, max_tokens=3)
    rig.finish()
    for output in rig.outputs["x"]:
        assert None not in output.prompt_logprobs[1:]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"logprobs": None}, "no log-probability of token"),
        ({"logprobs": ()}, "no log-probability of token"),
        ({"logprobs": ({},)}, "no log-probability of token"),
        ({"prompt_logprobs": None}, "no log-probabilities for position 1 of the prompt"),
        ({"prompt_logprobs": {0: {}}}, "for position 0 of the prompt"),
        ({"prompt_logprobs": {9: {}}}, "for position 9 of the prompt"),
        ({"prompt_logprobs": {2: {}}}, "for position 2 of the prompt"),
    ],
)
def test_a_runner_that_leaves_scores_out_is_found_out(broken, message) -> None:
    rig = Rig()
    rig.add("x", 5, logprobs=0, prompt_logprobs=0)
    rig.add("y", 5)
    rig.runner.after = lambda out, got: SamplerOutput(
        tuple(r._replace(**broken) if row.request.id == "x" else r for row, r in zip(out.rows, got.rows, strict=True))
    )
    final = rig.finish(but=["x"])["x"]
    assert final.finish_reason == "error" and message in final.error


@pytest.mark.parametrize("prompt", [3, 4, 5, 9])
@pytest.mark.parametrize("policy", PREEMPTING)
def test_vllm_8268_prompt_scores_are_computed_even_where_the_prefix_is_cached(policy, prompt) -> None:
    rig = Rig(policy, prefix_caching=True)
    rig.add("first", tokens("same", prompt), prompt_logprobs=1)
    first = rig.run()["first"]
    rig.add("second", tokens("same", prompt), prompt_logprobs=1)
    second = rig.finish()["second"]
    assert told(first) == told(second)
    assert second.timings.cached_tokens == 0


def test_only_the_first_sample_scores_the_prompt() -> None:
    rig = Rig(PagedScheduler)
    rig.add("x", 9, prompt_logprobs=0, n=3)
    rig.finish()
    assert rig.engine.stats().cached_tokens == 2 * 8


def test_what_nobody_asks_for_is_not_there() -> None:
    rig = Rig()
    rig.add("x", 5)
    rig.finish()
    (completion,) = rig.outputs["x"][-1].outputs
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert rig.outputs["x"][-1].prompt_logprobs is None
