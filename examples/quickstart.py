"""A tiny model learns countdown tasks in about two minutes, without a GPU: python examples/quickstart.py."""

import os

import async_grpo
from async_grpo.data import COUNTDOWN_HELDOUT, COUNTDOWN_TRAIN, TINY_MODEL


def names_every_number(completions, nums, **columns):  # a small reward for a good try, in TRL's form
    return [0.1 * all(str(n) in text for n in of_row) for text, of_row in zip(completions, nums, strict=True)]


steps = {"num_training_batches": int(os.environ.get("QUICKSTART_STEPS", "60")), "learning_rate": 2e-4}
sizes = {"batch_size": 32, "samples_per_question": 8, "max_generation_tokens": 24, "max_tokens_per_gpu": 4096}
other = {"num_warmup_steps": 5, "enforce_eager": True, "output_dir": "outputs/quickstart"}
rewards, held_out = ["countdown", names_every_number], {"eval_dataset": COUNTDOWN_HELDOUT}
result = async_grpo.train(TINY_MODEL, COUNTDOWN_TRAIN, rewards, **held_out, **steps, **sizes, **other)
before, after = (result.evaluations[place]["eval_avg@1"] for place in (0, -1))
print(f"held-out accuracy {before:.3f} -> {after:.3f}; curve {result.plot()}; model {result.model}")
