"""OpenEnv's environments: `openenv:URL` of a server, or `openenv:PACKAGE.MODULE:CLASS` in this process."""

import inspect
import json
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, cast

from openenv.core import GenericEnvClient, env_server
from pydantic import TypeAdapter, ValidationError

from async_grpo.options.fields import refuse
from async_grpo.rewards.adapter.decorators import accepted_options

DAY_S = 86_400.0  # the parent keeps the time
OBJECT = TypeAdapter(dict[str, Any]).validate_json


class NoAction(ValueError): ...


class OpenEnv:
    """One session. `action_field`: of an action, that the policy's text becomes; none: the text is the action, as JSON.
    `observation_field`: of an observation, that the policy is told; none: all of it, as JSON. `tasks`: rows."""

    def __init__(
        self, environment: str, action_field: str = "message", observation_field: str = "", tasks: int = 1000
    ) -> None:
        refuse(":" not in environment, f"openenv:{environment}: name a server's URL or PACKAGE.MODULE:CLASS")
        self._environment, self._tasks = environment, tasks
        self._field, self._shown = action_field, observation_field
        self._session, self.numbers = cast(Any, None), {"wrong_actions": 0.0, "rewards": 0.0}

    @classmethod
    def rows(cls, split: str, environment: str, **options: Any) -> list[dict[str, Any]]:
        """OpenEnv has no data: "train" has even seeds, "eval" odd ones."""
        seeds = range(["train", "eval"].index(split), 2 * cls(environment, **options)._tasks, 2)
        return [{"input": f"openenv:{environment} {seed}", "seed": seed} for seed in seeds]

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self._session = (Served if "://" in self._environment else Local)(self._environment)
        seen = await self._session.reset(seed)
        refuse(seen.done, "it was over before it began")
        return self._told(seen.observation)

    async def step(self, said: str) -> tuple[str, float, bool]:
        try:
            seen = await self._session.step({self._field: said} if self._field else _checked(OBJECT, said))
        except NoAction as error:  # with a field the policy cannot help it
            refuse(bool(self._field), f"a text as {self._field!r} makes no action: {error}")
            self.numbers["wrong_actions"] += 1
            return f"error: {error}", 0.0, False
        self.numbers["rewards"] += seen.reward is not None
        refuse(seen.done and not self.numbers["rewards"], "it is over, and has never given a reward")
        return self._told(seen.observation), seen.reward or 0.0, seen.done

    def close(self) -> Any:
        return self._session and self._session.close()

    def _told(self, observation: dict[str, Any]) -> str:
        told: Any = {n: v for n, v in observation.items() if n not in ("done", "reward", "metadata")}
        if self._shown:
            refuse(self._shown not in told, f"an observation has no {self._shown!r}, only {', '.join(told)}")
            told = told[self._shown]
        return told if isinstance(told, str) else json.dumps(told, ensure_ascii=False, default=str)


class Served:
    """A session of a server."""

    def __init__(self, url: str) -> None:
        self._client: Any = GenericEnvClient(url, connect_timeout_s=DAY_S, message_timeout_s=DAY_S)
        self.close = self._client.close

    async def reset(self, seed: int) -> Any:
        seen, self._socket = await self._client.reset(seed=seed), self._client._ws
        return seen

    async def step(self, action: dict[str, Any]) -> Any:
        try:
            seen = await self._client.step(action)
        except RuntimeError as error:
            raise NoAction(error) if str(error).endswith("(code: VALIDATION_ERROR)") else error from None
        if self._client._ws is not self._socket:  # later clients connect again, to another session
            raise ConnectionError("the connection was lost, and the session with it")
        return seen


class Local:
    """A session without a server, by the methods that one would call. What is not `async` holds up its process."""

    def __init__(self, name: str) -> None:
        self._made = resolve_name(name)()
        refuse(not self._made.SUPPORTS_CONCURRENT_SESSIONS, f"{name} lacks SUPPORTS_CONCURRENT_SESSIONS")
        self.close = self._made.close

    async def reset(self, seed: int) -> Any:
        method = self._method("reset")
        return await self._seen(method(**accepted_options(method, {"seed": seed}, num_given=0)))

    async def step(self, action: dict[str, Any]) -> Any:
        method = self._method("step")
        first, *_ = inspect.signature(method, eval_str=True).parameters.values()
        return await self._seen(method(_checked(env_server.deserialize_action, action, first.annotation)))

    def _method(self, name: str) -> Any:
        own, default = (getattr(of, f"{name}_async") for of in (type(self._made), env_server.Environment))
        return getattr(self._made, name if own is default else f"{name}_async")

    async def _seen(self, returned: Any) -> Any:
        seen = await returned if inspect.isawaitable(returned) else returned
        return SimpleNamespace(**env_server.serialize_observation(seen))


def _checked(read: Any, *given: Any) -> Any:
    try:
        return read(*given)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in error.errors())
        raise NoAction("; ".join(wrong)) from None
