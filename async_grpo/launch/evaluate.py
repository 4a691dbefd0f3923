"""`async-grpo eval`: evaluate a checkpoint or a model with a run's engines and rewards, without a trainer.

The folder of the checkpoint is untrusted, so only the portable options of its run are taken over
(`options/portable.py`).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from async_grpo.algorithm.config import TOP_K
from async_grpo.algorithm.flow.config import FLOW, FlowConfig
from async_grpo.config.run import RunConfig
from async_grpo.config.run_options import MemberConfig
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.errors import CheckpointBroken
from async_grpo.experience.config import EvaluationTask
from async_grpo.experience.data_files import names_data_set
from async_grpo.inference.config import DRAWING_ENGINE, EngineOptions
from async_grpo.launch.check import check, refuse_at_once
from async_grpo.launch.early_start import early_start
from async_grpo.launch.export import ADAPTER_CONFIG_FILE, ExportConfig, export
from async_grpo.launch.judge_servers import LocalJudge
from async_grpo.launch.local_config import LocalConfig, MayHaveNoTrainer
from async_grpo.launch.local_run import parameters, start
from async_grpo.launch.process_variables import gpus
from async_grpo.metrics.writer import claim
from async_grpo.options.fields import (
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    TABLE,
    Range,
    choices_of,
    dashed,
    names_in,
    option,
    refuse,
    required,
)
from async_grpo.options.portable import portable_options, refuse_named
from async_grpo.processes.hub import local_model
from async_grpo.processes.private_folder import private_folder
from async_grpo.processes.untrusted_files import printable
from async_grpo.training.checkpoint_folder import MANIFEST, checkpoints_of, read

# Maximum number of unfinished completions; fewer if the engines have room for fewer
COMPLETIONS_AT_ONCE = 1024
EVALUATION_TIMEOUT_S = 7 * 86_400.0
# Too large to limit anything: an evaluation has no trainer rank for which a sequence could be too long
MAX_TOKENS_PER_GPU = 1 << 30
FLOW_INDEX_FILE = "model_index.json"  # file that marks a folder of diffusers, whose model draws
MODEL_FILES = ("config.json", FLOW_INDEX_FILE)
# Options that `async-grpo eval` does not have. Their values come from the checkpoint's run
OPTIONS_OF_THE_RUN = (
    "infinite_sampler_seed",
    "dtype",
    "float32_head",
    "advantage_estimator",
)
# Options for which None means the value of the checkpoint's run or, without such a run, the default of `async-grpo run`
OPTIONS_WITH_A_DEFAULT_OF_RUN = ("max_generation_tokens", "temperature", "top_p", "top_k", "min_p")
# Options that concern only this machine or this command. Their values in the checkpoint's run are ignored
OPTIONS_OF_THIS_COMMAND = (
    "path",
    "output_dir",
    "run_name",
    "logging_level",
    "verifiers",
    "verdict_cache",
    "judge_model_id",
    "endpoint_host",
)
# Options with addresses to which rows and completions are sent
ADDRESS_OPTIONS = {"judge_urls", "http_scorer_urls"}
# Keyword options, each with the option that names the code that gets them. They are taken from the run's folder only if
# that code ships with the library, because an untrusted folder must not pass arguments to the user's code
OWNER_OF_KEYWORDS = {"reward_options": "reward_fns", "environment_options": "environment"}


def _truncation(name: str, allowed: Range) -> Any:
    """Return an option that restricts sampling to probable tokens, as the option of this name restricts it in training."""
    return option(
        None,
        f"The same as --{name} of `async-grpo run`. The default is that of the checkpoint's run, or else of "
        "`async-grpo run`.",
        "Evaluation",
        range=allowed,
        portable=True,
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(EvaluationTask, EnvironmentConfig, LocalJudge, EngineOptions, FlowConfig, MemberConfig):
    """Options of `async-grpo eval`. For a checkpoint, options that are not set take the values of its run."""

    path: str = required(
        "Folder of a checkpoint, of a run (its newest checkpoint), of a model, or of a LoRA adapter.",
        argument=True,
    )
    eval_data_path: str | None = option(
        None,
        "File of questions: JSONL, .json, .csv, .tsv or .parquet, a folder, or a data set of the hub as NAME:SPLIT. "
        "Several are given as NAME=FILE,NAME=FILE.",
        everyday=True,
        aliases=("data",),
        # A path in a folder's options is safe: the file is only read as rows (see ADDRESS_OPTIONS)
        portable=True,
        form=TABLE,
    )
    lora_adapters: str = option(
        "",
        "LoRA adapters to compare on the base model PATH, on the same engines, one after the other: NAME=FOLDER,"
        "NAME=FOLDER, or a folder that holds adapters, such as hf_format of a run. The base is evaluated as well.",
        "Evaluation",
        form=TABLE,
    )
    max_generation_tokens: int | None = option(
        None,
        "Maximum length of a completion in tokens, as in training; --eval-max-tokens overrides it. The default is that "
        "of the checkpoint's run, or else of `async-grpo run`.",
        "Evaluation",
        range=POSITIVE,
        portable=True,
    )
    temperature: float | None = option(
        None,
        "Sampling temperature, as in training; --eval-temperature overrides it. The default is that of the "
        "checkpoint's run, or else of `async-grpo run`.",
        "Evaluation",
        range=POSITIVE,
        portable=True,
    )
    top_p: float | None = _truncation("top-p", POSITIVE_SHARE)
    top_k: int | None = _truncation("top-k", TOP_K)
    min_p: float | None = _truncation("min-p", SHARE)
    output_dir: str = option("runs/eval", "Folder for results, samples and logs.", everyday=True)
    generation_workers: int = option(1, "Number of generation workers.", "Local", range=POSITIVE)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], explicit_names: Collection[str]) -> "EvalConfig":
        """Return the configuration of a command line, completed by the options of the folder's run.

        Args:
            options: A value for every option, set by the user or by default.
            explicit_names: Names of the options that the user set. The folder's run does not override them.

        Raises:
            ConfigurationError: The folder's run has an option that only the user may set.
        """
        folder = Path(options["path"])
        inherited_names = {field.name for field in fields(cls)} - {*OPTIONS_OF_THIS_COMMAND, *explicit_names}
        # The evaluation starts its own judge servers, so drop the addresses of the run's
        if "judge_model" in explicit_names:
            inherited_names -= {"judge_urls"}
        inherited = portable_options(cls, _options_of(folder), inherited_names, folder)
        if (folder / FLOW_INDEX_FILE).is_file():
            inherited["policy"] = FLOW
        if inherited.get("policy", options["policy"]) == FLOW and "engine" not in explicit_names:
            inherited["engine"] = DRAWING_ENGINE
        for name, owner in OWNER_OF_KEYWORDS.items():
            is_shipped = _names_only_shipped(owner, {**options, **inherited}[owner])
            if inherited.get(name) and not is_shipped:
                refuse_named({name: inherited[name]}, folder)
        if inherited.get("eval_data_path"):
            files = EvaluationTask(eval_data_path=inherited["eval_data_path"]).eval_files
            if any(names_data_set(Path(file)) for file in files.values()):
                # The folder may come from a stranger. It must not make this machine download data from the hub
                refuse_named({"eval_data_path": inherited["eval_data_path"]}, folder)
            # The folder may name any file of this machine. Do not send its rows to an address
            if address_names := sorted(ADDRESS_OPTIONS & {*explicit_names}):
                print(
                    f"--{dashed(address_names[0])} would receive the rows of a file that the folder names",
                    flush=True,
                )
                refuse_named({"eval_data_path": inherited["eval_data_path"]}, folder)
            print(
                f"questions, as the run of {folder} says: {printable(inherited['eval_data_path'])}",
                flush=True,
            )
        texts = [f"{name}={value}" for name, value in inherited.items() if isinstance(value, str) and value]
        if texts:
            print(f"taken over from the run of {folder}: {printable(' '.join(texts))}", flush=True)
        return cls(**{**options, **inherited})

    def as_run(self, model: Path) -> LocalConfig:
        """Return the options of the evaluation, which is a run without any training step.

        Args:
            model: Hugging Face folder of the model.

        Raises:
            ConfigurationError: An option is missing or wrong.
        """
        files = self.eval_files
        refuse(not files, "say on what: --data FILE, or --data NAME=FILE,NAME=FILE")
        options = _options_without_a_flag(Path(self.path))
        for field in fields(self):
            value = getattr(self, field.name)
            is_default = value is None and field.name in OPTIONS_WITH_A_DEFAULT_OF_RUN
            if field.name not in ("path", "lora_adapters") and not is_default:
                options[field.name] = value
        if options.get("dtype", "auto") == "auto":
            # Resolve "auto" here. The evaluation program would resolve it wrongly: it sees no GPU, because the engines
            # have all
            options["dtype"] = "bfloat16" if gpus() and not self.draws else "float32"
        if self.eval_max_tokens is not None:
            options["max_generation_tokens"] = self.eval_max_tokens
        group_size = max(2, self.eval_samples)  # a group of a run has at least two samples
        options |= {
            "model_name_or_path": str(model),
            "data_path": next(iter(files.values())),
            "samples_per_question": group_size,
            "batch_size": max(1, COMPLETIONS_AT_ONCE // group_size),
            "max_staleness": 0,
            "evaluation_verifiers": max(self.evaluation_verifiers, self.verifiers_per_reward),
            "max_tokens_per_gpu": MAX_TOKENS_PER_GPU,
            "experience_timeout_s": EVALUATION_TIMEOUT_S,
            "eval_pinned": True,
            "resume": "never",
        }
        return MayHaveNoTrainer(**options, nproc_per_node=0)  # without ranks, the engines get all GPUs


def evaluate(config: EvalConfig) -> None:
    """Generate and score completions, print the results, and write them to `output_dir`.

    Raises:
        ConfigurationError: The folder contains neither a model nor a checkpoint, or an option is wrong.
        AsyncGrpoError: The evaluation failed; see `run_locally`.
    """
    model = Path(local_model(config.path))
    step = 0
    names_of_valid_folders = (*MODEL_FILES, ADAPTER_CONFIG_FILE, "checkpoints", MANIFEST)
    is_valid_folder = any((model / name).exists() for name in names_of_valid_folders)
    refuse(
        not is_valid_folder,
        f"{model} holds no model ({' or '.join(MODEL_FILES)}), no adapter, no run and no checkpoint",
    )
    adapters = _absolute_adapters(config.lora_adapters, model)
    with private_folder("grpo-eval-") as scratch:
        if not _is_model(model):
            model = scratch / "model"
            dtype = config.as_run(model).dtype
            # Merge a LoRA adapter into the model, so that every engine can evaluate it
            step = export(ExportConfig(path=config.path, output_dir=str(model), dtype=dtype, merged=True))
        run = config.as_run(model)
        arguments = [
            "-m",
            "async_grpo.launch.evaluator",
            parameters(run),
            f"--evaluated={config.path}",
            f"--step={step}",
            f"--lora-adapters={adapters}",
        ]
        refuse_at_once(run)
        with early_start(run) as early:
            check(run, early)
            claim(run.output_path)
            start(run, early, arguments)


def _absolute_adapters(adapters: str, model: Path) -> str:
    """Return `--lora-adapters` as a table of absolute paths; "" if the option is not set.

    Raises:
        ConfigurationError: A folder contains no adapter, or `model` is not a model.
    """
    if not adapters:
        return ""
    refuse(
        not (model / "config.json").exists(),
        f"--lora-adapters are compared on their base, but {model} is no model: give the folder of the base",
    )
    # Import this here, because it takes seconds
    from async_grpo.config.compared_adapters import adapter_folders

    folders = {name: str(folder.absolute()) for name, folder in adapter_folders(adapters).items()}
    return json.dumps(folders)


def _is_model(folder: Path) -> bool:
    """Return whether a folder contains a whole model, of transformers or of diffusers."""
    return any((folder / name).exists() for name in MODEL_FILES)


def _options_of(folder: Path) -> dict[str, Any]:
    """Return the options of the run that wrote a checkpoint.

    The result is {} for the folder of a model, and for a broken checkpoint, which `export` refuses later.
    """
    if _is_model(folder):
        return {}
    try:
        checkpoint = next(iter(checkpoints_of(folder)), folder)
        options = read(checkpoint).options
    except CheckpointBroken:
        return {}
    names = options.get("reward_fns")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        # A manifest has a list here, but the option takes a text with commas
        options = options | {"reward_fns": ",".join(names)}
    return options


def _options_without_a_flag(folder: Path) -> dict[str, Any]:
    """Return the values of OPTIONS_OF_THE_RUN, for which `async-grpo eval` has no flags, from a checkpoint's run."""
    options = _options_of(folder)
    shipped_estimators = choices_of(RunConfig.__dataclass_fields__["advantage_estimator"])
    if options.get("advantage_estimator") not in shipped_estimators:
        # The run's estimator may be a file of code, which must not be executed. An evaluation needs no estimator, so
        # drop it
        options.pop("advantage_estimator", None)
    return portable_options(RunConfig, options, OPTIONS_OF_THE_RUN, folder)


def _names_only_shipped(option_name: str, value: Any) -> bool:
    """Return whether all entries of an option's value, a comma list, ship with this library."""
    portable = EvalConfig.__dataclass_fields__[option_name].metadata["portable"]
    return not value or {part.strip() for part in str(value).split(",")} <= {*names_in(portable)}
