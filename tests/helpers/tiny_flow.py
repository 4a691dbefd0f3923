"""A tiny random flow-matching model in a folder of diffusers, and settings of a run that draws with it."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from async_grpo.messages import FlowSettings, SharedRunSettings

NEEDS_DIFFUSERS = pytest.mark.skipif(
    find_spec("diffusers") is None and not os.environ.get("REQUIRE_EXTRAS"),
    reason="diffusers is not there: scripts/setup_extras",
)
NUM_LABELS = 5
NUM_STEPS = 4
NOISE_LEVEL = 0.7
SHAPE = (1, 4, 4)


def save_tiny_flow_model(folder: Path, seed: int = 0, **changes) -> Path:
    """Write the folder. The weights are large, so that labels, times and states all change the velocity."""
    from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(seed)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 1,
        "num_layers": 2,
        "sample_size": 4,
        "patch_size": 2,
        "num_embeds_ada_norm": NUM_LABELS,
    }
    model = DiTTransformer2DModel(**(config | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "DiTPipeline",
        "id2label": {str(number): name for number, name in enumerate("abcde")},
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "vae": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def flow_settings(fingerprint: str = "", **changes) -> SharedRunSettings:
    """Return the settings of a run that draws. `changes` are those of `FlowSettings`."""
    return SharedRunSettings(
        run_name="test",
        model_fingerprint=fingerprint,
        vocab_size=NUM_LABELS,
        dtype="float32",
        temperature=NOISE_LEVEL,
        stop_token_ids=(),
        max_total_tokens=NUM_STEPS + 1,
        max_completion_tokens=NUM_STEPS,
        transport="object_store",
        logprob_roles=(),
        seed=0,
        flow=FlowSettings(**{"num_steps": NUM_STEPS, "window_every": 1} | changes),
    )


def random_pictures(count: int, seed: int, num_steps: int = NUM_STEPS):
    """Return (label, steps, latents (T, 2, *SHAPE), behavior log-probs, advantages) of random samples, as dicts."""
    random = np.random.default_rng(seed)
    pictures = []
    for _ in range(count):
        begin = int(random.integers(num_steps))
        steps = np.arange(begin, num_steps, dtype=np.int32)
        pictures.append(
            {
                "label": int(random.integers(NUM_LABELS)),
                "steps": steps,
                "latents": random.standard_normal((len(steps), 2, *SHAPE)).astype(np.float32),
                "behaviour": random.normal(-3, 1, len(steps)).astype(np.float32),
                "advantages": random.normal(size=len(steps)).astype(np.float32),
            }
        )
    return pictures
