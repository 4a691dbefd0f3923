"""Which options a folder may say is a list that grows on purpose only: what is new is not taken over."""

import inspect
from dataclasses import fields

import pytest

from async_grpo.config.run import RunConfig
from async_grpo.data.reward_registry import REWARD_ADAPTERS
from async_grpo.errors import ConfigurationError
from async_grpo.launch.evaluate import EvalConfig
from async_grpo.options.fields import choices_of, names_in
from async_grpo.options.portable import portable_options
from async_grpo.rewards.adapter.decorators import function_of
from async_grpo.rewards.config import FOLDER_REWARD_OPTIONS, SHIPPED_REWARDS
from async_grpo.rewards.judges.remote_judge import RemoteJudge

# Free text that a folder may say, and why it names no code, file, command or address
FREE_TEXT = {
    "curriculum": "a column of the data",
    "prompt_column": "a column of the data",
    "answer_column": "a column of the data",
    "reward_column": "a column of the data",
    "teacher_column": "a column of the data",
    "teacher_demonstration": "a column of the data",
    "teacher_template": "a text of the prompt",
    "chat_template_kwargs": "values that the user's own chat template reads",
    "system_prompt": "a text of the prompt",
    "estimator_options": "numbers and words that the estimator knows",
    "loss_options": "numbers and words that the loss knows",
    "reward_weights": "numbers by name",
    "reward_limits": "numbers by name",
    "running_mean_column": "a column of the data",
    "on_reward_failure": "one of four policies by name",
    "environment_options": "taken over for shipped environments alone",
    "lora_targets": "names of layers of the model",
    "tool_parser": "one of the readers of calls by name",
    "reasoning_parser": "one of vLLM's parsers by name",
    "eval_data_path": "a file, not of the hub, that is read as rows, and that no judge of the user's is sent",
}
OF_A_TABLE = {"reward_fns", "reward_options", "environment", "critic_model"}
# Options of shipped rewards that only the user may give, and why
THE_USERS_ALONE = {"allow_unsandboxed": "runs code that nothing keeps off the network"}


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


def test_a_folder_may_say_that_the_critic_starts_from_the_policy_and_names_no_other_folder(tmp_path):
    assert portable_options(RunConfig, {"critic_model": "same"}, {"critic_model"}, tmp_path) == {
        "critic_model": "same"
    }
    with pytest.raises(ConfigurationError, match="--critic-model /etc"):
        portable_options(RunConfig, {"critic_model": "/etc"}, {"critic_model"}, tmp_path)


def test_the_shipped_rewards_are_those_of_the_shipped_registry_that_ask_nobody():
    adapters = {str(getattr(name, "value", name)): adapter for name, adapter in REWARD_ADAPTERS.items()}
    judges = {name for name, adapter in adapters.items() if isinstance(adapter, RemoteJudge)}
    assert set(SHIPPED_REWARDS) == adapters.keys() - judges and len(judges) == 4


def test_the_names_of_a_table_are_read_without_importing_it():
    assert names_in("async_grpo.environments.make:ENVIRONMENTS") == ("guess", "countdown_tools")
    assert names_in(("a", "b")) == ("a", "b")


def options_of_shipped_rewards() -> dict[str, list[inspect.Parameter]]:
    """Return every keyword option of the shipped rewards, with its parameters: several rewards may share a name."""
    options: dict[str, list[inspect.Parameter]] = {}
    for name, adapter in REWARD_ADAPTERS.items():
        if str(getattr(name, "value", name)) in SHIPPED_REWARDS:
            for parameter in list(inspect.signature(function_of(adapter)).parameters.values())[1:]:
                options.setdefault(parameter.name, []).append(parameter)
    return options


def test_each_option_of_a_shipped_reward_may_be_said_by_a_folder_or_a_line_says_why_not():
    options = options_of_shipped_rewards()
    assert {"allow_unsandboxed", "test_seconds", "weight", "pattern"} <= options.keys()
    assert options.keys() == FOLDER_REWARD_OPTIONS.keys() | THE_USERS_ALONE.keys()
    assert not FOLDER_REWARD_OPTIONS.keys() & THE_USERS_ALONE.keys()


def test_a_limit_of_time_or_memory_may_only_be_lowered_from_its_default():
    limits = {name: largest for name, largest in FOLDER_REWARD_OPTIONS.items() if largest is not None}
    options = options_of_shipped_rewards()
    assert limits.keys() == {name for name in options if name.endswith(("_seconds", "_s", "_mb", "_gb"))}
    for name, largest in limits.items():
        assert {parameter.default for parameter in options[name]} == {largest}, name


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        ("weight=0.5", True),
        ("test_seconds=4,all_or_nothing=true", True),
        ("test_seconds=4.001", False),
        ("total_seconds=21", False),
        ("memory_mb=1025", False),
        ("memory_mb=0", False),
        ("memory_mb=true", False),
        ("memory_mb=much", False),
        ("allow_unsandboxed=true", False),
        ("weight=0.5, allow_unsandboxed = true", False),
        ("url=http://127.0.0.1", False),
    ],
)
def test_of_the_options_of_rewards_a_folder_says_harmless_ones_alone(tmp_path, said, is_taken):
    stored = {"reward_fns": "code,format", "reward_options": said}
    if is_taken:
        assert portable_options(EvalConfig, stored, stored, tmp_path) == stored
        return
    with pytest.raises(ConfigurationError, match="give --reward-options yourself"):
        portable_options(EvalConfig, stored, stored, tmp_path)


@pytest.mark.parametrize("value", [10**30, 10**9 + 1])
def test_a_number_of_a_folder_has_an_upper_bound_whatever_the_options_own_range(tmp_path, value):
    with pytest.raises(ConfigurationError, match="at most 1e\\+09 is taken over: give --max-turns yourself"):
        portable_options(EvalConfig, {"max_turns": value}, {"max_turns"}, tmp_path)
    assert portable_options(EvalConfig, {"max_turns": 10**9}, {"max_turns"}, tmp_path) == {"max_turns": 10**9}


def test_an_option_that_is_left_out_without_an_error_is_named(tmp_path, capsys):
    stored = {"tensor_parallel_size": 4, "split_control_tokens": False, "max_turns": 3}
    assert portable_options(EvalConfig, stored, stored, tmp_path) == {"max_turns": 3}
    assert (
        f"not taken over from the run of {tmp_path}: split_control_tokens=False tensor_parallel_size=4"
        in (capsys.readouterr().out)
    )
