"""A secret of the environment is planted, and looked for in every place that a process writes to."""

import os
import subprocess
import sys

import pytest

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.options.redaction import redacted, secrets

SECRET = "sk-planted-0123456789"
PROGRAM = """
import logging, sys
from async_grpo.errors import RunFailed
from async_grpo.options.command_line import run_command
from async_grpo.options.log_setup import set_up_logging
from dataclasses import dataclass

SECRET = "sk-planted-0123456789"
logging.basicConfig(level=logging.INFO)
set_up_logging("INFO", "[x] ")
logging.getLogger("async_grpo.judges").warning("asked with %s, answered %d", SECRET, 401)
logging.getLogger("transformers.of_others").info(f"header: Bearer {SECRET}")
try:
    raise ValueError(f"no access by {SECRET}")
except ValueError:
    logging.getLogger("async_grpo.judges").exception("it failed")
if sys.argv.pop() == "refuses":
    @dataclass
    class Nothing:
        pass

    def run(config):
        raise RunFailed(f"401 for key {SECRET}")

    run_command(Nothing, run, help="")
raise OSError(f"unexpected: {SECRET}")
"""


@pytest.mark.parametrize(
    ("ending", "said"), [("refuses", "error: 401 for key ***"), ("dies", "unexpected: ***")]
)
def test_a_planted_secret_is_in_no_log_of_whoever_and_in_no_error(ending, said):
    environment = os.environ | {"MY_JUDGE_API_KEY": SECRET}
    command = [sys.executable, "-c", PROGRAM, ending]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and SECRET not in done.stdout + done.stderr
    for line in ("asked with ***, answered 401", "header: Bearer ***", "no access by ***", said):
        assert line in done.stderr, done.stderr


def test_what_is_short_or_a_path_or_not_called_a_secret_is_shown(monkeypatch, tmp_path):
    shown = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN_PATH": str(tmp_path),
        "PLAIN": "plain-and-long-enough",
    }
    hidden = {"DB_PASSWORD": "correct horse", "aws_secret": "aaaaaaaabbbb", "HF_TOKEN": "hf_aaaaaaaa"}
    for name, value in (shown | hidden).items():
        monkeypatch.setenv(name, value)
    assert hidden.items() <= secrets().items() and not shown.keys() & secrets().keys()
    assert redacted(" ".join(shown.values())) == " ".join(shown.values())
    assert redacted("correct horse / hf_aaaaaaaa") == "*** / ***"


def test_of_two_secrets_of_which_one_is_part_of_the_other_nothing_is_left(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-ijkl")
    assert redacted("abcdefgh-ijkl abcdefgh") == "*** ***"


def test_an_option_that_holds_a_secret_is_refused_before_it_is_written_anywhere(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_API_KEY", SECRET)
    with pytest.raises(
        ConfigurationError, match=r"judge_urls.* MY_JUDGE_API_KEY: .*name the variable"
    ) as error:
        RunConfig(model_name_or_path="m", data_path="d", judge_urls=f"https://judge/?key={SECRET}")
    assert SECRET not in str(error.value)
