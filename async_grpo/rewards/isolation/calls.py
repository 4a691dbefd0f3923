"""A reward, built and ready to be called in its process: whatever it does becomes answers."""

import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from async_grpo.rewards.adapter.result import describe, failure, read_answer, read_change
from async_grpo.rewards.adapter.traits import accepted_options, function_of, traits_of
from async_grpo.rewards.isolation.framing import MessageTooLarge, encode

Answers = list[dict[str, Any]]  # as `contract.read_answer` makes them


class Reward:
    """A registered object with the options that it names; a class is built.

    The methods are coroutines for the sake of rewards that await; `run_plain` runs them for all others.

    >>> reward = Reward(lambda sample, weight=1.0: weight * sample["value"], {"weight": 2.0, "url": "x"})
    >>> run_plain(reward.answers([{"value": 3}]))[0]["reward"]
    6.0
    """

    def __init__(self, adapter: Any, options: Mapping[str, Any]) -> None:
        self.kind = traits_of(adapter)
        if isinstance(adapter, type):
            adapter = adapter(**accepted_options(adapter, options, num_given=0))
        self._adapter = adapter
        self._function = _refuse_judge if self.kind.is_judge else function_of(adapter)
        self._options = accepted_options(self._function, options)
        self._pid = os.getpid()

    @property
    def closes(self) -> bool:
        """Whether there is something to do at the end."""
        return callable(getattr(self._adapter, "close", None))

    async def warm_up(self) -> None:
        """Call its `warm_up`, if there is one."""
        await _call(getattr(self._adapter, "warm_up", lambda: None))

    async def close(self) -> None:
        """Call its `close`, if there is one."""
        if self.closes:
            await _call(self._adapter.close)

    async def replies(self, request: Mapping[str, Any]) -> Answers:
        """The answers to a message of the parent: to its samples, or to a group to post-process."""
        if "group" in request:
            answers = await self.post_processed(request["group"])
        else:
            answers = await self.answers(request["samples"])
        if os.getpid() != self._pid:  # a fork made by the reward, which came back like its parent
            os._exit(1)
        return answers

    async def answers(self, samples: Sequence[dict[str, Any]]) -> Answers:
        """One for each sample, whatever happens."""
        if not self.kind.is_batch:
            return [await self._answer(sample) for sample in samples]
        try:
            returned = await _call(self._function, [dict(sample) for sample in samples], **self._options)
        except BaseException as error:
            if len(samples) == 1 or not isinstance(error, Exception | SystemExit):
                return _all_failed(describe(error), len(samples))
            return [answer for sample in samples for answer in await self.answers([sample])]
        if wrong := _misfit(returned, len(samples)):
            return _all_failed(f"the batch of {len(samples)} samples came to {wrong}", len(samples))
        return [self._read(answer, sample) for answer, sample in zip(returned, samples, strict=True)]

    async def post_processed(self, group: Sequence[dict[str, Any]]) -> Answers:
        """What `post_process_scores` makes of a group's answers (see `decorators.post_process`)."""
        answers = [{name: member[name] for name in member if name != "sample"} for member in group]
        if not self.kind.has_post_process:
            return answers
        try:
            returned = await _call(self._adapter.post_process_scores, [dict(member) for member in group])
            if wrong := _misfit(returned, len(group)):
                raise ValueError(f"a group of {len(group)} came to {wrong}")
            return [read_change(change, answer) for change, answer in zip(returned, answers, strict=True)]
        except BaseException as error:
            return _all_failed(f"post_process_scores: {describe(error)}", len(group))

    async def _answer(self, sample: dict[str, Any]) -> dict[str, Any]:
        try:
            # A copy: the steps are measured on the sample as it was, whatever the reward writes into its own.
            return self._read(await _call(self._function, dict(sample), **self._options), sample)
        except BaseException as error:  # sys.exit() and time-outs of libraries would take the process down
            return failure(describe(error))

    def _read(self, returned: Any, sample: dict[str, Any]) -> dict[str, Any]:
        try:
            return read_answer(returned, sample, self.kind.is_process_reward)
        except Exception as error:  # a number too large for a float, a dict that is none
            return failure(describe(error))


async def built(adapter: Any, options: Mapping[str, Any]) -> tuple[Reward | None, dict[str, Any]]:
    """The reward, warmed up, and the message that greets the parent; no reward and the reason, if it cannot be."""
    try:
        reward = Reward(adapter, options)
        await reward.warm_up()
    except BaseException as error:  # the parent must learn the reason, whatever the user's code raised
        return None, {"error": describe(error)}
    return reward, {"kind": asdict(reward.kind), "closes": reward.closes}


def reply_frame(request_id: int, answers: Answers, max_bytes: int) -> bytes:
    """The message with the answers to one request."""
    try:
        return encode({"id": request_id, "answers": answers}, max_bytes)
    except MessageTooLarge as error:
        failed = _all_failed(f"the adapter's answer: {error}", len(answers))
        return encode({"id": request_id, "answers": failed}, max_bytes)


def run_plain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that needs no event loop; where it does, a TypeError is raised in it."""
    try:
        coroutine.send(None)
        coroutine.throw(TypeError("it awaits, so it must be declared `async def`"))
    except StopIteration as done:
        return done.value
    raise TypeError("it goes on awaiting, and must be declared `async def`")


def _refuse_judge(sample: Any) -> None:
    raise TypeError("a judge is asked over the network by the pool itself, not in a process of its own")


async def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    returned = function(*arguments, **options)
    return await returned if inspect.isawaitable(returned) else returned


def _misfit(returned: Any, num_wanted: int) -> str:
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__}, not a list"
    return "" if len(returned) == num_wanted else f"{len(returned)} answers"


def _all_failed(reason: str, count: int) -> Answers:
    return [failure(reason) for _ in range(count)]
