"""examples/openai_server.py, asked by the real `openai` client over HTTP."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import http.client
import importlib.util
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchkit import Engine
from batchkit.aio import AsyncEngine
from tiny_models import tiny

# The environment with the oldest transformers has none of these.
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

SERVER = Path(__file__).resolve().parents[2] / "examples" / "openai_server.py"
WAIT_S = 60.0


class Letters:
    """A tokenizer for the tiny model: a token is a character from space on; 2 ends a text."""

    eos_token_id = 2

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 29 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token + 29) for token in token_ids if token > 2 or not skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> list[int]:
        return self.encode("".join(f"{message['role'][0]}: {message['content']} " for message in messages))


class Served:
    """The server in a thread, and its engine, whose steps can be held."""

    def __init__(self) -> None:
        self._is_held = False
        self._passes = threading.Semaphore(0)
        spec = importlib.util.spec_from_file_location("openai_server", SERVER)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        inner = Engine.from_model(tiny(), Letters(), num_kv_blocks=64, max_num_seqs=4, on_step=self._end_step)
        self.engine = AsyncEngine(inner, max_waiting=3)
        self.app = module.make_app(self.engine, "tiny")
        config = uvicorn.Config(self.app, log_level="warning", lifespan="on")
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def _end_step(self, report: Any) -> None:
        if self._is_held:
            assert self._passes.acquire(timeout=WAIT_S), "nobody let this step end"

    def hold(self, *, after: int = 0) -> None:
        """Let no step end, or only so many first."""
        while self._passes.acquire(blocking=False):
            pass  # one is left over if no step was held when they were let go
        self._is_held = True
        for _ in range(after):
            self._passes.release()

    def let_go(self) -> None:
        self._is_held = False
        self._passes.release()

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._socket.close()
        assert not self._thread.is_alive()

    def get(self, path: str) -> int:
        with urllib.request.urlopen(self.url + path, timeout=WAIT_S) as response:
            return int(response.status)


def until(condition: Callable[[], object]) -> None:
    """Look until it is so; what takes as long as `WAIT_S` hangs."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()
    assert not served.engine.thread.is_open
    assert served.engine.stats().num_free_blocks == 64


# The model is a random one: what is no letter is forbidden, so that each token has a text and none ends it.
COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "logit_bias": {"0": -100, "1": -100, "2": -100}}
CHAT: dict[str, Any] = {**COMMON, "messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {**COMMON, "prompt": "Once upon"}


def test_chat_whole_and_streamed(served: Served) -> None:
    whole = served.client.chat.completions.create(**CHAT, seed=7)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length" and choice.message.content
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (9, 12, 21)
    assert whole.object == "chat.completion" and whole.model == "tiny"

    chunks = list(
        served.client.chat.completions.create(**CHAT, seed=7, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 11 + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


def test_completion_with_several_samples_log_probabilities_and_stop(served: Served) -> None:
    whole = served.client.completions.create(**TEXT, seed=3, n=2, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len({choice.text for choice in whole.choices}) == 2
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text and len(choice.text) == 12
    (alone,) = served.client.completions.create(**TEXT, seed=3).choices
    assert alone.text == whole.choices[0].text

    texts, reasons = ["", ""], [[], []]
    for chunk in served.client.completions.create(**TEXT, seed=3, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [["length"], ["length"]]

    stop = alone.text[5]
    (stopped,) = served.client.completions.create(**TEXT, seed=3, stop=[stop]).choices
    assert (stopped.text, stopped.finish_reason) == (alone.text[: alone.text.index(stop)], "stop")


def test_several_prompts_whole_and_streamed(served: Served) -> None:
    many = {**TEXT, "prompt": ["One", "Two", [5, 6, 7]], "seed": 1}
    whole = served.client.completions.create(**many)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [""] * 3
    for chunk in served.client.completions.create(**many, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 1000}, "can never run"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "é"}]}, "vocabulary"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_told_what_is_wrong(served: Served, changes: dict[str, Any], says: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as raised:
        served.client.chat.completions.create(**{**CHAT, **changes}, stream=stream)
    assert raised.value.type == "invalid_request_error"


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "body",
    [
        "no JSON",
        "[1]",
        deep(100_000),
        '{"prompt": "a", "stream": 1}',
        *(
            f'{{"prompt": "a", "max_tokens": 1, {field}}}'
            for field in (
                '"n": "two"',
                '"n": 1025',
                '"model": []',
                '"model": 0',
                '"model": false',
                '"priority": []',
                '"priority": 1e999',
                '"cache_salt": []',
                '"cache_salt": 5',
                '"temperature": 1e999',
                f'"temperature": 1{"0" * 400}',
                f'"priority": 1{"0" * 400}',
                f'"seed": 1{"0" * 5000}',
                f'"max_tokens": 1{"0" * 400}',
                f'"stop_token_ids": [1{"0" * 400}]',
                '"logprobs": 21',
                '"logprobs": -1',
                f'"temperature": {deep(900)}',
                f'"stop": {deep(900)}',
                f'"logit_bias": {deep(900)}',
            )
        ),
    ],
)
def test_a_bad_body_is_refused(served: Served, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(
            urllib.request.Request(f"{served.url}/v1/completions", body.encode(), headers), timeout=WAIT_S
        )
    with raised.value as error:
        assert error.code == 400
        assert set(json.load(error)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_more_prompts_than_may_wait_are_a_bad_request_and_no_matter_of_trying_again(
    served: Served, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="a list of 4, which never find room at once; send at most 3"):
        served.client.completions.create(**{**TEXT, "prompt": ["a"] * 4}, stream=stream)


def test_a_client_that_goes_away_in_the_middle_of_its_body_is_no_fault_of_the_server(served: Served) -> None:
    coming: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"prompt": "Once', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    head = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(served.app({**head, "root_path": ""}, receive, send))  # raises what a server would log
    assert [message.get("status") for message in sent] == [499, None]


def test_models_and_health(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.get("/health") == 200
    with pytest.raises(openai.NotFoundError, match="only 'tiny'") as raised:
        served.client.completions.create(**{**TEXT, "model": "other"})
    assert raised.value.code == "model_not_found"


def test_many_clients_at_once_get_what_each_gets_alone(served: Served) -> None:
    def ask(i: int) -> str:
        while True:
            try:
                return served.client.completions.create(**{**TEXT, "prompt": f"Client {i}", "seed": i}).choices[0].text
            except openai.RateLimitError:
                pass  # there are only so many places

    alone = [ask(i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


@pytest.mark.parametrize("how", ["streamed", "whole"])
def test_a_client_that_goes_away_aborts_its_request(served: Served, how: str) -> None:
    before = served.engine.stats().finished.get("abort", 0)

    def is_aborted() -> bool:
        return served.engine.stats().finished.get("abort", 0) == before + 1

    long = {**TEXT, "max_tokens": 100}
    if how == "streamed":
        served.hold(after=1)
        with served.client.completions.create(**long, stream=True) as stream:
            assert next(iter(stream)).choices[0].text
    else:
        served.hold()
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(long))
        until(lambda: served.engine.stats().num_running)
        connection.close()
    # The server has noticed: its wish waits for the end of the step that is held, or came between two of them.
    until(lambda: served.engine.thread._mailbox.qsize() or is_aborted())
    served.let_go()
    until(is_aborted)
    assert served.engine.stats().num_running == 0


def test_who_finds_no_room_is_turned_away(served: Served) -> None:
    served.hold()
    with ThreadPoolExecutor(16) as pool:

        def ask(i: int) -> int:
            try:
                return len(served.client.completions.create(**TEXT, seed=i).choices)
            except openai.RateLimitError as error:
                assert error.response.headers["retry-after"] == "1"
                return 0

        asking = [pool.submit(ask, i) for i in range(16)]
        # Four may run, three may wait: not all of them have a place.
        until(lambda: sum(future.done() for future in asking) >= 16 - 7)
        served.let_go()
        got = [future.result(timeout=WAIT_S) for future in asking]
    assert 4 <= sum(got) <= 7


def test_an_engine_that_fails_is_a_server_error_and_the_health_check_says_so() -> None:
    served = Served()
    served.engine.thread.call(lambda engine: engine.close())
    with pytest.raises(openai.InternalServerError) as raised:
        served.client.completions.create(**TEXT)
    assert raised.value.status_code == 503
    served.engine.thread.close()
    with pytest.raises(urllib.error.HTTPError) as unhealthy:
        served.get("/health")
    assert unhealthy.value.code == 503
    unhealthy.value.close()
    served.close()
