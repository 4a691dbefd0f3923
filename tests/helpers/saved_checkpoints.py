"""Small checkpoints on disk, whole as a run saves them, without a model."""

import json
from pathlib import Path

from async_grpo.training.checkpoint_folder import Manifest, complete, partial_folder


def save_checkpoint(output_dir: Path, step: int) -> Path:
    """Write the whole checkpoint of a step and return its folder."""
    partial = partial_folder(output_dir, step)
    (partial / "training").mkdir(parents=True)
    (partial / "training" / "shard-00001.safetensors").write_bytes(bytes(range(256)) * 4)
    (partial / "experience.json").write_text(json.dumps({"step": step}))
    manifest = Manifest(
        step=step,
        samples=8 * step,
        world_size=1,
        options={"batch_size": 2},
        inputs={},
        versions={"torch": "2"},
    )
    return complete(partial, manifest)
