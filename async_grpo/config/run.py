"""The configurations of the trainer and the workers, with the checks that need no data, model or reward registry."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from async_grpo.algorithm.teacher_config import UNSCORED
from async_grpo.config.compatibility import broken_values
from async_grpo.config.recipes import apply_recipe
from async_grpo.config.rules import refuse_broken
from async_grpo.config.run_options import MemberConfig, RunOptions
from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import EngineConfig
from async_grpo.inference.logprob_config import LogprobConfig
from async_grpo.metrics.trackers import parse_trackers
from async_grpo.options.fields import (
    LIST,
    NOT_NEGATIVE,
    option,
    refuse,
    required,
)
from async_grpo.options.redaction import secrets
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.training.lora_config import with_lora_rate
from async_grpo.types import ENVIRONMENT

# Keys that `training_params.json` has in addition to the options. They are allowed in every file for `--config`
FACTS = (
    "WORLD_SIZE",
    "reward_registry_sha256",
    "reward_sources_sha256",
    "algorithm_sources_sha256",
    "settings",
    "num_questions",
    "ray_version",
)
_cluster = partial(option, panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """All options of a training run. Sizes are in tokens, samples (completions) or questions (prompts)."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], explicit_names: Collection[str]) -> Self:
        """Make a configuration from the options of a command line.

        Args:
            options: The values of all options.
            explicit_names: Names of the options that the user has set. The recipe may change all other options, and
                LoRA the learning rate.

        Raises:
            ConfigurationError: An option is wrong, or the model is an adapter whose base is not found.
        """
        options, adapter_message = with_base_of_adapter(options)
        options, recipe_message = apply_recipe(options, explicit_names)
        options, lora_message = with_lora_rate(options, explicit_names)
        # Only rank 0 of the trainer prints the messages. `async-grpo run` uses a subclass, so it does not print them a
        # second time
        if cls is RunConfig and os.environ.get("RANK", "0") == "0":
            for message in filter(None, (adapter_message, recipe_message, lora_message)):
                print(message, flush=True)
        return cls(**options)

    def __post_init__(self) -> None:
        if self.environment and not self.reward_fns:
            # If no other reward is named, use the environment's own reward
            object.__setattr__(self, "reward_fns", ENVIRONMENT)
        if self.is_taught_alone and not self.reward_fns:
            object.__setattr__(self, "reward_fns", UNSCORED)
        super().__post_init__()
        refuse(not self.output_dir.strip(), "--output-dir is empty: name a folder, such as runs/first")
        parse_trackers(self.track)
        for variable, secret in secrets().items():
            names = [name for name, value in vars(self).items() if isinstance(value, str) and secret in value]
            refuse(
                bool(names),
                f"{names} holds the value of the environment variable {variable}: it would be written down; name the "
                "variable, or unset it",
            )
        refuse_broken(self, broken_values(self))


def with_base_of_adapter(options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """If the model is the folder of an adapter, make it the initial adapter, and its base the model.

    Returns:
        The options, and a message that names the base, or "" if the model is no adapter.

    Raises:
        ConfigurationError: The base of the adapter is not found.
    """
    folder = Path(options.get("model_name_or_path") or "").expanduser()
    is_adapter = (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists()
    if options.get("init_adapter") is not None or not is_adapter:
        return dict(options), ""
    # Import this here, because it loads torch, which takes seconds
    from async_grpo.modeling.incomplete_folders import base_of_adapter

    base = base_of_adapter(folder)
    message = f"{folder} holds an adapter: the training begins with it, on its base {base}"
    return {**options, "init_adapter": str(folder), "model_name_or_path": base}, message


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(EngineConfig, LogprobConfig, MemberConfig):
    """All options of one worker. The trainer provides temperature, lengths, stop tokens and dtype."""

    mode: str = required(
        "What the worker does for the run: generate completions, or compute log-probs.",
        choices=("generation", "logprob"),
        everyday=True,
    )
    reward_fns: str = option(
        "",
        "Comma-separated rewards of the run. A generation worker may name them instead of the trainer.",
        everyday=True,
        form=LIST,
    )
    drain_s: float = _cluster(
        30.0,
        "Seconds that the worker has after SIGTERM to finish its work. Unfinished work continues on other workers.",
        range=NOT_NEGATIVE,
    )
    rejoin_s: float = _cluster(
        300.0,
        "Seconds that a worker keeps its model loaded after the trainer died and waits for it to be restarted; 0 does "
        "not wait.",
        range=NOT_NEGATIVE,
    )
    node: str = _cluster(
        "here",
        "Where the worker runs: here (on this node), on any node, or on any node with free GPUs (gpu), which may "
        "join later.",
        choices=("here", "any", "gpu"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.model_path).is_dir():
            raise ConfigurationError(f"--model-path {self.model_path}: there is no such folder")


def write_params(path: Path, config: RunConfig, facts: Mapping[str, Any]) -> None:
    """Write the run's parameters to a file that `--config` can read.

    `async-grpo run` writes the file first, and its trainer writes it again. Keys that the second call does not set keep
    their values.

    Args:
        path: The file.
        config: The options. The rewards are written as a list.
        facts: Other values of this start; the keys must be in FACTS.
    """
    assert set(facts) <= set(FACTS), f"FACTS lacks {set(facts) - set(FACTS)}"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    options = {**dataclasses.asdict(config), "reward_fns": list(parse_names(config.reward_fns))}
    text = json.dumps({**earlier, **options, **facts}, indent=2) + "\n"
    # Write a new file and rename it, because workers may be reading the old one
    new_path = path.with_suffix(".new")
    new_path.write_text(text, encoding="utf-8")
    new_path.replace(path)
