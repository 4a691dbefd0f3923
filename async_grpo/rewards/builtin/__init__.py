"""The shipped rewards, one file each; every `score(sample, ...)` returns `reward`, or steps, and its components.

Malformed model output is worth 0. A row that cannot be scored (no gold answer, no numbers) raises ValueError:
the sample then counts as failed, because a zero would teach the policy something that nobody has checked.
"""

from collections.abc import Callable
from typing import Any

Adapter = Callable[..., dict[str, Any]]


def warmed_by(example: dict[str, Any]) -> Callable[[Adapter], Adapter]:
    """Decorator: score `example` when the adapter's process starts, so that no real sample pays for imports.

    >>> @warmed_by({"answer": "1"})
    ... def shout(sample):
    ...     print("scored", sample["answer"])
    ...     return {"reward": 1.0}
    >>> shout.warm_up()
    scored 1
    """

    def mark(adapter: Adapter) -> Adapter:
        def warm_up() -> None:
            adapter(dict(example))

        adapter.warm_up = warm_up
        return adapter

    return mark


def process_reward(adapter: Adapter) -> Adapter:
    """Decorator: the adapter rewards single steps; it returns `step_rewards` or `token_rewards`.

    Ends are exclusive; `reward` is the sum unless the adapter returns one, too.

    >>> @process_reward
    ... def sentences(sample):
    ...     text = sample["completion"]
    ...     ends = [n + 1 for n, character in enumerate(text) if character == "."]
    ...     return {"step_rewards": [{"reward": 1.0, "char_end": end} for end in ends]}
    >>> sentences({"completion": "One. Two."})
    {'step_rewards': [{'reward': 1.0, 'char_end': 4}, {'reward': 1.0, 'char_end': 9}]}
    """
    adapter.process = True
    return adapter
