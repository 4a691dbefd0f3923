"""`OutputLog`: a log file of limited size for what processes of environments, tools and agents print."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

# A full file is renamed to `<name>.1`, and replaces the one that was renamed before
MAX_FILE_BYTES = 16 << 20
MAX_SOURCE_BYTES = 4 << 20  # limit for the output of one process; further output is read and dropped
MAX_PIECE_BYTES = 1 << 16

log = logging.getLogger(__name__)


class OutputLog:
    """Writes the output of processes to a file, and keeps the disk from filling up.

    At most two files of MAX_FILE_BYTES exist: `path`, and the one before it, whose name ends in `.1`.

    Args:
        path: The file. It is created at the first output.
        hide_secrets: Function that replaces secrets in a text.
    """

    def __init__(self, path: Path, hide_secrets: Callable[[str], str]) -> None:
        self._path = path
        self._hide_secrets = hide_secrets
        self._lock = threading.Lock()
        self._last_source = ""
        self._has_failed = False

    def pipe(self, source: str) -> int:
        """Return the writing end of a pipe whose data goes to the log. The caller must close it.

        A thread reads the pipe until all processes that have it open have ended.

        Args:
            source: Name of the process. The log has it in front of the process's output.
        """
        reading_end, writing_end = os.pipe()
        thread = threading.Thread(target=self._copy, args=(reading_end, source), daemon=True)
        thread.start()
        return writing_end

    def _copy(self, reading_end: int, source: str) -> None:
        output = self.output_of(source)
        with open(reading_end, "rb", buffering=0) as pipe:
            while True:
                piece = pipe.read(MAX_PIECE_BYTES)
                if not piece:
                    break
                output.add(piece)
        output.end()

    def output_of(self, source: str) -> "SourceOutput":
        """Return an object that takes the output of one process, piece by piece."""
        return SourceOutput(self, source)

    def write(self, source: str, data: bytes) -> None:
        """Append data to the file. If that is impossible, for example because the disk is full, drop the data.

        The first such failure is a warning.
        """
        text = self._hide_secrets(data.decode(errors="replace"))
        with self._lock:
            if source != self._last_source:
                text = f"--- {source}\n{text}"
                self._last_source = source
            try:
                with self._path.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(text)
                    is_full = file.tell() > MAX_FILE_BYTES
                if is_full:
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                    self._last_source = ""
            except OSError as error:
                self._last_source = ""
                if not self._has_failed:
                    log.warning(
                        "output of environments and agents is lost: %s cannot be written: %s",
                        self._path,
                        error,
                    )
                self._has_failed = True


class SourceOutput:
    """Collects the output of one process, and writes at most MAX_SOURCE_BYTES of it to the log.

    It writes only whole lines, because half of a secret would not be recognized.
    """

    def __init__(self, log: OutputLog, source: str) -> None:
        self._log = log
        self._source = source
        self._num_bytes = 0
        self._unfinished_line = b""

    def add(self, piece: bytes) -> None:
        """Take a piece of output."""
        if self._num_bytes > MAX_SOURCE_BYTES:
            return
        self._num_bytes += len(piece)
        lines, newline, unfinished_line = (self._unfinished_line + piece).rpartition(b"\n")
        self._unfinished_line = unfinished_line
        if lines or newline:
            self._log.write(self._source, lines + newline)
        if len(self._unfinished_line) > MAX_PIECE_BYTES:
            self.end()
        if self._num_bytes > MAX_SOURCE_BYTES:
            self.end()
            note = f"[more than {MAX_SOURCE_BYTES} bytes: further output of this process is dropped]\n"
            self._log.write(self._source, note.encode())

    def end(self) -> None:
        """Write the last line if the process has not ended it."""
        if self._unfinished_line:
            self._log.write(self._source, self._unfinished_line + b"\n")
            self._unfinished_line = b""
