"""Temporary folders that only their user can enter. If the process that made one is killed, a later process removes it."""

import atexit
import fcntl
import glob
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# File in each folder that describes the process that made it: process id, start time in clock ticks, PID namespace,
# boot id and host name. The process keeps the file locked
OWNER_FILE = "owner"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEAD_STATES = ("Z", "X")  # in /proc/PID/stat: states of a process that has ended but was not collected yet
PREFIX = "grpo-"  # beginning of the names of private folders, for all programs of a run
TORCH_DEFAULT_CACHE = "torchinductor_"  # beginning of the name of torch's default cache folder in /tmp

log = logging.getLogger(__name__)
# Folder of this process -> open descriptor of its owner file. Closing the descriptor releases the lock
_owner_files: dict[Path, int] = {}


@contextmanager
def private_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """Make a private folder that exists while the block runs. See `make_private_folder`."""
    folder = make_private_folder(prefix)
    try:
        yield folder
    finally:
        os.close(_owner_files.pop(folder))
        # Ignore errors, because programs that were just killed may still be writing to the folder
        shutil.rmtree(folder, ignore_errors=True)
        # Also remove the folders of programs that were started in the block and killed at its end
        remove_abandoned()


def make_private_folder(prefix: str = PREFIX) -> Path:
    """Make a folder of mode 0700 in the temporary directory, after removing abandoned folders there.

    The caller must remove the folder. If the caller's process is killed first, a later `remove_abandoned` removes it.
    """
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    pid = os.getpid()
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _owner_files[folder] = descriptor
    os.write(descriptor, " ".join((str(pid), _start_ticks(pid), *_place())).encode())
    # If the file system has no locks, `remove_abandoned` cannot lock the file either, and does not remove the folder
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def remove_abandoned(prefix: str = PREFIX) -> None:
    """Remove this user's private folders whose process has ended.

    Folders that other users can enter are not removed, because another user could have written the owner file.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        # The folder may belong to an unrelated program, or another process may be removing it
        with suppress(OSError, ValueError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and not status.st_mode & 0o077:
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder if the process that made it ran in this PID scope (see `_place`) and has ended.

    Other hosts or containers may share the directory, and their process ids have no meaning here. The PID namespace may
    have the same name on all hosts, so the boot id and the host name are compared as well. If all of these are equal on
    two hosts, the lock on the owner file still shows that the process is running.

    Raises:
        OSError: The folder has no owner file, or a running process has locked the file.
        ValueError: The owner file belongs to an unrelated program.
    """
    with (folder / OWNER_FILE).open("r+") as owner_file:
        pid, start_ticks, *place = owner_file.read().split()
        if tuple(place) != _place() or _start_ticks(int(pid)) == start_ticks:
            return
        fcntl.flock(owner_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        log.info("removed %s: the process that made it was killed", folder)


def _start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, or "" if the process is not running."""
    try:
        after_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Fields 3 (state) and 22 (start time) of proc(5)
    return "" if after_the_name[0] in DEAD_STATES else after_the_name[19]


def _place() -> tuple[str, str, str]:
    """Return the scope in which this process's PIDs are valid: PID namespace, boot id and host name."""
    return os.readlink("/proc/self/ns/pid"), BOOT_ID.read_text().strip(), socket.gethostname()


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """During the block, make this process and the processes that it starts use the folder for temporary files."""
    directory = tempfile.tempdir
    variable = os.environ.get("TMPDIR")
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = directory
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


def compile_cache(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variable that gives torch.compile a cache folder of this user; {} if the user has set it.

    Torch's default is /tmp/torchinductor_USER. Another user could create this folder first, and torch executes the code
    in it. The returned folder is in this user's own cache, so that later runs can use it again. If it cannot be made
    there, or other users can write to it, a temporary folder is returned, which is removed when this process ends.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    # torch sets the variable to its default itself, for example when vLLM is imported. Replace that value
    is_torch_default = Path(environment.get(name, "")).name.startswith(TORCH_DEFAULT_CACHE)
    if environment.get(name) and not is_torch_default:
        return {}
    try:
        caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches) / "async-grpo" / "torchinductor"
        # Create the parent first: `mkdir` applies `mode` only to the last folder. Parents that it creates get a mode
        # from the umask, which may let a group write
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        problem = _problem_of_cache(folder)
    except (OSError, RuntimeError) as error:  # there is no home folder, or it is not writable
        problem = f"no folder can be made in the user's cache ({error})"
    if problem:
        folder = _cache_of_this_process()
        log.warning("torch.compile keeps its results in %s, until this process ends: %s", folder, problem)
    return {name: str(folder)}


def _problem_of_cache(folder: Path) -> str:
    """Return why a folder is not safe for code that this user executes; "" if it is safe."""
    # Check the parent as well, because anyone who can write to it can replace the folder
    for place in (folder, folder.parent):
        status = place.stat()
        if status.st_uid != os.geteuid():
            return f"{place} belongs to user {status.st_uid}"
        if status.st_mode & 0o022:
            return f"{place} can be written to by others (chmod go-w {place})"
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


@cache
def _cache_of_this_process() -> Path:
    """Return a private folder that is removed at the end of this process. Later calls return the same folder."""
    folder = make_private_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
