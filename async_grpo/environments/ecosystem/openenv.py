"""Environments of OpenEnv. `openenv:URL` names a server. `openenv:PACKAGE.MODULE:CLASS` names a class to run here."""

import inspect
import json
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from openenv.core import GenericEnvClient, env_server
from pydantic import TypeAdapter, ValidationError

from async_grpo.options.fields import refuse
from async_grpo.rewards.adapter.decorators import accepted_options

NO_TIMEOUT_S = 86_400.0  # a day, in effect no limit, because the parent process enforces the time limit
parse_object = TypeAdapter(dict[str, Any]).validate_json


class NoAction(ValueError):
    """The policy's text is not a valid action of the environment."""


class OpenEnv:
    """One session of an environment.

    Args:
        environment: URL of a server, or PACKAGE.MODULE:CLASS.
        action_field: Field of an action that is set to the policy's text. "" if the policy writes whole actions as
            JSON.
        observation_field: Field of an observation that the policy reads. "" for all fields, as JSON.
        tasks: Number of rows.
    """

    def __init__(
        self, environment: str, action_field: str = "message", observation_field: str = "", tasks: int = 1000
    ) -> None:
        refuse(":" not in environment, f"openenv:{environment}: name a server's URL or PACKAGE.MODULE:CLASS")
        self.numbers = {"wrong_actions": 0.0, "rewards": 0.0}
        self._environment = environment
        self._action_field = action_field
        self._observation_field = observation_field
        self._tasks = tasks
        self._session: Any = None

    @classmethod
    def rows(cls, split: str, environment: str, **options: Any) -> list[dict[str, Any]]:
        """Return one row for each seed. OpenEnv has no data sets. "train" has even seeds, and "eval" has odd seeds."""
        first_seed = ["train", "eval"].index(split)
        num_rows = cls(environment, **options)._tasks
        rows = []
        for seed in range(first_seed, 2 * num_rows, 2):
            rows.append({"input": f"openenv:{environment} {seed}", "seed": seed})
        return rows

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin a session, and return its first observation."""
        make_session = ServerSession if "://" in self._environment else LocalSession
        self._session = make_session(self._environment)
        result = await self._session.reset(seed)
        refuse(result.done, "it was over before it began")
        return self._shown(result.observation)

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Take the action that the policy's text describes. For an invalid action, return an error and the reward 0."""
        try:
            action = {self._action_field: text} if self._action_field else _checked(parse_object, text)
            result = await self._session.step(action)
        except NoAction as error:
            # With `action_field`, any text should make a valid action. If it does not, the options are wrong
            refuse(bool(self._action_field), f"a text as {self._action_field!r} makes no action: {error}")
            self.numbers["wrong_actions"] += 1
            return f"error: {error}", 0.0, False
        if result.reward is not None:
            self.numbers["rewards"] += 1
        has_no_reward = not self.numbers["rewards"]
        refuse(result.done and has_no_reward, "it is over, and has never given a reward")
        return self._shown(result.observation), result.reward or 0.0, result.done

    def close(self) -> Any:
        """End the session."""
        return self._session and self._session.close()

    def _shown(self, observation: dict[str, Any]) -> str:
        """Return the part of an observation that the policy reads."""
        fields = {
            name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")
        }
        content: Any = fields
        if self._observation_field:
            is_missing = self._observation_field not in fields
            refuse(
                is_missing,
                f"an observation has no {self._observation_field!r}, only {', '.join(fields)}",
            )
            content = fields[self._observation_field]
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


class ServerSession:
    """A session of an environment that runs on a server."""

    def __init__(self, url: str) -> None:
        self._client: Any = GenericEnvClient(
            url,
            connect_timeout_s=NO_TIMEOUT_S,
            message_timeout_s=NO_TIMEOUT_S,
        )
        self.close = self._client.close

    async def reset(self, seed: int) -> Any:
        """Begin the session, and return its first result."""
        result = await self._client.reset(seed=seed)
        self._socket = self._client._ws
        return result

    async def step(self, action: dict[str, Any]) -> Any:
        """Take an action, and return its result."""
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if str(error).endswith("(code: VALIDATION_ERROR)"):
                raise NoAction(error) from None
            raise
        # Newer versions of the client silently reconnect, which begins another session
        if self._client._ws is not self._socket:
            raise ConnectionError("the connection was lost, and the session with it")
        return result


class LocalSession:
    """A session in this process, without a server. It calls the same methods as a server would.

    Methods that are not `async` block the process while they run.
    """

    def __init__(self, name: str) -> None:
        self._game = resolve_name(name)()
        refuse(not self._game.SUPPORTS_CONCURRENT_SESSIONS, f"{name} lacks SUPPORTS_CONCURRENT_SESSIONS")
        self.close = self._game.close

    async def reset(self, seed: int) -> Any:
        """Begin the session, and return its first result."""
        method = self._method("reset")
        return await self._result(method(**accepted_options(method, {"seed": seed}, num_given=0)))

    async def step(self, action: dict[str, Any]) -> Any:
        """Take an action, and return its result."""
        method = self._method("step")
        first_parameter, *_ = inspect.signature(method, eval_str=True).parameters.values()
        parsed = _checked(env_server.deserialize_action, action, first_parameter.annotation)
        return await self._result(method(parsed))

    def _method(self, name: str) -> Any:
        """Return the `async` variant of a method if the class defines it, otherwise the plain method."""
        async_name = f"{name}_async"
        is_default = getattr(type(self._game), async_name) is getattr(env_server.Environment, async_name)
        return getattr(self._game, name if is_default else async_name)

    async def _result(self, returned: Any) -> Any:
        """Convert an observation to the form of a server's result."""
        observation = await returned if inspect.isawaitable(returned) else returned
        return SimpleNamespace(**env_server.serialize_observation(observation))


def _checked(parse: Any, *arguments: Any) -> Any:
    """Call `parse` and return its result.

    Raises:
        NoAction: The arguments do not satisfy the schema of `parse`.
    """
    try:
        return parse(*arguments)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            field_name = ".".join(str(part) for part in fault["loc"])
            faults.append(f"{field_name} {fault['msg']}".strip())
        raise NoAction("; ".join(faults)) from None
