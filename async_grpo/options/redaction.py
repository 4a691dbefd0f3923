"""Secrets never reach a log: the values of environment variables whose names say that they are secret."""

import logging
import os
import re
import sys
import traceback
from typing import Any

SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
SHORTEST = 8  # characters: the "false" of TOKENIZERS_PARALLELISM is no secret


def secrets() -> dict[str, str]:
    """Of this process's environment, by name; a path that exists here is none (HF_TOKEN_PATH)."""
    named = {name: value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    return {n: value for n, value in named.items() if len(value) >= SHORTEST and not os.path.exists(value)}


def redacted(text: str) -> str:
    """The text with *** for every secret.

    >>> os.environ["MY_API_KEY"] = "sk-0123456789"
    >>> redacted("401 for https://judge/?key=sk-0123456789")
    '401 for https://judge/?key=***'
    >>> del os.environ["MY_API_KEY"]
    """
    for value in sorted(secrets().values(), key=len, reverse=True):  # one may be part of another
        text = text.replace(value, "***")
    return text


class RedactedRecord(logging.LogRecord):
    """What every logger of the process makes, those of other libraries included."""

    def getMessage(self) -> str:
        return redacted(super().getMessage())

    def __setattr__(self, name: str, value: Any) -> None:
        """A formatter keeps the text of a traceback in the record."""
        super().__setattr__(name, redacted(value) if name == "exc_text" and value else value)


def redact_logs() -> None:
    """From now on, in all logs of this process, and in the traceback that it may end with."""

    def tell(*error: Any) -> None:
        print(redacted("".join(traceback.format_exception(*error))), file=sys.stderr, end="")

    logging.setLogRecordFactory(RedactedRecord)
    sys.excepthook = tell
