"""`async-grpo eval`: what it takes over of a checkpoint's run, what goes before, and what is refused."""

import dataclasses
import json

import pytest

from async_grpo.__main__ import main
from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.launch.commands import COMMANDS, config_class
from async_grpo.launch.evaluate import EvalConfig, _absolute_adapters, evaluate
from async_grpo.launch.evaluator import EvaluatorConfig
from async_grpo.training.checkpoint_folder import Manifest, complete, partial_folder

OF_THE_RUN = {
    "model_name_or_path": "the model",
    "data_path": "train.jsonl",
    "reward_fns": "countdown,format",
    "reward_options": "weight=0.5",
    "eval_data_path": "held=held.jsonl",
    "eval_samples": 4,
    "eval_every": 10,
    "keep_best": "held",
    "temperature": 0.75,
    "top_p": 0.9,
    "max_generation_tokens": 24,
    "infinite_sampler_seed": 5,
    "kl_coef": 0.1,
    "max_staleness": 2,
}


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoint_with(tmp_path)


def checkpoint_with(tmp_path, **changes):
    partial = partial_folder(tmp_path / "run", 12)
    partial.mkdir(parents=True)
    (partial / "experience.json").write_text("{}")
    known = {"step": 12, "samples": 96, "world_size": 1, "inputs": {}, "versions": {}}
    return complete(partial, Manifest(**known, options=as_options(RunConfig(**OF_THE_RUN)) | changes))


def given(path, **options) -> EvalConfig:
    """As the command line makes it."""
    defaults = {one.name: one.default for one in dataclasses.fields(EvalConfig)}
    return EvalConfig.from_options(defaults | {"path": str(path)} | options, {"path", *options})


def test_what_is_not_given_is_as_in_the_run_of_the_checkpoint(checkpoint):
    for path in (checkpoint, checkpoint.parents[1]):  # the checkpoint's folder, and the run's
        run = given(path, output_dir="here").as_run("exported")
        taken = ("reward_fns", "reward_options", "eval_data_path", "eval_samples", "temperature")
        for name in (*taken, "top_p", "max_generation_tokens", "infinite_sampler_seed"):
            assert getattr(run, name) == OF_THE_RUN[name], name
        assert (run.model_name_or_path, run.data_path, run.output_dir) == ("exported", "held.jsonl", "here")
        assert run.logprob_roles == () and run.nproc_per_node == 0 and run.resume == "never"
        assert run.samples_per_question >= run.eval_samples and run.dtype in ("float32", "bfloat16")


def test_what_is_given_goes_before(checkpoint):
    config = given(
        checkpoint,
        eval_samples=1,
        eval_data_path="a=1.jsonl,b=2.jsonl",
        reward_fns="format",
        eval_max_tokens=99,
    )
    run = config.as_run("exported")
    assert (run.eval_samples, run.reward_fns, run.max_generation_tokens) == (1, "format", 99)
    assert run.eval_files == {"a": "1.jsonl", "b": "2.jsonl"} and run.data_path == "1.jsonl"


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (24, None)),
        ({"max_generation_tokens": 99}, (99, None)),
        ({"eval_max_tokens": 99}, (99, 99)),
        ({"eval_max_tokens": 99, "max_generation_tokens": 5}, (99, 99)),
    ],
)
def test_the_length_of_completions_is_given_as_in_training(checkpoint, options, lengths):
    run = given(checkpoint, **options).as_run("exported")
    assert (run.max_generation_tokens, run.eval_max_tokens) == lengths


@pytest.mark.parametrize(
    ("options", "temperatures"),
    [
        ({}, (0.75, None)),
        ({"temperature": 0.5}, (0.5, None)),
        ({"eval_temperature": 0.0}, (0.75, 0.0)),
    ],
)
def test_the_temperature_is_given_as_in_training(checkpoint, options, temperatures):
    run = given(checkpoint, **options).as_run("exported")
    assert (run.temperature, run.eval_temperature) == temperatures


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({}, (0.9, 0, 0.0)),
        ({"top_p": 1.0}, (1.0, 0, 0.0)),
        ({"top_k": 20, "min_p": 0.05}, (0.9, 20, 0.05)),
    ],
)
def test_sampling_is_truncated_as_in_training_unless_the_options_say_otherwise(checkpoint, options, rules):
    run = given(checkpoint, **options).as_run("exported")
    assert (run.top_p, run.top_k, run.min_p) == rules


def test_a_judge_that_the_evaluation_serves_itself_is_not_looked_for_where_the_run_had_it(tmp_path):
    url = "http://127.0.0.1:1"
    checkpoint = checkpoint_with(tmp_path, judge_urls=url)
    with pytest.raises(
        ConfigurationError, match="used --judge-urls http://127.0.0.1:1.* give --judge-urls yourself"
    ):
        given(checkpoint)
    assert given(checkpoint, judge_urls=url, eval_data_path="held.jsonl").judge_urls == url
    assert given(checkpoint, judge_model="judge").judge_urls == ""


def test_a_model_s_folder_has_the_defaults_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    run = given(tmp_path, eval_data_path="x.jsonl", reward_fns="format").as_run(tmp_path)
    assert (run.temperature, run.eval_samples, run.eval_files) == (1.0, 1, {"": "x.jsonl"})
    assert run.truncation is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_fns": "format"}, "say on what: --data FILE"),
        ({"eval_data_path": "x.jsonl"}, "name the rewards of the run"),
        ({"eval_data_path": "a=,b", "reward_fns": "format"}, "NAME=FILE"),
    ],
)
def test_an_evaluation_that_lacks_something_is_refused(tmp_path, options, message):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=message):
        evaluate(given(tmp_path, **options))


def test_a_folder_that_holds_nothing_of_ours_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path), "--data", "x.jsonl", "--reward-fns", "format"])
    assert ended.value.code == 2
    assert (
        "holds no model (config.json or model_index.json), no adapter, no run and no checkpoint"
        in capsys.readouterr().err
    )


def test_a_broken_checkpoint_is_refused_by_name(checkpoint):
    (checkpoint / "manifest.json").write_text("{}")
    config = given(checkpoint, eval_data_path="x.jsonl", reward_fns="format")
    with pytest.raises(ConfigurationError, match=r"step_000000012: manifest\.json"):
        evaluate(config)


def test_adapters_are_compared_on_a_model_alone_and_named_by_absolute_paths(
    checkpoint, tmp_path, monkeypatch
):
    options = {"eval_data_path": "x.jsonl", "reward_fns": "format"}
    config = given(checkpoint, lora_adapters=str(tmp_path), **options)
    with pytest.raises(ConfigurationError, match="is no model: give the folder of the base"):
        evaluate(config)
    base = tmp_path / "base"
    adapter = tmp_path / "adapters" / "a"
    for folder, name in ((base, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir(parents=True)
        (folder / name).write_text("{}")
    with pytest.raises(ConfigurationError, match=r"a=nowhere: there is no adapter_config\.json"):
        evaluate(given(base, lora_adapters="a=nowhere", **options))
    monkeypatch.chdir(tmp_path)
    assert json.loads(_absolute_adapters("adapters", base)) == {"a": str(adapter)}
    assert not hasattr(given(base, lora_adapters="adapters", **options).as_run(base), "lora_adapters")


def test_its_own_program_and_the_workers_read_the_same_parameters(tmp_path):
    """Every key of the file is an option of the run, of the worker, or of the evaluator."""
    (tmp_path / "config.json").write_text("{}")
    run = given(tmp_path, eval_data_path="x.jsonl", reward_fns="format").as_run(tmp_path)
    known = {one.name for name in ("run", "worker") for one in dataclasses.fields(config_class(name))}
    assert set(json.loads(json.dumps(dataclasses.asdict(run)))) <= known
    assert {one.name for one in dataclasses.fields(EvaluatorConfig)} - known == {
        "evaluated",
        "step",
        "lora_adapters",
    }
    assert COMMANDS["eval"].config == "EvalConfig"
