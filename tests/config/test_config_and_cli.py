"""SharedRunSettings: derived numbers, refusals with the way out, and the command lines built from them."""

import dataclasses
import pickle

import pytest

from async_grpo import errors
from async_grpo.config.run import RunConfig, WorkerConfig
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.options.command_line import normalized, run_command

WORKER = dataclasses.fields(WorkerConfig)


def config(**changes) -> RunConfig:
    return RunConfig(**{"model_name_or_path": "m", "data_path": "d", **changes})


def test_a_step_takes_whole_groups_and_by_default_the_whole_batch():
    assert (config().samples_per_step, config().groups_per_step, config().steps_per_batch) == (4096, 128, 1)
    split = config(batch_size=8, samples_per_question=4, train_minibatch_size=16, num_training_batches=10)
    assert (split.groups_per_step, split.steps_per_batch, split.num_steps) == (4, 2, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_minibatch_size": 4000, "samples_per_question": 32, "batch_size": 128},
            r"whole number of steps",
        ),
        ({"train_minibatch_size": 33}, r"not a whole number of groups of 32.*use 32"),
        ({"batch_size": 0}, r"--batch-size must be above 0, not 0"),
        ({"max_staleness": -1}, r"--max-staleness cannot be negative"),
        ({"lr_scheduler": "step"}, r"'step' is unknown; known: constant, constant_with_warmup"),
        ({"dtype": "int8"}, r"--dtype 'int8' is unknown"),
        ({"temperature": 0.0}, r"--temperature must be above 0"),
    ],
)
def test_impossible_settings_are_refused_with_the_values(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        config(**changes)


def test_a_worker_without_its_model_folder_is_refused():
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        WorkerConfig(mode="generation", model_path="/does/not/exist")


def parse(*argv: str, config_class=RunConfig, retired=None, **more):
    seen = []
    with pytest.raises(SystemExit) as ended:
        run_command(config_class, seen.append, help="", retired=retired, argv=list(argv), **more)
    return (seen[0] if seen else None), ended.value.code


def test_dashes_and_underscores_are_one():
    one, code = parse(
        "--model-name-or-path=m", "--data_path", "d", "--max_tokens_per_gpu=77", "--no-mask_truncated"
    )
    assert code == 0 and one.max_tokens_per_gpu == 77 and one.mask_truncated is False and one.data_path == "d"


def test_the_prior_spelling_of_flags_with_a_value_works():
    given = ["--max_num_seqs=8", "--enable_prefix_caching", "false"]
    assert normalized(given, WORKER, {})[0] == ["--max-num-seqs=8", "--no-enable-prefix-caching"]
    assert normalized(["--enable-prefix-caching=True"], WORKER, {})[0] == ["--enable-prefix-caching"]


def test_a_retired_option_warns_with_its_successor(capsys):
    one, code = parse(
        "--model-name-or-path",
        "m",
        "--data-path",
        "d",
        "--clip_ratio_c",
        "10",
        retired={"clip_ratio_c": "gone"},
    )
    assert code == 0 and one is not None
    assert "warning: --clip-ratio-c has no effect any more: gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--model-name-or-path", "m"], ["--model-name-or-path", "m", "--data-path", "d", "--nope", "1"]]
)
def test_missing_and_unknown_options_end_with_code_2(argv, capsys):
    one, code = parse(*argv)
    assert one is None and code == 2


def test_errors_become_one_line_and_an_exit_code(capsys):
    def fail_with(error: Exception) -> int:
        def run(_) -> None:
            raise error

        with pytest.raises(SystemExit) as ended:
            run_command(RunConfig, run, help="", argv=["--model-name-or-path", "m", "--data-path", "d"])
        return ended.value.code

    assert fail_with(ConfigurationError("wrong file")) == 2
    assert fail_with(RunFailed("worker died")) == 1
    assert capsys.readouterr().err == "error: wrong file\nerror: worker died\n"


@pytest.mark.parametrize("front_door", ["trainer_core", "worker_dispatcher"])
def test_the_prior_options_of_the_front_doors_are_accepted_or_retired(front_door):
    """Names of prior art; each is an option here, or warns."""
    import importlib

    program = {"trainer_core": "trainer", "worker_dispatcher": "worker"}[front_door]
    module = importlib.import_module(f"async_grpo.programs.{program}")
    prior = {
        "trainer_core": "model_name_or_path learning_rate batch_size lr_scheduler num_warmup_steps "
        "experience_batcher_name max_tokens_per_gpu temperature max_generation_tokens insert_reasoning_phrases data_path "
        "min_samples_per_checkpoint output_dir infinite_sampler_seed samples_per_question constant_length_samples "
        "dump_samples_filename clip_low clip_high clip_ratio_c num_training_batches train_minibatch_size logging_level "
        "global_rank use_torch_compile",
        "worker_dispatcher": "model_path mode tensor_parallel_size max_num_seqs overhead_seqs enable_prefix_caching "
        "max_tokens_per_gpu temperature global_num_verifiers write_failed_generation_samples reward_fns",
    }[front_door].split()
    config_class = {"trainer_core": RunConfig, "worker_dispatcher": WorkerConfig}[front_door]
    assert set(prior) <= set(config_class.__dataclass_fields__) | set(module.RETIRED)


def test_every_error_survives_a_process_boundary():
    for name in dir(errors):
        error_class = getattr(errors, name)
        if isinstance(error_class, type) and issubclass(error_class, errors.AsyncGrpoError):
            again = pickle.loads(pickle.dumps(error_class("message")))
            assert type(again) is error_class and str(again) == "message"
