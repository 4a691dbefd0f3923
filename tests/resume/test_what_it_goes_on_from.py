"""What `--resume` takes, what it refuses by name, and where the same command goes on."""

import dataclasses
import json
from pathlib import Path

import pytest
from fake_chain import chain_config

from async_grpo.config.resume import FIXED, as_options, data_digests, find_checkpoint, goes_on, refuse_changes
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE
from async_grpo.training.checkpoint_folder import Manifest, checkpoints_of, complete, partial_folder, versions


@pytest.fixture
def config(tmp_path) -> RunConfig:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    return chain_config(data_path=str(data), output_dir=str(tmp_path / "run"), reward_fns="countdown")


def save(config: RunConfig, step: int, **changes) -> Path:
    partial = partial_folder(config.output_path, step)
    partial.mkdir(parents=True)
    (partial / "experience.json").write_text("{}")
    told = {"step": step, "samples": step * 8, "world_size": 1, "versions": versions()}
    return complete(
        partial, Manifest(**told | {"options": as_options(config), "inputs": data_digests(config)} | changes)
    )


CHANGES = {
    "infinite_sampler_seed": {"infinite_sampler_seed": 99},
    "groups_per_step": {"train_minibatch_size": 4},
    "samples_in_flight": {"max_staleness": 1, "groups_alive": 3},
    "temperature": {"temperature": 0.5},
    "max_generation_tokens": {"max_generation_tokens": 7},
    "reward_fns": {"reward_fns": "format"},
    "advantage_estimator": {"advantage_estimator": "rloo"},
    "logprob_roles": {"kl_coef": 0.1},
    "max_staleness": {"max_staleness": 5},
    "min_p": {"min_p": 0.1},
    "samples_per_question": {"samples_per_question": 2, "batch_size": 4},
    "model_name_or_path": {"model_name_or_path": "elsewhere"},
    "passes_per_batch": {"passes_per_batch": 2},
    "teacher_top_k": {"teacher_top_k": 8},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_finished_groups_rest_on_cannot_change(config, name):
    saved = save(config, 3)
    with pytest.raises(ConfigurationError, match="--resume never, and another --output-dir") as refused:
        find_checkpoint(dataclasses.replace(config, **CHANGES[name]))
    assert str(saved) in str(refused.value) and ", but it was" in str(refused.value)


def test_the_batch_of_several_passes_cannot_change_nor_can_they_be_added_to_an_older_run(config):
    passes = dataclasses.replace(config, passes_per_batch=2, max_staleness=7)
    saved = save(passes, 4)
    with pytest.raises(ConfigurationError, match="--batch-size .with several passes per batch"):
        find_checkpoint(dataclasses.replace(passes, batch_size=4, train_minibatch_size=8))
    older = {name: value for name, value in as_options(passes).items() if "passes" not in name}
    save(passes, 6, options={name: value for name, value in older.items() if name != "cycle_steps"})
    with pytest.raises(ConfigurationError, match="--passes-per-batch: the value is 2, but it was 1"):
        find_checkpoint(passes)
    assert saved.exists()


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"teacher_top_k": 8}])
def test_options_that_an_older_run_did_not_have_cannot_be_added(config, change):
    (name,) = change
    changed = dataclasses.replace(config, **change)
    older = {option: value for option, value in as_options(config).items() if option != name}
    save(config, 6, options=older)
    assert find_checkpoint(config) is not None
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}: the value is .*, but it was"):
        find_checkpoint(changed)


OTHER_VALUES = {bool: True, int: 7, float: 0.125, str: "other"}
FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}


@pytest.mark.parametrize("name", sorted(FIXED.keys() & FIELDS.keys()))
def test_a_run_that_is_older_than_an_option_ran_with_its_default(config, name):
    """Before, each option that the checkpoint did not name was taken for unchanged."""
    default = FIELDS[name].default
    has_default = default is not dataclasses.MISSING
    if has_default:
        unchanged = dataclasses.replace(config)
        object.__setattr__(unchanged, name, default)
        earlier_of_default = {key: value for key, value in as_options(unchanged).items() if key != name}
        refuse_changes(unchanged, Path("earlier"), earlier_of_default)
    changed = dataclasses.replace(config)
    value = "other" if default is None or not has_default else OTHER_VALUES[type(default)]
    value = not default if isinstance(default, bool) else value
    object.__setattr__(changed, name, value)  # no rule between options refuses it
    earlier = {key: value for key, value in as_options(changed).items() if key != name}
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}: the value is .*, but it was"):
        refuse_changes(changed, Path("earlier"), earlier)


def test_the_table_of_the_page_is_that_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "continue-a-run.md").read_text()
    for name, reason in FIXED.items():
        assert reason in page, name


def test_other_options_may_change_and_the_log_says_which(config, caplog):
    saved = save(config, 3, versions={"torch": "1.0"})
    found = find_checkpoint(dataclasses.replace(config, learning_rate=0.5, train_minibatch_size=8))
    assert found is not None and found[0] == saved
    assert "--learning-rate" in caplog.text and "-> 0.5" in caplog.text and "torch 1.0 ->" in caplog.text
    assert "--resume" not in caplog.text


def test_another_file_of_questions_is_refused(config):
    save(config, 3)
    Path(config.data_path).write_text("{} \n")
    with pytest.raises(ConfigurationError, match="the file of --data-path is not the one"):
        find_checkpoint(config)


def test_where_no_checkpoint_can_be_used_nothing_begins_anew(config):
    (save(config, 3) / "manifest.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds 1 checkpoints, and none of them can be used"):
        find_checkpoint(config)
    assert find_checkpoint(dataclasses.replace(config, resume="never")) is None


def test_a_run_without_a_checkpoint_begins_again_and_another_one_is_refused(config, caplog):
    config.output_path.mkdir()
    (config.output_path / METRICS_FILE).write_text("{}\n")
    (config.output_path / PARAMS_FILE).write_text(json.dumps(as_options(config)))
    assert find_checkpoint(config) is None and "it begins again" in caplog.text
    with pytest.raises(ConfigurationError, match="--temperature: the value is 0.25, but it was"):
        find_checkpoint(dataclasses.replace(config, temperature=0.25))


def test_the_same_command_with_a_path_goes_on_from_what_it_has_made(config, tmp_path):
    first = save(config, 3)
    elsewhere = dataclasses.replace(config, resume=str(first), output_dir=str(tmp_path / "other"))
    assert find_checkpoint(elsewhere)[0] == first and not goes_on(elsewhere)
    made = save(elsewhere, 5)
    assert find_checkpoint(elsewhere)[0] == made and goes_on(elsewhere)
    back = dataclasses.replace(config, resume=str(first))
    save(config, 4)
    assert find_checkpoint(back)[0] == first and goes_on(back)


def test_never_means_a_new_folder_even_below_the_working_folder(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not goes_on(dataclasses.replace(config, resume="never", output_dir="."))
    assert goes_on(config)


def test_rewards_that_the_workers_will_name_are_not_compared_yet(config):
    assert find_checkpoint(dataclasses.replace(config, reward_fns="")) is None
    save(config, 3)
    assert find_checkpoint(dataclasses.replace(config, reward_fns="")) is not None
    assert len(checkpoints_of(config.output_path)) == 1
