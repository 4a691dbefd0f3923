"""`--resume`: find the checkpoint from which a run continues, and refuse changes of options that must stay the same."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.config.base_weights import base_digest
from async_grpo.config.run import RunConfig
from async_grpo.environments.config import ROWS
from async_grpo.errors import ConfigurationError
from async_grpo.experience.data_files import digest_of_rows
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE, options_of
from async_grpo.options.fields import dashed
from async_grpo.processes.untrusted_files import open_regular, printable
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.training.checkpoint_folder import Manifest, checkpoints_of, named, newest, versions

# Options that a resumed run must not change, each with the reason. All other options may change, and changes are logged
_BOUND = "the groups alive were admitted under the earlier bound"
_CYCLE = "the versions of the groups alive, and the step in which each is trained last, depend on it"
_RENDERED = "the prompts of the finished groups were rendered with the earlier value"
FIXED = {
    "model_name_or_path": "the checkpoint has weights of the earlier model, which also stays the KL reference",
    "policy": "the checkpoint has weights of the earlier kind of policy",
    "data_path": "the saved position in the data would belong to other questions",
    "prompt_column": "the finished groups answer the prompts of the earlier column",
    "prompt_as": "the finished groups answer prompts of the earlier form",
    "answer_column": "the finished groups were scored by the answers of the earlier column",
    "environment": "the finished groups are trajectories of the earlier environment",
    "chat_template": _RENDERED,
    "chat_template_kwargs": _RENDERED,
    "system_prompt": _RENDERED,
    "curriculum": "the levels that the run has reached are those of the earlier column",
    "infinite_sampler_seed": "the order of the questions and all random draws depend on it",
    "critic_model": "the checkpoint has the critic of the earlier run",
    "critic_warmup_steps": "the schedule of the policy's learning rate begins after the earlier number of steps",
    "running_mean_column": "the running means belong to the values of the earlier column",
    "samples_per_question": "the finished groups have the earlier size",
    "groups_per_step": "the step in which a group is due depends on it",
    "passes_per_batch": _CYCLE,
    "cycle_steps": _CYCLE,
    "max_staleness": _BOUND,
    "samples_in_flight": _BOUND,
    "temperature": "the finished groups have log-probs at the earlier temperature",
    **dict.fromkeys(
        ("top_p", "top_k", "min_p"),
        "the finished groups have log-probs over the tokens that the earlier rule keeps",
    ),
    "flow_loss": "the checkpoint has the policies and the samples of the earlier loss",
    "guidance": "the finished groups were drawn with the earlier guidance",
    "picture_size": "the finished groups have pictures of the earlier size",
    "max_generation_tokens": "the finished groups were generated under the earlier limit",
    "reward_fns": "the finished groups were scored by the earlier rewards",
    "optimizer": "the checkpoint has the moments of the earlier optimizer",
    "freeze_vision": "the checkpoint has the moments of the weights that the run trained earlier",
    **dict.fromkeys(
        ("lora_rank", "lora_targets", "init_adapter"), "the checkpoint has the adapter of the earlier layers"
    ),
    **dict.fromkeys(("lora_alpha", "lora_rslora"), "the checkpoint has an adapter for the earlier scale"),
    "load_in_4bit": "the checkpoint has an adapter for the earlier values of the frozen weights",
    "advantage_estimator": "the optimizer and the finished groups have what the earlier estimator needs",
    "moves_reference": "only the checkpoints of a run with a moving reference have its weights",
    "logprob_roles": "the finished groups have the log-probs that the earlier options need, and no others",
    "teacher_names": "the finished groups have the log-probs of the earlier teachers",
    "teacher_column": "the finished groups have the log-probs of the teachers in the earlier column",
    "teacher_top_k": "the finished groups have the log-probs of the earlier number of tokens",
}
# Values that are computed from several options and must not change, with the names of these options for messages
DERIVED = {
    "groups_per_step": "--batch-size / --train-minibatch-size",
    "cycle_steps": "--batch-size (with several passes per batch): the number of optimizer steps of a batch",
    "samples_in_flight": "--groups-alive",
    "moves_reference": "--ref-update-steps: whether the reference moves",
    "logprob_roles": "the log-probs wanted by --kl-coef, --old-policy, --policy-loss and --teacher",
    "teacher_names": "--teacher",
}
# Values of DERIVED in a run whose checkpoint is older than the options from which they are computed. All other options
# have their defaults in such a run
DERIVED_BEFORE_THEIR_OPTIONS: dict[str, Any] = {"moves_reference": False, "teacher_names": []}
# Options that often differ between starts of one run, so their changes are not logged
OF_EACH_START = ("resume", "output_dir", "run_name", "max_hours", "stall_s")
SHOWN_CHARACTERS = 200
WAY_OUT = "give the earlier value, or begin a new run: --resume never, and another --output-dir"
log = logging.getLogger(__name__)


def find_checkpoint(config: RunConfig) -> tuple[Path, Manifest] | None:
    """Return the checkpoint from which the run continues, and its manifest, or None if this is a new run.

    Raises:
        ConfigurationError: The checkpoint is broken, or an option or the data that must stay the same has changed.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        checkpoint = newest(config.output_path)
        if checkpoint is None:
            _refuse_to_begin_over(config)
            return None
    else:
        checkpoint = _continued(config) or named(Path(config.resume), "--resume ", ", auto or never")
    folder, manifest = checkpoint
    refuse_changes(config, folder, manifest.options)
    _refuse_other_data(config, folder, manifest)
    _log_changes(config, manifest)
    return checkpoint


def _refuse_other_data(config: RunConfig, folder: Path, manifest: Manifest) -> None:
    digests = data_digests(config)
    if manifest.inputs != digests:
        changed = [name for name in digests if digests[name] != manifest.inputs.get(name)]
        raise ConfigurationError(
            f"the file of --{dashed(', '.join(changed))} is not the one that the run of {folder} read; {WAY_OUT}"
        )


def goes_on(config: RunConfig) -> bool:
    """Return whether the output folder may already contain a run, because `--resume` lets this start continue it."""
    if config.resume == "auto":
        return True
    if config.resume == "never":
        return False
    checkpoint_path = Path(config.resume).absolute()
    is_inside = config.output_path.absolute() in (checkpoint_path, *checkpoint_path.parents)
    return is_inside or _continued(config) is not None


def _continued(config: RunConfig) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint of the output folder if a run with the same `--resume PATH` wrote it, else None.

    So a command with `--resume PATH` can be repeated: the second start continues the first one, and does not start from
    PATH again.
    """
    checkpoint = newest(config.output_path)
    if checkpoint is None:
        return None
    _, manifest = checkpoint
    return checkpoint if manifest.options.get("resume") == config.resume else None


def _refuse_to_begin_over(config: RunConfig) -> None:
    """Refuse to begin a new run in the folder of another run.

    It is refused if the folder has broken checkpoints, or a run whose options differ although they must not change.
    """
    folder = config.output_path
    broken = checkpoints_of(folder)
    if broken:
        raise ConfigurationError(
            f"--output-dir {folder} holds {len(broken)} checkpoints, and none of them can be used (see above): restore "
            "one, or begin a new run: --resume never, and another --output-dir"
        )
    metrics = folder / METRICS_FILE
    has_steps = metrics.exists() and metrics.stat().st_size > 0
    if has_steps and (folder / PARAMS_FILE).exists():
        refuse_changes(config, folder, options_of(folder))
        log.warning("--output-dir %s holds a run without a checkpoint: it begins again", folder)


def refuse_changes(config: RunConfig, folder: Path, earlier: Mapping[str, Any]) -> None:
    """Refuse changes of options that must stay the same.

    Args:
        config: The options of this start.
        folder: Folder of the earlier run, for messages.
        earlier: The options of the earlier run.

    Raises:
        ConfigurationError: An option in FIXED has changed.
    """
    options = as_options(config)
    for name, reason in FIXED.items():
        value = options[name]
        earlier_value = earlier[name] if name in earlier else _value_without_option(name, value)
        if name == "reward_fns" and not value:
            # The workers name the rewards later. `Prepared.with_rewards` then calls this function again
            continue
        if value != earlier_value:
            flags = DERIVED.get(name, f"--{dashed(name)}")
            raise ConfigurationError(
                f"{flags}: the value is {value}, but it was {_shown(earlier_value)} in the run of {folder}: {reason}; "
                f"{WAY_OUT}"
            )


def _value_without_option(name: str, value: Any) -> Any:
    """Return the value of an option in a run whose checkpoint lacks it, because the option is newer than the checkpoint.

    Args:
        name: Name of an option, or of a value in DERIVED.
        value: The value in this start of the run. It is returned for a derived value that existed in all earlier runs.
    """
    if name in DERIVED:
        return DERIVED_BEFORE_THEIR_OPTIONS.get(name, value)
    (field,) = [field for field in dataclasses.fields(RunConfig) if field.name == name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # An option without a default is in every checkpoint. If it is missing, the checkpoint's options are damaged
    return None if field.default is dataclasses.MISSING else field.default


def _log_changes(config: RunConfig, manifest: Manifest) -> None:
    """Log the options and package versions that have changed since the checkpoint was written."""
    changes = []
    for name, value in as_options(config).items():
        earlier_value = manifest.options.get(name)
        if value != earlier_value and name not in OF_EACH_START:
            changes.append(f"--{dashed(name)} {_shown(earlier_value)} -> {value}")
    for name, version in versions().items():
        earlier_version = manifest.versions.get(name)
        if version != earlier_version:
            changes.append(f"{name} {_shown(earlier_version)} -> {version}")
    if changes:
        log.warning("resumed with other options or versions: %s", ", ".join(changes))


def _shown(value: Any) -> str:
    """Return a value of a manifest as text that is safe to print, because the manifest may come from somebody else."""
    return printable(str(value)[:SHOWN_CHARACTERS])


def as_options(config: RunConfig) -> dict[str, Any]:
    """Return the options of the run and the values in DERIVED, in the form that checkpoints store."""
    names = [field.name for field in dataclasses.fields(RunConfig)]
    options = {name: getattr(config, name) for name in (*names, *DERIVED)}
    options["logprob_roles"] = list(config.logprob_roles)
    options["teacher_names"] = list(config.teacher_names)
    options["reward_fns"] = list(parse_names(config.reward_fns))
    return options


def data_digests(config: RunConfig) -> dict[str, str]:
    """Return SHA-256 digests of the files on which the run depends, by the option that names them.

    They are: the data, a chat template in a file, the base model of an adapter, and its initial values. A resumed run
    compares them, to check that its prompts are the same and that the checkpoint's adapter belongs to the base.
    """
    digests = {}
    if config.data_path == ROWS:
        # If an environment makes the rows, its name and its options determine them
        digests["data_path"] = f"{config.environment} {config.environment_options}"
    else:
        digests["data_path"] = digest_of_rows(Path(config.data_path))
    if config.chat_template is not None:
        digests["chat_template"] = _file_digest(config.chat_template)
    if config.has_lora:
        digests["model_name_or_path"] = base_digest(config.model_name_or_path)
    if config.init_adapter is not None:
        # This file contains the scale of the adapter. If it had changed, the matrices of the checkpoint would be used
        # with another scale
        digests["init_adapter"] = _file_digest(
            str(Path(config.init_adapter).expanduser() / "adapter_config.json")
        )
    return digests


def _file_digest(path: str) -> str:
    with open_regular(Path(path), follow_links=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
