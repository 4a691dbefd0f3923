"""TRL's side of `first_step`: train one step, and write down what was trained on, the gradient, and the adapter.

PYTHONPATH=. .venv-trl/bin/python -m benchmarks.against_trl.first_step_trl SETTINGS FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from benchmarks.against_trl import trl_side


class Recorder(TrainerCallback):
    """Writes the adapter before and after the step, and its gradient after clipping."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.save_pretrained(self._folder / "adapter")
        self._save("before", {name: weight.detach().clone() for name, weight in trained_weights(model)})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._save("gradient", {name: weight.grad.clone() for name, weight in trained_weights(model)})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._save("after", {name: weight.detach().clone() for name, weight in trained_weights(model)})

    def _save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self._folder / f"{name}.safetensors")


def trained_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def main() -> None:
    settings, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(settings["cores"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = trl_side.rows_with_prompts(settings, tokenizer)
    reward = trl_side.Rewards(
        settings["reward"], 0, tokenizer, trl_side.end_tokens(settings["model"]), list(rows[0])
    )
    compute_rewards = reward.as_function()

    def record_rewards(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        found = compute_rewards(completion_ids, **columns)
        samples = [
            {"prompt": prompt, "completion": completion, "reward": score}
            for prompt, completion, score in zip(
                columns["input_token_ids"], completion_ids, found, strict=True
            )
        ]
        (folder / "samples.json").write_text(json.dumps(samples))
        return found

    trainer = GRPOTrainer(
        model=settings["model"],
        processing_class=tokenizer,
        reward_funcs=record_rewards,
        train_dataset=trl_side.questions_in_order(settings, rows),
        callbacks=[Recorder(folder)],
        peft_config=trl_side.adapter(settings["lora_rank"]),
        args=trl_side.configuration(settings, folder),
    )
    trainer.train()


if __name__ == "__main__":
    main()
