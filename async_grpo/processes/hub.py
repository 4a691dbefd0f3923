"""Ask the Hugging Face hub for models and data sets, within a time limit.

A machine without network access would otherwise wait for minutes. The environment variables of the hub's library apply:
HF_ENDPOINT, HF_TOKEN, HF_HOME, and HF_HUB_OFFLINE, with which only files that were fetched before are used.
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
    except Exception as error:  # the libraries of the network raise many kinds
        raise ConfigurationError(
            f"{name}: there is no such file or folder, and {hub} cannot be reached ({error or type(error).__name__}): "
            f"{way_out(name, kind)}"
        ) from error


def fetch_model(name: str) -> Path:
    """Return the folder with the files of a model of the hub. Files that were not fetched before are fetched.

    Raises:
        ConfigurationError: The hub does not have the model, or cannot be reached, and the model was not fetched before.
    """
    from huggingface_hub import snapshot_download

    reach_hub(name, "model")
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # the libraries of the network raise many kinds
        variable = offline_variable()
        problem = f"{variable} is set, and it was not fetched before" if variable else str(error)
        raise ConfigurationError(
            f"{name}: there is no such folder, and the model cannot be fetched from the hub ({problem}): "
            f"{way_out(name, 'model')}"
        ) from error


def local_model(path: str) -> str:
    """Return the folder of a model: the path itself, or for the name of a model of the hub the folder it is fetched to.

    Raises:
        ConfigurationError: The path has the form of a name of the hub, and there is neither such a folder nor such a model.
    """
    if Path(path).expanduser().exists() or not is_hub_name(path):
        return path
    return str(fetch_model(path))


def way_out(name: str, kind: str) -> str:
    """Return what to do on a machine that cannot reach the hub."""
    repo_type = "" if kind == "model" else f" --repo-type {kind}"
    return f"where it can be reached, run hf download {name}{repo_type} --local-dir FOLDER, and give the folder here"


def _call_within(seconds: float, call: Callable[[], Any]) -> None:
    """Call a function that cannot be interrupted, such as one that looks up the name of a host.

    Raises:
        TimeoutError: It takes longer. Its thread is left behind, and does not keep the process from ending.
        Exception: What the function raises.
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
