"""What reads foreign text (judges' replies, completions, pages, logs, metrics of other runs) takes time in its proportion.

Every regular expression of the package stands in `PATTERNS`, with the feed of `FEEDS` that shows it hostile text, or with
the reason why it sees none. A new one must be added there: see first that no two of its parts match the same character.
"""

import ast
import itertools
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from async_grpo.environments import chat
from async_grpo.launch import local_run
from async_grpo.processes import look, supervisor
from async_grpo.programs import why
from async_grpo.rewards.adapter.result import excerpt
from async_grpo.rewards.builtin import answers, code, countdown, json_schema, math_verify, mathd, sympy, text
from async_grpo.rewards.http.exchange import json_object, retry_after_s
from async_grpo.rewards.judges import judge_prompts, judge_replies

PACKAGE = Path(__file__).resolve().parents[2] / "async_grpo"
CALLS = {"compile", "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
OURS = "own text, or that of the user's command line"
PLAIN = "its parts match different characters, each at most once"
LIMITED = "a pattern of the user, under a time limit"
CHECKED = "a pattern of the user, which is only compiled"

PATTERNS: dict[str, dict[str, str]] = {
    "cluster/ray_session.py": {r"\x1b\[[0-9;]*m": PLAIN},
    "environments/chat.py": {r"<tool_call>\s*(\{(?:(?!</?tool_call>).)*\})\s*</tool_call>": "message_of"},
    "environments/games/guess.py": {r"\d+": PLAIN},
    "launch/local_run.py": {r"was the first to end, with exit code 2\b": "log lines"},
    "metrics/alarms.py": {
        r"\d[\d.,]*": PLAIN,
        "(?!eval_).*/reward_std": "metric names",
        "eval_(.+_)?avg_reward": "metric names",
    },
    "metrics/reader.py": {
        r"f'({_WORD}@)?({_WORD}|\\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\\])'": OURS,
        r"[\w ./~@%+=:,-]+": OURS,
    },
    "metrics/trackers.py": {"[^a-zA-Z0-9_]": PLAIN},
    "options/redaction.py": {
        r"\\u[0-9a-f]{4}": PLAIN,
        "KEY|TOKEN|SECRET|PASSW|CREDENTIAL": OURS,
        "%[0-9A-F]{2}": OURS,
    },
    "processes/look.py": {r"^(Thread [^\n]*)\n((?:    .*\n?)*)": "log lines", r"SigCgt:\s*(\w+)": OURS},
    "processes/supervisor.py": {
        r"(\[rank\d+\]: )?([a-z_]+\.)*[A-Z]\w+(Error|Exception): ": "log lines",
        r"rank\s*: (\d+)": "torchrun_root",
        r"exitcode\s*: (-?\d+)\s+\(pid: (\d+)\)": "torchrun_root",
    },
    "programs/plot.py": {r"(\d*):(\d*)": OURS},
    "programs/samples.py": {"<script>(.*?)</script>": OURS},
    "programs/why.py": {r"error: | ERROR |^([a-z_]+\.)*[A-Z]\w+(Error|Exception): ": "log lines"},
    "rewards/builtin/answers.py": {
        r"[\s${}~]|\\(?:q?quad|text|mbox|mathrm)(?![a-zA-Z])|\\[,;:! ]": "boxed_answer",
        r"-?\d{1,3}(,\d{3})+(\.\d+)?": "ungrouped",
        r"\s*(\{|[^\s$]+)": "boxed_answer",
        "[{}]": "boxed_answer",
        r"[ \t]*```[ \t]*(\w*)": "fenced_blocks",
        "(</?answer>)": "answer_block",
    },
    "rewards/builtin/countdown.py": {
        r"<answer>(.*?)(</answer>|\Z)": "countdown",
        "[0-9]+": "countdown",
        r"(?:(?:0|[1-9][0-9]*)(?![0-9])|[+\-*/() ])+": "countdown",
    },
    "rewards/builtin/math_verify.py": {
        r"[^\t\n\r\x20-\x7e]": "readable",
        r"[\d\s]++/?": "readable",
        r"(?<=\d)[ \t]+(?=\d)": "readable",
    },
    "rewards/builtin/mathd.py": {r"(-?\d+)/(-?\d+)": "mathd", r"\s": "mathd", "pattern": "mathd"},
    "rewards/builtin/sympy.py": {
        r"-?\d+": "parts of sympy",
        r"-{0,2}\\frac\{\d+\}\{\d+\}": "parts of sympy",
        r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln)(?![a-zA-Z])": "parts of sympy",
        r"[()\[\]]": "parts of sympy",
    },
    "rewards/builtin/text.py": {r".*?</think>\n<answer>.*?</answer>": "format", "pattern": LIMITED},
    "rewards/judges/judge_prompts.py": {
        "f'<(?=[|｜]{_NAMED}>|{_NAMED}[|｜]>|/?s>|(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>|</?SYS>>|<<(?i:BEGIN|END))"
        "|\\\\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\\\\])'": "completion_of",
        r"f'(?:<[|｜]{_NAMED}>|</s>|<eos>|<end_of_turn>)\\Z'": "completion_of",
    },
    "rewards/judges/judge_replies.py": {"pattern": LIMITED},
    "rewards/judges/judge_schemas.py": {"pattern": f"{LIMITED}; {CHECKED}"},
    "rewards/judges/score_line.py": {
        "score": "score line",
        r"([\s*_\"`]{1,8}is\b)?[\s*_:：=\"`]{1,40}": "score line",
        r"(?:\\boxed\{|[\[($*_\"`]){0,8}": "score line",
        r"[+\-−–]?\.?\d": "score line",
        r"[+\-−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)": "score line",
        r"[*_\"'`)\]}>$]{0,8}": "score line",
        r"[ \t]{0,3}(?:/|out of)[ \t]{0,3}([0-9]+(?:\.[0-9]+)?)": "score line",
        r"[^\S\n]*(?:\n|\Z)|<[/|]": "score line",
        r"[.,;:!?][*_\"'`)\]}>$]{0,8}(?=\s|\Z)[^\S\n]*": "score line",
        r"[+\-−–~.=*/×÷^<>≈]{0,3}[^\S\n]*\d": "score line",
        r"(?:or|to|and)\b": "score line",
        r"[ \t]{1,3}(?:\(|[-–—]{1,3}[ \t]{1,3}|[✓✔✅]|([^\W\d_]{2,30}))": "score line",
        r"[^\W\d_]+": "score line",
    },
    "weights/self_test.py": {r"\.\d+\.": PLAIN},
}


def patterns_in(path: Path) -> Iterator[str]:
    """Yield the expressions that a module gives to `re` or `regex`: constants as they are, all else as source."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id in ("re", "regex") and node.func.attr in CALLS:
            pattern = node.args[0]
            yield pattern.value if isinstance(pattern, ast.Constant) else ast.unparse(pattern)


def test_every_regular_expression_of_the_package_has_been_looked_at():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if patterns := set(patterns_in(path)):
            found[path.relative_to(PACKAGE).as_posix()] = patterns
    assert found == {module: set(patterns) for module, patterns in PATTERNS.items()}


def test_whoever_imports_names_of_re_would_escape_this_review():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("re", "regex"), path
            if isinstance(node, ast.Import):
                assert not any(name.name in ("re", "regex") and name.asname for name in node.names), path


# Feeds


def scored(score: Callable[..., Any], **row: Any) -> Callable[[str], Any]:
    """Return a function that gives a text to a reward as its completion."""
    return lambda completion: score(
        {"answer": "7", "completion_token_ids": [], **row, "completion": completion}
    )


def in_box(score: Callable[..., Any], longest: int) -> Callable[[str], Any]:
    """The same, with as much of the text in a box as the reward reads."""
    return lambda content: score({"answer": "7", "completion": rf"\boxed{{{content[:longest]}}}"})


def judge_by_schema(reply: str) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "number"}, "why": {"pattern": r"^(\w+\s?)*$"}},
    }
    judge_replies.by_schema(reply, schema | {"required": ["score"]}, "score")


def look_at_log(log: str) -> None:
    look.THREAD.sub("", log)
    local_run.REFUSED.search(log)
    for line in [*log.splitlines()[:100], log]:
        supervisor.TRACEBACK_END.match(line)
        why.ERROR.search(line)


FEEDS: dict[str, Callable[[str], Any]] = {
    "message_of": chat.message_of,
    "log lines": look_at_log,
    "metric names": lambda name: [
        re.fullmatch("(?!eval_).*/reward_std", name),
        re.fullmatch("eval_(.+_)?avg_reward", name),
    ],
    "torchrun_root": supervisor.torchrun_root,
    "boxed_answer": answers.boxed_answer,
    "ungrouped": answers.ungrouped,
    "fenced_blocks": answers.fenced_blocks,
    "answer_block": answers.answer_block,
    "countdown": scored(countdown.score_steps, nums=[3, 4], target=7),
    "readable": lambda answer: math_verify.readable(answer[: 3 * math_verify.MAX_CHARACTERS]),
    "mathd": scored(mathd.score),
    "mathd in a box": in_box(mathd.score, mathd.MAX_CHARACTERS),
    "parts of sympy": lambda element: [sympy.split_elements(element), sympy.exact_form(element)],
    "format": scored(text.format),
    "exact": scored(text.exact),
    "json_schema": scored(json_schema.score, schema=True),
    "code_of": code.code_of,
    "completion_of": lambda completion: judge_prompts.completion_of({"completion": completion}),
    "score line": lambda reply: judge_replies.by_score_line(reply, 10.0),
    "judge's JSON": judge_by_schema,
    "judge's body": lambda body: json_object(body.encode("utf-8", "surrogatepass")),
    "Retry-After": lambda header: retry_after_s(header[:8190]),  # aiohttp takes no longer one
    "excerpt": excerpt,
}
UNITS = [
    *(
        " ",
        "\n",
        "\t",
        "\u00a0",
        "\r\n",
        "    \n",
        "1",
        "9,",
        "1 ",
        "1.",
        "1/",
        "a",
        "A",
        "_",
        "a_.",
        "é",
        "\u0663",
    ),
    *("\U0001f600", "\ud800", "\0", *"()[]{}<>\\\"'`$,.:=*/-|", "<think>", "</think>", "<think></think>"),
    *(
        r"\boxed{",
        r"\boxed{}",
        r"\boxed ",
        r"\boxed{1},",
        r"\frac",
        r"\frac{",
        r"\text{ ",
        r"\sqrt ",
        "^ {",
        "####",
    ),
    *(
        "<answer>",
        "</answer>",
        "<answer></answer>",
        "```",
        "```json\n",
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>{}",
    ),
    *(
        "</tool_call>",
        '{"a":',
        '{"a":1},',
        "[{",
        "Score",
        "score ",
        "Score: ",
        "Score: 1 ",
        "Score: 1/",
        "1e",
        "<|a|> ",
    ),
    *(
        "Root Cause",
        "Root Cause rank: 1",
        "rank: 1 exitcode: 1 ",
        "[rank1]: ",
        "a.b.CError",
        "Thread \n",
        "eval_",
    ),
    *("eval_avg_reward/", "\x1b[1;", "error:"),
]
IN_THE_LOOP = {
    "score line",
    "judge's JSON",
    "judge's body",
    "completion_of",
    "message_of",
    "excerpt",
    "Retry-After",
}
NUM_CHARACTERS = 1_000_000  # for what runs in the controller's event loop
NUM_OTHER_CHARACTERS = 100_000  # for what runs in processes that can be killed
NUM_PAIR_CHARACTERS = 60_000
PAIRED = ["{", "}", "<", "\\", "$", '"', " ", "1", "a", "\n", "<think>", r"\boxed{"]
SECONDS = 2.0  # of processor time; what is linear takes some milliseconds, what is quadratic minutes


class TooSlow(BaseException):
    """No Exception, which what is fed may catch."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds of processor time, also in the middle of a match."""

    def interrupt(*_: object) -> None:
        raise TooSlow(what)

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def feed(name: str, unit: str, num_characters: int) -> None:
    """Show it the unit again and again, alone and with something else at begin and end."""
    babble = unit * (num_characters // len(unit))
    for shown in (babble, "{" + babble + "x"):
        # A text that is no answer is refused with one of these errors; BadReply is a ValueError
        with within(SECONDS, f"{name} on {unit!r}"), suppress(ValueError, RecursionError):
            FEEDS[name](shown)


def test_every_pattern_that_sees_foreign_text_has_a_feed():
    feeds = {feed for patterns in PATTERNS.values() for feed in patterns.values()}
    assert feeds - {OURS, PLAIN, LIMITED, f"{LIMITED}; {CHECKED}"} <= set(FEEDS)


@pytest.mark.parametrize("name", FEEDS)
def test_a_megabyte_of_whatever_it_is_is_read_in_time(name):
    for unit in UNITS:
        feed(name, unit, NUM_CHARACTERS if name in IN_THE_LOOP else NUM_OTHER_CHARACTERS)


@pytest.mark.parametrize("name", FEEDS)
def test_so_are_two_kinds_that_take_turns(name):
    for pair in itertools.combinations(PAIRED, 2):
        feed(name, "".join(pair), NUM_PAIR_CHARACTERS)
