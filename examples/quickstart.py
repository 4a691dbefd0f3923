"""Train a tiny model on countdown tasks in about two minutes, without a GPU: python examples/quickstart.py."""

import os

import async_grpo
from async_grpo.data import COUNTDOWN_HELDOUT, COUNTDOWN_TRAIN, TINY_MODEL


def names_every_number(completions, nums, **columns):
    """Reward a completion that uses every number, even if its result is wrong. The function has TRL's signature."""
    rewards = []
    for text, row_nums in zip(completions, nums, strict=True):
        uses_all = all(str(number) in text for number in row_nums)
        rewards.append(0.1 if uses_all else 0.0)
    return rewards


result = async_grpo.train(
    TINY_MODEL,
    COUNTDOWN_TRAIN,
    ["countdown", names_every_number],
    eval_dataset=COUNTDOWN_HELDOUT,
    num_training_batches=int(os.environ.get("QUICKSTART_STEPS", "60")),
    learning_rate=2e-4,
    batch_size=32,
    samples_per_question=8,
    max_generation_tokens=24,
    max_tokens_per_gpu=4096,
    num_warmup_steps=5,
    enforce_eager=True,
    output_dir="outputs/quickstart",
)
before = result.evaluations[0]["eval_avg@1"]
after = result.evaluations[-1]["eval_avg@1"]
print(f"held-out accuracy {before:.3f} -> {after:.3f}; curve {result.plot()}; model {result.model}")
