"""Train TRL's samples by this library's trainer, and compare the gradient and the adapter of the first step.

    python -m benchmarks.against_trl.first_step FOLDER     # case smollm2-lora; TRL's environment is .venv-trl

TRL trains one step and writes into FOLDER its new adapter, what it sampled, its gradient, and the adapter after the
step. This library begins with the same adapter, trains the same samples, and computes the log-probs of the behaviour
policy itself. If FOLDER has TRL's files already, TRL does not run again.

It prints |ours - TRL's| / |TRL's| over all tensors together: of the gradient, of its direction, and of the adapter.
TRL divides advantages by the standard deviation plus 1e-4, and this library by it plus 1e-6, so that the gradients'
lengths differ by some 2e-4.
"""

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.cluster.policy_kinds import load_language_policy, make_accumulator
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.messages import MicroBatch, SharedRunSettings
from async_grpo.modeling.load import load_config
from async_grpo.training.distributed import distributed_run
from async_grpo.types import PROMPT_TOKEN
from benchmarks.against_trl.cases import CASES, ROOT
from benchmarks.against_trl.models import model_folder
from benchmarks.against_trl.sides import question_order

CASE = CASES["smollm2-lora"]
SEQUENCES_PER_MICRO_BATCH = 16
Tensors = dict[str, Tensor]


def run_trl(folder: Path, model: Path, python: Path) -> None:
    """Have TRL train one step, and write down all that this program compares with."""
    settings = asdict(CASE) | {
        "steps": 1,
        "model": str(model),
        "data": str(CASE.train),
        "questions": question_order(CASE, seed=0),
        "seed": 0,
        "cores": torch.get_num_threads(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [python, "-m", "benchmarks.against_trl.first_step_trl", folder / "settings.json", folder]
    subprocess.run(command, check=True, cwd=ROOT)


def micro_batches(samples: list[dict[str, Any]], policy: Any) -> list[MicroBatch]:
    """Return the samples with their advantages, and with the log-probs of the policy itself."""
    rewards = torch.tensor([[sample["reward"]] for sample in samples], dtype=torch.float64)
    groups = torch.arange(len(samples)) // CASE.group
    advantages = ADVANTAGE_ESTIMATORS["grpo"](rewards, torch.ones(len(samples), 1), groups).flatten().numpy()
    batches = []
    for begin in range(0, len(samples), SEQUENCES_PER_MICRO_BATCH):
        part = slice(begin, begin + SEQUENCES_PER_MICRO_BATCH)
        batches.append(micro_batch(samples[part], advantages[part], policy))
    return batches


def micro_batch(samples: list[dict[str, Any]], advantages: np.ndarray, policy: Any) -> MicroBatch:
    """Return one packed micro-batch.

    Args:
        samples: Samples with the token ids of their prompt and completion.
        advantages: Advantage of each sample (n,).
        policy: The policy, whose log-probs are those of the behaviour policy.
    """
    sequences = [sample["prompt"] + sample["completion"] for sample in samples]
    lengths = [len(sequence) for sequence in sequences]
    masks = [np.arange(len(s["prompt"] + s["completion"])) >= len(s["prompt"]) for s in samples]
    loss_mask = np.concatenate(masks)
    input_ids = np.concatenate(sequences).astype(np.int32)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    with torch.no_grad():
        logprobs, *_ = policy(torch.tensor(input_ids), torch.tensor(cu_seqlens), torch.tensor(loss_mask), 1.0)
    return MicroBatch(
        input_ids=input_ids,
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        behaviour_logprobs=np.where(loss_mask, logprobs.numpy(), np.nan).astype(np.float32),
        advantages=np.where(loss_mask, np.repeat(advantages, lengths), np.nan).astype(np.float32),
        versions=np.where(loss_mask, 0, PROMPT_TOKEN).astype(np.int32),
        group_ids=np.zeros(len(lengths), np.int64),
        group_tokens=np.ones(len(lengths), np.int64),
    )


def short_name(name: str) -> str:
    """Return the part of a parameter's name that both sides share.

    >>> short_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight")
    'layers.0.mlp.up_proj.lora_A.weight'
    """
    return name[name.index("layers.") :].replace(".default", "")


def difference(ours: Tensors, theirs: Tensors) -> float:
    """Return |ours - theirs| / |theirs| over all tensors together."""
    squared_error = sum(float((ours[name] - tensor).square().sum()) for name, tensor in theirs.items())
    squared_norm = sum(float(tensor.square().sum()) for tensor in theirs.values())
    return (squared_error / squared_norm) ** 0.5


def norm(tensors: Tensors) -> float:
    """Return the Euclidean norm of all tensors together."""
    return sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5


def our_step(folder: Path, model: Path) -> tuple[Tensors, Tensors]:
    """Train TRL's samples from TRL's adapter. Return the gradient after clipping, and the adapter after the step."""
    config = RunConfig(
        model_name_or_path=str(model),
        data_path="unused",
        reward_fns="format",
        init_adapter=str(folder / "adapter"),
        learning_rate=CASE.learning_rate,
        lr_scheduler="constant",
        mask_truncated=CASE.mask_truncated,
    )
    vocab_size = load_config(model).vocab_size
    settings = SharedRunSettings(
        "x", "", vocab_size, "float32", 1.0, (2,), 256, 256, "object_store", (), 0,
        lora=lora_settings(config, str(model)),
    )  # fmt: skip
    with distributed_run("cpu") as ranks:
        policy = load_language_policy(config, settings, ranks)
        accumulator = make_accumulator(config, settings, policy, ranks)
        weights = {
            short_name(name): weight for name, weight in policy.named_parameters() if weight.requires_grad
        }
        gradient: Tensors = {}

        def keep_gradient(*_: Any) -> None:
            gradient.update({name: local(weight.grad) for name, weight in weights.items()})

        accumulator.optimizer.register_step_pre_hook(keep_gradient)
        samples = json.loads((folder / "samples.json").read_text())
        for batch in micro_batches(samples, policy):
            accumulator.add(batch)
        accumulator.finish()
        return gradient, {name: local(weight) for name, weight in weights.items()}


def local(tensor: Any) -> Tensor:
    """Return a copy of a tensor that one rank holds whole."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    options = parser.parse_args()
    model = model_folder(CASE.model, options.folder)
    if not (options.folder / "after.safetensors").exists():
        run_trl(options.folder, model, options.trl_python)
    theirs = {
        name: {
            short_name(key): tensor
            for key, tensor in load_file(options.folder / f"{name}.safetensors").items()
        }
        for name in ("gradient", "after")
    }
    gradient, after = our_step(options.folder, model)
    ratio = norm(gradient) / norm(theirs["gradient"])
    direction = {name: tensor / ratio for name, tensor in gradient.items()}
    print(
        f"gradient: {difference(gradient, theirs['gradient']):.1e}, "
        f"its direction: {difference(direction, theirs['gradient']):.1e}, "
        f"adapter after the step: {difference(after, theirs['after']):.1e}"
    )


if __name__ == "__main__":
    main()
