"""The other end of `processes.EnvironmentProcess`: environments of many trajectories, or tools, in one killable process.

    {"call": "reset", "of": 7, "arguments": [row, seed]}    ->  observation, state, numbers
    {"call": "step", "of": 7, "arguments": ["I say 12"]}    ->  the same, reward and done
    {"call": "leave", "of": 7, "arguments": []}             ->  it is closed and forgotten
    {"call": "schemas", "arguments": []}                    ->  schemas, of a list of functions
    {"call": "use", "arguments": ["add", "{...}"]}          ->  answer, and whether it failed

Each answer has a `status`: "ok", or another one and its `reason`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter, validate_call

from async_grpo.errors import ConfigurationError
from async_grpo.options.redaction import redacted
from async_grpo.options.source_file import SourceFile
from async_grpo.rewards.adapter.decorators import AdapterTraits, accepted_options
from async_grpo.rewards.adapter.result import (
    PLAUSIBLE_REWARD,
    describe,
    failure,
    is_finite_number,
    is_plausible,
    shown,
)
from async_grpo.rewards.isolation.child import Answers
from async_grpo.rewards.isolation.lines import Message

CAPACITY = 64  # calls at a time, of what is async
MAX_ANSWER = 65_536  # characters of a tool's


def hosted_environment(greeting: Message) -> tuple[bool, Callable[[], "EnvironmentHost"]]:
    """See `isolation.child.hosted_reward`."""
    found = SourceFile(**greeting["source"]).object()
    of_class = kind_of(found) == "environment"
    called = (found.reset, found.step, getattr(found, "close", None)) if of_class else found
    is_async = any(map(inspect.iscoroutinefunction, called))
    return is_async, partial(EnvironmentHost, found, greeting["options"], is_async)


def kind_of(found: Any) -> str:
    """Of an object that `--environment` names: "environment", "tools" or "program"; ConfigurationError: none of them."""
    if isinstance(found, type) and all(callable(getattr(found, name, None)) for name in ("reset", "step")):
        return "environment"
    if isinstance(found, Sequence) and found and all(map(callable, found)):
        return "tools"
    if inspect.iscoroutinefunction(found):
        return "program"
    raise ConfigurationError(
        f"{found!r} cannot play: name a class with reset and step, a list of functions (tools), or an "
        "`async def` of prompt and policy"
    )


class EnvironmentHost:
    """A `Host` of environments by the numbers of their trajectories, or of tools by their names."""

    def __init__(self, found: Any, options: Mapping[str, Any], is_async: bool) -> None:
        self.traits = AdapterTraits(CAPACITY if is_async else 1, is_async=is_async, finishes=not is_async)
        self._playing: dict[int, Any] = {}
        self._tools = {}
        if kind_of(found) == "tools":
            self._tools = {tool.__name__: tool for tool in found}
        else:
            known = accepted_options(found, options, num_given=0)
            if unknown := sorted(set(options) - set(known)):
                raise ConfigurationError(f"{found.__name__} takes no option {', '.join(unknown)}")
            self._make = partial(found, **known)

    async def call(self, method: str, *arguments: Any) -> None:
        """There is nothing to warm up or to close."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """See `Host`: one answer each."""
        return [[await self._reply(request["sample"])] for request in requests]

    async def _reply(self, asked: Message) -> dict[str, Any]:
        try:
            method = getattr(self, f"_{asked['call']}")
            return {"status": "ok"} | await method(asked.get("of"), *asked["arguments"])
        except BaseException as error:  # sys.exit() and time-outs of libraries would end the process
            return failure(describe(error))

    async def _reset(self, number: int, row: dict[str, Any], seed: int) -> dict[str, Any]:
        playing = self._playing[number] = self._make()
        return _seen(playing, await _awaited(playing.reset(row, seed)))

    async def _step(self, number: int, said: str) -> dict[str, Any]:
        if (playing := self._playing.get(number)) is None:
            raise RuntimeError("its process was ended, for another trajectory that did not answer")
        returned = await _awaited(playing.step(said))
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                f"step returned {shown(returned, 200)}, not (observation, reward, whether it is over)"
            )
        observation, reward, done = returned
        if not is_finite_number(reward):
            raise ValueError(f"the reward {shown(reward)} is no finite number")
        if not is_plausible(reward):
            raise ValueError(f"the reward is {shown(reward)}: {PLAUSIBLE_REWARD}")
        return _seen(playing, observation) | {"reward": float(reward), "done": bool(done)}

    async def _leave(self, number: int) -> dict[str, Any]:
        if close := getattr(self._playing.pop(number, None), "close", None):
            await _awaited(close())
        return {}

    async def _schemas(self, _: Any) -> dict[str, Any]:
        return {"schemas": list(map(_schema, self._tools.values()))}

    async def _use(self, _: Any, name: str, arguments: str) -> dict[str, Any]:
        """What a tool answers; what it raises, or that it cannot be called so, is an answer, too."""
        if name not in self._tools:
            known = ", ".join(self._tools)
            return {"answer": f"error: there is no tool {name!r}, only {known}", "failed": True}
        try:
            given = json.loads(arguments)
            if not isinstance(given, dict):
                raise TypeError(f"the arguments must be an object, not {arguments:.100}")
            # Arguments become what the type hints say
            answer = await _awaited(validate_call(self._tools[name])(**given))
            text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
            return {"answer": text[:MAX_ANSWER], "failed": False}
        except Exception as error:
            said = redacted(f"error: {type(error).__name__}: {error}")
            return {"answer": said[:MAX_ANSWER], "failed": True}


async def _awaited(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _seen(playing: Any, observation: Any) -> dict[str, Any]:
    """What the policy is told, and what the environment says of itself beside it."""
    messages = observation if isinstance(observation, list) else []
    are_messages = all(isinstance(one, Mapping) and "role" in one for one in messages)
    if not (are_messages and (observation is None or isinstance(observation, str | list))):
        raise TypeError(
            f"an observation is a text, a list of messages or None, not {shown(observation, 200)}"
        )
    numbers = {str(name): float(value) for name, value in getattr(playing, "numbers", {}).items()}
    return {"observation": observation, "state": str(getattr(playing, "state", "")), "numbers": numbers}


def _schema(tool: Any) -> dict[str, Any]:
    """As OpenAI's API describes a tool: parameters by the type hints, the description by the docstring."""
    about = {
        "name": tool.__name__,
        "description": inspect.getdoc(tool) or "",
        "parameters": TypeAdapter(tool).json_schema(),
    }
    return {"type": "function", "function": about}
