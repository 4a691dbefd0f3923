"""The private folder in a run's output folder that holds what a Python program gave to `async_grpo.train`."""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

FOLDER = "from_python"
DIGEST_CHARACTERS = 12  # of a file's name: enough to tell the data sets of one run apart


def folder_of_program(output_dir: Path) -> Path:
    """Make the folder of mode 0700, and return its path.

    Raises:
        ConfigurationError: it cannot be made, others can enter it, or options could not name files in it.
    """
    folder = output_dir / FOLDER
    signs = " and ".join(sorted(set(",=") & set(str(folder))))
    refuse(
        bool(signs),
        f"--output-dir {output_dir}: no option can name a file there: choose a path without {signs}",
    )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"--output-dir {output_dir} cannot be written to: {error.strerror}"
        ) from error
    # Code in it is executed: whoever could write to it could run code as this user
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    way_out = f"chmod 700 {folder} if it is yours, or choose another --output-dir"
    refuse(not is_private, f"{folder} is not a folder that only you can enter: {way_out}")
    return folder


def write_private_file(folder: Path, name: str, lines: Iterable[bytes]) -> Path:
    """Write a file of mode 0600 in one step, and return its path.

    Args:
        folder: The folder of `folder_of_program`.
        name: The file's name; `{digest}` in it is replaced by the beginning of the content's SHA-256.
        lines: The content. What iterating over it raises leaves no file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    new, digest = folder / f".new-{os.getpid()}", hashlib.sha256()
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for line in lines:
                digest.update(line)
                file.write(line)
        path = folder / name.format(digest=digest.hexdigest()[:DIGEST_CHARACTERS])
        new.replace(path)
    except OSError as error:
        raise ConfigurationError(f"a file in {folder} cannot be written: {error}") from error
    finally:
        new.unlink(missing_ok=True)
    return path
