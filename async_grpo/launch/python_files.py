"""Write rows and functions that are passed to `async_grpo.train` to a private folder in the run's output folder."""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

FOLDER = "from_python"
# Number of characters of the digest in a file's name. The digest distinguishes the data sets of one run
DIGEST_CHARACTERS = 12
PRIVATE_FOLDER_MODE = 0o700
PRIVATE_FILE_MODE = 0o600


def folder_of_program(output_dir: Path) -> Path:
    """Make the private folder (mode 0700) if it does not exist, and return its path.

    Raises:
        ConfigurationError: The folder cannot be made, other users can enter it, or its path contains a comma or "=",
            which separate the parts of an option's value.
    """
    folder = output_dir / FOLDER
    separators = " and ".join(sorted(set(",=") & set(str(folder))))
    refuse(
        bool(separators),
        f"--output-dir {output_dir}: options cannot name files in this folder: choose a path without {separators}",
    )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE_FOLDER_MODE, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"--output-dir {output_dir} cannot be written to: {error.strerror}"
        ) from error
    # The run executes code in this folder, so a user who could write to it could run code as this user
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    way_out = f"chmod 700 {folder} if it is yours, or choose another --output-dir"
    refuse(not is_private, f"{folder} is not a folder that only you can enter: {way_out}")
    return folder


def write_private_file(folder: Path, name: str, lines: Iterable[bytes]) -> Path:
    """Write a file (mode 0600) atomically, and return its path.

    Args:
        folder: The folder of `folder_of_program`.
        name: The file's name; `{digest}` in it is replaced by the beginning of the content's SHA-256.
        lines: The content. If the iterator raises an error, no file is written.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    new_file = folder / f".new-{os.getpid()}"
    digest = hashlib.sha256()
    try:
        new_file.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(new_file, flags, PRIVATE_FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            for line in lines:
                digest.update(line)
                file.write(line)
        path = folder / name.format(digest=digest.hexdigest()[:DIGEST_CHARACTERS])
        new_file.replace(path)
    except OSError as error:
        raise ConfigurationError(f"a file in {folder} cannot be written: {error}") from error
    finally:
        new_file.unlink(missing_ok=True)
    return path
