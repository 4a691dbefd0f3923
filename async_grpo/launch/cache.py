"""`async-grpo cache`: show the contents of a verdict cache, and delete entries."""

import sqlite3
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.options.fields import NOT_NEGATIVE, Section, option, refuse, required
from async_grpo.rewards.cache.file import AdapterEntries, CacheFile

DAY_S = 86_400.0
MEGABYTE = 2**20
# Seconds to wait for a locked cache. A running training locks it only for milliseconds, a backup program for longer
BUSY_S = 30.0
_cache = partial(option, panel="Cache")


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """Options of `async-grpo cache`."""

    path: str = required(
        "The cache file: the file that a run was given as --verdict-cache.", "Cache", argument=True
    )
    prune_older_than_days: float | None = _cache(
        None, "Delete the entries that were last used more than this number of days ago.", range=NOT_NEGATIVE
    )
    prune_adapter: str | None = _cache(
        None, "Delete the entries of this reward; together with --prune-older-than-days, only the old ones."
    )
    max_mb: float | None = _cache(
        None,
        "Maximum size of the cache in MiB. The least recently used entries are deleted first. Default: no limit.",
        range=NOT_NEGATIVE,
    )


def inspect_cache(config: CacheConfig) -> None:
    """Delete the entries that the options select, and print a table of the remaining ones.

    Raises:
        ConfigurationError: There is no such cache, it is damaged, or it contains no entry of the reward to prune.
        RunFailed: The cache is locked, or the disk is full.
    """
    console = Console(markup=False, highlight=False, emoji=False)
    refuse(not Path(config.path).is_file(), f"{config.path}: there is no such verdict cache")
    file = CacheFile(config.path, busy_s=BUSY_S)
    try:
        _prune(file, config, console)
        entries = file.entries()
    except (OSError, sqlite3.Error) as error:
        raise RunFailed(f"the verdict cache {config.path} cannot be used now: {error}") from error
    finally:
        file.close()
    console.print(_table(entries) if entries else "no entries")
    console.print(f"{config.path}: {Path(config.path).stat().st_size / MEGABYTE:.1f} MB", soft_wrap=True)


def _prune(file: CacheFile, config: CacheConfig, console: Console) -> None:
    days = config.prune_older_than_days
    adapter = config.prune_adapter
    megabytes = config.max_mb
    adapters = [entry.adapter for entry in file.entries()]
    if adapter is not None and adapter not in adapters:
        held_entries = f"the cache holds entries of {', '.join(adapters) or 'no reward'}"
        raise ConfigurationError(f"--prune-adapter {adapter}: {held_entries}")
    if days is None and adapter is None and megabytes is None:
        return
    num_deleted = file.prune(
        unused_for_s=None if days is None else days * DAY_S,
        adapter=adapter,
        max_bytes=None if megabytes is None else int(megabytes * MEGABYTE),
    )
    console.print(f"{num_deleted} entries deleted")


def _table(entries: list[AdapterEntries]) -> Table:
    table = Table("reward", box=box.SIMPLE_HEAD)
    for column in ("entries", "hits", "MB", "oldest", "newest", "cost saved"):
        table.add_column(column, justify="right")
    for entry in entries:
        table.add_row(
            entry.adapter,
            str(entry.count),
            str(entry.hits),
            f"{entry.num_bytes / MEGABYTE:.2f}",
            _minute(entry.oldest),
            _minute(entry.newest),
            f"{entry.cost_saved:.4g}",
        )
    return table


def _minute(timestamp: float) -> str:
    return f"{datetime.fromtimestamp(timestamp):%Y-%m-%d %H:%M}"
