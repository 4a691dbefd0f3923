"""Answers with code as models write them: fences, blocks that are no answer, exits, preludes, numbers in the output."""

import pytest
from reading_time import check_reading_time
from reported_inputs import reported_rows
from sandboxes import needs_network_off

from async_grpo.data.reward_registry import REWARD_ADAPTERS, RewardType
from async_grpo.rewards.answer_reading.fences import fenced_blocks
from async_grpo.rewards.answer_reading.program_output import Tolerance, same_output
from async_grpo.rewards.answer_reading.python_code import with_prelude
from async_grpo.rewards.answer_reading.stated import stated_answer
from async_grpo.rewards.builtin.code import code_of, score

TOLERANCE = Tolerance(relative=2e-6)
ROWS = reported_rows("code.jsonl")


@needs_network_off
@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_reported_completions_get_the_right_reward(row):
    # Outputs are compared as text by default, which the rows about numbers call wrong
    options = {"relative_tolerance": TOLERANCE.relative} if row.get("documented") else {}
    assert score(row, **options)["reward"] == row["label"]


F = "def f(x):\n    return x + 1\n"
BROKEN = "def f(x):\n    return x +\n"
DOC = 'def f(x):\n    """Add one.\n\n```\nf(1)\n```\n    """\n    return x + 1\n'


def indented(code: str, by: str) -> str:
    return "".join(by + line + "\n" for line in code.splitlines())


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("~~~python\na\n~~~", [("python", "a\n")]),
        ("~~~\na\n~~~~~", [("", "a\n")]),
        ("````python\na\n```\nb\n````", [("python", "a\n```\nb\n")]),
        ("```python\na\n````", [("python", "a\n")]),
        ("~~~python\n```\na\n```\n~~~", [("python", "```\na\n```\n")]),
        ("```python\n~~~\na\n~~~\n```", [("python", "~~~\na\n~~~\n")]),
        ("```{.python .numberLines}\na\n```", [("python", "a\n")]),
        ("```{python}\na\n```", [("python", "a\n")]),
        ("~~~ {.python title='x'}\na\n~~~", [("python", "a\n")]),
        ("```python:main.py\na\n```", [("python", "a\n")]),
        ("```Python3.11 hl_lines=[1]\na\n```", [("python3", "a\n")]),
        ("```c++\na\n```", [("c", "a\n")]),
        ("~~~ a `b`\nc\n~~~", [("a", "c\n")]),
        ("```python print(7)```\na\n```\nb\n```", [("", "b\n")]),  # the first line is text with code in it
        ("``\na\n``", []),
        # In a text without any block, a fence behind other words
        ("Here: ```python\na\n```", [("python", "a\n")]),
        ("Here: ```\na\n```", []),
        ("Here: ```bash\na\n```", []),
        ("Use `x` in ```python\na\n```", []),
        ("Write ```python\nor\n```\nb\n```", [("", "b\n")]),
        # A fence at the end of a line of code
        ("```python\na\nb```", [("python", "a\nb\n")]),
        ("```python\na\nb``` \nDone.", [("python", "a\nb\n")]),
        ("```python\na```\nRun:\n```bash\nc\n```", [("python", "a\n"), ("bash", "c\n")]),
        ("~~~py\na~~~", [("py", "a\n")]),
        ("````py\na```", []),
        ("```python\na  # ```\nb\n```", [("python", "a  # ```\nb\n")]),
        ("```python\n'''\na```\n'''\n```", [("python", "'''\na```\n'''\n")]),
        # In lists and quotes
        ("1. x\n\n   ```py\n   a\n     b\n   ```", [("py", "a\n  b\n")]),
        ("- ```py\n  a\n  ```\n- b", [("py", "a\n")]),
        ("10) ~~~\n    a\n    ~~~", [("", "a\n")]),
        ("* x\n\t```py\n\ta\n\t\tb\n\t```", [("py", "a\n\tb\n")]),
        ("      ```py\n      a\n      ```", [("py", "a\n")]),
        ("  ```py\na\n   b\n  ```", [("py", "a\n   b\n")]),
        ("   ```py\n   a\n```", [("py", "a\n")]),
        ("> ```py\n> a\n>   b\n> ```\nc", [("py", "a\n  b\n")]),
        ("> ```py\n> a\nc\n```\nd\n```", [("py", "a\n"), ("", "d\n")]),
        ("> > - ```py\n> >   a\n> >   ```", [("py", "a\n")]),
        ("-```\na\n```", []),
        ("1.```\na\n```", []),
        # A fence in the text of a block
        ("```py\nx = '''\n```\n'''\n```", [("py", "x = '''\n```\n'''\n")]),
        ('```py\nx = """a"""\n```\nb """\n```\nc\n```', [("py", 'x = """a"""\n'), ("", "c\n")]),
        ("```py\nx = '\"\"\"'  # '''\n```\n'''", [("py", "x = '\"\"\"'  # '''\n")]),
        ("```py\n    ```\n```", [("py", "    ```\n")]),
        ("```js\nx = '''\n```\n'''\n```", [("js", "x = '''\n")]),
        ("```text\n'''\n```\nb", [("text", "'''\n")]),
        # Ends by looser rules only
        ("```py\nx = '''\n```\nb\n", [("py", "x = '''\n")]),
        ("```py\nx = '''\n```\nb\n```py\nc\n```", [("py", "x = '''\n"), ("py", "c\n")]),
        ("```py\na\n      ```\nb", [("py", "a\n")]),
        ("````py\na\n```\nb", [("py", "a\n")]),
        # Without an end
        ("```py\na", []),
        ("~~~\na", []),
        ("~~~~~\n```py\na\n```", [("py", "a\n")]),
        ("```py\na\n~~~", []),
        ("```py\r\na\r\n```\r\nb", [("py", "a\r\n")]),
    ],
)
def test_fenced_blocks_are_read_as_commonmark_reads_them_where_models_obey_it(text, blocks):
    assert fenced_blocks(text) == blocks


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So:\n~~~\n7\n~~~", "7"),
        ("````\n7\n````", "7"),
        ("```\n7\n```", "7"),
        ("a\n~~~", "~~~"),
        ("7\n--", "--"),
    ],
)
def test_the_last_line_may_be_the_end_of_any_fence(text, answer):
    assert stated_answer(text, ["last line"]) == answer


def python(*codes: str) -> str:
    return "".join(f"Then:\n```python\n{code}```\n" for code in codes)


def plain(*codes: str) -> str:
    return "".join(f"Then:\n```\n{code}```\n" for code in codes)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # An example of use, a test, a session, a command or an output is no answer
        (python(F, "print(f(1))\n"), F),
        (python(F, "f(1)\n"), F),
        (python(F, "print(f'{f(1)} is 2')\n"), F),
        (python(F, "from solution import f\nprint(f(1))\n"), F),
        (python(F, "assert f(1) == 2\n"), F),
        (python(F, "def test():\n    assert f(1) == 2\ntest()\n"), F),
        (
            python(F, "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        f(1)\n"),
            F,
        ),
        (
            python("class Solution:\n    pass\n", "print(Solution().two([1], 1))\n"),
            "class Solution:\n    pass\n",
        ),
        (python(F, ">>> print(f(1))\n2\n"), F),
        (python(F, "2\n"), F),
        (python(F, "[1, 2]\n") + plain("4\n"), F),
        (plain(F, "4\n"), F),
        (plain(F, "$ python f.py\n2\n"), F),
        (plain(F, "Output: 4 apples\n"), F),
        (plain(F) + python("print(f(1))\n"), F),
        (python(F, "s = f(1)\n", "print(s)\n"), F),
        (python(F) + "```bash\nprint(1)\n```", F),
        (
            python("g = lambda x: x\ndef f(x):\n    return g(x)\n", "print(g(1))\n"),
            "g = lambda x: x\ndef f(x):\n    return g(x)\n",
        ),
        # The last answer counts, also when it is broken or stands behind an example
        (python("def f(x):\n    return 0\n", F), F),
        (python("print(f(1))\n", F), F),
        (python(F, "print(7)\n"), "print(7)\n"),
        (python(F, BROKEN), BROKEN),
        (python(F, "def g(x):\n    return x\nprint(g(1))\n"), "def g(x):\n    return x\nprint(g(1))\n"),
        (python(F, "import sys\nsys.stdout.write('7')\n"), "import sys\nsys.stdout.write('7')\n"),
        # A function may be redefined without a definition
        (python(BROKEN, F, "f = lambda x: x + 2\n"), "f = lambda x: x + 2\n"),
        (
            python("def add(a, b):\n    return a\n", "from operator import add\n"),
            "from operator import add\n",
        ),
        (python(F, "key = lambda x: x\nsorted([1], key=key)\n"), F),
        (python(F, "f = f(1)\n"), F),
        (python(F, "import math\n"), F),
        ("```python\n\ufeff" + F + "```", F),
        # Names that an earlier draft defines, but that the answer gets elsewhere
        (
            python("def gcd(a, b):\n    pass\n", "from math import gcd\nprint(gcd(4, 6))\n"),
            "from math import gcd\nprint(gcd(4, 6))\n",
        ),
        (
            python("def gcd(a, b):\n    pass\n", "from math import *\nprint(gcd(4, 6))\n"),
            "from math import *\nprint(gcd(4, 6))\n",
        ),
        (python(F, "for f in range(3):\n    print(f)\n"), "for f in range(3):\n    print(f)\n"),
        (python(F, "def g(f):\n    return f(1)\n"), "def g(f):\n    return f(1)\n"),
        (python(F, "def f(x): return f\n"), "def f(x): return f\n"),
        (python("def input():\n    return '1'\n", "print(input())\n"), "print(input())\n"),
        # No block answers
        (python("a\n", "b\n"), "b\n"),
        (plain("4\n", "5\n"), "5\n"),
        (python("x = 3\n") + plain("4\n"), "x = 3\n"),
        (python("x = 3\n") + plain("print(3)\n"), "print(3)\n"),
        # Blocks in a block of Markdown
        (f"````markdown\n{python(F)}````", F),
        (f"````\n```python\n{F}```\n````", F),
        (f"```python\n{DOC}```", DOC),
        (f"```\n{DOC}```", DOC),
        # Indentation that all lines share
        (f"1. x\n```python\n{indented(F, '   ')}```", F),
        (f"   ```python\n{indented(F, '   ')}   ```".strip(), F),
        (f"1. x\n   ```python\n{F}   ```", F),
        (f"```python\n{F}    y = 1\n```", F + "    y = 1\n"),
    ],
)
def test_the_answer_is_the_last_block_that_defines_or_prints_and_no_example_of_use(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("prelude", "code", "result"),
    [
        (
            "import math",
            "from __future__ import annotations\nx = 1",
            "from __future__ import annotations\nimport math\npass\nx = 1",
        ),
        (
            "import math",
            '"""Doc."""\nfrom __future__ import annotations',
            'from __future__ import annotations\nimport math\n"""Doc."""\npass',
        ),
        (
            "a = 1",
            "from __future__ import (\n    annotations,\n    division,\n)\nx = 1",
            "from __future__ import annotations, division\na = 1\npass\nx = 1",
        ),
        (
            "a = 1",
            "from __future__ import division; import re",
            "from __future__ import division\na = 1\npass; import re",
        ),
        (
            "a = 1",
            "# é\nfrom __future__ import division # é",
            "from __future__ import division\na = 1\n# é\npass # é",
        ),
        (
            "a = 1",
            "from __future__ import division\r\nx = 1",
            "from __future__ import division\na = 1\npass\nx = 1",
        ),
        (
            "from __future__ import division\na = 1",
            "from __future__ import annotations",
            "from __future__ import division\nfrom __future__ import annotations\npass\na = 1\npass",
        ),
        # Neighbours: the code follows the prelude as it is
        ("", "from __future__ import annotations", "\nfrom __future__ import annotations"),
        ("a = 1", "x = 1", "a = 1\nx = 1"),
        ("from __future__ import division", "x = 1", "from __future__ import division\nx = 1"),
        ("a = 1", "x = 1\nfrom __future__ import division", "a = 1\nx = 1\nfrom __future__ import division"),
        (
            "a = 1",
            "x = '''\nfrom __future__ import division\n'''",
            "a = 1\nx = '''\nfrom __future__ import division\n'''",
        ),
        ("a = 1", "from __future__ import division\nx = (", "a = 1\nfrom __future__ import division\nx = ("),
    ],
)
def test_statements_about_the_future_come_first(prelude, code, result):
    assert with_prelude(prelude, code) == result


def test_a_body_may_continue_the_prelude():
    prelude = 'def f(x):\n    """Add one."""'
    body = "    return x + 1\n"
    assert code_of(f"```python\n{body}```", prelude) == body
    assert code_of(f"```python\n{body}```", "import math") == "return x + 1\n"
    node = "class Node:\n    def __init__(self):\n        self.x = 1"
    assert code_of(f"```python\n{indented(F, '   ')}```", node) == F


def test_names_of_the_prelude_are_no_sign_of_an_example():
    node = "class Node:\n    pass\n"
    answer = "def f():\n    return Node()\n"
    assert code_of(python(node, answer), prelude=node) == answer
    assert code_of(python(node, answer)) == node


PRINT_7 = {"input": "", "output": "7"}
EXITS = [
    # completion, test, reward
    ("print(7)\nexit()", PRINT_7, 1.0),
    ("print(7)\nexit(0)", PRINT_7, 1.0),
    ("print(7)\nquit(None)", PRINT_7, 1.0),
    ("print(7)\nexit(False)", PRINT_7, 1.0),
    ("def main():\n    print(7)\n    quit()\nmain()\nprint(8)", PRINT_7, 1.0),
    ("print(7)\nif __name__ == '__main__':\n    exit(print(end=''))", PRINT_7, 1.0),
    ("try:\n    exit()\nexcept SystemExit:\n    print(7)", PRINT_7, 1.0),
    ("print(7)\nimport atexit\natexit.register(print, 8)\nexit()", {"input": "", "output": "7\n8"}, 1.0),
    ("print(7)\nexit(1)", PRINT_7, 0.0),
    ("print(7)\nexit('failed')", PRINT_7, 0.0),
    ("print(7)\nquit(3)", PRINT_7, 0.0),
    ("print(7)\nexit(True)", PRINT_7, 0.0),
    ("exit()\nprint(7)", PRINT_7, 0.0),
    ("print(7)\nraise SystemExit(1)", PRINT_7, 0.0),
    ("print(7)\nhelp()", PRINT_7, 0.0),
    # Functions of the tested code with such a name, and exits that would end the tests
    ("def exit(x): return x + 1", {"assert": "assert exit(1) == 2"}, 1.0),
    ("def quit(x): return x + 1", {"assert": "assert quit(1) == 2"}, 1.0),
    ("def f(x): return x + 1", {"assert": "assert f(1) == 2\nexit()"}, 0.0),
    ("def f(x): exit()", {"assert": "assert f(1) == 2"}, 0.0),
    ("exit()\ndef f(x): return x + 1", {"assert": "assert f(1) == 2"}, 0.0),
]


@needs_network_off
@pytest.mark.parametrize(("completion", "test", "reward"), EXITS)
def test_exit_and_quit_end_a_program_as_in_python(completion, test, reward):
    assert score({"completion": completion, "tests": [test]})["reward"] == reward


@needs_network_off
def test_integers_of_any_length_are_read_and_printed():
    tests = [
        {"input": "7" * 20_000, "output": "7" * 20_000},
        {"assert": "assert f('1' * 9000) == int('1' * 9000) + 1"},
    ]
    code = "def f(text):\n    return int(text) + 1\nif __name__ == '__main__':\n    print(int(input()))"
    assert score({"completion": code, "tests": tests})["reward"] == 1.0


@needs_network_off
def test_a_prelude_and_statements_about_the_future_work_in_both_kinds_of_tests():
    code = python(
        "from __future__ import annotations\ndef f(x: Later) -> int:\n    return math.floor(x)\nprint(f(7.5))\n"
    )
    tests = [{"assert": "assert f(1.5) == 1"}, PRINT_7]
    assert score({"completion": code, "prelude": "import math", "tests": tests})["reward"] == 1.0


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("0.333333", "0.3333333333", True),
        ("89.6", "89.599998", True),
        ("1.0000001e5", "100000.0", True),
        ("2.9999999", "3", True),
        ("3", "3.0", True),
        ("-0.0", "0.0", True),
        ("[0.3333333, .5]", "[0.33333333, 0.5]", True),
        ("x = 0.3333333.", "x = 0.3333334.", True),
        ("1 0.25\n2 0.5000001  \n\n", "1 0.25\n2 0.5", True),
        ("7", "7", True),
        # Neighbours
        ("0.34", "0.333333", False),
        ("100000001", "100000000", False),
        ("10000000000000000", "10000000000000001", False),
        ("3.1 3.2", "3.1", False),
        ("3.1\n3.2", "3.1 3.2", False),
        ("a 0.5", "b 0.5", False),
        ("0.5", "half", False),
        ("nan", "nan ", True),
        ("nan", "0.0", False),
        ("inf", "1e999", False),
        ("1e999", "2e999", False),
        ("-0.5", "0.5", False),
        ("v1.2.3", "v1.2.30", False),
        ("1.0000001.2", "1.0.2", False),
        ("x1.0000001", "x1.0", False),
        ("0.3333333  0.5", "0.33333333 0.5", False),
    ],
)
def test_numbers_in_outputs_may_differ_within_a_tolerance(output, expected, is_same):
    assert same_output(output, expected, TOLERANCE) is is_same
    assert same_output(output, expected) is (output.strip() == expected.strip())


def test_the_absolute_tolerance_helps_near_zero_and_negative_ones_are_refused():
    assert not same_output("1e-9", "0.0", TOLERANCE)
    assert same_output("1e-9", "0.0", Tolerance(absolute=1e-6))
    assert not same_output("1e-5", "0.0", Tolerance(absolute=1e-6))
    with pytest.raises(ValueError, match="relative_tolerance=-1"):
        score({"completion": "print(7)", "tests": [PRINT_7]}, relative_tolerance=-1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text_of", "count"),
    [
        (lambda n: "```python\n    ```\n" * n, 20_000),
        (lambda n: "```python\n'''\n```\n" * n, 20_000),
        (lambda n: "> ```\n" * n, 20_000),
        (lambda n: ">" * n + "```\n" + ">" * n, 50_000),
        (lambda n: "~~~\n```a\n" * n, 20_000),
        (lambda n: "```python\na```\n" * n, 20_000),
        (lambda n: "```python\n" + "a```\n" * n, 20_000),
        (lambda n: "a ```python\n" * n, 20_000),
        (lambda n: "````a\n```\n" * n, 20_000),
        (lambda n: "- " * n + "```", 50_000),
        (lambda n: " \t" * n + "```\n" + " \t" * n, 50_000),
        (lambda n: "1.0" * n, 40_000),
        (lambda n: python(*["def f(x):\n    return f(x)\nf(1)\n"] * n), 2000),
        (lambda n: python("x\n", "from __future__ import annotations\n" * n), 2500),
    ],
)
def test_hostile_texts_are_read_in_linear_time(text_of, count):
    """What takes quadratic time would take minutes."""

    def read(text: str) -> None:
        code_of(text)
        with_prelude("import math", text)
        same_output(text, text[::-1], TOLERANCE)

    check_reading_time(read, text_of, count, limit_s=2.0)


@needs_network_off
def test_the_registered_reward_takes_the_tolerance():
    row = {"completion": "print('0.333333')", "tests": [{"input": "", "output": "0.3333333333"}]}
    reward = REWARD_ADAPTERS[RewardType.CODE]
    assert reward(row)["reward"] == 0.0
    assert reward(row, relative_tolerance=2e-6)["reward"] == 1.0
    assert reward(row, absolute_tolerance=1e-6)["reward"] == 1.0
