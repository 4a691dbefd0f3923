"""`failure_text`: describes an error of the user's environment or program, with the lines of the user's code."""

import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MAX_TRACEBACK_CHARACTERS = 2000


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the first line of the user's code on.

    Errors that this library raises on purpose have none, because its own lines would not help the user.
    """
    if type(error).__module__.startswith("async_grpo."):
        return ""
    frames = list(traceback.extract_tb(error.__traceback__))
    while frames and Path(frames[0].filename).is_relative_to(PACKAGE):
        frames.pop(0)
    text = "".join(traceback.format_list(frames)).rstrip()
    # Keep the end, which is the most helpful part
    return text[-MAX_TRACEBACK_CHARACTERS:]


def failure_text(error: BaseException) -> str:
    """Return the type and the message of an error, and the traceback of the user's code below them."""
    description = f"{type(error).__name__}: {error}"
    lines = user_traceback(error)
    return f"{description}\n{lines}" if lines else description
