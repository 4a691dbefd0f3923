"""The run as an OpenAI-compatible server: whoever talks to it with the key of a trajectory has it recorded and trained.

    POST /v1/chat/completions, /v1/completions     as OpenAI's, with tools, streaming, n, stop, max_tokens
    GET  /v1/models, /v1/row                       the policy; the row of the data set that the trajectory is about
    POST /v1/result {"reward": 1.0}                what the trajectory has earned, with further numbers for the metrics
    POST /v1/trajectories                          with the run's key: a trajectory that waits for an agent, its key and row

What is drawn is drawn as the run trains it: temperature, top_p, penalties and seeds of a request are ignored. A streamed
answer comes when it is whole, in the pieces that clients expect.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from aiohttp import web
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from async_grpo.environments.policy import Policy, Reply, TrajectoryOver, row_of
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.rewards.adapter.result import is_finite_number

MAX_REQUEST_BYTES = 16 * 2**20
CLAIMS, CLAIM_WAITS_S = "/v1/trajectories", 20.0
MODEL = "policy"  # the name that the server gives it; any name is accepted


Word = Annotated[str, Field(min_length=1)]


class Request(BaseModel):
    """What both kinds of requests may say; all else is ignored."""

    model: str = MODEL
    n: Annotated[int, Field(ge=1, le=64)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None


class Function(BaseModel, extra="allow"):
    name: str
    arguments: str | dict[str, Any] = "{}"


class Call(BaseModel, extra="allow"):
    function: Function


class Text(BaseModel):
    type: Literal["text"]  # images are not taken
    text: str


class ChatMessage(BaseModel, extra="allow"):
    role: str
    content: str | list[Text] | None = None
    tool_calls: list[Call] | None = None


class ChatRequest(Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None


class CompletionRequest(Request):
    prompt: str | list[Annotated[int, Field(ge=0)]]


class Result(BaseModel):
    reward: float
    numbers: dict[str, float] = {}


class Trajectory:
    """One that is open: its policy, and what was reported of it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.result: Result | None = None
        self.claimed, self.reported = asyncio.Event(), asyncio.Event()
        self._turns: set[asyncio.Future[list[Reply]]] = set()  # under way

    async def all_of(self, turns: Iterable[Awaitable[Reply]]) -> list[Reply]:
        """What they return. They end with the trajectory, and not before, if who asked has gone."""
        together = asyncio.gather(*turns)
        self._turns.add(together)
        together.add_done_callback(self._turns.discard)
        try:
            return await asyncio.shield(together)
        except asyncio.CancelledError:
            if together.cancelled():
                raise ConfigurationError("the trajectory has ended") from None
            raise

    def end(self) -> None:
        """Nothing is sampled for it any more."""
        for together in tuple(self._turns):
            together.cancel()


class Endpoint:
    """Listens on `host` (loopback, unless told otherwise) from `start` to `close`. Each open trajectory has a key.

    told: file that is to hold address and key of the run, for agents that are started elsewhere.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, told: Path | None = None) -> None:
        self._host, self._port, self._told = host, port, told
        self._open: dict[str, Trajectory] = {}
        self._run_key, self._unclaimed = secrets.token_urlsafe(32), asyncio.Queue[str]()
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"http://{self._host}:{self._port}/v1"

    async def start(self) -> None:
        """ConfigurationError: the address is taken."""
        served = web.Application(middlewares=[self._guard], client_max_size=MAX_REQUEST_BYTES)
        served.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/v1/result", self._report),
                web.post(CLAIMS, self._claim),
                web.get("/v1/models", self._models),
                web.get("/v1/row", self._row),
            ]
        )
        self._runner = web.AppRunner(served, access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"--endpoint-host {self._host} --endpoint-port {self._port} cannot be listened on ({error}): choose another"
            ) from error
        self._port = self._runner.addresses[0][1]
        if self._told is not None:
            self._told.unlink(missing_ok=True)
            self._told.touch(mode=0o600)  # whoever can read it can take part in the run
            self._told.write_text(json.dumps({"base_url": self.base_url, "key": self._run_key}))

    async def close(self) -> None:
        """Stop listening; requests under way are cancelled."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._told is not None:
            self._told.unlink(missing_ok=True)

    def open(self, policy: Policy) -> tuple[str, Trajectory]:
        """A key for the trajectory of that policy."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._open[key] = trajectory = Trajectory(policy)
        return key, trajectory

    def offer(self, key: str) -> None:
        """Give the trajectory to the agent that asks for one next."""
        self._unclaimed.put_nowait(key)

    def shut(self, key: str) -> None:
        """The trajectory has ended: its key opens nothing any more."""
        if (trajectory := self._open.pop(key, None)) is not None:
            trajectory.end()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Whose key it is; every error in the form that clients of OpenAI's API read."""
        try:
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            key = key.strip() if kind.lower() == "bearer" else ""
            if request.path == CLAIMS and secrets.compare_digest(key.encode(), self._run_key.encode()):
                return await handler(request)
            trajectory = self._open.get(key)
            if trajectory is None or request.path == CLAIMS:
                return _error(401, "no trajectory has this key, or it has ended", "invalid_api_key")
            request["trajectory"] = trajectory
            return await handler(request)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return _error(400, f"{'.'.join(map(str, first['loc'])) or 'the request'}: {first['msg']}")
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason)
        except TrajectoryOver as limit:
            return _error(400, f"the trajectory is over: it has had its {limit}", "trajectory_over")
        except ConfigurationError as error:
            return _error(400, str(error))
        except AsyncGrpoError as error:
            return _error(503, str(error), "engine_lost")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(ChatRequest, request)
        messages = list(map(_as_template, asked.messages))
        return await self._answer(request, asked, messages, tools=asked.tools)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await _read(CompletionRequest, request)
        policy: Policy = request["trajectory"].policy
        prompt = asked.prompt
        refuse(len(prompt) == 0, "prompt: it is empty")
        if isinstance(prompt, str):
            return await self._answer(request, asked, policy.recorder.ask_text(prompt))
        refuse(max(prompt) >= policy.limits.vocabulary, f"prompt: {max(prompt)} is no token of the model")
        return await self._answer(request, asked, np.asarray(prompt, np.int32))

    async def _answer(
        self, request: web.Request, asked: Request, context: Any, **more: Any
    ) -> web.StreamResponse:
        policy: Policy = request["trajectory"].policy
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        limits = [one for one in (asked.max_tokens, asked.max_completion_tokens) if one is not None]
        most = min(limits, default=None)
        turns = (policy.complete(context, max_tokens=most, stop=stop, **more) for _ in range(asked.n))
        replies = await request["trajectory"].all_of(turns)
        answer = _body(asked, replies, stop)
        return await _streamed(request, asked, answer) if asked.stream else _json(answer)

    async def _report(self, request: web.Request) -> web.StreamResponse:
        result = await _read(Result, request)
        if not all(map(is_finite_number, (result.reward, *result.numbers.values()))):
            raise ConfigurationError("reward: only finite numbers are allowed")
        request["trajectory"].result = result
        request["trajectory"].reported.set()
        return _json({"object": "result", "reward": result.reward})

    async def _claim(self, _: web.Request) -> web.StreamResponse:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_WAITS_S):
                while (trajectory := self._open.get(key := await self._unclaimed.get())) is None:
                    pass  # it has ended unclaimed
                trajectory.claimed.set()
                return _json({"key": key, "row": row_of(trajectory.policy.prompt)})
        return web.Response(status=204)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "async-grpo"}]})

    async def _row(self, request: web.Request) -> web.StreamResponse:
        return _json(row_of(request["trajectory"].policy.prompt))


async def _read(kind: type[Any], request: web.Request) -> Any:
    """The body of a request; ValidationError, or an HTTP error, for what is none."""
    try:
        return TypeAdapter(kind).validate_python(json.loads(await request.text()))
    except (ValueError, RecursionError, LookupError) as error:
        if isinstance(error, ValidationError):
            raise
        raise web.HTTPBadRequest(text=f"the body is no JSON: {type(error).__name__}") from error


def _as_template(message: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: its content is one text."""
    told = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        told["content"] = "".join(part.text for part in message.content)
    return told


def _body(asked: Request, replies: Sequence[Reply], stop: Sequence[str]) -> dict[str, Any]:
    is_chat, tokens = isinstance(asked, ChatRequest), sum(len(reply.completion) for reply in replies)
    choices = []
    for index, reply in enumerate(replies):
        reason = "length" if reply.completion.truncated else "stop"
        if is_chat:
            message = dict(reply.message)
            if message.get("tool_calls"):
                reason = "tool_calls" if reason == "stop" else reason
            choices.append({"index": index, "message": message, "finish_reason": reason, "logprobs": None})
        else:
            text = next(
                (reply.text.removesuffix(end) for end in stop if reply.text.endswith(end)), reply.text
            )
            choices.append({"index": index, "text": text, "finish_reason": reason, "logprobs": None})
    given = replies[0].prompt_tokens
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": choices,
        "usage": {"prompt_tokens": given, "completion_tokens": tokens, "total_tokens": given + tokens},
    }


async def _streamed(request: web.Request, asked: Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The answer as server-sent events."""
    usage = answer.pop("usage")
    if is_chat := isinstance(asked, ChatRequest):
        answer["object"] = "chat.completion.chunk"
    events = []
    for choice in answer.pop("choices"):
        index, reason = choice["index"], choice["finish_reason"]
        if is_chat:
            message = choice["message"]
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            events += [{"index": index, "delta": delta, "finish_reason": None}]
            events += [{"index": index, "delta": {}, "finish_reason": reason}]
        else:
            events += [{"index": index, "text": choice["text"], "finish_reason": reason, "logprobs": None}]
    lines = [answer | {"choices": [event]} for event in events]
    if (asked.stream_options or {}).get("include_usage"):
        lines.append(answer | {"choices": [], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    with suppress(ConnectionError):  # who asked has gone: the turn counts all the same
        await response.prepare(request)
        for line in [*map(json.dumps, lines), "[DONE]"]:
            await response.write(f"data: {line}\n\n".encode())
        await response.write_eof()
    return response


def _json(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _error(status: int, message: str, code: str = "invalid_request") -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json({"error": {"message": message, "type": kind, "code": code, "param": None}}, status)
