"""Functions, classes, async functions, batches, post-processing, files: found, called and answered alike."""

import asyncio
import hashlib
import json
import os
import textwrap
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import process_maker

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.decorators import (
    ASYNC_CAPACITY,
    AdapterTraits,
    accepted_options,
    batch,
    check_options,
    post_process,
    process_reward,
    traits_of,
)
from async_grpo.rewards.adapter.registry_source import (
    RewardRegistrySource,
    display_name,
    parse_names,
    resolve,
)
from async_grpo.rewards.adapter.result import MAX_REASON_CHARACTERS, failure, read_answer, read_change
from async_grpo.rewards.bench.completions import POOR_COMPLETIONS, check_adapter
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.types import AdapterResult, RewardStatus
from tests.helpers.answers import answer_of
from tests.helpers.one_worker import OneWorker

ROOT = Path(__file__).resolve().parents[2]
OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus
NAN = float("nan")


# What may be answered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "reward", "extra"),
    [
        (0.5, 0.5, {}),
        (-3, -3.0, {}),
        (True, 1.0, {}),
        ({"reward": 0.5, "length": 3}, 0.5, {"length": 3.0}),
        ({"score": 0.5, "length": 3}, 0.5, {"length": 3.0}),
        ({"reward": 0.5, "score": 9}, 0.5, {"score": 9.0}),
        ({"reward": 1, "abstain": False}, 1.0, {}),
        ({"reward": Fraction(1, 4), "flag": True}, 0.25, {"flag": 1.0}),
        ((0.25, None, None), 0.25, {}),
        (({"score": 0.25, "clarity": 1}, "", ""), 0.25, {"clarity": 1.0}),
    ],
)
def test_numbers_dicts_and_triples_are_answers(returned, reward, extra):
    expected = {"status": "ok", "reward": reward, "extra": extra, "steps": [], "reason": ""}
    assert read_answer(returned, {}) == expected


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ((NAN, "q", "e"), "reward=nan: only finite numbers are allowed e (asked: 'q')"),
        (None, "the adapter returned a NoneType"),
        ((1.0, "q"), "the adapter returned a tuple"),
        ([1.0, "q", "e"], "the adapter returned a list"),
        ({"score": "high"}, "reward='high'"),
        ("1.0", "returned a str, not a number or a dict"),
        ({"points": 1.0}, "no `reward`, only ['points']"),
        ({"reward": 1.0, "part": -float("inf")}, "part=-inf"),
        ({"reward": [1.0]}, "reward=[1.0]"),
        (((1.0, "q", "e"), "q", None), ""),
    ],
)
def test_what_is_no_finite_number_is_no_answer(returned, reason):
    answer = read_answer(returned, {})
    assert reason in answer["reason"]
    assert (answer["status"], answer["reward"]) == (("ok", 1.0) if reason == "" else ("failed", None))


def test_query_and_explanation_go_into_the_reason_alone_and_not_at_any_length():
    answer = read_answer((1.0, "Is it polite?", "It says please."), {})
    assert answer["reason"] == "It says please. (asked: 'Is it polite?')" and answer["extra"] == {}
    long = read_answer((1.0, "q" * 10**6, {"e": "x" * 10**6}), {})
    assert len(long["reason"]) < 2 * MAX_REASON_CHARACTERS and long["status"] == "ok"
    abstained = read_answer(({"abstain": "no code in it", "reward": 1.0}, None, None), {})
    assert abstained == failure("no code in it", "abstained")


# Kinds ------------------------------------------------------------------------------------------------------------


def plain(sample, weight=1.0): ...


async def waits(sample): ...


class Plain:
    def __init__(self, weight=1.0, **rest): ...

    def __call__(self, sample, bias=0.0): ...


class Computes:
    def compute_score(self, sample, bias=0.0): ...


class Waits:
    async def __call__(self, sample): ...


class WaitsInheriting(Waits):
    process = True

    def post_process_scores(self, group): ...


@batch(max_samples=5, max_wait_s=0.5)
class Batched:
    async def compute_score(self, samples): ...


class Judge:
    def endpoint(self): ...

    async def score(self, sample, client, *, phase, deadline): ...


@pytest.mark.parametrize(
    ("adapter", "kind"),
    [
        (plain, AdapterTraits()),
        (partial(plain, weight=2.0), AdapterTraits()),
        (process_reward(lambda sample: {}), AdapterTraits(is_process_reward=True)),
        (post_process(lambda group: group)(lambda sample: 1.0), AdapterTraits(has_post_process=True)),
        (waits, AdapterTraits(64, is_async=True)),
        (Plain, AdapterTraits()),
        (Plain(), AdapterTraits()),
        (Computes, AdapterTraits()),
        (Waits(), AdapterTraits(64, is_async=True)),
        (WaitsInheriting, AdapterTraits(64, is_async=True, is_process_reward=True, has_post_process=True)),
        (Batched, AdapterTraits(5, is_async=True, is_batch=True, max_wait_s=0.5)),
        (batch()(lambda samples: []), AdapterTraits(32, is_batch=True, max_wait_s=0.01)),
        (Judge(), AdapterTraits(256, is_async=True, is_judge=True)),
    ],
)
def test_the_kind_of_a_reward_is_seen_from_outside(adapter, kind):
    assert traits_of(adapter) == kind
    assert AdapterTraits(**json.loads(json.dumps(asdict(kind)))) == kind  # as its process says it


class NoReward:
    def score(self, sample): ...


def test_what_cannot_be_called_the_class_of_a_judge_and_an_impossible_batch_are_refused():
    for thing in (None, NoReward, NoReward()):
        with pytest.raises(ConfigurationError, match="is no reward: give a function, a class with __call__"):
            traits_of(thing)
    with pytest.raises(ConfigurationError, match=r"register a judge itself, Judge\(...\), not its class"):
        traits_of(Judge)
    for max_samples, max_wait_s in ((0, 0.1), (1, NAN)):
        with pytest.raises(ConfigurationError, match="@batch needs max_samples >= 1 and max_wait_s >= 0"):
            batch(max_samples, max_wait_s)


def test_an_option_counts_as_known_wherever_it_is_named():
    class Strict:
        def __init__(self, url): ...

        def __call__(self, sample, weight=1.0): ...

    adapters = {"strict": Strict, "plain": plain, "judge": Judge()}
    check_options(adapters, {"url": "x", "weight": 2.0})
    with pytest.raises(
        ConfigurationError, match="no reward function of strict, plain, judge takes the option self, ulr"
    ):
        check_options(adapters, {"ulr": "x", "self": 1})
    assert accepted_options(Strict, {"url": "x", "weight": 2.0}, num_given=0) == {"url": "x"}


def test_a_reward_that_awaits_must_say_so_and_a_number_too_large_for_a_float_is_a_failure():
    async def hidden():
        await asyncio.sleep(0)
        return 1.0

    reason = answer_of(lambda sample: hidden(), {}, {})["reason"]
    assert reason.startswith("TypeError: it awaits, so it must be declared `async def`")
    too_large = answer_of(lambda sample: {"reward": 10**400}, {}, {})
    assert too_large["status"] == "failed" and "only finite numbers are allowed" in too_large["reason"]


# In their processes -----------------------------------------------------------------------------------------------

PAGE = textwrap.dedent(
    '''
    import asyncio, os, time
    from async_grpo.rewards.adapter.decorators import batch, post_process

    class Counting:
        """Says how often it was built and called in this process, with which options, and when it was closed."""
        built = 0

        def __init__(self, start=0.0, log=""):
            Counting.built += 1
            self.calls, self.log = start, log

        def __call__(self, sample, step=1.0):
            self.calls += step
            return {"score": self.calls, "built": Counting.built, "pid": os.getpid()}

        def warm_up(self):
            self.calls += 100

        def close(self):
            with open(self.log, "a") as file:
                file.write(f"closed after {self.calls:g}\\n")

    class Session:
        """What it opens belongs to the event loop of its process."""
        in_flight = most = 0

        def __init__(self, log=""):
            self.loop, self.log = asyncio.get_running_loop(), log

        async def warm_up(self):
            await asyncio.sleep(0)
            self.warm = True

        async def __call__(self, sample):
            assert self.loop is asyncio.get_running_loop() and self.warm
            Session.in_flight += 1
            Session.most = max(Session.most, Session.in_flight)
            await asyncio.sleep(sample.get("seconds", 0.0))
            Session.in_flight -= 1
            return {"reward": sample.get("value", 1.0), "most": Session.most, "pid": os.getpid()}

        async def close(self):
            await asyncio.sleep(0)
            with open(self.log, "a") as file:
                file.write("closed")

    @batch(max_samples=4, max_wait_s=0.2)
    def batched(samples, weight=1.0):
        return [{"reward": weight * sample["value"], "size": len(samples)} for sample in samples]

    @batch(max_samples=4, max_wait_s=0.2)
    async def batched_later(samples):
        await asyncio.sleep(0.05)
        values, said = [sample["value"] or None for sample in samples], f"one of {len(samples)}"
        return [value and (value, None, said) for value in values] if values[-1] else [1.0]

    def fill(group):
        known = [member["reward"] for member in group if member["status"] == "ok"]
        return [sum(known) / len(known) if member["reward"] is None else None for member in group]

    @post_process(fill)
    def filled(sample):
        return 1.0 / sample["value"]

    async def later(group):
        await asyncio.sleep(0.01)
        return [{"reward": 0.5, "size": len(group)} for _ in group if group[0]["sample"].get("value") != 1]

    @post_process(later)
    async def filled_later(sample):
        return {"reward": 1.0, "length": 3}

    REWARD_ADAPTERS = {name: value for name, value in list(globals().items()) if callable(value)}
    '''
)
SOURCE = RewardRegistrySource("page_of_kinds", PAGE)


async def scored(adapter: str, samples: list[dict[str, Any]], **options: Any) -> list[AdapterResult]:
    """The results of one worker, all samples asked at once."""
    worker = OneWorker(SOURCE, adapter, options)
    try:
        await worker.start()
        return await asyncio.gather(*(worker.score(sample, 20.0) for sample in samples))
    finally:
        await worker.close()


async def changed(adapter: str, samples: list[dict[str, Any]]) -> list[AdapterResult]:
    """The results of a group after post-processing."""
    worker = AdapterProcess(SOURCE, adapter)
    try:
        results = [await worker.score(sample, 20.0) for sample in samples]
        assert worker.has_post_process
        return await worker.post_process(samples, results, 20.0)
    finally:
        await worker.close()


async def test_a_class_is_built_once_with_its_options_warmed_up_and_closed_at_the_end(tmp_path):
    log = tmp_path / "log"
    results = await scored("Counting", [{}] * 5, start=10.0, step=2.0, log=str(log), url="x")
    assert [result.reward for result in results] == [112.0, 114.0, 116.0, 118.0, 120.0]
    assert {result.extra["built"] for result in results} == {1.0}
    assert len({result.extra["pid"] for result in results} - {os.getpid()}) == 1
    assert log.read_text() == "closed after 120\n"


async def test_an_async_reward_has_many_samples_in_flight_in_one_process(tmp_path):
    log = tmp_path / "log"
    samples = [{"value": float(number), "seconds": 0.3} for number in range(2 * ASYNC_CAPACITY)]
    results = await scored("Session", samples, log=str(log))
    assert [result.reward for result in results] == [sample["value"] for sample in samples]
    assert max(result.extra["most"] for result in results) == ASYNC_CAPACITY
    assert len({result.extra["pid"] for result in results}) == 1
    assert log.read_text() == "closed"


async def test_a_batch_function_gets_its_samples_together_and_each_its_own_answer():
    """Full batches wait for nobody, and the last not for ever for its others."""
    results = await scored("batched", [{"value": number} for number in range(10)], weight=2.0)
    assert [result.reward for result in results] == [2.0 * number for number in range(10)]
    assert [result.extra["size"] for result in results] == [4.0] * 8 + [2.0] * 2
    assert 0.2 <= results[9].latency_s < 10


async def test_a_batch_function_may_be_async_and_its_answers_are_read_one_by_one():
    results = await scored("batched_later", [{"value": 0.5}, {"value": 0}, {"value": 0.25}])
    assert [result.reward for result in results] == [0.5, None, 0.25]
    assert results[0].reason == "one of 3" and "returned a NoneType" in results[1].reason
    results = await scored("batched_later", [{"value": 1}, {"value": 0}])
    reason = "it returned 1 answers for a batch of 2 samples"
    assert [(result.status, result.reason) for result in results] == [(FAILED, reason)] * 2


async def test_post_processing_sees_the_failures_of_a_group_and_may_fill_them():
    results = await changed("filled", [{"value": 1}, {"value": 0}, {"value": 2}])
    assert [(result.status, result.reward) for result in results] == [(OK, 1.0), (OK, 0.75), (OK, 0.5)]
    assert results[0].reason == "" and results[0].latency_s > 0 and results[0].adapter == "filled"


async def test_post_processing_may_be_async_and_add_numbers_but_lose_no_sample():
    results = await changed("filled_later", [{}, {}])
    assert [(result.reward, result.extra) for result in results] == [(0.5, {"length": 3.0, "size": 2.0})] * 2
    results = await changed("filled_later", [{"value": 1}, {}])
    assert [result.status for result in results] == [FAILED] * 2
    assert results[0].reason.startswith(
        "post_process_scores: ValueError: it returned 0 answers for a group of 2"
    )


@pytest.mark.parametrize(
    ("change", "status", "reward", "extra", "reason"),
    [
        (None, "ok", 1.0, {"a": 1.0}, "why"),
        (0.5, "ok", 0.5, {"a": 1.0}, ""),
        ({"reward": 0.5, "a": 2, "b": 3}, "ok", 0.5, {"a": 2.0, "b": 3.0}, ""),
        ({"sample": {}, "status": "ok", "reward": None, "extra": {}}, "ok", 1.0, {"a": 1.0}, "why"),
        ({"abstain": "ties"}, "abstained", None, {}, "ties"),
        (NAN, "failed", None, {}, "the adapter returned reward=nan: only finite numbers are allowed"),
        (b"x", "failed", None, {}, "the adapter returned a bytes, not a number or a dict with a `reward`"),
    ],
)
def test_a_change_is_read_like_an_answer(change, status, reward, extra, reason):
    answer = {"status": "ok", "reward": 1.0, "extra": {"a": 1.0}, "steps": [[2, 1.0]], "reason": "why"}
    found = read_change(change, answer)
    assert (found["status"], found["reward"], found["extra"]) == (status, reward, extra)
    assert found["reason"] == reason and found["steps"] == ([[2, 1.0]] if status == "ok" else [])


# By their files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Two files in folders of their own; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)
    for folder, factor in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        text = f"def shout(sample):\n    return {factor} * sample['value']\nasync def hum(sample):\n    return {factor}\n"
        (tmp_path / folder / "my-sympy.py").write_text(text)
    return tmp_path


PAGE_AND_FILE = RewardRegistrySource("small_page", "REWARD_ADAPTERS = {'half': lambda sample: 0.5}")


async def test_a_reward_named_by_its_file_travels_as_text_and_stands_beside_those_of_the_page(files):
    names = "a/my-sympy.py:shout, half,b/my-sympy.py:hum"
    source = PAGE_AND_FILE.with_files(names)
    for path in files.glob("*/my-sympy.py"):
        path.unlink()  # what happens to the files after the start changes nothing
    source = RewardRegistrySource.from_dict(json.loads(json.dumps(asdict(source))))
    adapters = resolve(source, names)
    assert list(adapters) == ["shout", "half", "hum"] == [display_name(name) for name in parse_names(names)]
    assert adapters["shout"]({"value": 4}) == 8
    for name, reward in (("shout", 8.0), ("half", 0.5), ("hum", 3.0)):
        worker = AdapterProcess(source, name)
        assert (await worker.score({"value": 4}, 20.0)).reward == reward
        assert worker.capacity == (ASYNC_CAPACITY if name == "hum" else 1)
        await worker.close()


def test_two_files_of_one_name_do_not_meet_nor_hide_a_package(files):
    (files / "sympy.py").write_text("def zero(sample):\n    return 0\n")
    source = PAGE_AND_FILE.with_files("a/my-sympy.py:shout,b/my-sympy.py:hum,sympy.py:zero")
    adapters = resolve(source, ["shout", "hum", "zero"])
    assert (adapters["shout"]({"value": 1}), adapters["zero"]({})) == (2, 0)
    assert asyncio.run(adapters["hum"]({})) == 3
    import sympy

    assert sympy.Integer(3) == 3


@pytest.mark.parametrize("names", ["a/my-sympy.py:shout,b/my-sympy.py:shout", "half,x.py:half"])
def test_two_rewards_must_not_be_known_by_one_name(names, files):
    (files / "x.py").write_text("half = len")
    known = names.rpartition(":")[2]
    for refused in (PAGE_AND_FILE.with_files, partial(resolve, PAGE_AND_FILE)):
        with pytest.raises(ConfigurationError, match=f"several rewards would be known as {known}: give"):
            refused(names)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c/none.py:shout", "", r"cannot read.*'c/none.py'.*No such file"),
        ("a/my-sympy.py:whisper", "", "a/my-sympy.py defines no 'whisper', only shout, hum"),
        ("a/own.py:x", "import no_such_package", "a/own.py cannot be imported: ModuleNotFoundError"),
        ("a/own.py:x", "x = 3", "3 is no reward"),
    ],
)
def test_a_file_that_cannot_be_read_or_lacks_the_reward_is_the_users_mistake(files, name, text, message):
    (files / "a" / "own.py").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        resolve(PAGE_AND_FILE.with_files(name), name)


def test_a_file_is_read_by_the_trainer_or_not_at_all_and_each_text_has_its_digest(files):
    with pytest.raises(ConfigurationError, match="a/my-sympy.py:shout is not among the files of this run"):
        resolve(PAGE_AND_FILE, "a/my-sympy.py:shout")
    source = PAGE_AND_FILE.with_files("a/my-sympy.py:shout,half")
    text = (files / "a" / "my-sympy.py").read_bytes()
    assert source.digests == {"small_page": source.sha256, "shout": hashlib.sha256(text).hexdigest()}


# What every reward must keep to -----------------------------------------------------------------------------------

COUNTDOWN = {"completion": "so</think>\n<answer>3*(4+5)</answer>", "nums": [3, 4, 5], "target": 27}


@pytest.mark.parametrize(
    ("name", "row"),
    [("sympy", {"completion": r"\boxed{\sqrt{8}}", "answer": r"2\sqrt{2}"}), ("countdown_steps", COUNTDOWN)],
)
async def test_the_shipped_rewards_keep_to_it(name, row):
    source = RewardRegistrySource.from_file(ROOT / "reward_registry.py")
    assert await check_adapter(name, process_maker(source), [row], timeout_s=30.0) == []


CHECKED = textwrap.dedent(
    """
    import os, random, time
    from async_grpo.rewards.adapter.decorators import post_process

    def good(sample): return float(sample["completion"] == sample["answer"])
    def fails(sample): return sample["no such column"]
    def generous(sample): return 1.0
    def strict(sample): return 1.0 / len(sample["completion"])
    def moody(sample): return random.random() + (sample["completion"] == sample["answer"])
    def local(sample): return os.getpid() + (sample["completion"] == sample["answer"])
    def slow(sample): return time.sleep(5 * (sample["completion"] == "")) or good(sample)
    def silent(sample): return good(sample) or {"abstain": "no answer"}
    forgetful = post_process(lambda group: [])(lambda sample: good(sample))
    CALLS = []
    def counts(sample):
        CALLS.append(1)
        return len(CALLS) * good(sample)
    REWARD_ADAPTERS = {name: value for name, value in list(globals().items()) if callable(value)}
    """
)


@pytest.mark.parametrize(
    ("adapter", "problems"),
    [
        ("good", []),
        ("silent", []),
        ("fails", ["sample 0: the right completion has failed: KeyError: 'no such column'"]),
        ("generous", [f"sample 0: {what} is worth 1, and the right one no more than that" for what in POOR_COMPLETIONS]),
        ("strict", ["sample 0: an empty completion has failed: ZeroDivisionError", "blanks is worth", "letters"]),
        ("moody", ["sample 0: asked again, it is worth", "in another process", "after a cancelled call"]),
        ("local", ["sample 0: in another process, it is worth"]),
        # Whether its process also outlives the cancelled call, and counts on, is a matter of two milliseconds.
        ("counts", ["sample 0: asked again, it is worth 18, while at first it is worth 1"]),
        ("slow", ["sample 0: an empty completion has timed_out: no answer within 1 s"]),
        (
            "forgetful",
            ["the whole group has failed: post_process_scores: ValueError: it returned 0 answers for a group of 1"],
        ),
        ("missing", ["reward function 'missing' cannot start: unknown reward function missing"]),
    ],
)  # fmt: skip
async def test_the_check_finds_what_is_wrong(adapter, problems):
    make = process_maker(RewardRegistrySource("checked_page", CHECKED))
    right = {"completion": "42 is the answer", "answer": "42 is the answer"}
    found = await check_adapter(adapter, make, [right], timeout_s=1.0)
    assert len(found) == len(problems) or adapter in ("fails", "strict", "moody", "local", "counts"), found
    for problem in problems:
        assert any(problem in text for text in found), (problem, found)
