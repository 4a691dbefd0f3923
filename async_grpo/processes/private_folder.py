"""Temporary folders that only their user can enter, and that the next start removes if their process was killed."""

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

# In the folder: process id, start time in clock ticks, process namespace, boot id and name of the host. Its process keeps
# the file locked
OWNER_FILE = "owner"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEAD_STATES = ("Z", "X")  # /proc/PID/stat: a process that was killed, and that nobody has waited for yet
PREFIX = "grpo-"  # of the folders of all programs of a run
TORCH_DEFAULT_CACHE = "torchinductor_"  # how the name begins of the folder in /tmp that torch chooses

log = logging.getLogger(__name__)
# Descriptors of this process's own, by folder: closing one gives its lock back
_owner_files: dict[Path, int] = {}


@contextmanager
def private_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """Make a folder for the length of the `with` block. See `make_private_folder`."""
    folder = make_private_folder(prefix)
    try:
        yield folder
    finally:
        os.close(_owner_files.pop(folder))
        # Programs that were just killed may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        # Folders of programs that were started in the block and killed at its end
        remove_abandoned()


def make_private_folder(prefix: str = PREFIX) -> Path:
    """Make a folder of mode 0700 in the temporary directory, and remove the abandoned ones there.

    The caller removes it. If the caller is killed before it can do so, `remove_abandoned` does.
    """
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    pid = os.getpid()
    descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _owner_files[folder] = descriptor
    os.write(descriptor, " ".join((str(pid), _start_ticks(pid), *_place())).encode())
    # On a file system without locks nobody can lock the file, so nobody removes the folder
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def remove_abandoned(prefix: str = PREFIX) -> None:
    """Remove the private folders of this user whose process is gone.

    Folders that others can enter are left alone: what stands in their owner file could be anybody's.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        # The folder may be another program's, or another start may be removing it
        with suppress(OSError, ValueError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and not status.st_mode & 0o077:
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder if its process ran here and is gone.

    The process ids of another host, or of another container, which share the directory, mean nothing here. The name of the
    process namespace is the same on all hosts, so the boot id and the host's name are compared as well. Where two hosts
    have all of these in common, the lock on the owner file says that the process lives.

    Raises:
        OSError: it has no owner file, or a process has locked that file.
        ValueError: the owner file is another program's.
    """
    with (folder / OWNER_FILE).open("r+") as owner_file:
        pid, start_ticks, *place = owner_file.read().split()
        if tuple(place) != _place() or _start_ticks(int(pid)) == start_ticks:
            return
        fcntl.flock(owner_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        log.info("removed %s: the process that made it was killed", folder)


def _start_ticks(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine's start; "" if it does not run."""
    try:
        after_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_the_name[0] in DEAD_STATES else after_the_name[19]  # proc(5): fields 3 and 22


def _place() -> tuple[str, str, str]:
    """Return what tells where process ids mean what they mean here: the process namespace, the boot id, the host's name."""
    return os.readlink("/proc/self/ns/pid"), BOOT_ID.read_text().strip(), socket.gethostname()


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process, and those that it starts in the block, put temporary files into the folder."""
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
    """Return the variable that has torch.compile keep its results in a folder that is this user's alone; {} if it is set.

    Torch's default, /tmp/torchinductor_USER, has a name that another user can take first. What lies there is executed. The
    folder is in this user's cache, so that it is there at the next run; where that one cannot be had, or others can write
    to it, it is a new one, which goes with this process.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    # torch writes its default into the environment of a process that asks for it, as importing vLLM does
    is_torch_default = Path(environment.get(name, "")).name.startswith(TORCH_DEFAULT_CACHE)
    if environment.get(name) and not is_torch_default:
        return {}
    try:
        caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches) / "async-grpo" / "torchinductor"
        # `parents` would make the first one as the umask says, which may be for a group to write to
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        problem = _problem_of_cache(folder)
    except (OSError, RuntimeError) as error:  # no home, or none that can be written to
        problem = f"no folder can be made in the user's cache ({error})"
    if problem:
        folder = _cache_of_this_process()
        log.warning("torch.compile keeps its results in %s, until this process ends: %s", folder, problem)
    return {name: str(folder)}


def _problem_of_cache(folder: Path) -> str:
    """Return why a folder must not hold code that this user executes, or an empty text."""
    # Whoever can write to the parent can put another folder in this one's place
    for place in (folder, folder.parent):
        status = place.stat()
        if status.st_uid != os.geteuid():
            return f"{place} belongs to user {status.st_uid}"
        if status.st_mode & 0o022:
            return f"{place} can be written to by others (chmod go-w {place})"
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


@cache
def _cache_of_this_process() -> Path:
    """Make a private folder that is removed at the end of this process."""
    folder = make_private_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
