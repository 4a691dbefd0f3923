"""What a run goes on from (`--resume`), and what may have changed by then."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.environments.config import ROWS
from async_grpo.errors import ConfigurationError
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE, options_of
from async_grpo.options.fields import dashed
from async_grpo.processes.untrusted_files import open_regular, printable
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.training.checkpoint_folder import Manifest, checkpoints_of, named, newest, versions

# What cannot change, and why. All else may, and the log says which did
_BOUND = "the groups alive were admitted under that bound"
FIXED = {
    "model_name_or_path": "the weights are that model's, and it stays the KL reference",
    "data_path": "the place in the data would be that of other questions",
    "environment": "the groups that are finished are trajectories of that one",
    "curriculum": "the levels that the run has come to are of that column",
    "infinite_sampler_seed": "the order of the questions and every draw come of it",
    "samples_per_question": "the groups that are finished have that size",
    "groups_per_step": "steps are counted in groups of that number",
    "max_staleness": _BOUND,
    "samples_in_flight": _BOUND,
    "temperature": "the groups that are finished have log-probs at that temperature",
    "max_generation_tokens": "the groups that are finished ended by that length",
    "reward_fns": "the groups that are finished have been scored by these",
    "optimizer": "the moments in the checkpoint are of that kind",
    "advantage_estimator": "optimizer and finished groups have what that estimator needs",
    "logprob_roles": "the groups that are finished have these and no others",
}
DERIVED = {  # of several options
    "groups_per_step": "--batch-size / --train-minibatch-size",
    "samples_in_flight": "--groups-alive",
    "logprob_roles": "the log-probs wanted by --kl-coef, --old-policy and --policy-loss",
}
OF_EACH_START = ("resume", "output_dir", "run_name", "max_hours", "stall_s")  # nothing to speak of
SHOWN_CHARACTERS = 200
WAY_OUT = "give the earlier value, or begin a new run: --resume never, and another --output-dir"
log = logging.getLogger(__name__)


def find_checkpoint(config: RunConfig) -> tuple[Path, Manifest] | None:
    """The checkpoint that the run goes on from; None: it begins.

    ConfigurationError: the one named is broken, or is of a run whose options do not fit.
    """
    if config.resume == "never":
        return None
    if config.resume != "auto":
        found = _continued(config) or named(Path(config.resume), "--resume ", ", auto or never")
    elif (own := newest(config.output_path)) is not None:
        found = own
    else:
        _refuse_to_begin_over(config)
        return None
    refuse_changes(config, found[0], found[1].options)
    if found[1].inputs != (now := data_digests(config)):
        what = ", ".join(name for name in now if now[name] != found[1].inputs.get(name))
        other = f"the file of --{dashed(what)} is not the one that the run of {found[0]} read"
        raise ConfigurationError(f"{other}; {WAY_OUT}")
    _tell_changes(config, found[1])
    return found


def goes_on(config: RunConfig) -> bool:
    """Whether the output folder may hold a run: the one that goes on."""
    if config.resume in ("never", "auto"):
        return config.resume == "auto"
    path, own = Path(config.resume).absolute(), config.output_path.absolute()
    return own in (path, *path.parents) or _continued(config) is not None


def _continued(config: RunConfig) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of the output folder, if a start with the same `--resume PATH` made it: the same command
    goes on from there."""
    found = newest(config.output_path)
    return found if found is not None and found[1].options.get("resume") == config.resume else None


def _refuse_to_begin_over(config: RunConfig) -> None:
    """A folder without a checkpoint to go on from may hold another run than this one, or what is left of this one."""
    folder = config.output_path
    if broken := checkpoints_of(folder):
        raise ConfigurationError(
            f"--output-dir {folder} holds {len(broken)} checkpoints, and none of them can be used (see above): restore "
            "one, or begin a new run: --resume never, and another --output-dir"
        )
    metrics, params = folder / METRICS_FILE, folder / PARAMS_FILE
    if metrics.exists() and metrics.stat().st_size and params.exists():
        refuse_changes(config, folder, options_of(folder))
        log.warning("--output-dir %s holds a run without a checkpoint: it begins again", folder)


def refuse_changes(config: RunConfig, where: Path, earlier: Mapping[str, Any]) -> None:
    """ConfigurationError if what cannot change did, since the options of the run there."""
    options = as_options(config)
    for name, reason in FIXED.items():
        value, before = options[name], earlier.get(name, options[name])
        if value != before and not (name == "reward_fns" and not value):  # else the workers will name them
            flags = DERIVED.get(name, f"--{dashed(name)}")
            changed = f"{flags}: {value}, and was {_shown(before)} in the run of {where}"
            raise ConfigurationError(f"{changed}: {reason}; {WAY_OUT}")


def _tell_changes(config: RunConfig, manifest: Manifest) -> None:
    now, then = as_options(config), manifest.options
    changed = [
        f"--{dashed(name)} {_shown(then.get(name))} -> {now[name]}"
        for name in now
        if now[name] != then.get(name) and name not in OF_EACH_START
    ]
    changed += [
        f"{name} {_shown(manifest.versions.get(name))} -> {found}"
        for name, found in versions().items()
        if manifest.versions.get(name) != found
    ]
    if changed:
        log.warning("resumed with other options or versions: %s", ", ".join(changed))


def _shown(value: Any) -> str:
    """Return a value of a manifest, which may be somebody else's, as a message shows it."""
    return printable(str(value)[:SHOWN_CHARACTERS])


def as_options(config: RunConfig) -> dict[str, Any]:
    """The options of the run, as its checkpoints keep them, and what follows from several of them."""
    names = [one.name for one in dataclasses.fields(RunConfig)]
    told = {name: getattr(config, name) for name in (*names, *DERIVED)}
    return told | {
        "logprob_roles": list(config.logprob_roles),
        "reward_fns": list(parse_names(config.reward_fns)),
    }


def data_digests(config: RunConfig) -> dict[str, str]:
    """By which it is known that data are the same: the sha256 of their file."""
    if config.data_path == ROWS:  # then the environment's name and options tell
        return {"data_path": f"{config.environment} {config.environment_options}"}
    with open_regular(Path(config.data_path), follow_links=True) as file:
        return {"data_path": hashlib.file_digest(file, "sha256").hexdigest()}
