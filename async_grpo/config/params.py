"""`training_params.json`: every setting of a run, in a form that can be given back as a configuration."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.rewards.adapter.registry_source import parse_names

# What is written beside the options; a file that is given back may hold it
FACTS = (
    "WORLD_SIZE",
    "reward_registry_sha256",
    "reward_sources_sha256",
    "algorithm_sources_sha256",
    "settings",
    "num_questions",
    "ray_version",
)


def write_params(path: Path, config: RunConfig, facts: Mapping[str, Any]) -> None:
    """Write the options of the run, the rewards as a list, and the `facts` of this start.

    `async-grpo run` writes first, and the trainer that it starts again: the launcher's own options are kept.
    """
    assert set(facts) <= set(FACTS), (
        f"FACTS lacks {set(facts) - set(FACTS)}: the file could not be given back"
    )
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    options = {**dataclasses.asdict(config), "reward_fns": list(parse_names(config.reward_fns))}
    params = {**before, **options, **facts}
    path.write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")
