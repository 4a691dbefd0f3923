"""Hide secrets in logs, metrics and files: values of secret environment variables, even if quoted or encoded."""

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
# Minimum length of a secret. For example, if TOKENIZERS_PARALLELISM=false counted as a secret, every "false" in a text
# would be masked
SHORTEST_CHARACTERS = 8
# If a secret has several lines, as a private key has, each line of at least this length counts as a secret, too
SHORTEST_LINE_CHARACTERS = 16
MASK = "***"

# Values that `register_secrets` has added. They are hidden whatever the names of their variables are
_registered: set[str] = set()


def secrets() -> dict[str, str]:
    """Return the secrets in this process's environment variables by name.

    Paths that exist are not secrets (for example HF_TOKEN_PATH).
    """
    secret_values = {}
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and _may_be_secret(value):
            secret_values[name] = value
    return secret_values


def register_secrets(values: Iterable[str]) -> None:
    """Hide these values in this process from now on.

    This is for the variables that `--reward-env` names and for the judges' keys, because their variables may have any
    name. Values shorter than 8 characters, and paths that exist on this machine, are not hidden.
    """
    _registered.update(value for value in values if _may_be_secret(value))


def redacted(text: str) -> str:
    """Return the text with *** in place of every secret, even if the secret is quoted or encoded (see `spellings`).

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
    """All texts that reveal a secret, and the values from which they were computed."""

    environment: dict[Any, Any]
    registered: frozenset[str]
    spellings: tuple[str, ...]  # the longest first, because one may be part of another


_hidden = _Hidden({}, frozenset(), ())


def _hidden_spellings() -> tuple[str, ...]:
    """Return all texts that reveal a secret, the longest first.

    They are computed again if the environment variables or the registered values have changed since the last call.
    Comparing the dict behind `os.environ` takes 1 µs, reading all variables 40 µs; every sample calls this several
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
    """Return the texts that reveal the secret, without those shorter than `SHORTEST_CHARACTERS`.

    These are the value itself, and its forms after quoting by `repr`, JSON or HTML, and in percent-encoding, hexadecimal
    and base64 (as in Basic authentication).

    >>> {"top/secret", "top%2Fsecret", "746f702f736563726574", "dG9wL3NlY3Jld"} <= spellings("top/secret")
    True
    """
    value = value.strip()
    parts = {value} | {line.strip() for line in value.splitlines() if len(line) >= SHORTEST_LINE_CHARACTERS}
    texts = set(parts)
    for part in parts:
        for escaped in _escaped_spellings(part):
            # Quoted texts may be quoted a second time, for example JSON inside JSON
            texts |= {escaped, *_escaped_spellings(escaped)}
        encoded = {quote(part, errors="replace"), quote(part, safe="", errors="replace")}
        encoded.add(quote_plus(part, errors="replace"))
        texts |= encoded
        texts |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), text) for text in encoded}
        texts |= _base64_spellings(part.encode(errors="replace"))
        texts |= _hexadecimal_spellings(part.encode(errors="replace"))
    return frozenset(text for text in texts if len(text) >= SHORTEST_CHARACTERS)


def _escaped_spellings(text: str) -> set[str]:
    """Return the text escaped as in JSON, in HTML and by `repr`, without the surrounding quotation marks."""
    in_json = json.dumps(text)[1:-1]
    # With both quotation marks in a text, `repr` escapes one of them
    both_marks = "'\""
    return {
        in_json,
        in_json.replace("/", r"\/"),  # PHP escapes slashes like this
        *_json_for_html(in_json),
        json.dumps(text, ensure_ascii=False)[1:-1],
        html.escape(text),
        html.escape(text, quote=False),
        # Go and Jinja escape quotation marks like this
        html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
        repr(text)[1:-1],
        repr(both_marks + text)[len(repr(both_marks)) - 1 : -1],
    }


def _json_for_html(in_json: str) -> set[str]:
    """Return the forms of a JSON text in which <, > and & are escaped, as in HTML. Some forms also escape ', / or +."""
    texts = set()
    for marks in ("<>&", "<>&'", "<>&'/", "<>&'+"):
        escaped = in_json
        for mark in marks:
            escaped = escaped.replace(mark, f"\\u{ord(mark):04x}")
        texts |= {escaped, re.sub(r"\\u[0-9a-f]{4}", lambda match: rf"\u{match[0][2:].upper()}", escaped)}
    return texts


def _hexadecimal_spellings(value: bytes) -> set[str]:
    """Return the value's bytes in hexadecimal, without and with separators between bytes, as hex dumps show them."""
    plain = {value.hex(), value.hex(" "), value.hex(":"), value.hex("-"), value.hex(" ", -2)}
    return plain | {text.upper() for text in plain}


def _base64_spellings(value: bytes) -> set[str]:
    """Return the forms of the value in a longer base64 text, such as that of `user:value` in Basic authentication.

    Base64 turns each block of three bytes into four characters, so there is one form for each of the three positions in
    a block at which the value may begin. Characters that also encode bits of the bytes around the value are left out.
    """
    texts = set()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for num_before in range(3):
            text = encode(b"\0" * num_before + value).decode()
            # First base64 character that encodes no bits of the bytes before the value
            first_index = -(-8 * num_before // 6)
            # First base64 character that may encode bits of the bytes after the value
            end_index = 8 * (num_before + len(value)) // 6
            texts.add(text[first_index:end_index])
    return texts


def _may_be_secret(value: str) -> bool:
    return len(value.strip()) >= SHORTEST_CHARACTERS and not os.path.exists(value)


class RedactedRecord(logging.LogRecord):
    """A log record without secrets. All loggers of the process make such records, including those of other libraries."""

    def getMessage(self) -> str:
        """Return the message without secrets."""
        return redacted(super().getMessage())

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Secrets are hidden in `exc_text`, the traceback that a formatter stores in the record."""
        super().__setattr__(name, redacted(value) if name == "exc_text" and value else value)


class RedactedStream:
    """A text stream that hides secrets in everything that is written to it."""

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
    """Hide secrets in all logs of this process from now on, and in tracebacks of uncaught exceptions in any thread."""

    def report(*error: Any) -> None:
        print(redacted("".join(traceback.format_exception(*error))), file=sys.stderr, end="")

    def report_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            report(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    logging.setLogRecordFactory(RedactedRecord)
    sys.excepthook = report
    threading.excepthook = report_thread


def redact_output() -> None:
    """Hide secrets in the logs of this process, and in everything that it prints."""
    redact_logs()
    # All other attributes of the stream remain available, because `RedactedStream` passes them on
    sys.stdout = RedactedStream(sys.stdout)
    sys.stderr = RedactedStream(sys.stderr)
