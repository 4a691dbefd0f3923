"""TRL's side of one measurement, which the Python of TRL's environment runs. Settings and results are JSON files.

    PYTHONPATH=. .venv-trl/bin/python -m benchmarks.against_trl.trl_side SETTINGS ANSWER

TRL runs with its fastest settings on a CPU: float32 (most CPUs emulate bfloat16), both cores, no gradient
checkpointing, no dropout, one generation and one optimizer step per batch, and no logging.
"""

import asyncio
import inspect
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.against_trl import rewards


class Rewards:
    """Computes the rewards of one batch: `function` for each sample, `calls` samples at a time (0: all at once)."""

    __name__ = "reward"

    def __init__(self, name: str, calls: int, tokenizer: Any, ends: list[int], columns: list[str]) -> None:
        self._columns = columns
        self._function = getattr(rewards, "countdown" if name == "shipped" else name)
        self._calls, self._tokenizer, self._ends = calls, tokenizer, set(ends)
        self.lengths_by_step: list[list[int]] = []
        self.mean_by_step: list[float] = []

    def samples(self, completion_ids: list[list[int]], columns: dict[str, list]) -> list[dict[str, Any]]:
        """Return the samples as the reward function gets them. The text has all tokens but the end token."""
        self.lengths_by_step.append([len(ids) for ids in completion_ids])
        kept = [[token for token in ids if token not in self._ends] for ids in completion_ids]
        texts = self._tokenizer.batch_decode(kept, skip_special_tokens=False)
        names = [name for name in columns if name in self._columns]
        rows = [
            dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)
        ]
        return [
            row | {"completion": text, "completion_token_ids": ids}
            for row, text, ids in zip(rows, texts, completion_ids, strict=True)
        ]

    def as_function(self) -> Any:
        if not inspect.iscoroutinefunction(self._function):

            def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
                return self._noted([self._function(one) for one in self.samples(completion_ids, columns)])

            return reward

        async def reward_async(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            places = asyncio.Semaphore(self._calls or len(completion_ids))

            async def call(sample: dict[str, Any]) -> float:
                async with places:
                    return await self._function(sample)

            return self._noted(await asyncio.gather(*map(call, self.samples(completion_ids, columns))))

        return reward_async

    def _noted(self, found: list[float]) -> list[float]:
        self.mean_by_step.append(statistics.fmean(found))
        return found


class Clock(TrainerCallback):
    """Records for each optimizer step the time of its end, and this process's CPU seconds until then."""

    def __init__(self, folder: Path, checkpoint_every: int) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self._folder, self._every = folder, checkpoint_every

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ends.append(time.time())
        self.cpu.append(time.process_time())
        if self._every and state.global_step % self._every == 0:
            model.save_pretrained(self._folder / f"step_{state.global_step}")


def main() -> None:
    settings, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(settings["cores"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = rows_with_prompts(settings, tokenizer)
    ends = end_tokens(settings["model"])
    reward = Rewards(settings["reward"], settings["calls"], tokenizer, ends, list(rows[0]))
    clock = Clock(answer.parent, settings["checkpoint_every"])
    trainer = GRPOTrainer(
        model=settings["model"],
        processing_class=tokenizer,
        reward_funcs=reward.as_function(),
        train_dataset=questions_in_order(settings, rows),
        callbacks=[clock],
        peft_config=adapter(settings["lora_rank"]),
        args=configuration(settings, answer.parent),
    )
    trainer.train()
    lengths = reward.lengths_by_step
    answer.write_text(
        json.dumps({
            "ends": clock.ends,
            "cpu": clock.cpu,
            "tokens": [sum(step) for step in lengths],
            "rewards": reward.mean_by_step,
            "length_quantiles": statistics.quantiles([one for step in lengths for one in step], n=20),
            "length_max": max(map(max, lengths)),
        })
    )  # fmt: skip


def rows_with_prompts(settings: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the rows of the task, with the text and the token ids of their prompts.

    Raises:
        SystemExit: TRL would tokenize a prompt in another way than this library.
    """
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    for row in rows:
        if "input_token_ids" not in row:
            messages = row.pop("messages")
            row["input"] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            row["input_token_ids"] = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        if tokenizer(row["input"])["input_ids"] != row["input_token_ids"]:
            raise SystemExit("TRL would read other prompts than ours")
    return rows


def questions_in_order(settings: dict[str, Any], rows: list[dict[str, Any]]) -> Dataset:
    """Return one row for each prompt of the run, in the order in which this library draws them."""
    return Dataset.from_list(
        [rows[number] | {"prompt": rows[number]["input"]} for number in settings["questions"]]
    )


def end_tokens(model: str) -> list[int]:
    """Return the tokens with which the model ends a completion."""
    ends = json.loads((Path(model) / "generation_config.json").read_text())["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]


def adapter(rank: int) -> Any:
    """Return peft's settings for the adapter that this library trains by default; None if all weights are trained."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def configuration(settings: dict[str, Any], folder: Path) -> GRPOConfig:
    samples = settings["prompts"] * settings["group"]
    per_call = min(settings["samples_per_call"], samples)
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=per_call,
        gradient_accumulation_steps=samples // per_call,
        num_generations=settings["group"],
        max_completion_length=settings["max_tokens"],
        mask_truncated_completions=settings["mask_truncated"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,  # this library's default
        max_grad_norm=1.0,
        seed=settings["seed"],
        shuffle_dataset=False,
        beta=0.0,
        temperature=1.0,
        disable_dropout=True,
        logging_steps=100_000,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        **settings["trl"],
    )


if __name__ == "__main__":
    main()
