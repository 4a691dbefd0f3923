"""Temporary folders that only their user can enter, and that the next start removes if their process was killed."""

import glob
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER_FILE = "owner"  # in the folder: process id, start time in clock ticks, process namespace
DEAD_STATES = ("Z", "X")  # /proc/PID/stat: a process that was killed, and that nobody has waited for yet
PREFIX = "grpo-"  # of the folders of all programs of a run

log = logging.getLogger(__name__)


@contextmanager
def private_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """Make a folder for the length of the `with` block. See `make_private_folder`."""
    folder = make_private_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # programs that were just killed may still write
        remove_abandoned()  # those of programs that were started in the block, and killed at its end


def make_private_folder(prefix: str = PREFIX) -> Path:
    """Make a folder of mode 0700 in the temporary directory, and remove the abandoned ones there.

    The caller removes it. If the caller is killed before it can do so, `remove_abandoned` does.
    """
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    pid = os.getpid()
    (folder / OWNER_FILE).write_text(f"{pid} {_start_ticks(pid)} {_process_namespace()}")
    return folder


def remove_abandoned(prefix: str = PREFIX) -> None:
    """Remove the private folders of this user whose process is gone.

    Folders that others can enter are left alone: what stands in their owner file could be anybody's.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        with suppress(
            OSError, ValueError
        ):  # another program's folder, or one that another start removes right now
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and not status.st_mode & 0o077 and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                log.info("removed %s: the process that made it was killed", folder)


def _is_abandoned(folder: Path) -> bool:
    """Raise OSError or ValueError for a folder that was not made here."""
    pid, start_ticks, namespace = (folder / OWNER_FILE).read_text().split()
    if namespace != _process_namespace():
        return False  # of another container that shares /tmp: its processes cannot be seen
    return _start_ticks(int(pid)) != start_ticks


def _start_ticks(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine's start; "" if it does not run."""
    try:
        after_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_the_name[0] in DEAD_STATES else after_the_name[19]  # proc(5): fields 3 and 22


def _process_namespace() -> str:
    """Return the kernel's name of the namespace in which process ids mean what they mean here."""
    return os.readlink("/proc/self/ns/pid")


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process, and those that it starts in the block, put temporary files into the folder."""
    directory, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = directory
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


def compile_cache(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that has torch.compile keep its results in this user's cache; {} if it is set, or cannot be.

    Torch's default, /tmp/torchinductor_USER, has a name that another user can take first. What lies there is executed.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if environment.get(name):
        return {}
    try:
        caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches) / "async-grpo" / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return {}
    return {name: str(folder)} if os.access(folder, os.W_OK) else {}
