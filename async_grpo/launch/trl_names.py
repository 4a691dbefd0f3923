"""Provide TRL's names, so that the first example of TRL's README runs with only the import and class name changed.

from async_grpo import AsyncGRPOTrainer, accuracy_reward

trainer = AsyncGRPOTrainer(model=model, reward_funcs=accuracy_reward, train_dataset=dataset)
trainer.train()
"""

import math
import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.launch.from_python import Rewards, TrainResult, train, with_defaults

# The only defaults that are taken from `GRPOConfig` of TRL 1.18. Schedule, AdamW's betas and seed differ from TRL's
TRL_DEFAULTS = {
    "batch_size": 1,  # number of questions. TRL counts completions; its default of 8 is one question's completions
    "samples_per_question": 8,
    "max_generation_tokens": 256,
    "learning_rate": 1e-6,
    "mask_truncated": False,
}
TRL_EPOCHS = 3


class AsyncGRPOTrainer:
    """`async_grpo.train` in the form of TRL's `GRPOTrainer`.

    The numbers of questions and completions, the completion length, the learning rate, the epochs, and the treatment of
    truncated completions have the defaults of TRL's `GRPOConfig`. All other options have the defaults of this library.

    Args:
        model: A Hugging Face folder.
        reward_funcs: One reward or several; see `async_grpo.train`. Several rewards are added up, as in TRL.
        args: A dict of this library's options. docs/coming-from.md lists their names next to TRL's.
        train_dataset: The questions, with the column `prompt`.
        eval_dataset: Held-out questions, or several such sets by name.
        options: Further options of this library.

    Raises:
        ConfigurationError: `args` is not a dict of options, an option is given twice, or `train_dataset` is missing.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        reward_funcs: Rewards | None = None,
        args: Mapping[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        if args is not None and not isinstance(args, Mapping):
            raise ConfigurationError(
                f"args is a {type(args).__name__}, whose options have other names here: give a dict, such as "
                "{'learning_rate': 1e-6, 'num_generations': 8}; docs/coming-from.md has the names side by side"
            )
        given_twice = sorted({*(args or {})} & options.keys())
        if given_twice:
            raise ConfigurationError(f"{', '.join(given_twice)} is given twice, once in args")
        if train_dataset is None:
            raise ConfigurationError(
                "train_dataset is missing: a list of dicts, a datasets.Dataset or a path"
            )
        self._model = model
        self._reward_funcs = reward_funcs
        self._train_dataset = train_dataset
        self._eval_dataset = eval_dataset
        self._options = {**(args or {}), **options}

    def train(self) -> TrainResult:
        """Train the model and return the run's results. See `async_grpo.train` for the errors."""
        return train(
            self._model,
            self._train_dataset,
            self._reward_funcs,
            eval_dataset=self._eval_dataset,
            **self._with_defaults(),
        )

    def _with_defaults(self) -> dict[str, Any]:
        """Return the options, completed by TRL's defaults for options that are not given."""
        defaults: dict[str, Any] = dict(TRL_DEFAULTS)
        if isinstance(self._train_dataset, Sized) and not isinstance(self._train_dataset, str):
            batch_size = self._options.get("batch_size", TRL_DEFAULTS["batch_size"])
            if isinstance(batch_size, int) and batch_size > 0:  # `train` refuses any other
                num_questions = TRL_EPOCHS * len(self._train_dataset)
                defaults["num_training_batches"] = math.ceil(num_questions / batch_size)
        if not isinstance(self._reward_funcs, str) and isinstance(self._reward_funcs, Sequence):
            defaults["reward_combine"] = "sum"
        return with_defaults(self._options, defaults)


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any], **columns: Any
) -> list[dict[str, Any]]:
    r"""Return one reward dict per completion: the reward is 1 if the answer equals the solution, by math-verify.

    This is the reward `math_verify` under the name and signature of TRL's function, with right answers in the column
    `solution`. See `rewards.builtin.math_verify` for what counts as the answer; the text in thoughts is ignored.

    >>> accuracy_reward(completions=[r"\boxed{7}"], solution=["3 + 4"])[0]["reward"]
    1.0
    """
    from async_grpo.rewards.builtin.math_verify import score  # imports sympy

    results = []
    for completion, right_answer in zip(completions, solution, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        results.append(score({"completion": text, "answer": right_answer}))
    return results
