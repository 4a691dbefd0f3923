"""Choose the directory of a run's temporary files so that the paths of its sockets are not longer than Linux allows."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.launch.plan import ERROR, WARNING, Finding
from async_grpo.launch.process_variables import LONGEST_SOCKET, MAX_SOCKET_BYTES, ray_folder
from async_grpo.processes.private_folder import PREFIX, temporary_files_in

SHORT_DIRECTORIES = (Path("/tmp"), Path("/var/tmp"))
# Placeholder for the random part of a folder's name that `tempfile` makes; it has this length
RANDOM_NAME = "12345678"

log = logging.getLogger(__name__)


@contextmanager
def short_temporary_directory() -> Iterator[None]:
    """In the block, use a temporary directory with a short path if the path in TMPDIR is too long for sockets.

    Clusters often set TMPDIR to a folder of the job, such as `/scratch/slurm/job_12345678/tmp`.

    Raises:
        ConfigurationError: There is no directory for temporary files, or none with a short name.
    """
    directory = _directory()
    if fits_sockets(directory):
        yield
        return
    short = _short_directory()
    if short is None:
        raise ConfigurationError(f"{_problem(directory)}: {_way_out()}")
    log.warning("%s: the run's temporary files go to %s instead", _problem(directory), short)
    with temporary_files_in(short):
        yield


def temporary_directory() -> Iterator[Finding]:
    """Yield a finding if `short_temporary_directory` would not use the directory of TMPDIR."""
    directory = _directory()
    if fits_sockets(directory):
        return
    short = _short_directory()
    level = ERROR if short is None else WARNING
    use = "" if short is None else f"; a run uses {short} instead"
    yield Finding("temporary files", level, f"{_problem(directory)}{use}", _way_out())


def fits_sockets(directory: Path) -> bool:
    """Return whether sockets in a run's private folder in this directory would have paths that Linux allows."""
    return _longest_path_bytes(directory) <= MAX_SOCKET_BYTES


def _longest_path_bytes(directory: Path) -> int:
    folder = directory.absolute() / f"{PREFIX}{RANDOM_NAME}"
    return len(os.fsencode(ray_folder(folder) / LONGEST_SOCKET))


def _directory() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no directory for temporary files ({error.strerror}): set TMPDIR to a folder that can be "
            "written to"
        ) from error


def _short_directory() -> Path | None:
    """Return a directory with a short name that can be written to, or None if there is none."""
    for directory in SHORT_DIRECTORIES:
        is_usable = directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
        if is_usable and fits_sockets(directory):
            return directory
    return None


def _problem(directory: Path) -> str:
    return (
        f"sockets in {directory} (TMPDIR) would have names of up to {_longest_path_bytes(directory)} bytes, and "
        f"{MAX_SOCKET_BYTES} are possible"
    )


def _way_out() -> str:
    return f"set TMPDIR to a folder with a shorter name, such as {SHORT_DIRECTORIES[0]}"
