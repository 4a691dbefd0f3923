"""The run as an OpenAI-compatible server: whoever talks to it with the key of a trajectory has it recorded and trained.

    POST /v1/chat/completions, /v1/completions     as OpenAI's, with tools, streaming, n, stop, max_tokens
    GET  /v1/models                                the policy
    POST /v1/result {"reward": 1.0}                what the trajectory has earned, with further numbers for the metrics;
                                                   or {"failure": "why"}
    POST /v1/trajectories                          with the run's key: a trajectory that waits for an agent, its key and row

What is drawn is drawn as the run trains it: temperature, top_p, penalties and seeds of a request are ignored. A streamed
answer comes when it is whole, in the pieces that clients expect.
"""

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from async_grpo.environments.chat import TrajectoryOver
from async_grpo.environments.open_trajectory import Trajectory
from async_grpo.environments.openai_api import (
    MODEL,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    Result,
    as_template,
    body_of,
    events_of,
    streamed,
)
from async_grpo.environments.request_body import parsed_body, read_body
from async_grpo.environments.trajectory_client import (
    Context,
    Reply,
    SharedContext,
    TrajectoryClient,
    Whole,
    row_of,
)
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.processes.http_server import IDLE_S, MAX_CONNECTIONS, ConnectionGate, bound_logs
from async_grpo.processes.offload import offloaded

CLAIMS, CLAIM_WAITS_S = "/v1/trajectories", 20.0
MAX_FAULT_CHARACTERS = 300  # of a name that a request has made up, and of what is wrong with it


TRAJECTORY = web.RequestKey("trajectory", Trajectory)


class AgentEndpoint:
    """Listens on `host` (loopback, unless told otherwise) from `start` to `close`. Each open trajectory has a key.

    told: file that is to hold address and key of the run, for agents that are started elsewhere.
    max_connections: at once; see `ConnectionGate`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        told: Path | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._host, self._port, self._told = host, port, told
        self._max_connections = max_connections
        self._open: dict[str, Trajectory] = {}
        self.run_key, self._unclaimed = secrets.token_urlsafe(32), asyncio.Queue[str]()
        self._broken: Result | None = None
        self._runner: web.AppRunner | None = None
        self._gate: ConnectionGate | None = None
        self._listener: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        return f"http://{self._host}:{self._port}/v1"

    async def start(self) -> None:
        """ConfigurationError: the address is taken."""
        bound_logs()
        served = web.Application(middlewares=[self._guard])
        served.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/v1/result", self._report),
                web.post(CLAIMS, self._claim),
                web.get("/v1/models", self._models),
            ]
        )
        self._runner = web.AppRunner(served, access_log=None, shutdown_timeout=2.0, keepalive_timeout=IDLE_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self._gate = ConnectionGate(self._runner.server, self._max_connections)
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._gate, self._host, self._port)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"--endpoint-host {self._host} --endpoint-port {self._port} cannot be listened on ({error}): choose another"
            ) from error
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._told is not None:
            self._told.unlink(missing_ok=True)
            self._told.touch(mode=0o600)  # whoever can read it can take part in the run
            self._told.write_text(json.dumps({"base_url": self.base_url, "key": self.run_key}))

    async def close(self) -> None:
        """Stop listening; requests under way are cancelled."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._told is not None:
            self._told.unlink(missing_ok=True)

    def open(self, policy: TrajectoryClient) -> tuple[str, Trajectory]:
        """A key for the trajectory of that policy."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._open[key] = trajectory = Trajectory(policy)
        if self._broken is not None:
            trajectory.report(self._broken)
        return key, trajectory

    def fail(self, reason: str) -> None:
        """Who would play all trajectories is gone: they have failed, those to come as well."""
        self._broken = Result(failure=reason)
        for trajectory in self._open.values():
            trajectory.report(self._broken)

    def offer(self, key: str) -> None:
        """Give the trajectory to the agent that asks for one next."""
        self._unclaimed.put_nowait(key)

    def shut(self, key: str) -> None:
        """The trajectory has ended: its key opens nothing any more."""
        if (trajectory := self._open.pop(key, None)) is not None:
            trajectory.end()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer the request, and its errors in the form that clients of OpenAI's API read."""

        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answered(request, handler)

        assert self._gate is not None
        return await self._gate.answer(request, answer)

    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Find whose key it is, and have the handler answer; an error becomes an answer."""
        try:
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            key = key.strip() if kind.lower() == "bearer" else ""
            if request.path == CLAIMS and secrets.compare_digest(
                key.encode(errors="replace"), self.run_key.encode()
            ):
                return await handler(request)
            trajectory = self._open.get(key)
            if trajectory is None or request.path == CLAIMS:
                return _error(401, "no trajectory has this key, or it has ended", "invalid_api_key")
            request[TRAJECTORY] = trajectory
            return await handler(request)
        except ValidationError as error:
            return _error(400, _fault_of(error))
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason)
        except TrajectoryOver as limit:
            return _error(400, f"the trajectory is over: it has had its {limit}", "trajectory_over")
        except ConfigurationError as error:
            return _error(400, str(error))
        except AsyncGrpoError as error:
            return _error(503, str(error), "engine_lost")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, _context_tokens(request))
        asked, messages = await offloaded(len(body), _chat_of, body)
        tools = None if asked.tool_choice == "none" else asked.tools
        return await self._answer(request, asked, messages, len(body), tools=tools)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        context_tokens = _context_tokens(request)
        body = await read_body(request, context_tokens)
        asked = await offloaded(len(body), _completion_of, body, context_tokens)
        prompt = Whole(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        return await self._answer(request, asked, prompt, len(body))

    async def _answer(
        self, request: web.Request, asked: OpenAIRequest, context: Context, size: int, **more: Any
    ) -> web.StreamResponse:
        policy: TrajectoryClient = request[TRAJECTORY].policy
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
        max_tokens = min(limits, default=None)
        # Several answers to one conversation: it is rendered and tokenised once
        shared = SharedContext(context, size)
        turns = (
            policy.complete(shared, max_tokens=max_tokens, stop=stop, **more) for _ in range(asked.n or 1)
        )
        replies = await request[TRAJECTORY].all_of(turns)
        return await _response(request, asked, replies)

    async def _report(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, context_tokens=0)
        result = await offloaded(len(body), _result_of, body)
        refuse((result.reward is None) != bool(result.failure), "give either a reward or a failure")
        request[TRAJECTORY].report(result)
        return web.json_response({"object": "result", "reward": result.reward})

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_WAITS_S):
                while (trajectory := self._open.get(key := await self._unclaimed.get())) is None:
                    pass  # it has ended unclaimed
                if request.transport is not None and not request.transport.is_closing():
                    trajectory.claimed.set()
                    return web.json_response({"key": key, "row": row_of(trajectory.policy.prompt)})
                self.offer(key)  # who asked has gone
        return web.Response(status=204)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        own = {"id": MODEL, "object": "model", "owned_by": "async-grpo"}
        return web.json_response({"object": "list", "data": [own]})


def _context_tokens(request: web.Request) -> int:
    policy: TrajectoryClient = request[TRAJECTORY].policy
    return policy.limits.tokens


def _chat_of(body: bytes) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """Return the request, and its messages as the chat template takes them."""
    asked = ChatRequest.model_validate(parsed_body(body))
    return asked, [as_template(message) for message in asked.messages]


def _completion_of(body: bytes, context_tokens: int) -> CompletionRequest:
    return CompletionRequest.model_validate(parsed_body(body, max_token_ids=context_tokens))


def _result_of(body: bytes) -> Result:
    return Result.model_validate(parsed_body(body))


async def _response(
    request: web.Request, asked: OpenAIRequest, replies: Sequence[Reply]
) -> web.StreamResponse:
    """Return the replies as the request wants them: whole, or streamed."""
    answer = body_of(asked, replies)
    sizes = [len(reply.text) for reply in replies]
    if asked.stream:
        return await streamed(request, events_of(asked, answer), max(sizes))
    text = await offloaded(sum(sizes), json.dumps, answer)
    return web.Response(text=text, content_type="application/json")


def _fault_of(error: ValidationError) -> str:
    """Return what is wrong in words; of several kinds that a value may have, one that it is too long for."""
    faults = error.errors(include_url=False, include_input=False)
    too_long = [fault for fault in faults if fault["type"] in ("too_long", "string_too_long")]
    fault = [*too_long, *faults][0]
    where = ".".join(map(str, fault["loc"])) or "the request"
    return f"{where[:MAX_FAULT_CHARACTERS]}: {fault['msg'][:MAX_FAULT_CHARACTERS]}"


def _error(status: int, message: str, code: str = "invalid_request") -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    told = {"message": message, "type": kind, "code": code, "param": None}
    return web.json_response({"error": told}, status=status)
