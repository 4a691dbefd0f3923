"""The log of a program: on the terminal, or in a file of its own, without secrets."""

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler

from async_grpo.options.fields import refuse
from async_grpo.options.redaction import redact_logs

STDOUT = 1  # file descriptors
STDERR = 2


def set_up_logging(level: str, prefix: str = "", *further_handlers: logging.Handler) -> None:
    """Log to stderr, one line per event and without secrets. In a file, each line has a date.

    Args:
        level: Lowest level that is logged.
        prefix: Stands before every message.
        further_handlers: Handlers for the same events, beside that of stderr.

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
    """Write the output of an actor's process into the run's folder of logs, and hide secrets in its logs.

    Ray's own files of the output are deleted with a Ray that belongs to the run. Elsewhere the variable ASYNC_GRPO_LOGS is
    not set, and the output goes where Ray puts it.

    Args:
        name: Kind of the actor, for the name of the file.
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
