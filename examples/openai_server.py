"""A server with the OpenAI API: /v1/chat/completions and /v1/completions, whole or streamed, for many clients at once.

    pip install fastapi uvicorn
    python examples/openai_server.py MODEL [--port 8000]
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "stream": true}'

Any OpenAI client works: `OpenAI(base_url="http://localhost:8000/v1", api_key="none")`. A client that goes away aborts
its requests; beyond `--max-waiting` requests that wait, the answer is 429.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from batchkit import Engine, EngineClosed, EngineFull, RequestError, RequestOutput
from batchkit.aio import AsyncEngine
from batchkit.openai import Response, error_body, options_of, params_of, prompts_of, shown

T = TypeVar("T")
Piece = tuple[int, RequestOutput]  # the number of the prompt, and what came of it


class APIError(Exception):
    """Becomes the response: a status, and the API's error object."""

    def __init__(self, status: int, message: str, *, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind=kind, code=code)


def make_app(engine: AsyncEngine, model: str) -> FastAPI:
    """The application. It closes the engine when it is shut down.

    Args:
        engine: has a tokenizer.
        model: the name by which clients ask for it.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="batchkit", lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await answer(request, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await answer(request, chat=False)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": 0, "owned_by": "batchkit"}
        return {"object": "list", "data": [card | {"max_model_len": engine.stats().max_model_len}]}

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({}, status_code=200 if engine.thread.is_open else 503)

    async def answer(request: Request, *, chat: bool) -> Any:
        body = await body_of(request, model)
        try:
            params = params_of(body, chat=chat)
            prompts = prompts_of(body, chat=chat)
            # A request that finds no room is refused at once, so that another server can have it.
            options = {"max_wait_s": 0.0, **options_of(body)}
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(str(error)) from error
        most = engine.thread.max_waiting
        if most is not None and len(prompts) > most:
            raise RequestError(
                f"prompt is a list of {len(prompts)}, which never find room at once; send at most {most}"
            )
        tokenizer = engine.thread.engine.tokenizer
        assert tokenizer is not None
        response = Response(
            chat=chat,
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=model,
            created=int(time.time()),
            params=params,
            decode=partial(tokenizer.decode, skip_special_tokens=False),
        )
        if not body.get("stream"):
            waiting = together([engine.generate(prompt, params, **options) for prompt in prompts])
            outputs = await unless_gone(request, waiting)
            for output in outputs:
                check(output)
            return JSONResponse(response.body(outputs))
        pieces = merged([engine.stream(prompt, params, **options) for prompt in prompts])
        first = await unless_gone(request, next_of(pieces))  # what is refused is refused with a status of its own
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(events(response, first, pieces, include_usage), media_type="text/event-stream")

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse(error_body(str(error)), status_code=400)

    @app.exception_handler(APIError)
    async def report(request: Request, error: APIError) -> JSONResponse:
        return JSONResponse(error.body, status_code=error.status)

    @app.exception_handler(EngineFull)
    async def turn_away(request: Request, error: EngineFull) -> JSONResponse:
        headers = {"Retry-After": "1"}
        return JSONResponse(error_body(str(error), kind="rate_limit_error"), status_code=429, headers=headers)

    @app.exception_handler(EngineClosed)
    async def be_closed(request: Request, error: EngineClosed) -> JSONResponse:
        return JSONResponse(error_body(str(error), kind="server_error"), status_code=503)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", kind="server_error"), status_code=500)

    return app


async def body_of(request: Request, model: str) -> dict[str, Any]:
    """The request's JSON object, if it is for this model."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON, or nested too deeply: {error}") from error
    except ClientDisconnect as error:
        raise client_gone() from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for name, kind in (("stream", bool), ("stream_options", dict)):
        if not isinstance(body.get(name), (kind, type(None))):
            raise RequestError(f"{name} must be {'an object' if kind is dict else 'true or false'}")
    asked = body.get("model")
    if not isinstance(asked, (str, type(None))):
        raise RequestError(f"model must be text, got {shown(asked)}")
    if asked is not None and asked != model:
        message = f"there is no model {asked!r}, only {model!r}"
        raise APIError(404, message, kind="invalid_request_error", code="model_not_found")
    return body


def client_gone() -> APIError:
    """What ends the work for a client that has gone away; nobody reads it."""
    return APIError(499, "the client has gone", kind="server_error")


def check(output: RequestOutput) -> None:
    """Raise if the request failed while it ran."""
    if output.error is not None:
        raise APIError(500, output.error, kind="server_error")


async def events(
    response: Response, first: Piece, pieces: AsyncGenerator[Piece, None], include_usage: bool
) -> AsyncGenerator[str, None]:
    """The server-sent events of a streamed response."""
    finals: dict[int, RequestOutput] = {}
    ended: set[tuple[int, int]] = set()
    async with aclosing(pieces):
        piece: Piece | None = first
        try:
            while piece is not None:
                prompt, output = piece
                check(output)
                for sample in output.outputs:
                    if (prompt, sample.index) in ended:
                        continue
                    if sample.finish_reason is not None:
                        ended.add((prompt, sample.index))
                    if sample.new_token_ids or sample.finish_reason is not None:
                        yield event(response.chunk(sample, prompt=prompt))
                if output.finished:
                    finals[prompt] = output
                piece = await anext(pieces, None)
        except Exception as error:  # the status has been sent
            failure = error if isinstance(error, APIError) else APIError(500, str(error), kind="server_error")
            yield event(failure.body)
            return
    if include_usage:
        yield event(response.usage_chunk([finals[prompt] for prompt in sorted(finals)]))
    yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return; if one raises, the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[Piece, None]:
    """What several streams give, as it comes, each with the number of its stream."""
    news: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(stream):
            async for output in stream:
                news.put_nowait((number, output))

    reading = asyncio.create_task(together([read(number, stream) for number, stream in enumerate(streams)]))
    reading.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while (piece := await news.get()) is not None:
            yield piece
        await reading  # raises what went wrong
    finally:
        reading.cancel()


async def next_of(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)


async def unless_gone(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns; if the client goes away meanwhile, it is cancelled, and with it what it waits for."""
    work = asyncio.create_task(coroutine)
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise client_gone()
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--served-name", help="the model's name for clients; default: as above")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", help='like "2GiB"')
    parser.add_argument("--max-num-seqs", type=int, default=32, help="requests that run at once")
    parser.add_argument("--max-waiting", type=int, default=256, help="requests that wait; more are turned away")
    args = parser.parse_args()

    inner = Engine.from_pretrained(
        args.model,
        dtype=args.dtype,
        kv_memory=args.kv_memory,
        max_num_seqs=args.max_num_seqs,
        prefix_caching=True,  # of a conversation, only the newest message is computed
    )
    engine = AsyncEngine(inner, max_waiting=args.max_waiting)
    uvicorn.run(make_app(engine, args.served_name or args.model), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
