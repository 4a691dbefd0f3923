"""The child's side of `processes.EnvironmentProcess`: runs environments of many trajectories, or tools, in one process.

The requests that it receives, and the answers:

    {"call": "reset", "trajectory": 7, "arguments": [row, seed]}    ->  observation, state, numbers
    {"call": "step", "trajectory": 7, "arguments": ["I say 12"]}    ->  the same, with reward and done
    {"call": "leave", "trajectory": 7, "arguments": []}             ->  the environment is closed and forgotten
    {"call": "schemas", "arguments": []}                            ->  schemas of the tools
    {"call": "use", "arguments": ["add", "{...}"]}                  ->  the tool's answer, and whether it failed

Each answer has a `status`. If the status is not "ok", the answer has a `reason`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter, validate_call

from async_grpo.environments.constructor import check_constructor_options
from async_grpo.environments.failure_text import user_traceback
from async_grpo.errors import ConfigurationError
from async_grpo.experience.plain_values import plain
from async_grpo.options.redaction import redacted
from async_grpo.options.source_file import SourceFile
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.adapter.result import (
    PLAUSIBLE_REWARD,
    describe,
    excerpt,
    failure,
    is_finite_number,
    is_plausible,
    shown,
)
from async_grpo.rewards.isolation.child import Answers
from async_grpo.rewards.isolation.lines import Message

ASYNC_CAPACITY = 64  # number of calls that async environments serve concurrently
MAX_ANSWER_CHARACTERS = 65_536  # limit of a tool's answer


def hosted_environment(greeting: Message) -> tuple[bool, Callable[[], "EnvironmentHost"]]:
    """Return whether the environment is async, and a function that creates its host (see `isolation.child.Host`)."""
    player = SourceFile(**greeting["source"]).object()
    functions = player
    if kind_of(player) == "environment":
        functions = [player.reset, player.step, getattr(player, "close", None)]
    is_async = any(inspect.iscoroutinefunction(function) for function in functions)
    return is_async, partial(EnvironmentHost, player, greeting["options"], is_async)


def kind_of(player: Any) -> str:
    """Return which kind of object `--environment` names: "environment", "tools" or "program".

    Raises:
        ConfigurationError: The object is none of these.
    """
    if isinstance(player, type):
        methods = [getattr(player, name, None) for name in ("reset", "step")]
        if all(callable(method) for method in methods):
            return "environment"
    if isinstance(player, Sequence) and player and all(callable(function) for function in player):
        return "tools"
    if inspect.iscoroutinefunction(player):
        return "program"
    name = player.__name__ if isinstance(player, type) else type(player).__name__
    described = f"the class {name}" if isinstance(player, type) else f"an object of the type {name}"
    raise ConfigurationError(
        f"{described} cannot play: name a class with reset and step, a list of functions (tools), or an "
        "`async def` with the arguments prompt and policy"
    )


class EnvironmentHost:
    """A `Host` that runs environments, one per trajectory, or tools.

    Args:
        player: A class of environments, or a list of tools.
        options: Keyword arguments for the class.
        is_async: Whether calls are served concurrently.
    """

    def __init__(self, player: Any, options: Mapping[str, Any], is_async: bool) -> None:
        self.traits = AdapterTraits(
            ASYNC_CAPACITY if is_async else 1,
            is_async=is_async,
            finishes=not is_async,
        )
        self._environments: dict[int, Any] = {}
        self._tools = {}
        check_constructor_options(player, options)
        if kind_of(player) == "tools":
            self._tools = {tool.__name__: tool for tool in player}
        else:
            self._make = partial(player, **options)

    async def call(self, method: str, *arguments: Any) -> None:
        """Do nothing, because an environment host has nothing to warm up or close."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """Return one answer to each request. See `Host`."""
        return [[await self._reply(request["sample"])] for request in requests]

    async def _reply(self, request: Message) -> dict[str, Any]:
        try:
            method = getattr(self, f"_{request['call']}")
            return {"status": "ok"} | await method(request.get("trajectory"), *request["arguments"])
        except BaseException as error:
            # Catch not only `Exception`: sys.exit() and the timeouts of some libraries raise other errors, which would
            # end the process
            answer = failure(describe(error))
            lines = user_traceback(error)
            # `describe` already names the line if there is only one
            if lines.count("  File ") > 1:
                answer["reason"] += excerpt(f"\n{lines}", len(lines) + 1)
            return answer

    async def _reset(self, trajectory: int, row: dict[str, Any], seed: int) -> dict[str, Any]:
        environment = self._make()
        self._environments[trajectory] = environment
        return _situation(environment, await _awaited(environment.reset(row, seed)))

    async def _step(self, trajectory: int, text: str) -> dict[str, Any]:
        environment = self._environments.get(trajectory)
        if environment is None:
            raise RuntimeError(
                "the environment's process was ended for another trajectory, which did not answer in time"
            )
        returned = await _awaited(environment.step(text))
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                f"step returned {shown(returned, 200)}, not (observation, reward, whether it is over)"
            )
        observation, reward, is_over = returned
        if not is_finite_number(reward):
            raise ValueError(f"the reward {shown(reward)} is no finite number")
        if not is_plausible(reward):
            raise ValueError(f"the reward is {shown(reward)}: {PLAUSIBLE_REWARD}")
        return _situation(environment, observation) | {"reward": float(reward), "done": bool(is_over)}

    async def _leave(self, trajectory: int) -> dict[str, Any]:
        environment = self._environments.pop(trajectory, None)
        close = getattr(environment, "close", None)
        if close:
            await _awaited(close())
        return {}

    async def _schemas(self, _: Any) -> dict[str, Any]:
        return {"schemas": [_schema(tool) for tool in self._tools.values()]}

    async def _use(self, _: Any, name: str, arguments: str) -> dict[str, Any]:
        """Return the answer of a tool. If it raises, or its arguments are invalid, the answer is an error message."""
        if name not in self._tools:
            names = ", ".join(self._tools)
            return {"answer": f"error: there is no tool {name!r}, only {names}", "failed": True}
        try:
            keywords = json.loads(arguments)
            if not isinstance(keywords, dict):
                raise TypeError(f"the arguments must be an object, not {arguments:.100}")
            # `validate_call` checks the arguments against the type hints, and converts them
            answer = await _awaited(validate_call(self._tools[name])(**keywords))
            text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
            return {"answer": _shortened(text), "failed": False}
        except Exception as error:
            message = redacted(f"error: {type(error).__name__}: {error}")
            return {"answer": _shortened(message), "failed": True}


def _shortened(text: str) -> str:
    """Return the text. If it has more than MAX_ANSWER_CHARACTERS, return its beginning and a sentence that says so."""
    if len(text) <= MAX_ANSWER_CHARACTERS:
        return text
    beginning = text[:MAX_ANSWER_CHARACTERS]
    return f"{beginning}\n[cut: {len(text)} characters, of which the first {len(beginning)} are here]"


async def _awaited(returned: Any) -> Any:
    """Return what a function returned. If it is awaitable, await it first."""
    return await returned if inspect.isawaitable(returned) else returned


def _situation(environment: Any, observation: Any) -> dict[str, Any]:
    """Check an observation, and return it together with the environment's state and numbers."""
    if isinstance(observation, list):
        is_observation = all(isinstance(message, Mapping) and "role" in message for message in observation)
        if any(isinstance(message.get("content"), list) for message in observation if is_observation):
            observation = plain(observation)  # images of Pillow become data URLs
    else:
        is_observation = observation is None or isinstance(observation, str)
    if not is_observation:
        raise TypeError(
            f"an observation is a text, a list of messages or None, not {shown(observation, 200)}"
        )
    numbers = {str(name): float(value) for name, value in getattr(environment, "numbers", {}).items()}
    return {"observation": observation, "state": str(getattr(environment, "state", "")), "numbers": numbers}


def _schema(tool: Any) -> dict[str, Any]:
    """Return the schema of a tool as in OpenAI's API, made from the tool's type hints and docstring."""
    function = {
        "name": tool.__name__,
        "description": inspect.getdoc(tool) or "",
        "parameters": TypeAdapter(tool).json_schema(),
    }
    return {"type": "function", "function": function}
