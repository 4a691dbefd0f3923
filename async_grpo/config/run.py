"""The configurations of the programs, and the checks of what can be seen without looking anything up."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from async_grpo.config.compatibility import broken_values, refuse_broken
from async_grpo.config.recipes import apply_recipe
from async_grpo.config.run_options import MemberConfig, RunOptions
from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import EngineConfig
from async_grpo.inference.logprob_config import LogprobConfig
from async_grpo.metrics.trackers import parse_trackers
from async_grpo.options.fields import NOT_NEGATIVE, option, refuse, required
from async_grpo.options.redaction import secrets
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.types import ENVIRONMENT

# What `training_params.json` holds beside the options; a file that is given back may hold it
FACTS = (
    *("WORLD_SIZE", "reward_registry_sha256", "reward_sources_sha256", "algorithm_sources_sha256"),
    *("settings", "num_questions", "ray_version"),
)
_cluster = partial(option, panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """Everything a training run is told. Units: tokens, samples (completions), questions (prompts), seconds."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], given: Collection[str]) -> Self:
        """The configuration of a command line: the recipe's presets apply to whatever was not `given`."""
        options, said = apply_recipe(options, given)
        # `async-grpo run` leaves it to its trainer
        if said and cls is RunConfig and os.environ.get("RANK", "0") == "0":
            print(said, flush=True)
        return cls(**options)

    def __post_init__(self) -> None:
        if self.environment and not self.reward_fns:
            object.__setattr__(self, "reward_fns", ENVIRONMENT)  # its own
        super().__post_init__()
        parse_trackers(self.track)
        for variable, secret in secrets().items():
            told = [name for name, value in vars(self).items() if isinstance(value, str) and secret in value]
            way_out = "it would be written down; name the variable, or unset it"
            refuse(bool(told), f"{told} holds the value of the environment variable {variable}: {way_out}")
        refuse_broken(self, broken_values(self))


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(EngineConfig, LogprobConfig, MemberConfig):
    """What one inference worker is told; temperature, lengths, stop ids and dtype come from the trainer."""

    mode: str = required(
        "What the worker does for the run: generate completions, or compute log-probs.",
        choices=("generation", "logprob"),
        everyday=True,
    )
    reward_fns: str = option(
        "",
        "Comma list of the run's rewards, which a generation worker may name instead of the trainer.",
        everyday=True,
    )
    drain_s: float = _cluster(
        30.0,
        "Seconds that the worker has after SIGTERM to finish its work. What it does not finish continues on other "
        "workers.",
        range=NOT_NEGATIVE,
    )
    rejoin_s: float = _cluster(
        300.0,
        "Seconds that a worker whose trainer died keeps its model loaded and waits for the trainer to start again; 0 "
        "does not wait.",
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
    """Write the options of the run, the rewards as a list, and the `facts` of this start: a file for `--config`.

    `async-grpo run` writes first, and the trainer that it starts again: the launcher's own options are kept.
    """
    assert set(facts) <= set(FACTS), f"FACTS lacks {set(facts) - set(FACTS)}"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    options = {**dataclasses.asdict(config), "reward_fns": list(parse_names(config.reward_fns))}
    new = path.with_suffix(".new")  # in one step: the workers read it
    new.write_text(json.dumps({**before, **options, **facts}, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
