"""`AgentEndpoint`: a server of OpenAI's API for agents. Turns requested with a trajectory's key are trained on.

    POST /v1/chat/completions, /v1/completions     as in OpenAI's API, with tools, streaming, n, stop, max_tokens
    POST /v1/responses                             as in OpenAI's API, with tools and streaming (`responses_api`)
    GET, DELETE /v1/responses/ID                   returns or removes an answer of this trajectory
    GET  /v1/models, /v1/models/policy             lists the policy
    POST /v1/result {"reward": 1.0}                reports the trajectory's reward, and optional numbers for metrics;
                                                   or {"failure": "why"}
    POST /v1/trajectories                          with the run's key: claims a trajectory; returns its key and its row

Turns are sampled with the run's settings, because they are trained on. The temperature, top_p, penalties and seed of a
request are ignored. Fields that would change what an answer contains are refused (`unsupported_fields`). A streamed
answer is sent only when it is complete, in the form that clients expect.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from async_grpo.environments.chat import TrajectoryOver
from async_grpo.environments.openai_server.event_stream import send_events
from async_grpo.environments.openai_server.open_trajectory import Trajectory
from async_grpo.environments.openai_server.openai_api import (
    MODEL,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    Result,
    as_template,
    body_of,
    events_of,
)
from async_grpo.environments.openai_server.request_body import parsed_body, read_body
from async_grpo.environments.openai_server.request_faults import validated
from async_grpo.environments.openai_server.responses_api import (
    RESPONSE_ID,
    answer_responses_request,
    stored_response,
)
from async_grpo.environments.openai_server.stored_responses import ResponseNotFound
from async_grpo.environments.openai_server.unsupported_fields import ignored_fields
from async_grpo.environments.trajectory_client import (
    Context,
    Reply,
    SharedContext,
    Tools,
    TrajectoryClient,
    Whole,
    row_of,
)
from async_grpo.environments.typed_output import TypedOutput, typed_output_of
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.processes.http_server import IDLE_S, MAX_CONNECTIONS, ConnectionGate, bound_logs
from async_grpo.processes.offload import offloaded

CLAIM_PATH = "/v1/trajectories"
RESPONSE_PATH = f"/v1/responses/{{{RESPONSE_ID}}}"
SHUTDOWN_S = 2.0  # seconds that unfinished requests have to end when the endpoint closes
CLAIM_WAIT_S = 20.0  # longest time that a claim waits for a trajectory

PATHS = (
    "there are POST /v1/chat/completions, /v1/responses, /v1/completions and /v1/result, and GET /v1/models"
)

# The field `created` is required, and 0 because the policy has no date
_POLICY = {"id": MODEL, "object": "model", "created": 0, "owned_by": "async-grpo"}

TRAJECTORY = web.RequestKey("trajectory", Trajectory)


class AgentEndpoint:
    """An HTTP server for agents, from `start` to `close`. Each open trajectory has a key.

    Args:
        host: The address on which to listen.
        port: The port on which to listen; 0 chooses a free port.
        address_file: File to which the endpoint's address and the run's key are written, for agents that are started
            elsewhere. None writes no file.
        max_connections: Maximum number of open connections; see `ConnectionGate`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        address_file: Path | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.run_key = secrets.token_urlsafe(32)
        self._host = host
        self._port = port
        self._address_file = address_file
        self._max_connections = max_connections
        self._open: dict[str, Trajectory] = {}  # open trajectories, by their keys
        self._unclaimed = asyncio.Queue[str]()  # keys of trajectories that no agent has claimed yet
        self._broken: Result | None = None  # failure of all trajectories once the agents' program has ended
        self._runner: web.AppRunner | None = None
        self._gate: ConnectionGate | None = None
        self._listener: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        """Return the base URL for clients of OpenAI's API."""
        return f"http://{self._host}:{self._port}/v1"

    async def start(self) -> None:
        """Begin to listen, and write the address file.

        Raises:
            ConfigurationError: The address cannot be used, for example because another server uses it.
        """
        bound_logs()
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/responses", self._respond),
                web.get(RESPONSE_PATH, self._stored_response),
                web.delete(RESPONSE_PATH, self._stored_response),
                web.post("/v1/completions", self._complete),
                web.post("/v1/result", self._report),
                web.post(CLAIM_PATH, self._claim),
                web.get("/v1/models", self._models),
                web.get(f"/v1/models/{MODEL}", self._model),
            ]
        )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            keepalive_timeout=IDLE_S,
        )
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
        if self._address_file is not None:
            self._write_address(self._address_file)

    def _write_address(self, path: Path) -> None:
        """Write the endpoint's address and the run's key to a file, for agents that are started elsewhere.

        The file appears only when it is complete, because agents wait for it. Only this user can read it, because
        anyone with the key can take part in the run.
        """
        new_path = path.with_name(f".{path.name}.new")
        new_path.unlink(missing_ok=True)
        descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"base_url": self.base_url, "key": self.run_key}, file)
        new_path.replace(path)

    async def close(self) -> None:
        """Stop listening. Unfinished requests are cancelled after a short time."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._address_file is not None:
            self._address_file.unlink(missing_ok=True)

    def open(self, policy: TrajectoryClient) -> tuple[str, Trajectory]:
        """Open a trajectory, and return its key and the trajectory."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        trajectory = Trajectory(policy)
        self._open[key] = trajectory
        if self._broken is not None:
            trajectory.report(self._broken)
        return key, trajectory

    def fail(self, reason: str) -> None:
        """Fail all open and all later trajectories, because the program that plays them has ended."""
        self._broken = Result(failure=reason)
        for trajectory in self._open.values():
            trajectory.report(self._broken)

    def offer(self, key: str) -> None:
        """Offer the trajectory of this key to agents. An agent that claims a trajectory gets the oldest offer."""
        self._unclaimed.put_nowait(key)

    def shut(self, key: str) -> None:
        """End a trajectory. Its key is not accepted any more."""
        trajectory = self._open.pop(key, None)
        if trajectory is not None:
            trajectory.end()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer a request through the connection gate, which enforces its limits."""

        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._response_or_error(request, handler)

        assert self._gate is not None
        return await self._gate.answer(request, answer)

    async def _response_or_error(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Return the handler's answer, or an error in the form of OpenAI's API."""
        try:
            if not self._authorize(request):
                return _error(401, "no trajectory has this key, or it has ended", "invalid_api_key")
            return await self._handled(request, handler)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            return _error(error.status, f"{error.status}: no {request.method} {request.path} here; {PATHS}")
        except web.HTTPException as error:
            return _error(error.status, error.text or error.reason)
        except TrajectoryOver as limit:
            return _error(400, f"the trajectory is over: it has had its {limit}", "trajectory_over")
        except ResponseNotFound as error:
            is_in_path = RESPONSE_ID in request.match_info
            return _error(404 if is_in_path else 400, str(error), "previous_response_not_found")
        except ConfigurationError as error:
            return _error(400, str(error))
        except AsyncGrpoError as error:
            return _error(503, str(error), "engine_lost")

    async def _handled(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Return the handler's answer. A refusal that follows several others is delayed."""
        trajectory = request.get(TRAJECTORY)
        if trajectory is None:
            return await handler(request)
        with trajectory.one_more_request():
            refusals = trajectory.policy.refusals
            async with refusals.watching(web.HTTPException, TrajectoryOver, ConfigurationError):
                return await handler(request)

    def _authorize(self, request: web.Request) -> bool:
        """Return whether the request has a key that its path accepts. Store the key's trajectory in the request."""
        kind, _, credentials = request.headers.get("Authorization", "").partition(" ")
        key = credentials.strip() if kind.lower() == "bearer" else ""
        if request.path == CLAIM_PATH:
            return secrets.compare_digest(key.encode(errors="replace"), self.run_key.encode())
        trajectory = self._open.get(key)
        if trajectory is None:
            return False
        request[TRAJECTORY] = trajectory
        return True

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        reads_images = request[TRAJECTORY].policy.reads_images
        body = await read_body(request, _context_tokens(request), has_images=reads_images)
        chat_request, messages, ignored = await offloaded(len(body), _chat_request_of, body)
        request[TRAJECTORY].policy.ignored_fields.update(ignored)
        tools = None if chat_request.tool_choice == "none" else chat_request.tools
        typed = typed_output_of(
            chat_request.response_format,
            chat_request.tool_choice,
            tools,
            chat_request.parallel_tool_calls,
        )
        return await self._answer(request, chat_request, messages, len(body), tools, typed)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await answer_responses_request(request, request[TRAJECTORY])

    async def _stored_response(self, request: web.Request) -> web.StreamResponse:
        return await stored_response(request, request[TRAJECTORY])

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        context_tokens = _context_tokens(request)
        body = await read_body(request, context_tokens)
        completion_request, ignored = await offloaded(len(body), _completion_request_of, body, context_tokens)
        request[TRAJECTORY].policy.ignored_fields.update(ignored)
        prompt = completion_request.prompt
        context: Context = Whole(prompt) if isinstance(prompt, str) else prompt
        return await self._answer(request, completion_request, context, len(body))

    async def _answer(
        self,
        request: web.Request,
        parsed: OpenAIRequest,
        context: Context,
        size: int,
        tools: Tools | None = None,
        typed: TypedOutput | None = None,
    ) -> web.StreamResponse:
        """Have the policy take the number of turns that the request asks for, and return the answer.

        Args:
            request: The HTTP request.
            parsed: The parsed body of the request.
            context: The history that each turn continues.
            size: Number of bytes of the body.
            tools: JSON schemas of the tools that the policy may call.
            typed: The form that the request requires of each turn.
        """
        trajectory = request[TRAJECTORY]
        stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
        token_limits = [parsed.max_tokens, parsed.max_completion_tokens]
        max_tokens = min((limit for limit in token_limits if limit is not None), default=None)
        # Shared, so that the conversation is rendered and tokenized only once for all turns
        shared = SharedContext(context, size)
        take_turn = partial(
            trajectory.policy.complete,
            shared,
            tools=tools,
            max_tokens=max_tokens,
            stop=stop,
            typed=typed,
        )
        replies = await trajectory.take_turns(take_turn, count=parsed.n or 1)
        return await _response(request, parsed, replies)

    async def _report(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, context_tokens=0)
        result = await offloaded(len(body), _result_of, body)
        refuse((result.reward is None) != bool(result.failure), "give either a reward or a failure")
        request[TRAJECTORY].report(result)
        return web.json_response({"object": "result", "reward": result.reward})

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_WAIT_S):
                key, trajectory = await self._next_unclaimed()
                is_connected = request.transport is not None and not request.transport.is_closing()
                if is_connected:
                    trajectory.claimed.set()
                    return web.json_response({"key": key, "row": row_of(trajectory.policy.prompt)})
                # The agent has disconnected, so offer the trajectory to the next agent
                self.offer(key)
        return web.Response(status=204)

    async def _next_unclaimed(self) -> tuple[str, Trajectory]:
        """Wait for a trajectory that no agent has claimed. Return its key and the trajectory."""
        while True:
            key = await self._unclaimed.get()
            trajectory = self._open.get(key)
            # None if the trajectory ended before an agent claimed it
            if trajectory is not None:
                return key, trajectory

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [_POLICY]})

    async def _model(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(_POLICY)


def _context_tokens(request: web.Request) -> int:
    policy: TrajectoryClient = request[TRAJECTORY].policy
    return policy.limits.tokens


def _chat_request_of(body: bytes) -> tuple[ChatRequest, list[dict[str, Any]], list[str]]:
    """Return the parsed request, its messages in the form that chat templates expect, and its ignored fields."""
    fields = parsed_body(body)
    chat_request = validated(ChatRequest, fields)
    messages = [as_template(message) for message in chat_request.messages]
    return chat_request, messages, ignored_fields(fields)


def _completion_request_of(body: bytes, context_tokens: int) -> tuple[CompletionRequest, list[str]]:
    """Return the parsed request, with at most `context_tokens` token ids, and the names of its ignored fields."""
    fields = parsed_body(body, max_token_ids=context_tokens)
    return validated(CompletionRequest, fields), ignored_fields(fields)


def _result_of(body: bytes) -> Result:
    return validated(Result, parsed_body(body))


async def _response(
    request: web.Request, parsed: OpenAIRequest, replies: Sequence[Reply]
) -> web.StreamResponse:
    """Return the replies as one body, or as a stream if the request asks for it."""
    answer = body_of(parsed, replies)
    text_lengths = [len(reply.text) for reply in replies]
    if parsed.stream:
        return await send_events(request, events_of(parsed, answer), max(text_lengths))
    text = await offloaded(sum(text_lengths), json.dumps, answer)
    return web.Response(text=text, content_type="application/json")


def _error(status: int, message: str, code: str = "invalid_request") -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "code": code, "param": None}
    return web.json_response({"error": error}, status=status)
