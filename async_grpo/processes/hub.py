"""Ask the Hugging Face hub for models and data sets, within a time limit.

Without the limit, a machine that has no network access would wait for minutes. The environment variables of the package
huggingface_hub apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, and HF_HUB_OFFLINE, which allows only files fetched before.
"""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError

REACH_S = 20.0  # seconds within which the hub must answer
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE_WORDS = ("1", "ON", "YES", "TRUE")  # values that huggingface_hub reads as true
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KINDS = {"dataset": "data set", "model": "model"}
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a name on the hub, OWNER/NAME.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("/data/gsm8k"), is_hub_name("data/gsm8k/train"), is_hub_name("gsm8k")
    (True, False, False, False)
    """
    return HUB_NAME.fullmatch(text) is not None


def offline_variable() -> str:
    """Return the name of the environment variable that forbids asking the hub, or "" if none does."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in TRUE_WORDS:
            return name
    return ""


def reach_hub(name: str, kind: str) -> None:
    """Ask the hub whether it has this model or data set. Do nothing if an environment variable forbids it.

    Args:
        name: OWNER/NAME.
        kind: "model" or "dataset".

    Raises:
        ConfigurationError: The hub does not have it, or cannot be reached in time.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if offline_variable():
        return
    words = KINDS[kind]
    hub = f"the hub at {constants.ENDPOINT}"
    try:
        _call_within(REACH_S, lambda: HfApi().repo_info(name, repo_type=kind, timeout=REACH_S))
    except GatedRepoError as error:
        raise ConfigurationError(
            f"{name}: {hub} gives this {words} only to users who accepted its terms: accept them on its page, and set "
            "HF_TOKEN (hf auth login)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"{name}: there is no such file or folder, and {hub} has no {words} of this name for you: correct the name, or "
            "log in if it is private (hf auth login)"
        ) from error
    except Exception as error:  # the network libraries raise many kinds of errors
        raise ConfigurationError(
            f"{name}: there is no such file or folder, and {hub} cannot be reached ({error or type(error).__name__}): "
            f"{way_out(name, kind)}"
        ) from error


def fetch_model(name: str) -> Path:
    """Return the folder with the files of a model from the hub. Fetch the files that were not fetched before.

    Raises:
        ConfigurationError: The hub does not have the model, or cannot be reached, and the model was not fetched before.
    """
    from huggingface_hub import snapshot_download

    reach_hub(name, "model")
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # the network libraries raise many kinds of errors
        variable = offline_variable()
        problem = f"{variable} is set, and it was not fetched before" if variable else str(error)
        raise ConfigurationError(
            f"{name}: there is no such folder, and the model cannot be fetched from the hub ({problem}): "
            f"{way_out(name, 'model')}"
        ) from error


def local_model(path: str) -> str:
    """Return the folder of a model. If `path` is no folder but a name on the hub, fetch the model from the hub.

    Raises:
        ConfigurationError: The path has the form of a name on the hub, but there is no such folder, and the model
            cannot be fetched.
    """
    if Path(path).expanduser().exists() or not is_hub_name(path):
        return path
    return str(fetch_model(path))


def way_out(name: str, kind: str) -> str:
    """Return advice for a machine that cannot reach the hub, for the end of an error message."""
    repo_type = "" if kind == "model" else f" --repo-type {kind}"
    return (
        f"on a machine that can reach it, run hf download {name}{repo_type} --local-dir FOLDER, copy the folder to "
        "this machine, and give the folder here"
    )


def _call_within(seconds: float, call: Callable[[], Any]) -> None:
    """Call a function in a thread, because a DNS lookup cannot be interrupted. Wait for it at most `seconds`.

    Raises:
        TimeoutError: The function takes longer. Its thread continues, but does not keep the process from ending.
        Exception: The function raised this error.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
