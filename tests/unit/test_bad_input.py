"""A mistake raises at the call, names the numbers, and leaves everything as it was."""

from __future__ import annotations

import math
import threading
import time

import pytest

from batchkit import (
    BlockAllocator,
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DuplicateRequest,
    DynamicScheduler,
    Engine,
    EngineBusy,
    EngineClosed,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    PolicyError,
    PromptsFailed,
    RequestError,
    RequestTooLong,
    SamplingParams,
    Scheduler,
    StaticScheduler,
    StructuredOutputsParams,
    Swap,
    WaitingServedScheduler,
)
from unit.helpers import POLICIES, PREEMPTING, Pieces, Rig, Runner, eager

NAN, INF = math.nan, math.inf
A = StructuredOutputsParams(regex="a+")


def params(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 4, **options})


def busy_rig(policy: type = OrcaScheduler, **options) -> Rig:
    """With one request running and one waiting."""
    rig = Rig(policy, blocks=8, model_len=48, vocab=100, seats=1, **options)
    rig.add("running", 4)
    rig.add("waiting", 4)
    rig.step()
    return rig


# ---- sampling parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": -1}, ValueError, "max_tokens must be at least 1, or 0 to generate nothing, got -1"),
        ({"max_tokens": 2.0}, TypeError, r"max_tokens must be an integer, got 2\.0"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an integer, got True"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, ValueError, r"min_tokens \(5\) is larger than max_tokens \(4\)"),
        ({"temperature": -0.5}, ValueError, r"temperature .* got -0\.5"),
        ({"temperature": NAN}, ValueError, "temperature .* NaN"),
        ({"temperature": INF}, ValueError, "temperature .* got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"top_p": 0}, ValueError, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": -0.1}, ValueError, r"top_p .* got -0\.1"),
        ({"top_p": 1.5}, ValueError, r"top_p .* got 1\.5"),
        ({"top_p": NAN}, ValueError, "top_p .* NaN"),
        ({"top_k": -2}, ValueError, "top_k .* got -2"),
        ({"top_k": 1.5}, TypeError, r"top_k must be an integer, got 1\.5"),
        ({"min_p": 1.1}, ValueError, r"min_p must be in \[0, 1\], got 1\.1"),
        ({"min_p": NAN}, ValueError, "min_p .* NaN"),
        ({"seed": 1.5}, TypeError, r"seed must be an integer, got 1\.5"),
        ({"stop": ""}, ValueError, "a stop string must not be empty"),
        ({"stop": ["a", 3]}, TypeError, "a stop string must be a string, got 3"),
        ({"stop": "a", "detokenize": False}, ValueError, "detokenize=True"),
        ({"stop_token_ids": ["a"]}, TypeError, "a token id of stop_token_ids must be an integer, got 'a'"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids must be a sequence, got 5"),
        ({"stop": 5}, TypeError, "stop must be a sequence, got 5"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos must be True or False, got 'no'"),
        ({"temprature": 0.5}, TypeError, "temprature"),
        ({"n": 0}, ValueError, r"n must be in \[1, 1024\], got 0"),
        ({"n": 1025}, ValueError, r"n must be in \[1, 1024\], got 1025"),
        ({"n": None}, TypeError, "n must be an integer, got None"),
        ({"temperature": 10**400}, ValueError, "temperature must be a number that a float can hold, got .* 401 digits"),
        ({"logit_bias": {3: -(10**400)}}, ValueError, "a value of logit_bias must be a number that a float can hold"),
        ({"n": 2.0}, TypeError, "n must be an integer"),
        ({"n": 2, "max_tokens": 0}, ValueError, "max_tokens=0 generates nothing, and n=2"),
        ({"presence_penalty": 2.1}, ValueError, r"presence_penalty must be in \[-2, 2\], got 2\.1"),
        ({"frequency_penalty": -3}, ValueError, r"frequency_penalty must be in \[-2, 2\], got -3"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be finite and above 0, got 0"),
        ({"repetition_penalty": INF}, ValueError, "repetition_penalty must be finite and above 0, got inf"),
        ({"logit_bias": {3: 101}}, ValueError, r"logit_bias must be in \[-100, 100\], got 101\.0 for token 3"),
        ({"logit_bias": {3: NAN}}, ValueError, "a value of logit_bias must be a number, got NaN"),
        ({"logit_bias": {"3": 1}}, TypeError, "a token id of logit_bias must be an integer, got '3'"),
        ({"logit_bias": [3]}, TypeError, "logit_bias must map token ids to numbers"),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids must have at least one token, got none"),
        ({"allowed_token_ids": ["a"]}, TypeError, "a token id of allowed_token_ids must be an integer"),
        ({"bad_words": "a"}, TypeError, "bad_words must be a sequence, got 'a'"),
        ({"bad_words": [""]}, ValueError, "a bad word must not be empty"),
        ({"logits_processors": [3]}, TypeError, "a logits processor must be a function of .* got 3"),
        ({"logprobs": -2}, ValueError, "logprobs must be at least 0, or -1 for all tokens, got -2"),
        ({"prompt_logprobs": True}, TypeError, "prompt_logprobs must be an integer, got True"),
        ({"structured_outputs": {"regex": "a"}}, TypeError, "structured_outputs must be StructuredOutputsParams"),
        ({"structured_outputs": A, "ignore_eos": True}, ValueError, "ignore_eos"),
        ({"structured_outputs": A, "min_tokens": 1}, ValueError, "min_tokens is 1"),
    ],
)
def test_sampling_params(options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("options", [{"top_p": 1}, {"temperature": 0}, {"top_k": -1}, {"min_p": 1}, {"max_tokens": 1}])
def test_the_borders_are_allowed(options) -> None:
    SamplingParams(**options)


# ---- requests ------------------------------------------------------------------------------------------------------

REQUESTS = [
    ([], {}, RequestError, "the prompt is empty"),
    ([100], {}, RequestError, "prompt token id 100 is not in the vocabulary of 100"),
    ([5, -1], {}, RequestError, "prompt token id -1 .* 100"),
    ([1], {"params": params(stop_token_ids=[100])}, RequestError, "stop token id 100 .* 100"),
    ([1], {"params": params(stop_token_ids=[-1])}, RequestError, "stop token id -1 .* 100"),
    ([1] * 33, {}, RequestTooLong, r"prompt of 33 .* 48 .* 32 \(8 blocks of 4 tokens\).* larger KV cache"),
    ([1] * 30, {"params": params(max_tokens=4)}, RequestTooLong, "30 tokens and 4 .* generate 3"),
    ([1] * 47, {"params": params(max_tokens=2)}, RequestTooLong, "47 tokens and 2"),
    ([1] * 30, {"params": SamplingParams(min_tokens=4)}, RequestTooLong, "min_tokens is 4.* 30 .* room for 3"),
    ([1], {"request_id": "running"}, DuplicateRequest, "'running' is still alive"),
    ([1], {"request_id": "waiting"}, DuplicateRequest, "'waiting' is still alive"),
    ([1], {"request_id": 7}, TypeError, "request_id must be a string, got 7"),
    ([1], {"params": {"max_tokens": 4}}, TypeError, "params must be SamplingParams"),
    ([1], {"parameters": params()}, TypeError, "parameters"),
    ([1], {"arrival": NAN}, ValueError, "arrival .* nan"),
    ([1], {"arrival": INF}, ValueError, "arrival .* inf"),
    ("text", {}, RequestError, "a text prompt needs a tokenizer"),
    ([1], {"params": params(stop="x")}, RequestError, r"stop strings \('x',\) need a tokenizer"),
    (5, {}, TypeError, "a prompt is text, a sequence of token ids, or a list of messages, got int"),
    (None, {}, TypeError, "got NoneType"),
    (b"bytes", {}, TypeError, "got bytes"),
    ({"role": "user", "content": "Hi"}, {}, TypeError, r"a list of messages; for a single message, \[message\]"),
    ([{"role": "user", "content": "Hi"}], {}, RequestError, "this engine has no tokenizer; give text or token ids"),
    ([{"content": "Hi"}], {}, RequestError, "message 0 must be an object with a role"),
    ([{"role": "user"}, 5], {}, RequestError, "message 1 must be an object with a role"),
    ([1], {"chat_template_kwargs": {}}, RequestError, "chat_template_kwargs are for messages"),
    ([1], {"deadline": "soon"}, TypeError, "deadline must be a time in seconds, got 'soon'"),
    ([1], {"deadline": NAN}, RequestError, "deadline .* nan"),
    ([1], {"deadline": 10**400}, RequestError, "deadline must be a time in seconds, got 1000"),
    ([1], {"length_hint": "long"}, TypeError, "length_hint must be a number of tokens, got 'long'"),
    ([1], {"length_hint": INF}, RequestError, "length_hint .* inf"),
    ([1], {"priority": "high"}, TypeError, "priority must be a number, got 'high'"),
    ([1], {"metadata": "tenant"}, TypeError, "metadata must be a mapping, got 'tenant'"),
    ([1, "a"], {}, TypeError, "not all of these are integers"),
    ([1, 2.0], {}, TypeError, "not all of these are integers"),
    ([[1, 2]], {}, TypeError, "not all of these are integers"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "message"), REQUESTS)
def test_a_request_that_cannot_be_taken(prompt, options, error, message: str) -> None:
    rig = busy_rig()
    before = rig.state()
    with pytest.raises(error, match=message):
        rig.engine.add_request(prompt, **options)
    assert rig.state() == before
    rig.engine.check()
    rig.add("good", 4)
    rig.finish()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_request_that_cannot_be_taken_under_every_policy(policy, index: int) -> None:
    prompt, options, error, message = REQUESTS[index]
    rig = busy_rig(policy, **eager(policy))
    before = rig.state()
    with pytest.raises(error, match=message):
        rig.engine.add_request(prompt, **options)
    assert rig.state() == before
    rig.finish()


def test_a_tokenizer_that_fails_at_the_prompt() -> None:
    class Failing(Pieces):
        def encode(self, text: str):
            raise LookupError("no such word")

        def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
            if 1 in token_ids:
                raise LookupError("no such token")
            return super().decode(token_ids)

    rig = Rig(OrcaScheduler, vocab=2, tokenizer=Failing("ab"))
    for prompt, message in (("a", "no such word"), ([1], "no such token")):
        with pytest.raises(RequestError, match=message):
            rig.engine.add_request(prompt)
        assert not rig.engine.has_unfinished()
        rig.engine.check()


def test_an_empty_text() -> None:
    rig = Rig(OrcaScheduler, vocab=2, tokenizer=Pieces("ab"))
    with pytest.raises(RequestError, match="the prompt is empty"):
        rig.engine.add_request("")


# ---- generate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("a string", {}, TypeError, r"for a single one, \[prompt\]"),
        (b"bytes", {}, TypeError, r"for a single one, \[prompt\]"),
        ([[1]], {"on_error": "ignore"}, ValueError, "on_error must be .* got 'ignore'"),
        ([[1]], {"window": 0}, ValueError, "window must be at least 1, got 0"),
        ([[1], [2]], {"params": [params()]}, ValueError, "2 prompts, but 1 params"),
        ([[1], [2]], {"params": [params()] * 3}, ValueError, "2 prompts, but 3 params"),
        ([[1], [2]], {"params": iter([params()])}, PromptsFailed, "after 1 of them, ValueError: only 1 params"),
        (iter([[1], [2]]), {"params": [params()]}, PromptsFailed, "only 1 params"),
        ([[1], [2]], {"params": iter([params()] * 3)}, ValueError, "more params than the 2 prompts"),
        (iter([[1], [2]]), {"params": [params()] * 3}, ValueError, "more params than the 2 prompts"),
        ([[1]], {"parameters": params()}, TypeError, "parameters"),
        (5, {}, TypeError, "int"),
        ([[1], [100]], {}, RequestError, "prompt 1: prompt token id 100"),
        ([[1], [2] * 33], {}, RequestTooLong, "prompt 1: a prompt of 33"),
        ([[1], 5], {}, TypeError, "prompt 1: a prompt is text"),
        ([1, 2, 3], {}, TypeError, "prompt 0: a prompt is text, .* got int"),
        ([{"role": "user", "content": "Hi"}], {}, TypeError, "prompt 0: a conversation is a list of messages"),
        ([[1]], {"params": {"max_tokens": 3}}, TypeError, "params must be SamplingParams, .* got {'max_tokens': 3}"),
        ({"input_ids": [[1]]}, {}, TypeError, "this takes many prompts, got dict; give its input_ids"),
        ([[1]], {"params": 3}, TypeError, "params must be SamplingParams, or one for each prompt, got 3"),
    ],
)
def test_generate(prompts, options, error, message: str) -> None:
    rig = busy_rig()
    with pytest.raises(error, match=message):
        rig.engine.generate(prompts, **{"params": params(), **options})
    rig.engine.check()
    alive = {seq.request.id for queue in (rig.scheduler.waiting, rig.scheduler.running) for seq in queue}
    assert alive <= {"running", "waiting"}
    rig.finish()  # and the others have all their outputs


# ---- a call at the wrong time --------------------------------------------------------------------------------------

VERBS = {
    "add_request": lambda engine: engine.add_request([1, 2]),
    "step": lambda engine: engine.step(),
    "generate": lambda engine: engine.generate([[1, 2]]),
    "wait": lambda engine: engine.wait(),
    "weights_changed": lambda engine: engine.weights_changed(),
    "close": lambda engine: engine.close(),
}


def within_a_step(rig: Rig, call, *, thread: bool) -> BaseException | object:
    """What a call gave that came while the runner was computing."""
    got: list[object] = []

    def attempt() -> None:
        try:
            got.append(call(rig.engine))
        except Exception as error:
            got.append(error)

    def before(out) -> None:
        rig.runner.before = None
        if thread:
            other = threading.Thread(target=attempt)
            other.start()
            other.join(30)
            assert not other.is_alive()
        else:
            attempt()

    rig.runner.before = before
    rig.step()
    assert len(got) == 1
    return got[0]


@pytest.mark.parametrize("thread", [True, False], ids=["from another thread", "from inside the runner"])
@pytest.mark.parametrize("name", VERBS)
def test_a_call_during_a_step(name: str, thread: bool) -> None:
    rig = busy_rig()
    queues = rig.names(rig.scheduler.running), rig.names(rig.scheduler.waiting)
    error = within_a_step(rig, VERBS[name], thread=thread)
    assert isinstance(error, EngineBusy)
    assert "only abort may be called from another thread" in str(error)
    assert (rig.names(rig.scheduler.running), rig.names(rig.scheduler.waiting)) == queues
    rig.add("good", 4)
    rig.finish()


@pytest.mark.parametrize("thread", [True, False], ids=["from another thread", "from inside the runner"])
def test_abort_during_a_step_is_queued(thread: bool) -> None:
    rig = busy_rig()
    said = within_a_step(rig, lambda engine: [engine.abort("running") for _ in range(2)], thread=thread)
    assert said == [True, False]
    assert rig.finals["running"].finish_reason == "abort"  # by the same step
    assert len(rig.finals["running"].token_ids) == 1  # its row of that step does not count
    assert within_a_step(rig, lambda engine: engine.abort("running"), thread=thread) is False
    rig.finish(but=["running"])


@pytest.mark.parametrize("thread", [True, False], ids=["from another thread", "from inside the runner"])
def test_questions_during_a_step_are_answered(thread: bool) -> None:
    rig = busy_rig()
    before = rig.engine.stats()
    assert within_a_step(rig, lambda engine: engine.has_unfinished(), thread=thread) is True
    assert within_a_step(rig, lambda engine: engine.geometry.num_blocks, thread=thread) == 8
    rig = busy_rig()
    assert within_a_step(rig, lambda engine: engine.stats(), thread=thread) == before
    rig.finish()


def test_a_thread_that_waits_for_its_turn_may_call_between_steps() -> None:
    rig = busy_rig()
    thread = threading.Thread(target=lambda: rig.add("good", 4))
    thread.start()
    thread.join(30)
    rig.finish()


def test_calls_from_inside_the_hook() -> None:
    """It may add, abort and ask; a step within a step is refused."""
    said: list[object] = []

    def on_step(report) -> None:
        if report.step != 2:
            return
        rig.add("added", 4)
        assert rig.engine.abort("b")
        assert rig.engine.stats().num_waiting == 1
        assert rig.engine.has_unfinished()
        for name in ("step", "generate"):
            try:
                VERBS[name](rig.engine)
            except EngineBusy as error:
                said.append(str(error))

    rig = Rig(OrcaScheduler, on_step=on_step)
    rig.add("a", 4)
    rig.add("b", 4)
    finals = rig.run()
    assert said == ["step was called from inside on_step"] * 2
    rig.assert_empty()
    assert {name: final.finish_reason for name, final in finals.items() if name in rig.jobs} == {
        "a": "length",
        "b": "abort",
        "added": "length",
    }
    rig.assert_as_alone("a")
    rig.assert_as_alone("added")


@pytest.mark.parametrize("name", [name for name in VERBS if name != "close"])
def test_a_closed_engine(name: str) -> None:
    rig = busy_rig()
    rig.keep(rig.engine.close())
    assert {final.finish_reason for final in rig.finals.values()} == {"abort"}
    with pytest.raises(EngineClosed, match="closed"):
        VERBS[name](rig.engine)
    rig.assert_empty()


def test_a_closed_engine_still_answers_questions() -> None:
    rig = busy_rig()
    rig.engine.close()
    assert rig.engine.close() == []
    assert rig.engine.abort("running") is False
    assert rig.engine.has_unfinished() is False
    assert rig.engine.stats().finished == {"abort": 2}
    assert rig.engine.geometry.num_blocks == 8
    rig.engine.check()
    assert rig.runner.closed


# ---- parts ---------------------------------------------------------------------------------------------------------


def parts(policy: type = OrcaScheduler, *, blocks: int = 8, block_size: int = 4, host_blocks: int = 0, **options):
    geometry = KVGeometry(num_blocks=8, block_size=4, host_blocks=4, max_model_len=32, vocab_size=100)
    host = PagedAllocator(host_blocks, options.pop("host_block_size", 4)) if host_blocks else None
    allocator = PagedAllocator(blocks, block_size)
    return Runner(geometry), policy(allocator, preemption=Swap(host) if host else None, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 9}, "the allocator has 9 blocks of 4 tokens, the runner 8 of 4"),
        ({"blocks": 7}, "the allocator has 7 blocks of 4 tokens, the runner 8 of 4"),
        ({"block_size": 8}, "the allocator has 8 blocks of 8 tokens, the runner 8 of 4"),
        ({"host_blocks": 5}, "Swap has 5 host blocks of 4 tokens, the runner 4 of 4"),
        ({"host_blocks": 2, "host_block_size": 8}, "Swap has 2 host blocks of 8 tokens, the runner 4 of 4"),
    ],
)
def test_parts_that_disagree_about_blocks(options, message: str) -> None:
    runner, scheduler = parts(**options)
    with pytest.raises(ValueError, match=message):
        Engine(runner, scheduler)
    other_runner, other_scheduler = parts()
    Engine(runner, other_scheduler)  # neither was taken
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks
    assert not other_runner.closed


def test_a_scheduler_class_instead_of_an_instance() -> None:
    runner, scheduler = parts()
    for wrong in (OrcaScheduler, None, "orca"):
        with pytest.raises(TypeError, match="must be an instance of a Scheduler subclass, got"):
            Engine(runner, wrong)
    with pytest.raises(TypeError, match="runner must be a ModelRunner, got None"):
        Engine(None, scheduler)
    Engine(runner, scheduler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "gpt2"}, "tokenizer must be a Tokenizer, and 'gpt2' has no decode and no eos_token_id"),
        ({"tokenizer": 5}, "5 has no encode and no decode and no eos_token_id"),
        ({"clock": time.monotonic}, "clock must be a Clock, .* has sleep_until, got <built-in"),
        ({"clock": 0.0}, r"clock must be a Clock, .* got 0\.0"),
        ({"on_step": "print"}, "on_step must be a function of a StepReport, got 'print'"),
    ],
)
def test_a_part_of_a_wrong_kind_is_refused_before_anything_runs(options, message: str) -> None:
    runner, scheduler = parts()
    with pytest.raises(TypeError, match=message):
        Engine(runner, scheduler, **options)
    Engine(runner, scheduler)  # neither was taken


@pytest.mark.parametrize("shared", ["runner", "scheduler", "allocator", "host"])
def test_a_part_that_another_engine_uses(shared: str) -> None:
    def make(runner=None, scheduler=None, allocator=None, host=None) -> Engine:
        geometry = KVGeometry(num_blocks=8, block_size=4, host_blocks=4, max_model_len=32, vocab_size=100)
        if scheduler is None:
            swap = Swap(host or PagedAllocator(4, 4))
            scheduler = PagedScheduler(allocator or PagedAllocator(8, 4), preemption=swap)
        return Engine(runner or Runner(geometry), scheduler)

    one: dict[str, object] = {
        "runner": Runner(KVGeometry(num_blocks=8, block_size=4, host_blocks=4, max_model_len=32, vocab_size=100))
    }
    one["host"], one["allocator"] = PagedAllocator(4, 4), PagedAllocator(8, 4)
    one["scheduler"] = PagedScheduler(one["allocator"], preemption=Swap(one["host"]))
    first = make(one["runner"], one["scheduler"])
    kind = {"runner": "Runner", "scheduler": "PagedScheduler"}.get(shared, "PagedAllocator")
    with pytest.raises(ValueError, match=f"this {kind} serves another engine already"):
        make(**{shared: one[shared]})
    assert len(first.generate([[1, 2]], params())[0].token_ids) == 4
    first.close()
    if shared == "runner":
        return  # a closed runner has freed its memory
    second = make(**{shared: one[shared]})
    assert len(second.generate([[1, 2]], params())[0].token_ids) == 4


def test_an_allocator_that_shares_blocks_says_how_many_before_the_first_step() -> None:
    class Silent(PagedAllocator):
        num_shares = BlockAllocator.num_shares

    runner, _ = parts()
    with pytest.raises(NotImplementedError, match="Silent does not say how many of its blocks are shared"):
        Engine(runner, PagedScheduler(Silent(runner.geometry.num_blocks, runner.geometry.block_size)))


def test_parts_that_were_refused_are_free_for_another_engine() -> None:
    runner, scheduler = parts()
    other_runner, other_scheduler = parts()
    Engine(runner, scheduler)
    with pytest.raises(ValueError, match="serves another engine"):
        Engine(other_runner, scheduler)
    with pytest.raises(ValueError, match="serves another engine"):
        Engine(runner, other_scheduler)
    Engine(other_runner, other_scheduler)


def test_a_scheduler_in_use_outside_an_engine() -> None:
    runner, scheduler = parts()
    scheduler.allocator.grow(10**6, 8)
    with pytest.raises(ValueError, match="the scheduler is in use: 2 blocks taken, 0 sequences waiting"):
        Engine(runner, scheduler)


def test_a_scheduler_whose_schedule_is_not_implemented() -> None:
    class Nothing(Scheduler):
        pass

    with pytest.raises(TypeError, match=r"abstract .*schedule"):
        Nothing(PagedAllocator(8, 4))


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "finish",
        "abort",
        "retire",
        "next_step",
        "copies_done",
        "recompute_all",
        "check",
        "waiting",
        "running",
        "num_held",
    ],
)
def test_overriding_what_is_final(name: str) -> None:
    with pytest.raises(TypeError, match=f"Wrong overrides {name}, which a Scheduler subclass must leave alone"):
        type("Wrong", (PagedScheduler,), {name: None})


def test_a_scheduler_for_another_version_of_the_interface() -> None:
    class Later(PagedScheduler):
        api_version = 2

    runner, scheduler = parts(Later)
    with pytest.raises(ValueError, match=r"Later was written for version 2 .* this is version 1"):
        Engine(runner, scheduler)
    Engine(runner, parts()[1])


@pytest.mark.parametrize("policy", PREEMPTING)
def test_a_policy_that_lets_tables_grow_on_a_contiguous_pool(policy) -> None:
    with pytest.raises(ValueError, match=f"{policy.__name__} lets tables grow .* ContiguousAllocator cannot"):
        policy(ContiguousAllocator(8, 4))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seqs": 9, "max_tokens_per_step": 8}, ValueError, r"max_tokens_per_step \(8\) .* max_num_seqs \(9\)"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1, got 0"),
        ({"max_tokens_per_step": 0}, ValueError, "max_tokens_per_step must be at least 1, got 0"),
        ({"max_model_len": -5}, ValueError, "max_model_len must be at least 1, got -5"),
        ({"max_tokens_per_step": 8.5}, TypeError, r"max_tokens_per_step must be an integer, got 8\.5"),
        ({"max_num_seqs": 2.5}, TypeError, r"max_num_seqs must be an integer, got 2\.5"),
        ({"max_model_len": 16.0}, TypeError, r"max_model_len must be an integer, got 16\.0"),
        ({"max_seqs": 4}, TypeError, "max_seqs"),
    ],
)
def test_options_of_every_policy(policy, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        policy(PagedAllocator(16, 4), **options)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (StaticScheduler, {"pad_to": 0}, "pad_to must be at least 1, got 0"),
        (StaticScheduler, {"pad_to": 5, "drop_finished": True}, "pad_to=5 .* drop_finished=True"),
        (DynamicScheduler, {"min_batch": 0}, r"min_batch must be between 1 and max_num_seqs \(4\), got 0"),
        (DynamicScheduler, {"min_batch": 5}, r"max_num_seqs \(4\), got 5"),
        (DynamicScheduler, {"max_wait_s": -1}, "max_wait_s .* got -1"),
        (DynamicScheduler, {"max_wait_s": NAN}, "max_wait_s .* got nan"),
        (DynamicScheduler, {"max_wait_s": INF}, "max_wait_s .* got inf"),
        (OrcaScheduler, {"reserve": "all"}, "reserve must be one of max_tokens, pow2, model_len, got 'all'"),
        (OrcaScheduler, {"reserve": "model_len"}, "needs max_model_len"),
        (WaitingServedScheduler, {"waiting_served_ratio": -0.1}, r"waiting_served_ratio .* got -0\.1"),
        (WaitingServedScheduler, {"waiting_served_ratio": NAN}, "waiting_served_ratio .* got nan"),
        (WaitingServedScheduler, {"waiting_served_ratio": INF}, "waiting_served_ratio .* got inf"),
        (WaitingServedScheduler, {"max_waiting_steps": -1}, "max_waiting_steps .* got -1"),
        (PagedScheduler, {"watermark_blocks": -1}, "watermark_blocks .* got -1"),
    ],
)
def test_options_of_one_policy(policy, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(PagedAllocator(16, 4), max_num_seqs=4, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_allocator_that_is_none(policy) -> None:
    with pytest.raises(TypeError, match=f"{policy.__name__} needs a BlockAllocator, got 8"):
        policy(8)


@pytest.mark.parametrize("make", [PagedAllocator, ContiguousAllocator])
@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (-1, 4), (4, 0)])
def test_a_pool_without_blocks(make, blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"got {blocks} blocks of {size} tokens"):
        make(blocks, size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
        ({"block_size": 1.5}, TypeError, r"block_size must be an integer, got 1\.5"),
        ({"host_blocks": -1}, ValueError, "host_blocks must be at least 0, got -1"),
    ],
)
def test_geometry(options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        KVGeometry(**{"num_blocks": 8, "block_size": 4, "max_model_len": 32, "vocab_size": 100, **options})


# ---- a policy's mistakes -------------------------------------------------------------------------------------------


def run_twice(scheduler, step) -> None:
    step.run(scheduler.waiting[0])
    step.run(scheduler.running[0])


def preempt_a_chosen_one(scheduler, step) -> None:
    step.run(scheduler.waiting[0])
    step.preempt(scheduler.running[0])


def preempt_a_waiting_one(scheduler, step) -> None:
    step.preempt(scheduler.waiting[0])


def run_a_finished_one(scheduler, step) -> None:
    step.run(scheduler.gone)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (run_twice, "is in this step already"),
        (preempt_a_chosen_one, "is in this step and cannot be preempted"),
        (preempt_a_waiting_one, "does not run and cannot be preempted"),
        (run_a_finished_one, "is neither waiting nor running in this scheduler"),
        (lambda scheduler, step: step.wait_until(NAN), "cannot wait until nan"),
        (lambda scheduler, step: step.wait_until(INF), "cannot wait until inf"),
        (lambda scheduler, step: step.wait_until(-INF), "cannot wait until -inf"),
    ],
)
def test_a_verb_used_without_meaning(mistake, message: str) -> None:
    class Wrong(OrcaScheduler):
        wrong = False

        def schedule(self, step) -> None:
            if self.wrong:
                mistake(self, step)
            super().schedule(step)

    rig = Rig(Wrong, seats=2)
    rig.add("gone", 4, max_tokens=1)
    rig.scheduler.gone = rig.seq("gone")
    rig.run()
    rig.add("a", 4)
    rig.scheduler.wrong = True
    with pytest.raises(PolicyError, match=message):
        rig.step()
    rig.scheduler.wrong = False
    rig.finish()


def test_waiting_until_a_time_that_has_passed_is_a_stall() -> None:
    class Late(ChunkedPrefillScheduler):
        def schedule(self, step) -> None:
            step.wait_until(step.now)

    rig = Rig(Late)
    rig.add("a")
    with pytest.raises(
        RuntimeError, match=r"named a time that is not later than now \(0.0 <= 0.0\), with 1 waiting, 0"
    ):
        rig.step()
