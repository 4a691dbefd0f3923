"""A digest of a model's weights, by which a run with LoRA notices that its base has changed."""

import hashlib
from pathlib import Path

SAMPLE_BYTES = 1 << 20  # number of bytes that are read at each place of a file
NUM_SAMPLES = 16  # number of places in each file


def base_digest(model_path: str) -> str:
    """Return a sha256 (hex) of samples of a model's weight files, and of their sizes.

    A checkpoint of LoRA does not hold the base. A run that goes on with another base would compute something else.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(model_path).expanduser().glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
