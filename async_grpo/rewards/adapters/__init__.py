"""The shipped rewards, one file each; every `score(sample, ...)` returns `reward` and its components.

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
