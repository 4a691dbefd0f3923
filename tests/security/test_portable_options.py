"""Which options a folder may say is a list that grows on purpose only: what is new is not taken over."""

from dataclasses import fields

import pytest

from async_grpo.config.run import RunConfig
from async_grpo.data.reward_registry import REWARD_ADAPTERS
from async_grpo.launch.evaluate import EvalConfig
from async_grpo.options.fields import choices_of, names_in
from async_grpo.rewards.config import SHIPPED_REWARDS
from async_grpo.rewards.judges.remote_judge import RemoteJudge

# Free text that a folder may say, and why it names no code, file, command or address
FREE_TEXT = {
    "curriculum": "a column of the data",
    "reward_column": "a column of the data",
    "estimator_options": "numbers and words that the estimator knows",
    "loss_options": "numbers and words that the loss knows",
    "reward_weights": "numbers by name",
    "reward_limits": "numbers by name",
    "on_reward_failure": "one of four policies by name",
    "reward_options": "taken over for shipped rewards alone",
    "environment_options": "taken over for shipped environments alone",
    "eval_data_path": "a file that is read as rows of JSON",
}
OF_A_TABLE = {"reward_fns", "environment"}


@pytest.mark.parametrize("config", [RunConfig, EvalConfig])
def test_text_is_portable_only_where_a_line_says_why(config):
    texts = [field for field in fields(config) if field.metadata["portable"] and "str" in str(field.type)]
    free = {field.name for field in texts if not choices_of(field)}
    assert free - OF_A_TABLE <= FREE_TEXT.keys()
    for name in free & OF_A_TABLE:
        assert config.__dataclass_fields__[name].metadata["portable"] is not True


def test_what_names_code_files_commands_and_addresses_is_not_portable():
    named = "reward_registry reward_env reward_fallback judge_urls http_scorer_urls judge_model engine engine_options"
    for name in named.split():
        assert not EvalConfig.__dataclass_fields__[name].metadata["portable"], name
    for (
        name
    ) in "model_name_or_path data_path output_dir weight_folder weight_transport track verdict_cache".split():
        assert not RunConfig.__dataclass_fields__[name].metadata["portable"], name


def test_the_shipped_rewards_are_those_of_the_shipped_registry_that_ask_nobody():
    adapters = {str(getattr(name, "value", name)): adapter for name, adapter in REWARD_ADAPTERS.items()}
    judges = {name for name, adapter in adapters.items() if isinstance(adapter, RemoteJudge)}
    assert set(SHIPPED_REWARDS) == adapters.keys() - judges and len(judges) == 4


def test_the_names_of_a_table_are_read_without_importing_it():
    assert names_in("async_grpo.environments.make:ENVIRONMENTS") == ("guess", "countdown_tools")
    assert names_in(("a", "b")) == ("a", "b")
