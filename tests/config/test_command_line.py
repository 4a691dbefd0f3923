"""One source for command line, TOML file, help, parameters of a run, and docs/options.md."""

import dataclasses
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo import errors
from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.kl import KL_KINDS
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.run import RunConfig, WorkerConfig, write_params
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.inference.config import EngineOptions, is_eager
from async_grpo.launch.commands import foreign_keys
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.local_run import trainer_arguments, worker_arguments
from async_grpo.observe.samples import SamplesConfig
from async_grpo.options.command_line import normalized, run_command
from async_grpo.options.fields import choices_of, option
from async_grpo.training.optimizer import LR_SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("--model-name-or-path", "m", "--data-path", "d")
WORKER = dataclasses.fields(WorkerConfig)


def parse(*argv: str, config_class=RunConfig, **more):
    """The configuration, None if there is none, and the exit code."""
    seen = []
    with pytest.raises(SystemExit) as ended:
        run_command(config_class, seen.append, help="", argv=list(argv), **more)
    return (seen[0] if seen else None), ended.value.code


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def test_dashes_and_underscores_are_one_and_flags_take_the_prior_spelling_with_a_value():
    given = ["--model-name-or-path=m", "--data_path", "d", "--max_tokens_per_gpu=77", "--no-mask_truncated"]
    one, code = parse(*given)
    assert code == 0 and one.max_tokens_per_gpu == 77 and one.mask_truncated is False and one.data_path == "d"
    given = ["--max_num_seqs=8", "--enable_prefix_caching", "false"]
    assert normalized(given, WORKER, {}) == ["--max-num-seqs=8", "--no-enable-prefix-caching"]
    assert normalized(["--enable-prefix-caching=True"], WORKER, {}) == ["--enable-prefix-caching"]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ([], None),
        (["--enforce-eager"], True),
        (["--no-enforce-eager"], False),
        (["--enforce-eager=false"], False),
        (["--config", "enforce_eager = true"], True),
        (["--config", "enforce_eager = false"], False),
        (["--config", "enforce_eager = false", "--enforce-eager"], True),
    ],
)
def test_a_flag_without_a_default_is_on_off_or_left_to_the_library(tmp_path, given, value):
    arguments = [written(tmp_path, text) if " = " in text else text for text in given]
    config, code = parse(
        f"--model-path={tmp_path}", "--mode=generation", *arguments, config_class=WorkerConfig
    )
    assert code == 0 and config.enforce_eager is value
    assert is_eager(config, has_gpu=False) is (True if value is None else value)
    assert is_eager(config, has_gpu=True) is bool(value)


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (["--clip_ratio_c", "10"], "--clip-ratio-c has no effect any more: gone"),
        (["--no-clip-ratio-c"], "--no-clip-ratio-c has no effect any more: gone"),
    ],
)
def test_a_retired_option_warns_with_what_is_in_its_place(capsys, given, warning):
    _, code = parse(*NEEDED, *given, retired={"clip_ratio_c": "gone"})
    assert code == 0 and f"warning: {warning}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model-name-or-path", "m"], "--data-path"),
        ([*NEEDED, "--nope", "1"], "--nope is no option"),
        (["--model-name-or-pth", "m", "--data-path", "d"], "did you mean --model-name-or-path"),
        ([*NEEDED, "--batch-size", "--dry-run"], "--batch-size needs a value"),
        ([*NEEDED, "--batch-size"], "--batch-size needs a value"),
        ([*NEEDED, "--batch-size", "many"], "'many' is not a whole number"),
        ([*NEEDED, "--learning-rate", "1e-5x"], "'1e-5x' is not a number"),
        ([*NEEDED, "--mask-truncated", "maybe"], "maybe"),
        ([*NEEDED, "--mask-truncated=maybe"], "--mask-truncated"),
    ],
)
def test_missing_misspelt_and_unknown_options_are_named_with_code_2(argv, said, capsys):
    assert parse(*argv) == (None, 2) and said in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(ConfigurationError("wrong"), 2), (RunFailed("died"), 1)])
def test_errors_become_one_line_and_an_exit_code(capsys, error, code):
    def run(_) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(RunConfig, run, help="", argv=NEEDED)
    assert ended.value.code == code and capsys.readouterr().err == f"error: {error}\n"


def test_the_command_line_beats_the_file_and_the_file_the_default(tmp_path):
    text = """model_name_or_path = "m"\ndata-path = "d"\nlearning-rate = 1e-5\nbatch_size = 64\nmask_truncated = false
    reward_fns = ["a", "b"]\nreward_weights = {a = 2.0}"""
    config, code = parse("--config", written(tmp_path, text), "--batch-size", "32")
    assert code == 0 and (config.learning_rate, config.batch_size, config.max_staleness) == (1e-5, 32, 1)
    assert config.reward_fns == "a,b" and config.weights_by_name == {"a": 2.0} and not config.mask_truncated
    first, _ = parse(written(tmp_path, text))  # as in `async-grpo run run.toml`
    assert first.batch_size == 64


def test_the_names_of_other_libraries_are_accepted_beside_ours(tmp_path):
    config, code = parse(
        *NEEDED, "--seed", "7", "--num-generations=4", "--max_steps", "9", "--save-every", "3"
    )
    assert code == 0
    assert (config.infinite_sampler_seed, config.samples_per_question, config.num_training_batches) == (
        7,
        4,
        9,
    )
    config, _ = parse("--config", written(tmp_path, "seed = 8\nmax_steps = 2"), *NEEDED)
    assert (config.infinite_sampler_seed, config.num_training_batches) == (8, 2)


def test_a_model_is_saved_every_so_many_steps_or_samples():
    size = ("--batch-size", "2", "--samples-per-question", "4")
    assert parse(*NEEDED, *size, "--save-every", "3")[0].samples_between_models == 3 * 2 * 4
    assert parse(*NEEDED, *size)[0].samples_between_models == 30_000


def test_null_in_the_parameters_of_a_run_is_a_choice_that_a_recipe_does_not_change(tmp_path):
    path = tmp_path / "params.json"
    path.write_text(json.dumps({"recipe": "dapo", "clip_low": None, "output_dir": None}))
    config, code = parse(f"--config={path}", *NEEDED)
    assert code == 0 and config.clip_low is None and config.output_dir == "runs/default"
    first = written(tmp_path, "clip_low = 0.1")
    assert parse("--config", first, f"--config={path}", *NEEDED)[0].clip_low is None
    assert parse(f"--config={path}", "--config", first, *NEEDED)[0].clip_low == 0.1
    assert parse(f"--config={path}", *NEEDED, "--clip-low=0.3")[0].clip_low == 0.3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--deterministic="], "a flag is given as --x, --no-x, --x=true or --x=false"),
        (["--deterministic=maybe"], "--deterministic=maybe: a flag is given as"),
        (["--no-deterministic=false"], "--no-deterministic=false: a flag is given as"),
        (["-o", "x"], "-o is no option"),
    ],
)
def test_flags_without_a_truth_and_options_of_one_dash_are_refused(argv, said, capsys):
    assert parse(*NEEDED, *argv) == (None, 2) and said in capsys.readouterr().err


def test_an_option_of_one_letter_needs_its_value(capsys):
    arguments = ("run", "-o", "--limit", "3")
    assert parse(*arguments, config_class=SamplesConfig) == (None, 2)
    assert "-o needs a value" in capsys.readouterr().err
    assert parse("run", "-o", "x.html", "--limit", "3", config_class=SamplesConfig)[0].output == "x.html"
    assert parse("run", "-o=x.html", config_class=SamplesConfig) == (None, 2)


def test_whoever_asks_for_help_gets_it_and_no_name_is_cut(capsys):
    for argv in (["--help"], ["--bogus", "--help"], ["--batch-size", "--help"]):
        assert parse(*argv)[1] == 0
        text = capsys.readouterr().out
        assert "…" not in text and "--min-samples-per-checkpoint" in text


def test_a_negative_number_is_a_value_and_no_option(capsys):
    assert parse(*NEEDED, "--kl-coef", "-1") == (None, 2)
    assert "--kl-coef cannot be negative, not -1.0" in capsys.readouterr().err


def test_the_options_of_a_file_may_stand_in_tables_named_for_the_rooms(tmp_path):
    tables = "\n".join(
        [
            'run_name = "x"',
            "[training]",
            "learning_rate = 1e-5",
            "[experience]",
            "seed = 3",
            "[rewards]",
            'reward_fns = ["a", "b"]',
            "[rewards.reward_weights]",
            "a = 2.0",
            "[inference]",  # of other programs
            "max_num_seqs = 8",
        ]
    )
    config, code = parse(written(tmp_path, tables), *NEEDED, foreign=foreign_keys)
    assert code == 0 and (config.run_name, config.learning_rate, config.infinite_sampler_seed) == (
        "x",
        1e-5,
        3,
    )
    assert config.reward_fns == "a,b" and config.weights_by_name == {"a": 2.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nbatch_size = 3", "batch_size belongs in the table [experience], not in [training]"),
        ("[trainin]\nlearning_rate = 3", "trainin is no option; did you mean training"),
        ("[training]\nlearning_rte = 3", "learning_rte is no option; did you mean learning_rate"),
        ("seed = 3\ninfinite_sampler_seed = 4", "infinite_sampler_seed has two values, 3 and 4"),
        ("seed = 3\n[experience]\nseed = 4", "infinite_sampler_seed has two values, 3 and 4"),
        ("batch_size = 3.5", "run.toml: Invalid value for '--batch-size': '3.5' is not a whole number"),
        ("batch_size = true", "'True' is not a whole number"),
        ('mask_truncated = "maybe"', "run.toml"),
    ],
)
def test_a_wrong_table_or_value_of_a_file_is_named_with_the_file(tmp_path, capsys, text, said):
    assert parse("--config", written(tmp_path, text), *NEEDED) == (None, 2)
    assert said in capsys.readouterr().err


def test_several_files_are_read_in_their_order(tmp_path):
    second = tmp_path / "second.toml"
    second.write_text("batch_size = 3")
    files = ("--config", written(tmp_path, "batch_size = 2\nlearning_rate = 1e-3"), f"--config={second}")
    config, _ = parse(*NEEDED, *files)
    assert (config.batch_size, config.learning_rate) == (3, 1e-3)


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
    assert parse("--config", written(tmp_path, text), *NEEDED) == (None, 2)
    assert said in capsys.readouterr().err


def test_the_parameters_of_a_run_start_it_again(tmp_path):
    """The launcher writes the file, and the trainer, which knows less of the workers, writes it again."""
    path = tmp_path / "training_params.json"
    settings = {"model_name_or_path": "m", "data_path": "d", "reward_fns": "a,b.py:c", "kl_coef": 0.1}
    trainer = RunConfig(**settings, mask_truncated=False, clip_low=0.3)
    local = LocalConfig(**dataclasses.asdict(trainer), generation_workers=2, max_num_seqs=48)
    write_params(path, local, {})
    write_params(path, trainer, {"WORLD_SIZE": 2, "settings": {"dtype": "float32"}})
    assert json.loads(path.read_text())["reward_fns"] == ["a", "b.py:c"]
    for first in (trainer, local):
        again, code = parse(str(path), "--output-dir", "new", config_class=type(first), foreign=foreign_keys)
        assert code == 0 and again == dataclasses.replace(first, output_dir="new")


def test_run_passes_its_options_on_to_its_programs(tmp_path, capsys):
    """By its parameters: every engine option, and the user's choice where it is the default and not the recipe's."""
    chosen = {
        "max_num_seqs": 7, "overhead_seqs": 3, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False, "enforce_eager": True, "engine_options": "block_size=32", "engine": "fake",
        "engine_stall_s": 33.0, "engine_restarts": 1, "colocate": True, "engine_python": "/opt/engines/bin/python",
    }  # fmt: skip
    assert set(chosen) == {field.name for field in dataclasses.fields(EngineOptions)}
    needed = {"model_name_or_path": str(tmp_path), "data_path": "d", "reward_fns": "a"}
    recipe = {"recipe": "dapo", "clip_low": 0.2, "clip_high": 0.3, "zero_variance": "keep"}
    recipe["old_policy"] = "proximal"
    size = {"samples_per_question": 4, "max_tokens_per_gpu": 99}
    local = LocalConfig(**needed, **recipe, **size, **chosen, output_dir=str(tmp_path))
    write_params(tmp_path / "training_params.json", local, {})
    told = [command[command.index("async_grpo.launch.worker") + 1 :] for command in worker_arguments(local)]
    engine, logprob = (parse(*one, config_class=WorkerConfig, foreign=foreign_keys)[0] for one in told)
    assert {name: getattr(engine, name) for name in chosen} == chosen
    assert engine.mode == "generation" and engine.further_options == {"block_size": 32}
    assert (logprob.mode, logprob.role, logprob.max_tokens_per_gpu) == ("logprob", "proximal", 99)
    trainer, _ = parse(*trainer_arguments(local, tmp_path)[-1:], foreign=foreign_keys)
    names = [field.name for field in dataclasses.fields(RunConfig)]
    assert trainer == RunConfig(**{name: getattr(local, name) for name in names})
    assert "yours: clip_high=0.3 zero_variance=keep" in capsys.readouterr().out


def test_the_help_shows_the_options_of_every_day_first_and_the_names_of_closed_sets(capsys):
    _, code = parse("--help")
    text = capsys.readouterr().out
    everyday, rest = text.split(" Everyday options ")[1].split(" Run ───")
    assert code == 0 and 18 <= len(re.findall(r"│ [* ]  --", everyday)) <= 26
    assert (
        "--learning-rate" in everyday and "--importance-level" in rest and " Off-policy correction ──" in rest
    )
    words = re.findall(r"\w+", everyday)
    assert {*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES, *LR_SCHEDULES} <= set(words)


def completions(line: str) -> list[str]:
    """What bash is offered behind a line that has been typed."""
    words = line.split(" ")
    variables = {
        "_ASYNC_GRPO_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-m", "async_grpo"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("async-grpo wa", ["watch"]),
        ("async-grpo run --samples-per", ["--samples-per-question"]),
        ("async-grpo run --kl-kind k", [kind for kind in KL_KINDS if kind.startswith("k")]),
        ("async-grpo run --dry-run --policy-loss dp", ["dppo_tv", "dppo_kl"]),
        ("async-grpo plot comp", ["compare"]),
        ("async-grpo data gsm", ["gsm8k"]),
    ],
)
def test_a_shell_completes_commands_options_and_names(line, offered):
    assert completions(line) == offered


def test_the_choices_are_those_of_the_registry():
    registries = {"policy_loss": POLICY_LOSSES, "lr_scheduler": LR_SCHEDULES, "kl_kind": KL_KINDS}
    for name, registry in (registries | {"advantage_estimator": ADVANTAGE_ESTIMATORS}).items():
        assert choices_of(RunConfig.__dataclass_fields__[name]) == tuple(registry)


def test_the_page_of_options_is_current():
    page = runpy.run_path(str(ROOT / "scripts" / "options_page.py"))["page"]
    assert (ROOT / "docs" / "options.md").read_text() == page(), (
        "python scripts/options_page.py > docs/options.md"
    )


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


def test_every_error_survives_a_process_boundary():
    for error_class in vars(errors).values():
        if isinstance(error_class, type) and issubclass(error_class, errors.AsyncGrpoError):
            again = pickle.loads(pickle.dumps(error_class("message")))
            assert type(again) is error_class and str(again) == "message"
