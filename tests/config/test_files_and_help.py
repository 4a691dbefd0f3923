"""One source for command line, TOML file, help, parameters of a run, and docs/options.md."""

import dataclasses
import json
from pathlib import Path

import pytest
from test_config_and_cli import parse

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.kl import KL_KINDS
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.run import RunConfig, WorkerConfig, write_params
from async_grpo.generation.config import EngineOptions
from async_grpo.launch.local_run import LocalConfig, trainer_command, worker_commands
from async_grpo.options.fields import choices_of, option
from async_grpo.programs.options_page import foreign_keys, page
from async_grpo.training.optimizer import LR_SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("--model-name-or-path", "m", "--data-path", "d")


def written(tmp_path: Path, text: str, name: str = "run.toml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_the_command_line_beats_the_file_and_the_file_the_default(tmp_path):
    text = """model_name_or_path = "m"\ndata-path = "d"\nlearning-rate = 1e-5\nbatch_size = 64\nmask_truncated = false
    reward_fns = ["a", "b"]\nreward_weights = {a = 2.0}"""
    config, code = parse("--config", written(tmp_path, text), "--batch-size", "32")
    assert code == 0 and (config.learning_rate, config.batch_size, config.max_staleness) == (1e-5, 32, 1)
    assert (
        config.reward_fns == "a,b" and config.weights_by_name == {"a": 2.0} and config.mask_truncated is False
    )
    first, _ = parse(written(tmp_path, text))  # as in `async-grpo run run.toml`
    assert first.batch_size == 64


def test_what_a_file_sets_goes_before_a_recipe(tmp_path):
    file = written(tmp_path, 'recipe = "dapo"\nclip_high = 0.5')
    config, _ = parse(f"--config={file}", *NEEDED)
    assert (config.clip_high, config.zero_variance) == (0.5, "resample")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rte = 1e-6", "run.toml: learning_rte is no option; did you mean learning_rate"),
        ("learning_rate = ", "run.toml cannot be read"),
        ("max_num_seqs = 8", "run.toml: max_num_seqs is no option"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_its_name_and_key(tmp_path, capsys, text, said):
    config, code = parse("--config", written(tmp_path, text), *NEEDED)
    assert config is None and code == 2 and said in capsys.readouterr().err


def test_one_file_serves_all_programs(tmp_path):
    """Each reads its own keys; the trainer's model is the worker's."""
    file = written(
        tmp_path,
        f'model_name_or_path = "{tmp_path}"\ndata_path = "d"\nmax_num_seqs = 8\nlearning_rate = 1e-5',
    )
    worker, code = parse(
        "--config", file, "--mode", "generation", config_class=WorkerConfig, foreign=foreign_keys
    )
    assert code == 0 and (worker.model_path, worker.max_num_seqs) == (str(tmp_path), 8)
    trainer, code = parse("--config", file, foreign=foreign_keys)
    assert code == 0 and trainer.learning_rate == 1e-5


def test_the_parameters_of_a_run_start_it_again(tmp_path):
    first = RunConfig(
        model_name_or_path="m",
        data_path="d",
        reward_fns="a,b.py:c",
        kl_coef=0.1,
        mask_truncated=False,
        clip_low=0.3,
    )
    write_params(
        tmp_path / "training_params.json", first, {"WORLD_SIZE": 2, "settings": {"dtype": "float32"}}
    )
    assert json.loads((tmp_path / "training_params.json").read_text())["reward_fns"] == ["a", "b.py:c"]
    again, code = parse(str(tmp_path / "training_params.json"), "--output-dir", "new", foreign=foreign_keys)
    assert code == 0 and again == dataclasses.replace(first, output_dir="new")


def test_the_parameters_of_a_local_run_tell_of_its_workers_as_well(tmp_path):
    """The launcher writes the file, and the trainer, which knows less, writes it again."""
    local = LocalConfig(
        model_name_or_path=str(tmp_path), data_path="d", reward_fns="a", generation_workers=2, max_num_seqs=48
    )
    trainer = RunConfig(model_name_or_path=str(tmp_path), data_path="d", reward_fns="a")
    for config, facts in ((local, {}), (trainer, {"WORLD_SIZE": 1})):
        write_params(tmp_path / "training_params.json", config, facts)
    again, code = parse(
        str(tmp_path / "training_params.json"), config_class=LocalConfig, foreign=foreign_keys
    )
    assert code == 0 and again == local


def test_a_renamed_option_is_accepted_with_a_warning(capsys):
    config, code = parse(*NEEDED, "--no-positive-resampling", "0.9")
    assert code == 0 and config.retire_solved_above == 0.9
    assert "--no-positive-resampling is now called --retire-solved-above" in capsys.readouterr().err


def test_the_help_shows_the_options_of_every_day_first_and_the_names_of_closed_sets(capsys):
    _, code = parse("--help")
    said = capsys.readouterr().out
    everyday, rest = said.split("Everyday options:")[1].split("\nRun:")
    assert code == 0 and 18 <= everyday.count("  --") <= 26
    assert "--learning-rate" in everyday and "--importance-level" in rest and "Off-policy correction:" in rest
    assert all(name in everyday for name in (*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES, *LR_SCHEDULES))


@pytest.mark.parametrize(
    ("option", "registry"),
    [
        ("advantage_estimator", ADVANTAGE_ESTIMATORS),
        ("policy_loss", POLICY_LOSSES),
        ("lr_scheduler", LR_SCHEDULES),
        ("kl_kind", KL_KINDS),
    ],
)
def test_the_choices_are_those_of_the_registry(option, registry):
    assert choices_of(RunConfig.__dataclass_fields__[option]) == tuple(registry)


def test_the_page_of_options_is_current():
    assert (ROOT / "docs" / "options.md").read_text() == page(), "python -m async_grpo.programs.options_page"


def test_run_passes_its_options_on_to_its_programs(tmp_path, capsys):
    """By its parameters: every engine option, and the user's choice where it is the default and not the recipe's."""
    chosen = {
        "max_num_seqs": 7, "overhead_seqs": 3, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False, "enforce_eager": True, "engine_options": "block_size=32", "engine": "fake",
    }  # fmt: skip
    assert set(chosen) == {field.name for field in dataclasses.fields(EngineOptions)}
    local = LocalConfig(
        model_name_or_path=str(tmp_path),
        data_path="d",
        reward_fns="a",
        samples_per_question=4,
        output_dir=str(tmp_path),
        recipe="dapo",
        policy_loss="ppo_clip",
        old_policy="proximal",
        clip_low=0.2,
        clip_high=0.3,
        zero_variance="keep",
        max_tokens_per_gpu=99,
        **chosen,
    )
    write_params(tmp_path / "training_params.json", local, {})
    told = [command[command.index("async_grpo.programs.worker") + 1 :] for command in worker_commands(local)]
    engine, logprob = (parse(*one, config_class=WorkerConfig, foreign=foreign_keys)[0] for one in told)
    assert {name: getattr(engine, name) for name in chosen} == chosen
    assert engine.mode == "generation" and engine.further_options == {"block_size": 32}
    assert (logprob.mode, logprob.role, logprob.max_tokens_per_gpu) == ("logprob", "proximal", 99)
    trainer, _ = parse(*trainer_command(local)[-1:], foreign=foreign_keys)
    assert trainer == RunConfig(
        **{one.name: getattr(local, one.name) for one in dataclasses.fields(RunConfig)}
    )
    assert "yours: clip_high=0.3 zero_variance=keep" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extended(RunConfig):
    """A room's section with one more option: nothing else is written for it."""

    patience: float = option(1.5, "How long to hope.", "Groups")


def test_a_new_option_is_one_field(tmp_path, capsys):
    assert parse(*NEEDED, "--patience", "3", config_class=Extended)[0].patience == 3.0
    assert parse(written(tmp_path, "patience = 4.0"), *NEEDED, config_class=Extended)[0].patience == 4.0
    parse("--help", config_class=Extended)
    assert "How long to hope." in capsys.readouterr().out
    assert parse(*NEEDED, "--patience", "inf", config_class=Extended)[1] == 2
