"""What makes two questions to a reward the same one, for the verdict cache."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.judges.remote_judge import JudgeAddresses

VOLATILE_COLUMNS = frozenset({"group_id"})  # no property of the text that is judged
DELIVERY = frozenset(  # settings of a judge that say how it is asked, not what
    "limits api_key_env timeout_s attempts hedge_quantile endpoint_options price_per_million_tokens".split()
)


def key_of(adapter: str, version: str, sample: Mapping[str, Any]) -> str:
    """`ADAPTER:DIGEST`, the same for the same question to the same adapter; every column but `group_id` makes a difference.

    Args:
        version: of the adapter; an answer of another version is never found.

    Raises:
        ValueError: the sample holds what JSON cannot.

    >>> one = key_of("mathd", "v1", {"completion": "4", "answer": "4", "group_id": 1})
    >>> one == key_of("mathd", "v1", {"answer": "4", "group_id": 2, "completion": "4"}), one[:6]
    (True, 'mathd:')
    """
    read = {name: value for name, value in sample.items() if name not in VOLATILE_COLUMNS}
    return f"{adapter}:{_digest([adapter, version, read])}"


def version_of(*settings: Any) -> str:
    """A digest of whatever a reward's answers depend on: of user code, the sha256 of its registry file and its options.

    The library's own rewards and judges count as well, so that an upgrade asks anew. What a file imports beside them
    does not: after the upgrade of such a package, `async-grpo cache --prune-adapter` forgets the old answers.

    Raises:
        ValueError: the settings hold what JSON cannot.

    >>> version_of({"model": "m", "temperature": 0.0}) == version_of({"temperature": 0.0, "model": "m"})
    True
    """
    return _digest([_library(), *settings])


def version_of_judge(judge: Any, code: str = "", addresses: JudgeAddresses | None = None) -> str:
    """A digest of a judge's class and settings; how it is asked (limits, time-outs, keys, prices, the order of its
    replicas) makes no difference.

    Args:
        code: the sha256 of the user's text; it counts if the class is defined there.
        addresses: where the run's judges are asked; by its `model_id` their model counts, and not their addresses.

    Raises:
        ConfigurationError: a setting is no plain value.
    """
    kind = type(judge)
    if dataclasses.is_dataclass(judge):
        settings = {
            field.name: getattr(judge, field.name) for field in dataclasses.fields(judge) if field.init
        }
    else:
        settings = dict(vars(judge))
    settings = {name: value for name, value in settings.items() if name not in DELIVERY}
    for name in {"url", "urls"} & settings.keys():
        if addresses and addresses.model_id and addresses.are_asked_by(judge):
            settings[name] = addresses.model_id  # our own servers have other ports in each run
            continue
        settings[name] = sorted([settings[name]] if isinstance(settings[name], str) else settings[name])
    ours = kind.__module__.startswith("async_grpo.")
    try:
        return version_of(kind.__qualname__, "" if ours else code, settings)
    except ValueError as error:
        raise ConfigurationError(
            f"the verdict cache cannot tell two settings of {kind.__qualname__} apart ({error}): let it be a dataclass "
            "of plain values, or run without --verdict-cache"
        ) from error


@lru_cache
def _library() -> str:
    """A digest of this room's code."""
    room = Path(__file__).parents[1]
    files = sorted(room.rglob("*.py"))
    return _digest([[str(file.relative_to(room)), file.read_text(encoding="utf-8")] for file in files])


def _digest(value: Any) -> str:
    try:
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"no key of the verdict cache can be made: {error}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()
