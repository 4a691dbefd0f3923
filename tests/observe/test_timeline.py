"""What each process did when: few spans that tell the truth, written with every step, taken back on resume, and drawn."""

import asyncio
import itertools
import json
import time

import numpy as np
import pytest
from fake_chain import Chain, chain_config
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig, EvaluationConfig
from async_grpo.experience.dataset import Question
from async_grpo.messages import StepEnd
from async_grpo.metrics.spans import Spans, condensed, union
from async_grpo.metrics.writer import TIMELINE_FILE, MetricsWriter, rewind
from async_grpo.observe.figures import COLOURS
from async_grpo.observe.plot import main, timeline
from async_grpo.testing import FakeEngine, FakeGeneration, FakeLogprobs, FakeVerification
from async_grpo.training.record import Recorder, record_folder
from async_grpo.types import Group, Prompt

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=20)


def seconds_in(intervals) -> set[int]:
    """Of whole seconds, those that lie in any interval."""
    return {second for begin, end in intervals for second in range(begin, end)}


@given(INTERVALS)
def test_the_union_holds_every_second_once_and_nothing_else(drawn):
    intervals = [(begin, begin + length) for begin, length in drawn]
    joined = union(intervals)
    assert seconds_in(joined) == seconds_in(intervals)
    assert sum(end - begin for begin, end in joined) == len(seconds_in(intervals))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(joined))


@given(INTERVALS, st.integers(1, 5))
def test_condensed_spans_are_few_lose_no_second_and_add_only_the_shortest_gaps(drawn, most):
    intervals = [(begin, begin + length) for begin, length in drawn]
    spans = [("a", "train", *interval) for interval in intervals] + [("b", "wait", 0, 1)]
    few = [span[2:] for span in condensed(spans, most) if span[0] == "a"]
    assert len(few) <= most and seconds_in(intervals) <= seconds_in(few)
    assert ("b", "wait", 0, 1) in condensed(spans, most)
    exact = union(intervals)
    if len(exact) <= most:
        assert few == exact
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(exact)]
    kept = [after[0] - before[1] for before, after in itertools.pairwise(few)]
    closed = sorted(gaps)[: len(gaps) - len(kept)]
    assert sorted(kept + closed) == sorted(gaps) and max(closed, default=0) <= min(kept, default=99)


def test_a_span_ends_with_its_block_even_if_that_fails():
    spans, before = Spans(), time.time()
    with pytest.raises(ZeroDivisionError), spans.measure("rewards", "score"):
        time.sleep(0.01)
        1 / 0  # noqa: B018
    ((lane, what, begin, end),) = spans.take()
    assert (lane, what) == ("rewards", "score") and before <= begin and 0.01 <= end - begin < 1
    assert spans.take() == []


class BusyEngine(FakeEngine):
    """Takes 60 ms for a group, and says so."""

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        begun = time.time()
        await asyncio.sleep(0.06)
        async for completion in super().complete(prompt_token_ids, seeds, sampling):
            yield completion
        self._progress["busy"].append((begun, time.time()))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The metrics lines of a run of five steps, and what was written down of it."""
    folder = tmp_path_factory.mktemp("run")
    chain = Chain(folder, engines=2, engine=BusyEngine, config=chain_config(num_training_batches=5))
    begun = time.time()
    lines = chain.train(lambda: FakeVerification(delay_s=0.01))
    writer = MetricsWriter(folder, num_steps=5)
    for line in lines:
        writer.write(line)
    writer.close()
    spans = [json.loads(line) for line in (folder / TIMELINE_FILE).read_text().splitlines()]
    return folder, lines, spans, begun, time.time()


def length(spans) -> float:
    return sum(span["end"] - span["begin"] for span in spans)


def test_every_process_of_a_run_has_its_lane(run):
    _, _, spans, begun, ended = run
    kinds = {(span["lane"], span["what"]) for span in spans}
    trainer = {("trainer 0", what) for what in ("wait", "train")}
    engines = {("engine g0", "generate"), ("engine g1", "generate")}
    assert kinds >= {*trainer, *engines, ("rewards", "score"), ("weights", "sync")}
    assert {what for _, what in kinds} <= set(COLOURS)
    assert all(begun - 0.001 <= span["begin"] < span["end"] <= ended + 0.001 for span in spans)
    assert {span["step"] for span in spans} == {1, 2, 3, 4, 5}
    assert max(sum(span["step"] == step for span in spans) for step in range(1, 6)) <= 60


def test_the_trainer_does_one_thing_at_a_time_and_its_spans_add_up_to_its_seconds(run):
    _, lines, spans, *_ = run
    for line in lines:
        own = [s for s in spans if s["lane"] == "trainer 0" and s["step"] == line["step"]]
        trained = length([span for span in own if span["what"] == "train"])
        assert trained == pytest.approx(line["seconds_computing"], abs=0.01)
        ordered = sorted((span["begin"], span["end"]) for span in own)
        assert all(before[1] <= after[0] + 0.003 for before, after in itertools.pairwise(ordered))


def test_what_an_engine_was_busy_with_is_what_the_metrics_count(run):
    _, lines, spans, *_ = run
    busy = union([(s["begin"], s["end"]) for s in spans if s["what"] == "generate"])
    counted = sum(line["engine_busy_s"] for line in lines)
    assert sum(end - begin for begin, end in busy) == pytest.approx(counted, rel=0.3) and counted > 0.1


async def test_log_probs_and_an_evaluation_have_lanes_of_their_own():
    config = BatchConfig(samples_per_question=2)
    generation = FakeGeneration(delay=lambda ordinal, member: 0.01)
    slow = FakeLogprobs()

    async def logprobs(sequences, lengths):
        await asyncio.sleep(0.01)
        return await FakeLogprobs().logprobs(sequences, lengths)

    slow.logprobs = logprobs
    batcher = ExperienceBatcher(config, [], generation, FakeVerification(), slow, slow)

    prompt = Prompt(0, np.array([1, 2], np.int32), {"input": "q"})
    group = await batcher.rollouts.group(prompt, 0, 0)
    assert isinstance(await batcher.rollouts.add_logprobs(group), Group)
    kinds = {span[:2] for span in batcher.rollouts.spans.take()}
    assert {("reference", "logprobs"), ("proximal", "logprobs")} <= kinds

    await batcher.evaluate([Question(np.array([1], np.int32), {"input": "q"})], EvaluationConfig())
    assert ("evaluation", "evaluate") in {span[:2] for span in batcher.rollouts.spans.take()}


def test_a_resumed_run_takes_the_spans_of_the_steps_that_it_does_again_out_of_the_file(tmp_path):
    lines = [
        json.dumps({"step": step, "lane": "a", "what": "wait", "begin": 0, "end": 1}) for step in (1, 2, 3)
    ]
    (tmp_path / TIMELINE_FILE).write_text("\n".join(lines) + "\n" + lines[0][:20])
    rewind(tmp_path, 2, None)
    assert (tmp_path / TIMELINE_FILE).read_text().splitlines() == lines[:2]
    assert (tmp_path / f"undone_{TIMELINE_FILE}").read_text().splitlines() == [lines[2], lines[0][:20]]


def test_the_record_of_a_step_does_not_hold_when_it_was_made(tmp_path):
    class Source:
        start = staticmethod(lambda: None)

        def next_message(self, rank):
            return StepEnd(0, 1, 1, {"spans": [("rewards", "score", 1.0, 2.0)], "avg_reward": 0.5})

    end = Recorder(Source(), tmp_path, 1, {}).next_message(0)
    assert end.stats["spans"], "the run itself has them"
    told = json.loads((record_folder(tmp_path, 0) / "rank_0.json").read_text())
    assert told["stats"] == {"avg_reward": 0.5}


def test_the_picture_shows_every_lane_and_the_steps_that_were_asked_for(run, tmp_path):
    folder, *_ = run
    with pytest.raises(SystemExit) as ended:
        main(["timeline", str(folder), "--steps", "2:3", "-o", str(tmp_path / "t.svg")])
    assert not ended.value.code
    text = (tmp_path / "t.svg").read_text()
    for lane in ("engine g0", "engine g1", "rewards", "trainer 0", "weights"):
        assert f"<!-- {lane} -->" in text
    assert "<!-- 2 -->" in text and "<!-- 3 -->" in text and "<!-- 5 -->" not in text
    assert COLOURS["train"] in text and COLOURS["generate"] in text
    timeline(folder / TIMELINE_FILE, "", tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_steps_that_are_none_and_runs_without_a_timeline_are_refused(run, tmp_path):
    folder, *_ = run
    for steps, message in (("5", "'5' is not A:B"), ("a:b", "not A:B"), ("7:9", "no spans of these steps")):
        with pytest.raises(ConfigurationError, match=message):
            timeline(folder, steps, tmp_path / "t.svg")
    with pytest.raises(ConfigurationError, match="holds no spans"):
        timeline(tmp_path, "", tmp_path / "t.svg")
    with pytest.raises(ConfigurationError, match="must end in"):
        timeline(folder, "", tmp_path / "t.gif")
