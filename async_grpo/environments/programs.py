"""Rollout programs for environments and for tools. They pass texts between the policy and a process."""

import hashlib
from typing import Any

from async_grpo.environments.images import row_conversation
from async_grpo.environments.processes import EnvironmentFailed, EnvironmentProcesses, Place
from async_grpo.environments.trajectory_client import (
    Context,
    Foreign,
    TrajectoryClient,
    row_of,
)
from async_grpo.experience.row_messages import row_tools
from async_grpo.types import Completion, Prompt


class Play:
    """A rollout program in which an `Environment` and the policy take turns. Its reward is the sum over all steps.

    Args:
        processes: The processes that run the environments.
        seed: Seed of the run, from which the seeds of tasks are derived.
    """

    def __init__(self, processes: EnvironmentProcesses, seed: int) -> None:
        self._processes = processes
        self._seed = seed

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        """Play one trajectory."""
        rewards: list[float] = []
        states: list[str] = []
        messages: list[dict[str, Any]] = []
        async with self._processes.place() as place:
            answer = await place.call("reset", row_of(prompt), task_seed(self._seed, prompt))

            def trajectory_so_far() -> Completion:
                num_turns = policy.recorder.num_turns
                # If a limit ends the trajectory, the last turn may not have its reward yet
                turn_rewards = rewards + [0.0] * (num_turns - len(rewards))
                return policy.trajectory(
                    sum(rewards),
                    turn_rewards=turn_rewards,
                    states=states[:num_turns] if any(states) else (),
                    # A last turn without an end token does not count as truncated, because the environment accepted it
                    truncated=False,
                    numbers=answer["numbers"] | {"environment_s": place.seconds},
                )

            policy.at_limit = trajectory_so_far
            plays_the_row = answer["observation"] is None and bool(row_conversation(prompt))
            tools = row_tools(prompt.row) if plays_the_row else None
            while not answer.get("done"):
                states.append(answer["state"])
                context = _context(prompt, messages, answer["observation"], is_first=not rewards)
                reply = await policy.complete(context, tools=tools)
                messages.append(reply.message)
                answer = await place.call("step", reply.text)
                rewards.append(answer["reward"])
        return trajectory_so_far()


class UseTools:
    """A rollout program in which the policy may call tools any number of times. A turn without a call is its answer.

    Args:
        processes: The processes that run the tools.
        max_tool_tokens: Maximum tokens of a tool's answer; None if only the limit of its process applies.
    """

    def __init__(self, processes: EnvironmentProcesses, max_tool_tokens: int | None = None) -> None:
        self._processes = processes
        self._max_tool_tokens = max_tool_tokens
        self._schemas: list[dict[str, Any]] | None = None

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        """Play one trajectory."""
        messages = row_conversation(prompt) or [{"role": "user", "content": prompt.row["input"]}]
        num_calls = 0
        num_errors = 0
        async with self._processes.place() as place:

            def trajectory_so_far() -> Completion:
                return policy.trajectory(
                    numbers={
                        "tool_calls": num_calls,
                        "tool_errors": num_errors,
                        "environment_s": place.seconds,
                    }
                )

            policy.at_limit = trajectory_so_far
            if self._schemas is None:
                answer = await place.call("schemas")
                self._schemas = answer["schemas"]
            while True:
                reply = await policy.complete(messages, tools=self._schemas)
                messages.append(reply.message)
                calls = reply.message.get("tool_calls")
                if not calls:
                    break
                for call in calls:
                    answer = await _call_tool(place, call["function"])
                    num_calls += 1
                    if answer["failed"]:
                        num_errors += 1
                    text = answer["answer"]
                    if self._max_tool_tokens is not None:
                        text = await policy.recorder.shortened(text, self._max_tool_tokens)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return trajectory_so_far()


async def _call_tool(place: Place, function: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a tool, and whether the call failed."""
    try:
        return await place.call("use", function["name"], function["arguments"])
    except EnvironmentFailed as error:
        # The tool took too long, or its process died. The next call gets a new process
        return {"answer": f"error: {error}", "failed": True}


def task_seed(seed: int, prompt: Prompt) -> int:
    """Return the seed of a group's task, which is the same for all trajectories of the group.

    It is the row's `seed` if there is one. Otherwise it is a number of 31 bits that depends on the run's seed and the
    prompt.
    """
    row_seed = prompt.row.get("seed")
    if isinstance(row_seed, int):
        return row_seed
    # Groups of held-out questions (negative numbers) may be generated in several parts with different ordinals. So the
    # question identifies their task
    task_number = prompt.question if prompt.question < 0 else prompt.ordinal
    digest = hashlib.blake2b(f"task {seed}/{task_number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def _context(prompt: Prompt, messages: list[dict[str, Any]], observation: Any, *, is_first: bool) -> Context:
    """Add the observation to `messages`, and return the context that the policy continues.

    The context is a conversation if the row or the environment uses messages. Otherwise it is token ids or a text.

    Args:
        prompt: The prompt with its row.
        messages: The conversation so far, without the observation.
        observation: What `reset` or `step` of the environment returned: a text, messages, or None.
        is_first: Whether the observation comes from `reset`.
    """
    if is_first and observation is None:
        messages += row_conversation(prompt)
        return messages or prompt.token_ids
    is_plain_text = all(message["role"] == "assistant" for message in messages)
    if not is_first and is_plain_text:
        if isinstance(observation, list):
            raise TypeError(
                "the prompt is the row's text, so messages cannot follow it: return a text instead"
            )
        return Foreign(observation or "")
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    messages += observation or []
    return messages
