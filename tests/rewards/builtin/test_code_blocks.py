"""Which blocks of a completion are its code, if the tests are known, and ends of blocks that break CommonMark's rules."""

import pytest
from reading_time import check_reading_time
from sandboxes import needs_network_off

from async_grpo.rewards.answer_reading.fences import fenced_blocks
from async_grpo.rewards.builtin.answers import answering_part
from async_grpo.rewards.builtin.code import code_of, score
from async_grpo.rewards.builtin.json_schema import score as json_schema


def python(*codes: str) -> str:
    return "".join(f"Then:\n```python\n{code}```\n" for code in codes)


F = "def f(x):\n    return x + 1\n"
G = "def g(x):\n    return x + 2\n"
FLOOR = "def f(x):\n    return math.floor(x) + 1\n"
A = "class A:\n    def f(self):\n        return 1\n"
B = "class B:\n    def f(self):\n        return 2\n"
STUB = "def f(x):\n    ...\n"
PROGRAM = "n = int(input())\nprint(n + 1)\n"
MAIN = "def main():\n    print(f(int(input())))\nmain()\n"
CALL = [{"assert": "assert f(1) == 2"}]
CALL_BY_CHECK = [{"assert": "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"}]
RUN = [{"input": "6\n", "output": "7\n"}]

BY_TESTS = [
    # blocks, tests, code
    # The tests name the function
    ([F, G], CALL, F),
    ([F, G], CALL_BY_CHECK, F),
    ([F, "def f_fast(x):\n    return 1 + x\nprint(f_fast(3))\n"], CALL, F),
    ([F, "def timed(work):\n    return work()\n"], CALL, F),
    ([F, "print(7)\n"], CALL, F),
    ([F, "import solution\nprint(solution.f(1))\n"], CALL, F),
    ([F, STUB], CALL, F),
    ([F, "def f(x):\n    '''Add one.'''\n    raise NotImplementedError\n"], CALL, F),
    ([F, "def f(x):\n    '''Add one.'''\n    raise NotImplementedError()\n"], CALL, F),
    ([A, "class A:\n    def f(self): ...\n"], [], A),
    ([F, MAIN], CALL, F),
    # The tests run a program
    ([PROGRAM, "n = int(input())\n"], RUN, PROGRAM),
    ([PROGRAM, F], RUN, PROGRAM),
    ([PROGRAM, "print(n + 1)\n"], RUN, PROGRAM),
    ([MAIN.replace("f(", "1 + ("), F], RUN, MAIN.replace("f(", "1 + (")),
    # Blocks that need one another
    ([F, MAIN], RUN, f"{F}\n{MAIN}"),
    (["def main():\n    print(7)\n", "main()\n"], RUN, "def main():\n    print(7)\n\nmain()\n"),
    (["n = int(input())\n", "m = n + 1\n", "print(m)\n"], RUN, "n = int(input())\n\nm = n + 1\n\nprint(m)\n"),
    ([G, "def f(x):\n    return g(x) - 1\n"], CALL, f"{G}\ndef f(x):\n    return g(x) - 1\n"),
    (["import math\n", FLOOR], CALL, f"import math\n\n{FLOOR}"),
    (["import math\n", FLOOR], [], f"import math\n\n{FLOOR}"),
    (["x = 1\n", "import math\n", FLOOR], CALL, f"import math\n\n{FLOOR}"),
    ([A, B], [{"assert": "assert A().f() + B().f() == 3"}], f"{A}\n{B}"),
    ([A + B, B], [{"assert": "assert A().f() + B().f() == 3"}], f"{A + B}\n{B}"),
    ([G, "f = g\n"], CALL, f"{G}\nf = g\n"),
    (["x = 0\nfor n in [7]:\n    x += n\nprint(x)\n", "for n in [7]:\n    x += n\n"], RUN, None),
    # Neighbours: the last one counts
    ([F, "f = f(1)\n"], CALL, F),
    ([F, "x = 0\nx += 7\nprint(x)\n"], RUN, "x = 0\nx += 7\nprint(x)\n"),
    ([G, F], CALL, F),
    ([F.replace("1", "0"), F], CALL, F),
    ([F, F.replace("1", "0")], CALL, F.replace("1", "0")),
    ([F, "f = lambda x: x\n"], CALL, "f = lambda x: x\n"),
    ([F, "def f(x):\n    return x +\n"], CALL, "def f(x):\n    return x +\n"),
    ([F, "def f(x):\n    pass  # nothing to do\n"], [{"assert": "assert h(1) is None"}], F),
    ([PROGRAM, "print(int(input()))\n"], RUN, "print(int(input()))\n"),
    ([PROGRAM, "print(int(input())\n"], RUN, "print(int(input())\n"),
    ([STUB, F], CALL, F),
    ([STUB], CALL, STUB),
    ([F, G], [], G),
    ([F, G], [{"assert": "assert h(1) == 2"}], G),
    ([F, G], [*CALL, *RUN], f"{F}\n{G}"),
]


@pytest.mark.parametrize(("blocks", "tests", "code"), BY_TESTS)
def test_the_code_is_the_last_block_that_does_what_the_tests_need(blocks, tests, code):
    assert code_of(python(*blocks), tests=tests) == (blocks[0] if code is None else code)


def test_statements_about_the_future_come_first_when_blocks_are_joined():
    answer = python(f"from __future__ import annotations\n{F}", f"from __future__ import division\n{MAIN}")
    compile(code_of(answer, tests=RUN), "solution.py", "exec")


def chain(count: int) -> list[str]:
    return [f"from __future__ import annotations\ndef f{i}(x): return f{i - 1}(x)\n" for i in range(count)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text_of", "count"),
    [
        (lambda n: python(*chain(n)), 5_000),
        (lambda n: python(*chain(n)[::-1]), 5_000),
        (lambda n: python(*["def f(x): return g(x)\n", "def g(x): return f(x)\n"] * n), 5_000),
        (lambda n: python(*[STUB] * n), 10_000),
        (lambda n: "```python\n" * n, 25_000),
        (lambda n: "```\n```python\n" * n, 20_000),
        (lambda n: "```python\na\n```<b>\n" * n, 10_000),
        (lambda n: "```python\n" + "```<b>\n" * n, 20_000),
        (lambda n: "<answer>```python\n" * n + "</answer>", 10_000),
    ],
)
def test_hostile_texts_are_read_in_linear_time(text_of, count):
    """What takes quadratic time would take minutes."""

    def read(text: str) -> None:
        last = text.count("def f") - 1
        code_of(text, tests=[{"assert": f"assert f{last}(1) == f(1)"}])
        code_of(text, tests=RUN)

    check_reading_time(read, text_of, count, limit_s=4.0)


def test_names_of_the_prelude_are_not_what_the_answer_must_define():
    node = "class Node:\n    x = 1\n"
    tests = [{"assert": "assert f(Node()) == 2"}]
    assert code_of(python(node, F), prelude=node, tests=tests) == F
    assert code_of(python(F, G), prelude="def f(x):\n    '''Add one.'''\n", tests=tests) == F
    assert code_of(python(F, G), prelude="def f(x):", tests=CALL) == F
    assert code_of(python(F, G), prelude=F, tests=CALL) == G


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        # A tag or a mark behind the fence
        ("```python\na\n```<|im_end|>", [("python", "a\n")]),
        ("```python\na\n```</answer>", [("python", "a\n")]),
        ("```python\na\n``` </s>\n", [("python", "a\n")]),
        ("```python\na\n```.\nDone.", [("python", "a\n")]),
        ("```\na\n```**Why:** so", [("", "a\n")]),
        ("~~~python\na\n~~~<|eot_id|>", [("python", "a\n")]),
        ("```python\na\n```.\nTest:\n```python\nb\n```", [("python", "a\n"), ("python", "b\n")]),
        ("    ```python\n    a\n    ```, so", [("python", "a\n")]),
        ("```python\na\n``` This is it.", [("python", "a\n")]),
        ("```python\na\n```Explanation: so\n```text\nb\n```", [("python", "a\n"), ("text", "b\n")]),
        # Two opening fences
        ("```python\n```python\na\n```\n```", [("python", "a\n")]),
        ("```\n```python\na\n```\n```", [("python", "a\n")]),
        ("```markdown\n```python\na\n```\n```", [("python", "a\n")]),
        ("```python\n````python\na\n````\n```", [("python", "a\n")]),
        # Neighbours
        ("```python\na\n```python\nb\n```", [("python", "a\n```python\nb\n")]),
        ("```python\na\n```.python\nb\n```", [("python", "a\n```.python\nb\n")]),
        ("```python\na\n```<b>\nb\n```", [("python", "a\n```<b>\nb\n")]),
        ("````python\na\n```<b>\nb\n````", [("python", "a\n```<b>\nb\n")]),
        ("```python\nx = '''\n```<b>\n'''\n```", [("python", "x = '''\n```<b>\n'''\n")]),
        ("````python\na\n```<b>", []),
        ("```python\na\n``` Python title", []),
        ("```python\na\n``` this is it", []),
        ("```python\na\n```Explanation", []),
        ("````\n```python\na\n```\n````", [("", "```python\na\n```\n")]),
        ("```python\n~~~python\na\n~~~\n```", [("python", "~~~python\na\n~~~\n")]),
        ("```\n```\na\n```", [("", "")]),
        ("```<|im_end|>\na\n```", [("", "a\n")]),
    ],
)
def test_a_fence_before_a_mark_may_end_a_block_and_a_second_opening_fence_counts(text, blocks):
    assert fenced_blocks(text) == blocks


DOC = 'def f(x):\n    """Add one.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 1\n'


def test_fences_in_strings_of_code_without_fences_are_no_blocks():
    assert code_of(DOC) == DOC
    assert code_of(f"So:\n{DOC}") == "f(1)\n"
    assert code_of(f"```\n{DOC}```") == DOC


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<answer>a</answer>", "a"),
        ("So: <answer>\na\n</answer>\n", "\na\n"),
        ("x\n<answer>```python\na\n```</answer>", "```python\na\n```"),
        ("```\nb\n```\n<answer>\n```\na\n```\n</answer>", "\n```\na\n```\n"),
        # Neighbours
        ("a", "a"),
        ("```\nb\n```\n<answer>above</answer>", None),
        ("<answer></answer>", None),
        ("<answer> \n</answer>", None),
        ("<answer>a</answer><answer>b</answer>", None),
        ("print('<answer>a</answer>')", None),
        ("<answer>a</answer> and more", None),
    ],
)
def test_the_only_answer_at_the_end_is_read_if_it_holds_the_blocks(text, part):
    assert answering_part(text) == (text if part is None else part)


OTHER_LANGUAGES = [
    # language, code, tests, reward
    ("ipython", F, CALL, 1.0),
    ("code", F, CALL, 1.0),
    ("tool_code", F, CALL, 1.0),
    ("sage", PROGRAM, RUN, 1.0),
    ("cpp", "int f(int x) { return x + 1; }\n", CALL, 0.0),
    ("js", "function f(x) { return x + 1 }\n", CALL, 0.0),
    ("text", "7\n", RUN, 0.0),
]


@needs_network_off
@pytest.mark.parametrize(("language", "code", "tests", "reward"), OTHER_LANGUAGES)
def test_python_with_another_name_counts_if_there_is_no_other_block(language, code, tests, reward):
    block = f"```{language}\n{code}```\n"
    assert score({"completion": block, "tests": tests})["reward"] == reward
    both = block + python(F.replace("1", "0"))
    assert score({"completion": both, "tests": CALL})["reward"] == 0.0


DEFINED = ">>> def f(x):\n...     return x + 1\n...\n>>> f(1)\n2\n"


@needs_network_off
@pytest.mark.parametrize(
    ("completion", "tests", "reward"),
    [
        (python(DEFINED), CALL, 1.0),
        (f"```\n{DEFINED}```", CALL, 1.0),
        (f"```pycon\n{DEFINED}```", CALL, 1.0),
        (python(">>> n = int(input())\n>>> print(n + 1)\n7\n"), RUN, 1.0),
        (python(DEFINED.replace("1\n...", "0\n..."), DEFINED), CALL, 1.0),
        # Neighbours: beside other code, a session is an example
        (python(F, DEFINED.replace("+ 1", "+ 0")), CALL, 1.0),
        (python(DEFINED.replace("+ 1", "+ 0"), F), CALL, 1.0),
        (python(F) + f"```pycon\n{DEFINED.replace('+ 1', '+ 0')}```", CALL, 1.0),
        (python(">>> f(1)\n2\n"), CALL, 0.0),
    ],
)
def test_code_that_was_typed_into_a_session_counts_if_there_is_no_other(completion, tests, reward):
    assert score({"completion": completion, "tests": tests})["reward"] == reward


BODY = 'def f(x):\n    """Add one."""\n'


@needs_network_off
@pytest.mark.parametrize(
    ("completion", "prelude", "reward"),
    [
        ("    return x + 1", BODY, 1.0),
        ("\n    y = x + 1\n    return y\n", BODY, 1.0),
        ("    return x + 1\n\nprint(f(3))\n", BODY, 1.0),
        (F, BODY, 1.0),
        (f"\n\n{F}", BODY, 1.0),
        (f" {F}", BODY, 1.0),
        (python("    return x + 1\n"), BODY, 1.0),
        ("    return x + 0", BODY, 0.0),
        ("return x + 1", BODY, 0.0),
        ("    return x + 1", "import math", 0.0),
        ("", BODY, 0.0),
        (" \n ", BODY, 0.0),
    ],
)
def test_a_completion_may_continue_the_prelude(completion, prelude, reward):
    assert score({"completion": completion, "prelude": prelude, "tests": CALL})["reward"] == reward


LONG = "\n".join(map(str, range(200_000)))  # more than 1 MiB
PROGRAMS = [
    # code, input, output, reward
    ("print(input() == 'a', input() == 'b')", "a\r\nb\r\n", "True True", 1.0),
    ("print(int(input()))", "7\r\n", "7\r\n", 1.0),
    ("print(repr(input()))", "a\rb", r"'a\rb'", 1.0),
    ("for i in range(200_000): print(i)", "", LONG, 1.0),
    ("for i in range(200_001): print(i)", "", LONG, 0.0),
    ("while True: print('a' * 9999)", "", LONG, 0.0),
    ("import sys; sys.stdout.buffer.write(b'\\xff')", "", "\ufffd", 0.0),
    ("print('\\ufffd')", "", "\ufffd", 1.0),
    ("import os; print(os.path.basename(__file__))", "", "solution.py", 1.0),
]


@needs_network_off
@pytest.mark.parametrize(("code", "stdin", "output", "reward"), PROGRAMS)
def test_lines_bytes_and_long_outputs_of_programs(code, stdin, output, reward):
    tests = [{"input": stdin, "output": output}]
    assert score({"completion": python(code + "\n"), "tests": tests})["reward"] == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('<answer>{"a": 1}</answer>', 1.0),
        ('<answer>```json\n{"a": 1}\n```</answer>', 1.0),
        ('```json\n{"a": 1}\n```\nRun:\n```\ncurl\n```', 1.0),
        ('```json\n{"a": 1}\n```<|im_end|>', 1.0),
        ('```\n{"a": 1}\n```', 1.0),
        ('```json\n{"b": 1}\n```\n```\n{"a": 1}\n```', 0.0),
        ('<answer>{"a": 1}</answer> as asked', 0.0),
        ('<answer>{"b": 1}</answer>', 0.0),
        ('{"a": "<answer>1</answer>"}', 1.0),
    ],
)
def test_json_may_stand_in_the_answer_and_before_another_block(completion, reward):
    assert json_schema({"completion": completion, "schema": {"required": ["a"]}})["reward"] == reward
