"""What tests of data sets do with objects of the tested code, and how tests of pytest and unittest are run."""

import pytest
from sandboxes import IMPATIENT, needs_network_off, passes, program

pytestmark = needs_network_off

F = "def f(x): return x + 1\n"
WRONG = "def f(x): return x\n"


def cases(text: str) -> list[tuple[str, str]]:
    """Code, a line of ---, tests; cases are divided by lines of ===."""
    return [tuple(part.strip() + "\n" for part in case.split("\n---\n")) for case in text.split("\n===\n")]


# The same object is the same; the result may be an argument, also a keyword; operators that change an object; hashes and
# subclasses; context managers; coroutines; values of the standard library
RIGHT = cases("""
class A:
    def __init__(self): self.x = 1
def f(): pass
---
assert f.__name__ == 'f' and A.__name__ == 'A' and vars(A()) == A().__dict__ == {'x': 1}
===
class S:
    _x = None
    def __new__(cls):
        if cls._x is None: cls._x = super().__new__(cls)
        return cls._x
---
assert S() is S()
===
import enum
class C(enum.Enum):
    R = 1
def f(): return C.R
---
assert f() is C.R and f() is not None
===
class N: pass
def f(): return N()
---
assert f() is not f()
===
def f(a):
    a.sort()
    return a
---
a = [2, 1]
b = f(a)
assert b is a and a == [1, 2]
===
def f(a): return sorted(a)
---
a = [2, 1]
assert f(a) == [1, 2] and f(a) is not a and a == [2, 1]
===
def f(*, d): d['x'] = 1
---
d = {}
f(d=d)
assert d == {'x': 1}
===
def f(*, d): return dict(d, x=1)
---
d = {}
assert f(d=d) == {'x': 1} and d == {}
===
class V:
    def __init__(self, x): self.x = x
    def __iadd__(self, other): self.x += other.x; return self
---
v = w = V(1)
v += V(2)
assert v.x == 3 and v is w
===
class V:
    def __init__(self, x): self.x = x
    def __eq__(self, o): return self.x == o.x
    def __hash__(self): return self.x
---
assert len({V(1), V(1), V(2)}) == 2 and {V(1): 7}[V(1)] == 7
===
class A: pass
class B(A): pass
---
assert issubclass(B, A) and not issubclass(A, B)
===
class M:
    log = []
    def __enter__(self): self.log.append(1); return 7
    def __exit__(self, *a): self.log.append(a[0] is None)
---
with M() as x:
    assert x == 7
assert M.log == [1, True]
===
from contextlib import contextmanager
@contextmanager
def m():
    yield 7
---
with m() as x:
    assert x == 7
===
class M:
    kind = None
    def __enter__(self): return self
    def __exit__(self, kind, e, t): M.kind = (kind.__name__, str(e))
---
try:
    with M():
        raise ValueError('a')
except ValueError:
    pass
assert M.kind == ('ValueError', 'a')
===
async def f(): return 7
---
import asyncio
assert asyncio.run(f()) == 7
===
import asyncio
async def f(x):
    await asyncio.sleep(0.001)
    return x
---
import asyncio
async def main():
    return await asyncio.gather(f(1), f(2))
assert asyncio.run(main()) == [1, 2]
===
async def f(): raise ValueError
---
import asyncio
try:
    asyncio.run(f())
except ValueError:
    pass
else:
    assert False
===
def f(): return {'a': 1}.keys()
---
assert f() == {'a'}
===
def f(): return {'a': 1}.items()
---
assert f() == {('a', 1)}
===
def f(): return {'a': 1}.values()
---
assert list(f()) == [1]
===
import datetime as d
def f(t): return t + d.timedelta(days=1)
---
from datetime import *
assert f(datetime(2020, 1, 1, 5)) == datetime(2020, 1, 2, 5)
===
def f(t): return t.tzinfo, t.time()
---
from datetime import *
assert f(datetime(2020, 1, 1, 5, tzinfo=timezone.utc)) == (timezone.utc, time(5))
===
def f(s): return [1, 2, 3][s]
---
assert f(slice(1, None)) == [2, 3]
""")

WRONG_OBJECTS = cases("""
class f:
    def __new__(cls, *args): return cls
    __name__ = '2'
---
assert f(1).__name__ == '2'
===
class A: pass
---
assert A().__name__ == 'A'
===
class M(type): __class__ = int
class f(metaclass=M): __class__ = int
---
assert isinstance(f(), int)
===
class N: pass
def f(): return N()
---
assert f() is f()
===
def f(a): return list(a)
---
a = [1]
assert f(a) is a
===
class V:
    def __eq__(self, o): return True
---
{V()}
===
class V:
    def __hash__(self): return 'x'
---
{V()}
===
class A: pass
class B: pass
---
assert issubclass(B, A)
===
class M:
    def __enter__(self): return 3
    def __exit__(self, *a): return True
---
with M() as x:
    assert x == 7
===
class M:
    def __enter__(self): return 3
---
with M() as x:
    assert x == 3
===
async def f(): return 7
---
assert f() == 7
===
def f(): return 7
---
import asyncio
assert asyncio.run(f()) == 7
===
def f(): return {'a': 1}.keys()
---
assert f() == ['a']
===
import datetime as d
def f(): return d.datetime(2020, 1, 1)
---
from datetime import *
assert f() == datetime(2020, 1, 2)
""")


@pytest.mark.parametrize(("code", "tests"), RIGHT)
def test_objects_behave_as_in_one_process(code, tests):
    assert passes(code, tests)


@pytest.mark.parametrize(("code", "tests"), WRONG_OBJECTS)
def test_wrong_objects_do_not_pass(code, tests):
    assert not passes(code, tests)


BANK = """
class BankError(Exception): pass
class Poor(BankError, ValueError):
    def __init__(self, balance, *, fee=0):
        super().__init__(f"only {balance}")
        self.balance = balance
class Rich(BankError): pass
class Mixin: pass
class Mixed(Mixin, Rich): pass
class Unlucky(UnicodeDecodeError): pass
def pay(x):
    if x == 13: raise Unlucky('utf-8', b'a', 0, 1, 'bad')
    if x == 3: raise Mixed()
    if x == 0: raise KeyError('x')
    if x == 2: raise OSError(2, 'no file')
    raise Poor(x, fee=1)
"""

EXCEPTIONS = [
    # the body of a test that must raise, the handler, whether the test passes
    ("pay(1)", "except Poor", True),
    ("pay(1)", "except BankError", True),
    ("pay(1)", "except (Rich, Poor)", True),
    ("pay(1)", "except ValueError", True),
    ("pay(1)", "except Poor as e:\n    assert str(e) == 'only 1' and e.balance == 1\nexcept OSError", True),
    (
        "pay(0)",
        "except KeyError as e:\n    assert str(e) == \"'x'\" and e.args == ('x',)\nexcept OSError",
        True,
    ),
    ("pay(2)", "except FileNotFoundError as e:\n    assert e.errno == 2\nexcept KeyError", True),
    ("pay(13)", "except Unlucky", True),
    ("pay(13)", "except UnicodeError", True),
    ("pay(1)", "except Rich", False),
    ("pay(1)", "except KeyError", False),
    ("pay(0)", "except BankError", False),
    ("pay(1)", "except Poor as e:\n    assert str(e) == 'only 2'\nexcept OSError", False),
    ("pay(1)", "except Poor as e:\n    assert e.balance == 2\nexcept OSError", False),
    ("pay(1)", "except Missing", False),
]


@pytest.mark.parametrize(("body", "handler", "is_right"), EXCEPTIONS)
def test_tests_can_catch_exceptions_of_the_tested_code(body, handler, is_right):
    tests = f"try:\n    {body}\n{handler}:\n    pass\nelse:\n    raise AssertionError"
    assert passes(BANK, tests) is is_right


def test_classes_of_exceptions_can_be_used():
    assert passes(
        BANK, "e = Poor(5, fee=2)\nassert str(e) == 'only 5' and e.balance == 5 and isinstance(e, BankError)"
    )
    assert passes(
        BANK,
        "assert issubclass(Poor, BankError) and issubclass(Poor, Exception) and not issubclass(Rich, Poor)",
    )
    assert passes(f"{BANK}\ndef same(kind): return kind is Rich", "assert same(Rich) and not same(Poor)")
    unittest = "import unittest\nwith unittest.TestCase().assertRaises({}):\n    pay(1)"
    assert passes(BANK, unittest.format("Poor"))
    assert not passes(BANK, unittest.format("Rich"))


CASE = "import unittest\n{0}class T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n{1}"
MAIN = "if __name__ == '__main__':\n    unittest.main()\n"
STYLES = {
    "pytest": "def test_f():\n    assert f(1) == 2",
    "pytest, with imports": "from solution import f\ndef test_f():\n    assert f(1) == 2",
    "pytest, with a module": "import solution as s\ndef test_f():\n    assert s.f(1) == 2",
    "pytest, a class": "class TestF:\n    def setup(self): pass\n    def test_f(self):\n        assert f(1) == 2",
    "pytest, with a default": "def test_f(x=1):\n    assert f(x) == 2",
    "a function that is called": "def test_f():\n    assert f(1) == 2\ntest_f()",
    "a function with arguments that is called": "def test_f(x, y):\n    assert f(x) == y\ntest_f(1, 2)",
    "unittest": CASE.format("", ""),
    "unittest, guarded": CASE.format("", MAIN),
    "unittest, started": CASE.format("", "unittest.main()"),
    "unittest, with imports": CASE.format("from solution import f\n", MAIN),
    "exit": "assert f(1) == 2\nimport sys\nsys.exit(0)",
}


@pytest.mark.parametrize("tests", STYLES.values(), ids=STYLES)
def test_tests_in_the_styles_of_pytest_and_unittest_are_run(tests):
    assert passes(F, tests)
    assert not passes(WRONG, tests)
    assert not passes("pass", tests)
    assert not passes("raise SystemExit(0)", tests)
    assert not passes("import os\ndef f(x): os._exit(0)", tests, IMPATIENT)
    assert not passes("class SkipTest(Exception): pass\ndef f(x): raise SkipTest", tests)
    assert not passes("def f(x): raise SystemExit(0)", tests)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("def check(candidate):\n    assert candidate(1) == 2", "nothing that the tested code could define"),
        ("def test_f(capsys):\n    assert f(1) == 2", "nothing that the tested code could define"),
        ("from solution import f", "nothing that the tested code could define"),
        ("import sys\nsys.exit(0)", "nothing that the tested code could define"),
        ("import unittest\nunittest.main()", "nothing that the tested code could define"),
        ("import pytest\nassert f(1) == 2", "No module named 'pytest'"),
        ("from other import f\nassert f(1) == 2", "No module named 'other'"),
    ],
)
def test_tests_that_test_nothing_are_the_fault_of_the_row(tests, why):
    with pytest.raises(ValueError, match=why):
        passes(F, tests)


def test_deep_recursion_has_a_stack():
    code = """
        import sys
        from functools import lru_cache
        sys.setrecursionlimit(10**7)
        @lru_cache(None)
        def f(n): return 0 if n == 0 else 1 + f(n - 1)
        print(f(50000))
        """
    assert program(code).output == b"50000\n"
    assert not program("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)").ended_well


FORGED = [
    ["class", 0, [["AssertionError", ["Exception"]]]],
    ["class", 5, [["X", ["X"]]]],
    ["class", 1, [["E", ["KeyError", "OSError"]]]],
    ["class", 1, [1, 2]],
    ["class", "a", []],
    ["coroutine", 0],
    ["coroutine", None],
    ["argument", "0", {}],
    ["argument", "9", {}],
    ["argument", "1", {"0": ["list"]}],
    ["raised", [["SystemExit", ["BaseException"]]], "", 0, []],
    ["raised", [["SkipTest", ["Exception"]]], "", 0, [0]],
    ["raised", [["A\0", ["Exception"]]], "", 1, []],
    ["raised", [], "", "x", []],
    ["value", ["timezone", ["timedelta", 9999, 0, 0]], {}],
    ["value", True, {"x": 1}],
]
FORGE = """
import json, os
def f(x):
    for descriptor in range(3, 64):
        try: os.write(descriptor, json.dumps({!r}).encode() + b"\\n")
        except OSError: pass
"""


@pytest.mark.parametrize("answer", FORGED, ids=str)
def test_forged_answers_pass_nothing(answer):
    for tests in ("assert f(1) == 731946", CASE.format("", "").replace("2", "731946")):
        assert not passes(FORGE.format(answer), tests, IMPATIENT)
