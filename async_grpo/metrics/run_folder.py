"""The folder that a run writes to: one run at a time, and none over another's results."""

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import IO

import psutil

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.writer import METRICS_FILE

LOCK_FILE = ".lock"

log = logging.getLogger(__name__)
_held: list[IO[str]] = []  # a lock lasts as long as its file is open: until this process ends


def claim(folder: Path, mark: str | None = None) -> None:
    """Make the folder, and keep other runs out of it until this process ends.

    The programs that this process starts may claim it again: a run's trainer writes where its launcher holds the lock.

    Args:
        mark: a file's name. A folder that holds this file is emptied, one that holds anything else refused.

    Raises:
        ConfigurationError: it cannot be written to, another run writes there, or it holds what is not to be replaced.
    """
    _refuse_what_is_there(folder, mark)  # before a lock file is left among somebody's files
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        _refuse_what_is_there(folder, mark)  # another run may have come and gone meanwhile
        if mark is not None:
            _empty(folder)
            (folder / mark).touch()
    except OSError as error:
        raise ConfigurationError(f"--output-dir {folder} cannot be written to: {error.strerror}") from error


def _refuse_what_is_there(folder: Path, mark: str | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"--output-dir {folder} is a file: choose another name")
    if mark is None and (folder / METRICS_FILE).exists():
        raise ConfigurationError(
            f"--output-dir {folder} already holds a run ({METRICS_FILE}): choose another folder"
        )
    if mark is not None and not (folder / mark).exists() and _contents(folder):
        raise ConfigurationError(
            f"--output-dir {folder} is not empty and not an earlier demo: choose another folder"
        )


def _lock(folder: Path) -> None:
    lock = (folder / LOCK_FILE).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read()
        lock.close()
        if holder not in {str(process.pid) for process in (psutil.Process(), *psutil.Process().parents())}:
            raise ConfigurationError(
                f"another run (process {holder}) is writing to --output-dir {folder}: wait for its end, or choose "
                "another folder"
            ) from None
        return
    except OSError as error:  # a file system without locks, as some network mounts are
        log.warning("%s cannot be locked (%s): see that no other run writes there", folder, error.strerror)
        return
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    _held.append(lock)


def _contents(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != LOCK_FILE] if folder.exists() else []


def _empty(folder: Path) -> None:
    for path in _contents(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
