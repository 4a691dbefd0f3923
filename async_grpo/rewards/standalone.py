"""A pool without a run, as a reward function for TRL's trainers."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from async_grpo.types import Verdict

Text = str | Sequence[dict[str, Any]]  # a text, or the messages of a conversation


class ScoringPool(Protocol):
    """What `TRLReward` calls of a `VerifierPool`, whose module imports this one."""

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

    None stands for a sample that could not be scored, which TRL leaves out of the reward. The completions of one prompt
    are a group. Prompts and completions may be texts or conversations; of a completion's messages the texts are joined.

    Where it is made in a running event loop, it uses the pool of that loop, and must be called from other threads. Else
    the pool is started by the first call, and lives until `close`, or the end of `with`, or of the thread that made this
    call, which must make the others, too.

        with VerifierPool.from_registry("math_verify").as_trl_reward() as reward:
            trainer = GRPOTrainer(model, reward_funcs=reward, ...)
            trainer.train()

    Args:
        pool: not started, or started in the running event loop.
    """

    def __init__(self, pool: ScoringPool) -> None:
        self.__name__ = "+".join(pool.adapters)  # by which TRL logs it
        self._pool, self._loop = pool, _running_loop()
        self._runner: asyncio.Runner | None = None  # of a pool that is nobody else's
        self._start_error: BaseException | None = None

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The rewards of the completions, in their order.

        Args:
            columns: those of the data set, each a list with a value per completion; anything else (TRL's
                `trainer_state`) is left out.

        Raises what starting the pool raised, and a RuntimeError in the pool's own event loop: it would wait for itself.
        """
        samples = _samples(prompts, completions, completion_ids, columns)
        if self._loop is None:
            return self._started().run(self._score(samples))
        if _running_loop() is self._loop:
            raise RuntimeError(
                f"the reward {self.__name__} was called in the event loop of its pool: call it in another thread "
                "(await asyncio.to_thread(reward, ...)), or use `await pool.verify(sample)`"
            )
        return asyncio.run_coroutine_threadsafe(self._score(samples), self._loop).result()

    def close(self) -> None:
        """End the pool, if this function has started it. Harmless when repeated."""
        if self._runner is not None:
            with self._runner as runner:
                runner.run(self._pool.close())
            self._runner = None

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _score(self, samples: Sequence[dict[str, Any]]) -> list[float | None]:
        verdicts = await asyncio.gather(*map(self._pool.verify, samples))
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            groups[sample["group_id"]].append(place)
        for places in groups.values():
            group, scored = [samples[place] for place in places], [verdicts[place] for place in places]
            for place, verdict in zip(places, await self._pool.post_process(group, scored), strict=True):
                verdicts[place] = verdict
        return [verdict.reward for verdict in verdicts]

    def _started(self) -> asyncio.Runner:
        if self._start_error is not None:  # a pool that could not start is closed for good
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
    """The samples as a reward receives them, one per completion."""
    of_samples = {
        name: values
        for name, values in columns.items()
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == len(completions)
    }
    group_ids: dict[str, int] = {}
    texts = zip(map(_text, prompts), map(_text, completions), strict=True)
    return [
        {"truncated": False}
        | {name: values[place] for name, values in of_samples.items()}
        | {"input": prompt, "completion": completion, "sample_text": prompt + completion}
        | {"completion_token_ids": [] if completion_ids is None else list(map(int, completion_ids[place]))}
        | {"group_id": group_ids.setdefault(prompt, len(group_ids))}
        for place, (prompt, completion) in enumerate(texts)
    ]


def _text(text: Text) -> str:
    return text if isinstance(text, str) else "".join(str(message["content"]) for message in text)
