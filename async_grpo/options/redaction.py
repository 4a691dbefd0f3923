"""Secrets reach no log, metric or file: the values of secret environment variables, in each of their usual spellings."""

import base64
import html
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote, quote_plus

SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# A shorter value is no secret: the "false" of TOKENIZERS_PARALLELISM, the "1" of a switch. Without this bound, such a
# value would blank every text that holds the word.
SHORTEST_CHARACTERS = 8
SHORTEST_LINE_CHARACTERS = 16  # of a secret of several lines, such as a private key
MASK = "***"

# Values that this process hides whatever their variables are called
_registered: set[str] = set()


def secrets() -> dict[str, str]:
    """Return the secrets of this process's environment by name. A path that exists here is none (HF_TOKEN_PATH)."""
    secret_values = {}
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and _may_be_secret(value):
            secret_values[name] = value
    return secret_values


def register_secrets(values: Iterable[str]) -> None:
    """Hide these values from now on, in this process: those of `--reward-env` and of judges' keys.

    Their variables may have any name. Values shorter than 8 characters, and paths that exist here, are left as they are.
    """
    _registered.update(value for value in values if _may_be_secret(value))


def redacted(text: str) -> str:
    """Return the text with *** for every secret: as it is, and in each of its usual `spellings`.

    >>> os.environ["MY_API_KEY"] = "sk-01/23456789"
    >>> redacted("401 for https://judge/?key=sk-01%2F23456789 (sk-01/23456789)")
    '401 for https://judge/?key=*** (***)'
    >>> del os.environ["MY_API_KEY"]
    """
    if len(text) < SHORTEST_CHARACTERS:
        return text
    for spelling in _hidden_spellings():
        text = text.replace(spelling, MASK)
    return text


class _Hidden(NamedTuple):
    """All texts that give a secret away, and what they were made from."""

    environment: dict[Any, Any]
    registered: frozenset[str]
    spellings: tuple[str, ...]  # the longest first, because one may be part of another


_hidden = _Hidden({}, frozenset(), ())


def _hidden_spellings() -> tuple[str, ...]:
    """Return all texts that give a secret away, the longest first.

    They are made anew where the environment has changed since the last call. To see that takes a microsecond if the
    dictionaries behind `os.environ` are compared, and 40 if its variables are read, which every sample would pay several
    times.
    """
    global _hidden
    environment = getattr(os.environ, "_data", None)
    registered = frozenset(_registered)
    is_known = environment == _hidden.environment and registered == _hidden.registered
    if environment is not None and is_known:
        return _hidden.spellings
    texts: set[str] = set()
    for value in {*secrets().values(), *registered}:
        texts |= spellings(value)
    hidden = _Hidden(dict(environment or {}), registered, tuple(sorted(texts, key=len, reverse=True)))
    _hidden = hidden
    return hidden.spellings


@lru_cache(maxsize=1024)
def spellings(value: str) -> frozenset[str]:
    """Return the texts that give the secret away, each at least as long as a secret must be.

    They are the value as it is, quoted, escaped as in JSON or HTML, percent-encoded, in hexadecimal, and in base64 (Basic
    authentication).

    >>> {"top/secret", "top%2Fsecret", "746f702f736563726574", "dG9wL3NlY3Jld"} <= spellings("top/secret")
    True
    """
    value = value.strip()
    parts = {value} | {line.strip() for line in value.splitlines() if len(line) >= SHORTEST_LINE_CHARACTERS}
    texts = set(parts)
    for part in parts:
        for escaped in _escaped_spellings(part):
            # A quotation may be quoted again
            texts |= {escaped, *_escaped_spellings(escaped)}
        encoded = {quote(part, errors="replace"), quote(part, safe="", errors="replace")}
        encoded.add(quote_plus(part, errors="replace"))
        texts |= encoded
        texts |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), text) for text in encoded}
        texts |= _base64_spellings(part.encode(errors="replace"))
        texts |= _hexadecimal_spellings(part.encode(errors="replace"))
    return frozenset(text for text in texts if len(text) >= SHORTEST_CHARACTERS)


def _escaped_spellings(text: str) -> set[str]:
    """Return what JSON, HTML and `repr` make of the text, without the quotation marks around it."""
    in_json = json.dumps(text)[1:-1]
    both_marks = "'\""  # in a text that holds both, `repr` escapes one of them
    return {
        in_json,
        in_json.replace("/", r"\/"),  # as PHP writes it
        *_json_for_html(in_json),
        json.dumps(text, ensure_ascii=False)[1:-1],
        html.escape(text),
        html.escape(text, quote=False),
        html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),  # as Go and Jinja write it
        repr(text)[1:-1],
        repr(both_marks + text)[len(repr(both_marks)) - 1 : -1],
    }


def _json_for_html(in_json: str) -> set[str]:
    """Return what writers make of JSON that may stand in a page: Go escapes <, > and &, others quotation marks too."""
    texts = set()
    for marks in ("<>&", "<>&'", "<>&'/", "<>&'+"):
        escaped = in_json
        for mark in marks:
            escaped = escaped.replace(mark, f"\\u{ord(mark):04x}")
        texts |= {escaped, re.sub(r"\\u[0-9a-f]{4}", lambda match: rf"\u{match[0][2:].upper()}", escaped)}
    return texts


def _hexadecimal_spellings(value: bytes) -> set[str]:
    """Return the value's bytes in hexadecimal: `bytes.hex()`, and with a sign between two bytes as dumps show them."""
    plain = {value.hex(), value.hex(" "), value.hex(":"), value.hex("-"), value.hex(" ", -2)}
    return plain | {text.upper() for text in plain}


def _base64_spellings(value: bytes) -> set[str]:
    """Return what base64 makes of the value, whatever stands before and after it (`user:` of Basic authentication).

    Three bytes become four characters, so the value may begin at one of three places of such a block. Characters that
    also depend on the bytes around it are left out.
    """
    texts = set()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for num_before in range(3):
            text = encode(b"\0" * num_before + value).decode()
            first = -(-8 * num_before // 6)  # the first character without a bit of the bytes before
            beyond = 8 * (num_before + len(value)) // 6  # the first with a bit of the bytes behind
            texts.add(text[first:beyond])
    return texts


def _may_be_secret(value: str) -> bool:
    return len(value.strip()) >= SHORTEST_CHARACTERS and not os.path.exists(value)


class RedactedRecord(logging.LogRecord):
    """A log record without secrets, which every logger of the process makes, other libraries' included."""

    def getMessage(self) -> str:
        """Return the message without secrets."""
        return redacted(super().getMessage())

    def __setattr__(self, name: str, value: Any) -> None:
        """Redact the text of a traceback, which a formatter keeps in the record."""
        super().__setattr__(name, redacted(value) if name == "exc_text" and value else value)


class RedactedStream:
    """A text stream that hides secrets in whatever `print` and `traceback` write to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without secrets."""
        self._stream.write(redacted(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line without secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_logs() -> None:
    """Hide secrets in all logs of this process from now on, and in the tracebacks that it or a thread may end with."""

    def report(*error: Any) -> None:
        print(redacted("".join(traceback.format_exception(*error))), file=sys.stderr, end="")

    def report_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            report(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    logging.setLogRecordFactory(RedactedRecord)
    sys.excepthook = report
    threading.excepthook = report_thread


def redact_output() -> None:
    """Hide secrets in the logs of this process, and in what it prints."""
    redact_logs()
    sys.stdout = RedactedStream(sys.stdout)  # `print` needs no more of a stream
    sys.stderr = RedactedStream(sys.stderr)
