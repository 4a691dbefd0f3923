"""The `Host` of rewards: a user's function or object, in a process of its own."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from async_grpo.rewards.adapter.decorators import accepted_options, function_of, traits_of
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.adapter.result import describe, failure, read_answer, read_change
from async_grpo.rewards.isolation.child import Answers, Message


def hosted(greeting: Message) -> tuple[bool, Callable[[], "Reward"]]:
    """Whether it needs an event loop, and what makes it there."""
    name = greeting["adapter"]
    adapter = resolve(RewardRegistrySource.from_dict(greeting["source"]), [name])[name]
    return traits_of(adapter).is_async, partial(Reward, adapter, greeting["options"])


class Reward:
    """A `Host`: a registered object with the options that it names; a class is built. `run_plain` runs what awaits nothing.

    >>> from async_grpo.rewards.isolation.child import run_plain
    >>> reward = Reward(lambda sample, weight=1.0: weight * sample["value"], {"weight": 2.0, "url": "x"})
    >>> run_plain(reward.replies([{"sample": {"value": 3}}]))[0][0]["reward"]
    6.0
    """

    def __init__(self, adapter: Any, options: Mapping[str, Any]) -> None:
        self.traits = traits_of(adapter)
        if isinstance(adapter, type):
            adapter = adapter(**accepted_options(adapter, options, num_given=0))
        self._adapter = adapter
        self._function = _refuse_judge if self.traits.is_judge else function_of(adapter)
        self._options = accepted_options(self._function, options)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the registered object returns; None if it has none of this name."""
        returned = getattr(self._adapter, method, lambda: None)(*arguments)
        return await returned if inspect.isawaitable(returned) else returned

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """For each request its answers: one for each sample or member, whatever happens."""
        if "group" in requests[0]:
            return [await self._post_processed(requests[0]["group"])]
        # Copies: steps are measured on the samples as they were, whatever the reward writes into its own.
        samples = [dict(request["sample"]) for request in requests]
        returned: Any
        try:
            returned = self._function(samples if self.traits.is_batch else samples[0], **self._options)
            if inspect.isawaitable(returned):
                returned = await returned
        except BaseException as error:  # sys.exit() and time-outs of libraries would end the process
            if len(requests) == 1 or not isinstance(error, Exception | SystemExit):
                return [[failure(describe(error))] for _ in requests]
            return [answers for request in requests for answers in await self.replies([request])]
        if not self.traits.is_batch:
            returned = [returned]
        if wrong := _misfit(returned, len(requests)):
            return [[failure(f"the batch of {len(requests)} samples came to {wrong}")] for _ in requests]
        return [[self._read(*pair)] for pair in zip(returned, requests, strict=True)]

    async def _post_processed(self, group: Sequence[Message]) -> Answers:
        """What `post_process_scores` makes of a group's answers (see `decorators.post_process`)."""
        answers = [{name: member[name] for name in member if name != "sample"} for member in group]
        if not self.traits.has_post_process:
            return answers
        try:
            returned = await self.call("post_process_scores", [dict(member) for member in group])
            if wrong := _misfit(returned, len(group)):
                raise ValueError(f"a group of {len(group)} came to {wrong}")
            return [read_change(change, answer) for change, answer in zip(returned, answers, strict=True)]
        except BaseException as error:
            return [failure(f"post_process_scores: {describe(error)}")] * len(group)

    def _read(self, returned: Any, request: Message) -> dict[str, Any]:
        try:
            return read_answer(returned, request["sample"], self.traits.is_process_reward)
        except Exception as error:  # a number too large for a float, a dict that is none
            return failure(describe(error))


def _refuse_judge(sample: Any) -> None:
    raise TypeError("a judge is asked over the network by the pool itself, not in a process of its own")


def _misfit(returned: Any, num_wanted: int) -> str:
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__}, not a list"
    return "" if len(returned) == num_wanted else f"{len(returned)} answers"
