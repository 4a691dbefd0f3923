"""`async-grpo cache`: what a verdict cache holds, and less of it."""

import sqlite3
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from async_grpo.errors import RunFailed
from async_grpo.options.fields import NOT_NEGATIVE, Section, option, refuse, required
from async_grpo.rewards.cache.file import AdapterEntries, CacheFile

DAY_S, MEGABYTE = 86_400.0, 2**20
_cache = partial(option, panel="Cache")
BUSY_S = 30.0  # a run that writes lets go of the file within milliseconds; copying it takes longer


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """What one may do to a verdict cache."""

    path: str = required("File that --verdict-cache of a run named.", "Cache", argument=True)
    prune_older_than_days: float | None = _cache(
        None, "Delete the entries that were last used more than this number of days ago.", range=NOT_NEGATIVE
    )
    prune_adapter: str | None = _cache(
        None, "Delete the entries of this reward; together with --prune-older-than-days, only the old ones."
    )
    max_mb: float | None = _cache(
        None,
        "Size in MiB down to which the longest unused entries are deleted after that. By default there is no limit.",
        range=NOT_NEGATIVE,
    )


def inspect_cache(config: CacheConfig) -> None:
    """Delete what is to be deleted, and show the rest.

    ConfigurationError: there is no such cache, it is damaged, or holds nothing of the reward to prune.
    RunFailed: it is locked, or the disk is full.
    """
    console = Console(markup=False, highlight=False, emoji=False)
    days, adapter, megabytes = config.prune_older_than_days, config.prune_adapter, config.max_mb
    refuse(not Path(config.path).is_file(), f"{config.path}: there is no such verdict cache")
    file = CacheFile(config.path, busy_s=BUSY_S)
    try:
        known = [one.adapter for one in file.entries()]
        held = f"the cache holds entries of {', '.join(known) or 'no reward'}"
        refuse(adapter not in (None, *known), f"--prune-adapter {adapter}: {held}")
        if (days, adapter, megabytes) != (None, None, None):
            seconds = None if days is None else days * DAY_S
            size = None if megabytes is None else int(megabytes * MEGABYTE)
            deleted = file.prune(unused_for_s=seconds, adapter=adapter, max_bytes=size)
            console.print(f"{deleted} entries deleted")
        entries = file.entries()
    except (OSError, sqlite3.Error) as error:
        raise RunFailed(f"the verdict cache {config.path} cannot be used now: {error}") from error
    finally:
        file.close()
    console.print(_table(entries) if entries else "no entries")
    console.print(f"{config.path}: {Path(config.path).stat().st_size / MEGABYTE:.1f} MB", soft_wrap=True)


def _table(entries: list[AdapterEntries]) -> Table:
    table = Table("reward", box=box.SIMPLE_HEAD)
    for column in ("entries", "hits", "MB", "oldest", "newest", "cost saved"):
        table.add_column(column, justify="right")
    for one in entries:
        moments = (f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M}" for moment in (one.oldest, one.newest))
        size, saved = f"{one.num_bytes / MEGABYTE:.2f}", f"{one.cost_saved:.4g}"
        table.add_row(one.adapter, str(one.count), str(one.hits), size, *moments, saved)
    return table
