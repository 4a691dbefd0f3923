"""Set up the log of a program: secrets are hidden, and an actor may write to a separate file."""

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler

from async_grpo.options.fields import refuse
from async_grpo.options.redaction import redact_logs

# File descriptors of a process's output
STDOUT = 1
STDERR = 2


def set_up_logging(level: str, prefix: str = "", *further_handlers: logging.Handler) -> None:
    """Log to stderr, one line per event, with secrets hidden. If stderr is no terminal, each line starts with a date.

    Args:
        level: Lowest level that is logged.
        prefix: Text in front of every message.
        further_handlers: Handlers that get the same events, in addition to the handler of stderr.

    Raises:
        ConfigurationError: The level is unknown.
    """
    is_unknown = level.upper() not in logging.getLevelNamesMapping()
    refuse(is_unknown, f"--logging-level {level!r}: use DEBUG, INFO, WARNING or ERROR")
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(
            console=Console(stderr=True),
            show_path=False,
            markup=False,
            log_time_format="%H:%M:%S",
        )
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    for further_handler in further_handlers:
        further_handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    redact_logs()
    logger = logging.getLogger("async_grpo")
    logger.setLevel(level.upper())
    logger.handlers = [handler, *further_handlers]
    logger.propagate = False


def log_to_own_file(name: str) -> None:
    """Write the output of an actor's process into a file in the run's log folder, and hide secrets in its logs.

    Ray deletes its own log files when the run's private cluster ends. On other clusters ASYNC_GRPO_LOGS is unset, and
    the output goes to Ray's files.

    Args:
        name: Kind of the actor; the name of the file starts with it.
    """
    redact_logs()
    folder = os.environ.get("ASYNC_GRPO_LOGS")
    if not folder:
        return
    file = os.open(f"{folder}/{name}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (STDOUT, STDERR):
        os.dup2(file, stream)
    os.close(file)
    set_up_logging("INFO", f"[{name}] ")
