"""What the rollout side saves comes back as it was; a trainer's state comes back on any number of ranks."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import pack, random_sequence, tiny_model
from two_ranks import full, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.errors import CheckpointBroken
from async_grpo.experience.dataset import PromptCursor, Question
from async_grpo.experience.state import ExperienceState, UnfinishedGroup
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training import checkpoint
from async_grpo.training.checkpoint import MAX_FILES, Checkpointer
from async_grpo.training.checkpoint_folder import checkpoints_of, newest, verify_checkpoint
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy
from async_grpo.types import (
    AdapterResult,
    Completion,
    FinishReason,
    Group,
    Outcome,
    RewardStatus,
    Sample,
    Turn,
    Verdict,
)

QUESTIONS = [Question(np.array([n, 1], np.int32), {"input": f"q{n}"}) for n in range(5)]


def sample(prompt, member: int, length: int, verdict: Verdict, further: bool) -> Sample:
    random = np.random.default_rng(1000 * prompt.ordinal + member)
    logprobs = random.normal(size=length).astype(np.float32)
    completion = Completion(
        token_ids=random.integers(0, 100, length).astype(np.int32),
        logprobs=logprobs,
        versions=random.integers(0, 9, length).astype(np.int32),
        finish_reason=FinishReason.STOP if member % 2 else FinishReason.LENGTH,
        text='a "quote", \u2028 and \U0001f600',
        char_ends=np.arange(length, dtype=np.int32),
        member=member,
    )
    if not further:
        return Sample(prompt, replace(completion, char_ends=None), verdict)
    if length > 1:  # a trajectory
        turns = (
            Turn(np.array([1, 5], np.int32), 1, True, "x", "y"),
            Turn(np.empty(0, np.int32), length - 1, text="é", number=3),
        )
        outcome = Outcome(0.1 + 0.2, "", (0.5, 1 / 3), ("s", "t"), {"tool_calls": 2.0})
        completion = replace(completion, turns=turns, outcome=outcome)
    return Sample(prompt, completion, verdict, ref_logprobs=logprobs / 3, proximal_logprobs=logprobs * 7)


VERDICTS = [
    Verdict(RewardStatus.OK, 0.1 + 0.2, (AdapterResult("a", RewardStatus.OK, 1 / 3, {"x": 1e-300}),)),
    Verdict(RewardStatus.OK, -0.0, (AdapterResult("p", RewardStatus.OK, 2.0, steps=((3, 0.5), (7, -1.0))),)),
    Verdict(RewardStatus.FAILED, None, (AdapterResult("a", RewardStatus.FAILED, reason="it said: no"),)),
    Verdict(RewardStatus.OK, 0.5, filled=True),
]


def same(one, other) -> bool:
    """Equal in every field, arrays in every bit and dtype."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, n), getattr(other, n)) for n in one.__dataclass_fields__
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and str(one) == str(other)


@pytest.mark.parametrize("further", [True, False])
@pytest.mark.parametrize("finished", [0, 3])
def test_groups_alive_come_back_in_every_bit(tmp_path, further, finished):
    cursor, alive = PromptCursor(QUESTIONS, 3), {}
    for number in range(4, 4 + finished):
        prompt = next(cursor)
        samples = tuple(sample(prompt, m, m * number, VERDICTS[(m + number) % 4], further) for m in range(3))
        alive[number] = Group(prompt, samples, 2, number, VERDICTS[number % 4] if further else None, 1)
    alive[9] = UnfinishedGroup(next(cursor), 2)
    state = ExperienceState(2, 10, cursor.state(), alive)
    state.save(tmp_path)
    back = ExperienceState.load(tmp_path, PromptCursor(QUESTIONS, 3).prompt)
    assert (back.step, back.admitted, back.cursor) == (2, 10, cursor.state())
    assert list(back.alive) == list(alive) and all(same(alive[n], back.alive[n]) for n in alive)


def test_the_keys_of_the_file_stay_those_that_earlier_versions_wrote(tmp_path):
    cursor = PromptCursor(QUESTIONS, 3)
    prompt = next(cursor)
    group = Group(prompt, (sample(prompt, 0, 4, VERDICTS[0], further=True),), 2, 0)
    ExperienceState(2, 1, cursor.state(), {0: group}).save(tmp_path)
    (row,) = json.loads((tmp_path / "experience.json").read_text())["groups"]
    assert row["admitted_version"] == 2
    assert row["samples"][0]["turns"][0] == {
        "before": [1, 5],
        "tokens": 1,
        "fresh": True,
        "said": "x",
        "text": "y",
        "number": 0,
    }


@pytest.mark.parametrize(("fresh", "kept"), [((True, False), True), ((True, True), False)])
def test_a_group_whose_turns_an_older_version_saved_without_their_times_is_played_again_where_they_may_differ(
    tmp_path, fresh, kept
):
    cursor = PromptCursor(QUESTIONS, 3)
    first, second = next(cursor), next(cursor)
    trajectory = sample(first, 0, 4, VERDICTS[0], further=True)
    turns = tuple(replace(turn, fresh=f) for turn, f in zip(trajectory.completion.turns, fresh, strict=True))
    trajectory = replace(trajectory, completion=replace(trajectory.completion, turns=turns))
    plain = sample(second, 0, 3, VERDICTS[1], further=True)
    alive = {0: Group(first, (trajectory,), 0, 0, None, 2), 1: Group(second, (plain,), 0, 1)}
    ExperienceState(0, 2, cursor.state(), alive).save(tmp_path)
    path = tmp_path / "experience.json"
    content = json.loads(path.read_text())
    for turn in content["groups"][0]["samples"][0]["turns"]:
        del turn["number"]
    path.write_text(json.dumps(content))
    back = ExperienceState.load(tmp_path, PromptCursor(QUESTIONS, 3).prompt)
    if kept:
        assert (
            back.alive[0].samples[0].completion.token_ids.tolist() == trajectory.completion.token_ids.tolist()
        )
    else:
        assert same(back.alive[0], UnfinishedGroup(first, 2))
    assert same(back.alive[1], alive[1])  # the arrays behind it are its own


@given(drawn=st.integers(0, 23), retired=st.sets(st.integers(0, 4), max_size=4), more=st.integers(1, 12))
def test_a_restored_cursor_draws_what_the_first_one_would_have(drawn, retired, more):
    first = PromptCursor(QUESTIONS, 37)
    for place in retired:
        first.retire(first.prompt(0, place))
    for _ in range(drawn):
        next(first)
    second = PromptCursor(QUESTIONS, 37)
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(more):
        assert same(next(first), next(second))


def trained(ranks, folder: Path, steps: int, resume: bool):
    """A policy after some AdamW steps on fixed gradients; saved there, or resumed from there."""
    policy = shard_policy(PolicyModel(tiny_model(seed=1)), ranks)
    config = OptimizerConfig(learning_rate=1e-2, num_warmup_steps=8, lr_scheduler="linear")
    optimizer, scheduler = build_policy_optimizer(policy, config, 20)
    given = {"keep": 2, "timeout_s": 60.0, "options": {}, "inputs": {}}
    checkpointer, done = Checkpointer(folder, ranks, policy, scheduler, **given), 0
    if resume:
        path, manifest = newest(folder)
        checkpointer.load(path)
        done = manifest.step
    for step in range(done, steps):
        for number, parameter in enumerate(policy.parameters()):
            whole = torch.sin(torch.arange(parameter.numel()) * (step + 1.0) + number).reshape(
                parameter.shape
            )
            if hasattr(parameter, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = whole
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()
    if not resume:
        checkpointer.save(steps, 8 * steps)
        assert checkpointer.wait()
    state = {name: full(p.detach()).clone() for name, p in policy.named_parameters()}
    return state | {"lr": torch.tensor(scheduler.get_last_lr()[0])}, gradients(policy, ranks)


def gradients(policy, ranks) -> dict[str, torch.Tensor]:
    """Of one minibatch of five sequences, dealt out over the ranks."""
    accumulator, optimizer = recording_accumulator(policy, Objective(AlgorithmConfig()), ranks)
    random = np.random.default_rng(3)
    sequences = [random_sequence(random, with_ref=False) for _ in range(5)]
    mine = sequences[ranks.rank :: ranks.world_size]
    accumulator.add(pack(mine))
    accumulator.finish()
    return optimizer.gradients


def save_by_ranks(ranks, folder):
    checkpoint.FILE_BYTES = 1000  # so that a rank has several files, as with a large model
    return trained(ranks, folder, 5, resume=False)


def resume_on_ranks(ranks, folder):
    return trained(ranks, folder, 9, resume=True)


@pytest.mark.parametrize(("saves", "resumes"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.exhaustive)])
def test_optimizer_schedule_weights_and_gradients_go_on_whatever_the_ranks(tmp_path, saves, resumes, ranks):
    expected, expected_gradients = trained(ranks, tmp_path / "other", 9, resume=False)
    if saves == 1:
        trained(ranks, tmp_path, 5, resume=False)
        found, found_gradients = on_two_ranks(resume_on_ranks, tmp_path, world_size=resumes)
    else:
        on_two_ranks(save_by_ranks, tmp_path, world_size=saves)
        found, found_gradients = trained(ranks, tmp_path, 9, resume=True)
    folder, _ = newest(tmp_path)
    assert verify_checkpoint(folder).world_size == saves
    assert len(list((folder / "training").glob("*.safetensors"))) == saves * (MAX_FILES if saves == 2 else 1)
    # The last elements of a shard are computed one by one, the others in vectors: a third ends elsewhere than a half
    rtol, atol = (0.0, 0.0) if resumes == 1 else (1e-6, 1e-7)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)
    whole, worst = relative_error(found_gradients, expected_gradients)
    assert whole < 1e-5 and worst < 1e-5


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """What a write finds on a full disk, by the limit of this process: an error in its middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("fails", ["training", "experience"])
def test_on_a_full_disk_the_run_goes_on_and_the_last_good_checkpoint_stays(tmp_path, ranks, caplog, fails):
    policy = shard_policy(PolicyModel(tiny_model(seed=1)), ranks)
    _, scheduler = build_policy_optimizer(policy, OptimizerConfig(), 20)
    cursor = PromptCursor(QUESTIONS, 3)
    group = Group((prompt := next(cursor)), (sample(prompt, 0, 200_000, VERDICTS[0], False),), 0, 0)
    state = ExperienceState(0, 1, cursor.state(), {0: group} if fails == "experience" else {})

    def save_experience(folder: Path, step: int):
        return lambda: state.save(folder)

    given = {"keep": 2, "timeout_s": 60.0, "options": {}, "inputs": {}, "save_experience": save_experience}
    checkpointer = Checkpointer(tmp_path, ranks, policy, scheduler, **given)
    checkpointer.save(1, 8)
    assert checkpointer.wait()
    largest = max(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*shard*"))
    with no_file_longer_than(4096 if fails == "training" else largest):
        checkpointer.save(2, 16)
        assert not checkpointer.wait()
    assert "could not be written; the run goes on, the last one stays" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000000001"]
    checkpointer.save(3, 24)
    assert checkpointer.wait() and verify_checkpoint(checkpoints_of(tmp_path)[0]).step == 3


def test_running_means_come_back_and_those_of_a_hostile_file_are_refused(tmp_path):
    cursor = PromptCursor(QUESTIONS, 3)
    ExperienceState(2, 0, cursor.state(), {}, {"7": 0.1 + 0.2}).save(tmp_path)
    assert ExperienceState.load(tmp_path, cursor.prompt).running_means == {"7": 0.1 + 0.2}
    path = tmp_path / "experience.json"
    content = json.loads(path.read_text())
    for means in ([1.0], {"7": "1"}, {"7": float("inf")}, {"7": True}):
        path.write_text(json.dumps(content | {"running_means": means}))
        with pytest.raises(CheckpointBroken, match="the running mean"):
            ExperienceState.load(tmp_path, cursor.prompt)
    del content["running_means"]  # as in a checkpoint of an earlier version
    path.write_text(json.dumps(content))
    assert ExperienceState.load(tmp_path, cursor.prompt).running_means == {}
