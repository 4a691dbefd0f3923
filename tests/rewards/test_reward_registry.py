"""The user's page: cheap to import, complete, and the same text in every process."""

import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, parse_names, resolve
from async_grpo.rewards.judges import JudgeAddresses
from reward_registry import REWARD_ADAPTERS, RewardType

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "reward_registry.py"


def modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


HEAVY = "sympy math_verify latex2sympy2_extended numpy torch ray vllm aiohttp jsonschema openai asyncio"
BUILTIN = "; ".join(
    f"import async_grpo.rewards.builtin.{name}" for name in ("countdown", "text", "math_verify", "sympy")
)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import reward_registry", HEAVY),
        ("import async_grpo.rewards.isolation.child", "numpy asyncio async_grpo.types"),
        (BUILTIN, "ray vllm torch transformers"),
    ],
    ids=["the page", "the process of an adapter", "the shipped rewards"],
)
def test_what_every_process_of_a_reward_imports_is_cheap(statement, unwanted):
    assert not modules_after(statement) & set(unwanted.split())


NAMES = (
    "math_verify mathd sympy countdown countdown_steps format code regex exact length majority json_schema environment "
    "environment_turns unscored "
    "llm_judge generative_rm reward_model http_scorer"
).split()


def test_every_reward_type_has_its_adapter():
    assert set(REWARD_ADAPTERS) == set(RewardType)
    assert [kind.value for kind in RewardType] == NAMES
    assert all(kind.value == kind.name.lower() for kind in RewardType)
    assert REWARD_ADAPTERS["mathd"] is REWARD_ADAPTERS[RewardType.MATHD]  # type: ignore[index]


def test_a_judge_server_of_the_run_is_no_http_scorer():
    page = RewardRegistrySource("page_of_judges", PAGE.read_text())

    def urls(addresses: JudgeAddresses) -> dict[str, tuple[str, ...]]:
        return {name: addresses.with_address(one).urls for name, one in resolve(page, NAMES[-4:]).items()}

    server = (ROOT / "examples" / "http_scorer_server.py").read_text()
    assert resolve(page, ["http_scorer"])["http_scorer"].endpoint().urls == ("http://127.0.0.1:8080",)
    assert '"--port", type=int, default=8080' in server
    of_the_run = dict.fromkeys(NAMES[-4:-1], ("http://127.0.0.1:1",))
    scorers = {"http_scorer": ("http://127.0.0.1:2", "http://127.0.0.1:3")}
    scorer_urls = "http://127.0.0.1:2, http://127.0.0.1:3"
    given = JudgeAddresses(judge_urls="http://127.0.0.1:1", http_scorer_urls=scorer_urls)
    assert urls(given) == {**of_the_run, **scorers}
    with pytest.raises(
        ConfigurationError, match="LLMJudge has no address: give --judge-urls, .*--judge-model"
    ):
        urls(JudgeAddresses())


def test_a_page_is_loaded_once_and_anew_when_its_text_changes():
    first = RewardRegistrySource("changing_page", "VALUE = 1").load()
    assert RewardRegistrySource("changing_page", "VALUE = 1").load() is first
    second = RewardRegistrySource("changing_page", "VALUE = 2").load()
    assert (first.VALUE, second.VALUE) == (1, 2) and sys.modules["changing_page"] is second


def test_a_page_that_raises_is_the_users_mistake_and_leaves_no_half_module():
    for text, reason in (("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError")):
        with pytest.raises(ConfigurationError, match=f"broken_page cannot be imported: {reason}"):
            RewardRegistrySource("broken_page", text).load()
        assert "broken_page" not in sys.modules


@pytest.mark.parametrize(
    "names", ["mathd,countdown", " mathd , countdown,", ["mathd", "countdown"], list(RewardType)[1:4:2]]
)
def test_names_come_as_a_list_or_comma_separated(names):
    assert list(resolve(RewardRegistrySource.from_file(PAGE), names)) == ["mathd", "countdown"]
    assert parse_names("sympy,mathd,sympy") == ("sympy", "mathd")  # twice counts once


KNOWN = "reward_registry knows " + ", ".join(sorted(kind.value for kind in RewardType))


@pytest.mark.parametrize(
    ("names", "problem"),
    [(" , ", "no reward function is named"), ("mathx,mathd,y", "unknown reward function mathx, y")],
)
def test_no_reward_and_an_unknown_one_are_errors_that_list_the_known_ones(names, problem):
    with pytest.raises(ConfigurationError, match=f"^{problem}: {KNOWN}; or FILE.py:NAME"):
        resolve(RewardRegistrySource.from_file(PAGE), names)
    with pytest.raises(ConfigurationError, match="no dict REWARD_ADAPTERS"):
        resolve(RewardRegistrySource("empty_page", ""), names)


def test_the_ten_lines_of_the_pages_docstring_work():
    lines = PAGE.read_text().split('"""')[1].splitlines()
    example = [line[4:] for line in lines if line.startswith("    ")]
    page = "from enum import Enum\n" + "\n".join(example)
    adapters = resolve(RewardRegistrySource("docstring_page", page), "short")
    assert adapters["short"]({"completion_token_ids": [1] * 99}) == {"reward": 1.0, "num_tokens": 99}
    assert adapters["short"]({"completion_token_ids": [1] * 99}, max_tokens=98)["reward"] == 0.0


@pytest.mark.parametrize("name", ["json.py", "my-rewards.py"])
def test_a_page_must_not_pose_as_another_module(name, tmp_path):
    (tmp_path / name).write_text("REWARD_ADAPTERS = {}")
    with pytest.raises(ConfigurationError, match="rename it"):
        RewardRegistrySource.from_file(tmp_path / name)
