"""Tests against code that nobody has read: right code passes them, and no attack that we could think of does."""

import hashlib
import json
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import IMPATIENT, STANDING, needs_network_off, passes

from async_grpo.rewards.sandbox.rpc import WireError, decode, encode
from async_grpo.rewards.sandbox.run import Sandbox

pytestmark = needs_network_off


# Right code


def cases(text: str) -> list[tuple[str, str]]:
    """Code, a line of ---, tests; cases are divided by lines of ===."""
    return [tuple(part.strip() + "\n" for part in case.split("\n---\n")) for case in text.split("\n===\n")]


RIGHT = cases("""
def f(x): return x + 1
def g(a, *, k=2): return [k * x for x in a]
def power(x): return 10 ** x
def third(x): return x / 3
def much(x): return (x,) * 2, {x}, b'x', None, {1: {2: [x]}}, float('inf')
def lone(): return chr(0xd800)
LIMIT = 3
---
import math
assert f(1) == 2
assert f(-1) == 0
assert g([1, 2], k=3) == [3, 6]
assert power(9999) == 10 ** 9999
assert math.isclose(third(1), 0.3333333333333333)
assert abs(third(2) - 2 / 3) < 1e-9
assert much('y') == (('y', 'y'), {'y'}, b'x', None, {1: {2: ['y']}}, float('inf'))
assert lone() == chr(0xd800) and LIMIT == 3
===
def f(a): a.sort()
def turn(m): m[:] = [list(r) for r in zip(*m[::-1])]
def count(d): d['a'] = d.get('a', 0) + 1
---
from collections import defaultdict
a, m, d = [3, 1], [[1, 2], [3, 4]], defaultdict(int)
assert f(a) is None and turn(m) is None and count(d) is None
assert a == [1, 3] and m == [[3, 1], [4, 2]] and d['a'] == 1
===
def f(n):
    for i in range(n): yield i
def adder(n): return lambda x: x + n
def apply(g, x): return g(x)
def keys(d): return d.keys()
---
assert list(f(3)) == [0, 1, 2]
assert next(f(1)) == 0
assert 2 in f(3)
assert adder(2)(3) == 5
assert apply(len, 'abc') == 3 and apply(str, 3) == '3'
assert sorted(keys({'b': 1, 'a': 2})) == ['a', 'b']
===
class E(KeyError): pass
def f(x):
    if x < 0: raise ValueError('negative')
    raise E(x)
---
try:
    f(-1)
except ValueError as error:
    assert 'neg' in str(error)
else:
    assert False
try:
    f(1)
except KeyError:
    pass
else:
    raise AssertionError
===
if __name__ == '__main__': 1 / 0
import sys
def f(x): print('noise', x); print('noise', file=sys.stderr); return x
---
print('more')
def check(candidate):
    assert candidate(1) == 1
    assert [candidate(i) for i in (1, 2)] == [1, 2]
check(f)
===
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def last(n):
    while n.next: n = n.next
    return n
---
s = Stack()
s.push(1)
s.push([2])
assert len(s) == 2 and s.pop() == [2] and s.items == [1]
assert isinstance(s, Stack) and not isinstance(1, Stack)
n = Node(1, Node(2))
assert last(n).value == 2
n.next = None
assert last(n) == n and n.next is None
===
from dataclasses import dataclass
@dataclass(order=True)
class P:
    x: int
    y: int = 0
    def __add__(self, other): return P(self.x + (other if isinstance(other, int) else other.x))
    __radd__ = __add__
    def __neg__(self): return P(-self.x)
---
assert P(1) == P(1, 0) and P(1) != P(2) and P(1) < P(2)
assert P(1) + P(2) == P(3) and P(1) + 2 == P(3) and 2 + P(1) == P(3) and -P(1) == P(-1)
assert repr(P(1)) == 'P(x=1, y=0)' and f'{P(1)}' == 'P(x=1, y=0)'
assert sorted([P(2), P(1)])[0].x == 1
===
from collections import namedtuple
import enum
P = namedtuple('P', 'x y')
class N(enum.IntEnum):
    A = 1
class S(str, enum.Enum):
    A = 'a'
class L(list): pass
def f(): return P(1, 2), N.A, S.A, L([1])
---
p, n, s, l = f()
assert p == (1, 2) and p.x == 1 and p[1] == 2 and (1, 2) == p and p < (1, 3)
assert n == 1 and n + 1 == 2 and 3 - n == 2 and -n == -1 and n < 2 and s == 'a' and s.value == 'a'
assert l == [1] and len(l) == 1
l.append(2)
assert l == [1, 2]
""")


@pytest.mark.parametrize(("code", "tests"), RIGHT)
def test_right_code_passes_and_code_that_lacks_the_name_does_not(code, tests):
    assert passes(code, tests)
    assert not passes("pass", tests)


# Attacks

PLEASER = """
    class Pleaser(int if {number} else object):
        def __eq__(self, other): return True
        __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
        def __ne__(self, other): return False
        def __hash__(self): return 2
        def __sub__(self, other): return 0
        __rsub__ = __add__ = __mul__ = __sub__
        def __abs__(self): return 0
        def __round__(self, digits=None): return self
        __trunc__ = __float__ = __int__ = __index__ = __round__
        def __instancecheck__(self, kind): return True
    def f(x): return Pleaser()
    """


DEMANDS = """
f(1) == 2; 2 == f(1); abs(f(1) - 2) < 1e-6; abs(2 - f(1)) < 1e-6; math.isclose(f(1), 2); f(1) in [2, 3]; {f(1)} == {2};
[f(1)] == [2]; not f(1) != 2; 1 < f(1) < 3; round(f(1)) == 2; int(f(1)) == 2; f(1) * 1 == 2; -f(1) == -2; 3 in f(1);
{2: True}[f(1)]; f(1) is True; str(f(1)) == '2'; max(f(1), 2) == 2 and f(1) == 2; type(f(1)) is int and f(1) == 2
""".replace("\n", " ").split(";")


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("test", [demand.strip() for demand in DEMANDS])
def test_an_object_that_pleases_everybody_passes_nothing(test, number):
    assert not passes(PLEASER.format(number=number), f"assert {test}")


ATTACKS = {
    "leaves while being imported": "import os; os._exit(0)",
    "leaves when called": """
        import os
        def f(x): os._exit(0)
        """,
    "leaves politely when called": "def f(x): raise SystemExit(0)",
    "kills itself": """
        import os, signal
        def f(x): os.kill(os.getpid(), signal.SIGKILL)
        """,
    "brings its own built-ins and modules": """
        import builtins, math, sys
        builtins.AssertionError = type("E", (), {})
        builtins.abs = abs = lambda x: 0
        math.isclose = lambda *_: True
        sys.modules["math"] = math
        def f(x): return 3
        """,
    "raises as if a name were missing": "raise AttributeError",
    "patches the process that answers": """
        import sys
        for module in list(sys.modules.values()):
            for name in list(vars(module)) if "sandbox" in module.__name__ else ():
                if callable(getattr(module, name)) and name != "RpcChannel":
                    setattr(module, name, lambda *args, **kwargs: True)
        def f(x): return 3
        """,
    "answers before it is asked and reports its own success": """
        import json, os
        for message in (["value", True, {}], {"verdict": True, "exit_code": 0}, ["value", 3, {"0": 2}]) * 4:
            for descriptor in range(3, 64):
                try: os.write(descriptor, json.dumps(message).encode() + b"\\n")
                except OSError: pass
        def f(x): return 3
        """,
    "talks nonsense": """
        import os
        def f(x):
            for descriptor in range(3, 64):
                try: os.write(descriptor, bytes(range(256)) * 99)
                except OSError: pass
        """,
    "returns a mountain": "def f(x): return 'x' * 10**8",
    "returns a circle": """
        def f(x):
            a = []
            a.append(a)
            return a
        """,
    "returns an error of its own": "class f(AssertionError): pass",
}


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize(
    "test", ["assert f(1) == 2", "assert abs(f(1) - 2) < 1e-6", "assert math.isclose(f(1), 2)"]
)
def test_an_attack_does_not_pass(code, test):
    assert not passes(code, test, IMPATIENT)


@pytest.mark.parametrize("attack", ["leaves when called", "kills itself", "raises as if a name were missing"])
@pytest.mark.parametrize("handler", ["except: pass", "finally: import sys; sys.exit(0)"])
def test_not_even_tests_that_expect_an_error_take_vanished_code_for_one(attack, handler):
    assert not passes(ATTACKS[attack], f"try:\n    f(1)\n    assert False\n{handler}", IMPATIENT)


def test_tests_that_expect_an_error_do_not_take_a_missing_name_for_one():
    for handler in ("except: pass", "except NameError: pass"):
        assert not passes("pass", f"try:\n    f(1)\n    assert False\n{handler}")
    assert passes("def f(x): raise ValueError", "try:\n    f(1)\n    assert False\nexcept ValueError: pass")


def test_an_object_is_compared_by_one_value():
    code = """
        import sys
        values = iter([9, 0, 9, 0])
        class Chameleon(int): pass
        def f(x): return Chameleon()
        fork_server = sys.modules["async_grpo.rewards.sandbox.fork_server"]
        fork_server._plain = lambda value: next(values)
        """
    assert passes(code, "assert f(1) > 8")
    assert not passes(code, "x = f(1)\nassert 4 < x < 6")


def test_tests_that_cannot_be_run_are_the_fault_of_the_row():
    for tests, why in (
        ("import numpie\nassert f() == 1", "No module named 'numpie'"),
        ("assert f(", "was never closed"),
        ("assert 1 == 1", "nothing that the tested code could define"),
        ("assert f(lambda: 1)", "a function cannot be handed"),
    ):
        with pytest.raises(ValueError, match=why):
            passes("def f(): return 1", tests)
    assert not passes("def f(): import numpie", "assert f() == 1")


def test_the_tests_and_what_they_expect_cannot_be_found_from_inside():
    secret = 731946
    code = """
        import gc, hashlib, os, re, sys

        def f(x):
            seen = [repr(o) for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple))]
            frame = sys._getframe()
            while frame:
                seen += [repr(v) for v in frame.f_locals.values() if v is not seen]
                frame = frame.f_back
            for number in range(3, 64):
                try: seen.append(os.pread(number, 10**6, 0).decode())
                except OSError: pass
            for process in (os.getppid(), os.getpid(), os.getpid() + 1, os.getpid() - 1):
                for name in ("environ", "cmdline", "mem", "maps", "fd/0", "fd/3", "fd/4"):
                    try: seen.append(repr(open(f"/proc/{process}/{name}", "rb").read(10**6)))
                    except OSError: pass
            for text in set(re.findall("[0-9]{6}", " ".join(seen))):
                if hashlib.sha256(text.encode()).hexdigest() == "DIGEST":
                    return int(text)
            return seen.clear()
        """.replace("DIGEST", hashlib.sha256(str(secret).encode()).hexdigest())
    assert not passes(code, f"assert f(1) == {secret}")
    assert passes(code, f"assert f({secret}) == {secret}")  # so it finds what is there


def test_what_takes_too_long_is_a_time_out_wherever_it_does():
    sandbox = Sandbox(cpu_s=60, wall_s=0.4)
    for code in ("while True: pass", "def f(x):\n    while True: pass", "def f(x):\n    while True: yield 1"):
        run = sandbox.run_tests(code, "assert list(f(1)) == [1]")
        assert run.timed_out and not run.ended_well
    run = Sandbox(cpu_s=0.2, wall_s=60).run_tests("while True: pass", "assert f(1) == 2")
    assert run.timed_out and not run.ended_well


def test_tests_see_nothing_of_this_process_either():
    assert not passes("def f(): return 1", "import os\nassert f() and 'PATH' in os.environ")
    if "seccomp" in STANDING:
        assert passes("def f(): return 1", "import os\ntry: os.fork()\nexcept OSError: assert f()")


# The data between the two

keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers()))
values = st.recursive(
    keys | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.frozensets(keys),
    lambda one: st.lists(one) | st.tuples(one) | st.sets(keys) | st.dictionaries(keys, one),
    max_leaves=8,
)


def carried(value):
    return decode(json.loads(json.dumps(encode(value, refer=id))), resolve=str)


@given(values)
@settings(max_examples=40, deadline=None)
def test_plain_values_arrive_as_they_were(value):
    assert carried(value) == value and repr(type(carried(value))) == repr(type(value))


@pytest.mark.parametrize(
    "value",
    [Fraction(1, 3), Decimal("1.50"), date(2020, 2, 29), timedelta(days=1, seconds=2), deque([1, [2]]), Counter("aab"),
     OrderedDict(b=1, a=2), range(3, 9, 2), 2**200, -(2**200), bytearray(b"x")],
)  # fmt: skip
def test_values_of_the_standard_library_arrive_too(value):
    assert carried(value) == value and type(carried(value)) is type(value)


def test_a_defaultdict_arrives_as_a_dict_and_an_object_as_its_number():
    assert carried(defaultdict(int, a=1)) == {"a": 1}
    assert decode(encode([object()], refer=lambda value: 5), resolve=lambda number: -number) == [-5]


@pytest.mark.parametrize("tag", ["os.getcwd", "type", "decimal.Decimal", "", "__class__", None, []])
def test_decoding_builds_nothing_but_what_is_listed(tag):
    for data in ([tag], ["list", [tag, "abc"]]):
        with pytest.raises(WireError):
            decode(data, resolve=str)


@pytest.mark.parametrize("data", [[], ["int", "x"], ["date", 1], ["set", ["list"]], ["dict", 1], ["object"]])
def test_what_no_value_could_have_become_is_a_wire_error(data):
    with pytest.raises(WireError):
        decode(data, resolve=str)
