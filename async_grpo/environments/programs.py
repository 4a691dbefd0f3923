"""The rollout programs of environments and of tools: what is between the policy and a process."""

import hashlib
from typing import Any

from async_grpo.environments.processes import EnvironmentFailed, EnvironmentProcesses
from async_grpo.environments.trajectory_client import Foreign, TrajectoryClient, messages_of, row_of
from async_grpo.types import Completion, Prompt


class Play:
    """A program: an `Environment` tells, the policy says, until one of them ends it. The reward is the sum of its steps."""

    def __init__(self, processes: EnvironmentProcesses, seed: int) -> None:
        self._processes, self._seed = processes, seed

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        rewards, states, messages = list[float](), list[str](), list[dict[str, Any]]()
        async with self._processes.place() as place:
            told = await place.call("reset", row_of(prompt), task_seed(self._seed, prompt))

            def so_far() -> Completion:
                count = policy.recorder.num_turns  # time may be up before the last one has its reward
                earned = rewards + [0.0] * (count - len(rewards))
                named = states[:count] if any(states) else ()
                numbers = told["numbers"] | {"environment_s": place.seconds}
                # An answer that was cut is one all the same, if the environment takes it
                more: dict[str, Any] = {"turn_rewards": earned, "states": named, "numbers": numbers}
                return policy.trajectory(sum(rewards), truncated=False, **more)

            policy.at_limit = so_far
            while not told.get("done"):
                states.append(told["state"])
                context = _context(prompt, messages, told["observation"], first=not rewards)
                reply = await policy.complete(context)
                messages.append(reply.message)
                told = await place.call("step", reply.text)
                rewards.append(told["reward"])
        return so_far()


class UseTools:
    """A program: the policy calls tools as often as it wants; what it says without a call is its answer."""

    def __init__(self, processes: EnvironmentProcesses) -> None:
        self._processes = processes
        self._schemas: list[dict[str, Any]] | None = None

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        messages = messages_of(prompt.row) or [{"role": "user", "content": prompt.row["input"]}]
        calls = errors = 0
        async with self._processes.place() as place:

            def so_far() -> Completion:
                numbers = {"tool_calls": calls, "tool_errors": errors, "environment_s": place.seconds}
                return policy.trajectory(numbers=numbers)

            policy.at_limit = so_far
            if self._schemas is None:
                self._schemas = (await place.call("schemas"))["schemas"]
            while True:
                reply = await policy.complete(messages, tools=self._schemas)
                messages.append(reply.message)
                if not (asked := reply.message.get("tool_calls")):
                    break
                for call in asked:
                    function = call["function"]
                    try:
                        answer = await place.call("use", function["name"], function["arguments"])
                    except EnvironmentFailed as error:  # late, or dead: the next call has a new process
                        answer = {"answer": f"error: {error}", "failed": True}
                    calls, errors = calls + 1, errors + answer["failed"]
                    told = {"tool_call_id": call["id"], "content": answer["answer"]}
                    messages.append({"role": "tool"} | told)
        return so_far()


def task_seed(seed: int, prompt: Prompt) -> int:
    """Of the task that all trajectories of one group find: the row's `seed`, or one of this prompt's own. 31 bits."""
    if isinstance(given := prompt.row.get("seed"), int):
        return given
    # Of one that is held out, parts of a group have ordinals of their own
    which = prompt.question if prompt.question < 0 else prompt.ordinal
    digest = hashlib.blake2b(f"task {seed}/{which}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def _context(prompt: Prompt, messages: list[dict[str, Any]], observation: Any, *, first: bool) -> Any:
    """What the policy goes on with: messages where the row or the environment speaks in them, else tokens and text."""
    if first and observation is None:
        messages += messages_of(prompt.row)
        return messages or prompt.token_ids
    if not first and all(one["role"] == "assistant" for one in messages):  # the row is plain text
        if isinstance(observation, list):
            raise TypeError("reset left the row's prompt, a text: messages cannot follow it, a text can")
        return Foreign(observation or "")
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    messages += observation or []
    return messages
