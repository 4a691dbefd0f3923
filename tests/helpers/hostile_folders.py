"""What the tests of hostile folders share: code that leaves a mark when it runs, commands run in this process, bounds."""

import json
import logging
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from async_grpo.__main__ import main

LONGEST_CPU_S = 60.0  # of one command; they take about one, and the first imports fifteen. Waits end by the test's timeout
MOST_MEMORY_KB = 2_000_000  # that one command may add to this process
SECRET = "the-secret-of-another-folder"


@dataclass(frozen=True)
class Canary:
    """A file that hostile code would write."""

    path: Path

    @property
    def code(self) -> str:
        """Python source that writes the file when it is imported, and has an object `run`."""
        return f"open({str(self.path)!r}, 'w').write('ran')\ndef run(*a, **k): return 1.0\n"

    @property
    def pickled(self) -> bytes:
        """A pickle that writes the file when it is loaded."""

        class Runs:
            def __reduce__(inner) -> tuple[Any, ...]:
                return os.system, (f"touch {self.path}",)

        return pickle.dumps(Runs())

    def source(self, folder: Path, name: str = "evil.py") -> Path:
        """Write a file of Python source."""
        path = folder / name
        path.write_text(self.code)
        return path


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def is_named_error(self) -> bool:
        """Whether it ended as a mistake of the user or of the folder does: in a sentence."""
        return self.code in (1, 2) and "error: " in self.err


@contextmanager
def bounded() -> Iterator[None]:
    """Fail where the block takes too long or too much memory."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"it did not end within {LONGEST_CPU_S} s of a core")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert added < MOST_MEMORY_KB, f"it took {added} KB"


def command(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> Ended:
    """Run `async-grpo ...` in this process."""
    logging.getLogger("async_grpo").handlers = []  # those of the command before write to its own streams
    with bounded(), pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    code = ended.value.code
    out, err = capfd.readouterr()
    found = Ended(code if isinstance(code, int) else 0 if code is None else 1, out, err)
    assert "Traceback" not in found.text, found.text
    return found


def resealed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's manifest, and seal it anew: whoever makes a folder can do so."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    plain = json.dumps({**content, "seal": ""}, sort_keys=True)
    seal = sha256(plain.encode()).hexdigest()
    path.write_text(json.dumps({**content, "seal": seal}, sort_keys=True, indent=1) + "\n")


def relisted(folder: Path) -> None:
    """Have a checkpoint's manifest list the files that are there."""

    def change(content: dict[str, Any]) -> None:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
        content["files"] = {
            str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files
        }
        content["sizes"] = {str(path.relative_to(folder)): path.stat().st_size for path in files}

    resealed(folder, change)


def replaced(path: Path, make: Callable[[Path], Any]) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    make(path)


def link_to(target: str | Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def now() -> float:
    return time.time()
