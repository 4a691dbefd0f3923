"""Forms in which public data sets hold the tests of a row."""

import json

import pytest
from sandboxes import needs_network_off

from async_grpo.rewards.builtin import code_tests, row_checks
from async_grpo.rewards.builtin.code import score

IO = {"input": "6\n", "output": "7\n"}
CALL = {"assert": "assert f(6) == 7"}

FORMS = {
    "inputs and outputs": ([IO, IO], [IO, IO]),
    "assertions": ([CALL], [CALL]),
    "both": ([CALL, IO], [CALL, IO]),
    "MBPP": (["assert f(6) == 7", "assert f(1) == 2"], [CALL, {"assert": "assert f(1) == 2"}]),
    "APPS and verl": ({"inputs": ["6\n", "7"], "outputs": ["7\n", "8"]}, [IO, {"input": "7", "output": "8"}]),
    "without a function": ({"fn_name": None, "inputs": ["6\n"], "outputs": ["7\n"]}, [IO]),
    "lists of lines": ({"inputs": [["6", ""]], "outputs": [["7", ""]]}, [IO]),
    "CodeContests": ({"input": ["6\n"], "output": ["7\n"]}, [IO]),
    "LiveCodeBench": ([IO | {"testtype": "stdin"}], [IO]),
    "an empty input": ({"inputs": [""], "outputs": ["7"]}, [{"input": "", "output": "7"}]),
}


@pytest.mark.parametrize(("form", "tests"), FORMS.values(), ids=FORMS)
def test_forms_of_public_data_sets_are_read_also_as_json(form, tests):
    assert code_tests.tests_of({"tests": form}) == code_tests.tests_of({"tests": json.dumps(form)}) == tests


REFUSED = [
    # form, why
    (None, "needs a list"),
    ([], "needs a list"),
    ({}, "of the same length"),
    ("[]", "needs a list"),
    ("assert f(6) == 7", "needs a list"),
    ("[1, 2", "needs a list"),
    ("[" * 100_000, "needs a list"),
    (7, "needs a list"),
    (["f(6) == 7"], "a test must have texts"),
    ([""], "a test must have texts"),
    ([None], "a test must have texts"),
    ([["6", "7"]], "a test must have texts"),
    ([{"input": "6"}], "a test must have texts"),
    ([{"input": 6, "output": 7}], "a test must have texts"),
    ([IO | {"assert": "x"}], "a test must have texts"),
    ([IO | {"weight": 1}], "a test must have texts"),
    ([{"assert": ["assert f(6) == 7"]}], "a test must have texts"),
    ({"inputs": ["6"], "outputs": []}, "of the same length"),
    ({"inputs": "6", "outputs": "7"}, "of the same length"),
    ({"inputs": [], "outputs": []}, "needs a list"),
    ({"inputs": [[6]], "outputs": ["7"]}, "a test must have texts"),
    ({"fn_name": "f", "inputs": [[6]], "outputs": [[7]]}, "function 'f' by its name: write them"),
    (
        [{"input": "6", "output": "7", "testtype": "functional"}],
        "'functional' call a function by its name: write",
    ),
]


@pytest.mark.parametrize(("form", "why"), REFUSED)
def test_other_forms_are_refused(form, why):
    with pytest.raises(ValueError, match=why):
        code_tests.tests_of({"tests": form})


@pytest.mark.parametrize(
    ("statements", "why"),
    [
        ("assert f(6) = 7", "is not valid Python"),
        ("    assert f(6) == 7", "is not valid Python: unexpected indent"),
        ("assert f(" + "(" * 5000 + "6", "is not valid Python"),
        ("import numpy as np\nassert f(6) == 7", "imports numpy, but tests can import only"),
        ("from pandas.testing import x\nassert f(6) == 7", "imports pandas"),
        ("import pytest\nwith pytest.raises(ValueError): assert f(6)", "imports pytest"),
        ("import io, sys\nsys.stdout = io.StringIO()\nassert f(6) is None", "uses sys.stdout"),
        ("from contextlib import redirect_stdout as r\nassert f(6) is None", "uses redirect_stdout"),
        ("import contextlib\nwith contextlib.redirect_stdout(None): assert f(6)", "uses redirect_stdout"),
        ("def test(capsys):\n    assert f(6) is None", "uses capsys, but the tested code runs in a process"),
        ("from unittest.mock import patch\nassert f(6) == 7", "uses patch"),
        ("import unittest\nwith unittest.mock.patch('builtins.input'): assert f(6)", "uses patch"),
    ],
)
def test_statements_that_could_only_judge_wrongly_are_refused_before_a_run(statements, why):
    with pytest.raises(ValueError, match=why):
        row_checks.check_code_row({"tests": [{"assert": statements}]})


@pytest.mark.parametrize(
    "statements",
    [
        "from solution import f\nassert f(6) == 7",
        "from collections.abc import Sequence\nassert f(6) == 7",
        "try:\n    import numpy\nexcept ImportError:\n    pass\nassert f(6) == 7",
        "import sys\nassert f(6) < sys.maxsize\nsys.stdout.flush()",
        "from contextlib import suppress\nassert f(6) == 7",
        "from unittest.mock import ANY\nassert f(6) == 7",
        "def patch(x): return f(x)\nassert patch(6) == 7",
        "class T:\n    patch = 7\nassert f(6) == T.patch",
    ],
)
@needs_network_off
def test_statements_that_look_like_refused_ones_are_run(statements):
    code = "```python\ndef f(x):\n    return x + 1\n```"
    assert score({"completion": code, "tests": [{"assert": statements}]})["reward"] == 1.0


@needs_network_off
def test_tests_in_json_are_run():
    code = (
        "```python\ndef f(x):\n    return x + 1\nif __name__ == '__main__':\n    print(f(int(input())))\n```"
    )
    tests = json.dumps({"inputs": ["6\n", "1"], "outputs": ["7\n", "3"]})
    assert score({"completion": code, "tests": tests})["reward"] == 0.5
    assert score({"completion": code, "tests": ["assert f(6) == 7"]})["reward"] == 1.0
