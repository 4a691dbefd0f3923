"""Anonymous shared memory that another process of the same machine opens by a path.

The bytes live as long as a process holds them open: after a SIGKILL on either side nothing stays behind in /dev/shm.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def shared_bytes(payload: memoryview | bytes, name: str) -> Iterator[str]:
    """A path under which other processes of this user can open (and mmap) `payload` while the block runs.

    >>> with shared_bytes(b"weights", "demo") as path:
    ...     open(path, "rb").read()
    b'weights'
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(payload).cast("B")
        written = 0
        while written < len(view):  # a single write stops at 2 GiB
            written += os.write(descriptor, view[written : written + (1 << 30)])
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
