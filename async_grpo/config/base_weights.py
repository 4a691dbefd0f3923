"""A digest of a model's weights. With it, a run with LoRA notices that its base model has changed."""

import hashlib
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.training.checkpoint_folder import Manifest

SAMPLE_BYTES = 1 << 20  # number of bytes that are read at each place of a file
NUM_SAMPLES = 16  # number of places in each file


def base_digest(model_path: str) -> str:
    """Return a sha256 (hex) of samples of a model's weight files, and of their sizes.

    A checkpoint of a LoRA run does not contain the base model. With another base, a resumed run would train another
    policy.
    """
    digest = hashlib.sha256()
    folder = Path(model_path).expanduser()
    if (folder / "model_index.json").is_file():
        folder = folder / "transformer"  # the part of a folder of diffusers that is trained
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def refuse_other_base(manifest: Manifest, folder: Path, model_path: str) -> None:
    """Refuse to use the adapter in a checkpoint with another base than the one on which it was trained.

    If `model_path` is not a folder, nothing is refused here. Loading the model then fails with a message that says what
    is missing.

    Args:
        manifest: The checkpoint's manifest.
        folder: The checkpoint's folder, for the message.
        model_path: Folder of the base.

    Raises:
        ConfigurationError: The weights in the base's folder are not those of the run.
    """
    digest = manifest.inputs.get("model_name_or_path")
    if not manifest.lora or digest is None or not Path(model_path).expanduser().is_dir():
        return
    if digest != base_digest(model_path):
        raise ConfigurationError(
            f"the weights in {model_path} are not those of the base on which the adapter in {folder} was trained: give the "
            "folder of that model"
        )
