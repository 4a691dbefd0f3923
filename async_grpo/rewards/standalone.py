"""`TRLReward`: uses a pool outside of a run as a reward function for TRL's trainers."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from async_grpo.types import Verdict

Text = str | Sequence[dict[str, Any]]  # a text, or the messages of a conversation


class ScoringPool(Protocol):
    """The methods of `VerifierPool` that `TRLReward` uses. An import of the class itself would be circular."""

    @property
    def adapters(self) -> tuple[str, ...]: ...

    async def start(self) -> None: ...

    async def verify(self, sample: dict[str, Any]) -> Verdict: ...

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]
    ) -> list[Verdict]: ...

    async def close(self) -> None: ...


class TRLReward(AbstractContextManager["TRLReward"]):
    """`reward_funcs` of a TRL trainer: `f(prompts, completions, completion_ids=None, **columns) -> [1.0, None, ...]`.

    None means that a sample could not be scored. TRL leaves it out of the reward. The completions of one prompt form a
    group. Prompts and completions may be texts or conversations. The messages of a conversation are joined into one
    text.

    If the object is made in a running event loop, its pool belongs to that loop, and the object must be called from
    other threads. Otherwise the first call starts the pool, and all later calls must come from the same thread. The
    pool runs until `close` is called, the `with` block ends, or that thread ends.

        with VerifierPool.from_registry("math_verify").as_trl_reward() as reward:
            trainer = GRPOTrainer(model, reward_funcs=reward, ...)
            trainer.train()

    Args:
        pool: A pool that is not started yet, or was started in the running event loop.
    """

    def __init__(self, pool: ScoringPool) -> None:
        self.__name__ = "+".join(pool.adapters)  # TRL logs the reward under this name
        self._pool = pool
        self._loop = _running_loop()
        self._runner: asyncio.Runner | None = None  # event loop of a pool that this object has started
        self._start_error: BaseException | None = None

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the reward of each completion, in order, or None for a sample that could not be scored.

        Args:
            prompts: One prompt per completion.
            completions: The completions.
            completion_ids: Token ids of each completion, if there are any.
            columns: Columns of the data set, each a list with one value per completion. Other keyword arguments, such
                as TRL's `trainer_state`, are ignored.

        Raises:
            RuntimeError: The call was made in the pool's event loop, where it would block itself.
            Exception: The pool cannot be started.
        """
        samples = _samples(prompts, completions, completion_ids, columns)
        if self._loop is None:
            runner = self._ensure_runner()
            return runner.run(self._score(samples))
        if _running_loop() is self._loop:
            raise RuntimeError(
                f"the reward {self.__name__} was called in the event loop of its pool: call it in another thread "
                "(await asyncio.to_thread(reward, ...)), or use `await pool.verify(sample)`"
            )
        return asyncio.run_coroutine_threadsafe(self._score(samples), self._loop).result()

    def close(self) -> None:
        """Close the pool, if this object has started it. A second call does nothing."""
        if self._runner is not None:
            with self._runner as runner:
                runner.run(self._pool.close())
            self._runner = None

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _score(self, samples: Sequence[dict[str, Any]]) -> list[float | None]:
        verdicts = await asyncio.gather(*map(self._pool.verify, samples))
        indices_by_group: defaultdict[int, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            indices_by_group[sample["group_id"]].append(index)
        for indices in indices_by_group.values():
            group_verdicts = await self._pool.post_process(
                [samples[index] for index in indices],
                [verdicts[index] for index in indices],
            )
            for index, verdict in zip(indices, group_verdicts, strict=True):
                verdicts[index] = verdict
        return [verdict.reward for verdict in verdicts]

    def _ensure_runner(self) -> asyncio.Runner:
        """Return the runner with the pool's event loop. The first call starts both the loop and the pool."""
        if self._start_error is not None:
            # A pool that failed to start was closed, and cannot be started again
            raise self._start_error
        if self._runner is None:
            self._runner = asyncio.Runner()
            try:
                self._runner.run(self._pool.start())
            except BaseException as error:
                self._start_error = error
                self.close()
                raise
        return self._runner


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _samples(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]] | None,
    columns: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return one sample per completion, as a dict with the fields that rewards read."""
    sample_columns = {}
    for name, values in columns.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        if is_list and len(values) == len(completions):
            sample_columns[name] = values
    group_ids: dict[str, int] = {}  # id of each prompt's group, by prompt
    samples = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt_text = _text(prompt)
        completion_text = _text(completion)
        token_ids = [] if completion_ids is None else [int(token) for token in completion_ids[index]]
        # The columns are copied first, so that they cannot replace the fields below. A column may only set `truncated`
        sample: dict[str, Any] = {"truncated": False}
        for name, values in sample_columns.items():
            sample[name] = values[index]
        sample["input"] = prompt_text
        sample["completion"] = completion_text
        sample["sample_text"] = prompt_text + completion_text
        sample["completion_token_ids"] = token_ids
        sample["group_id"] = group_ids.setdefault(prompt_text, len(group_ids))
        samples.append(sample)
    return samples


def _text(text: Text) -> str:
    if isinstance(text, str):
        return text
    return "".join(str(message["content"]) for message in text)
