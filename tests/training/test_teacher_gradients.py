"""The gradient of a step with a teacher, packed and on two ranks, equals a plain pass over each sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import VOCAB, tiny_model
from two_ranks import WORLD_SIZE, on_two_ranks, recording_accumulator, relative_error

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer, pack
from async_grpo.messages import dummy_micro_batch
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import shard_policy
from async_grpo.types import (
    AdapterResult,
    Completion,
    FinishReason,
    Group,
    Prompt,
    RewardStatus,
    Sample,
    Verdict,
)

COEF = 0.7
TOP_K = 3
CASES = {
    "alone": {"advantage_estimator": "teacher"},
    "with rewards": {"advantage_estimator": "dr_grpo"},
    "most probable tokens": {"advantage_estimator": "dr_grpo", "teacher_top_k": TOP_K},
}


def config(case) -> BatchConfig:
    return BatchConfig(**CASES[case], teacher="x", teacher_coef=COEF, policy_loss="cispo", clip_high=4.0)


def groups() -> list[Group]:
    """Three groups of four; a teacher gave no log-prob for some tokens, and for one sample none at all."""
    rng = np.random.default_rng(0)
    made = []
    for ordinal in range(3):
        prompt = Prompt(ordinal, rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32), {})
        samples = []
        for member in range(4):
            length = int(rng.integers(1, 20))
            completion = Completion(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                logprobs=rng.normal(-3.0, 0.5, length).astype(np.float32),
                versions=np.zeros(length, np.int32),
                finish_reason=FinishReason.STOP,
                text="",
                member=member,
            )
            teacher = rng.normal(-3.0, 1.0, length).astype(np.float32)
            is_missing = rng.random(length) < (1.0 if ordinal == member == 1 else 0.2)
            teacher[is_missing] = np.nan
            top_ids = rng.permuted(np.tile(np.arange(VOCAB), (length, 1)), axis=1)[:, :TOP_K]
            top_logprobs = np.log(rng.dirichlet(np.ones(TOP_K + 2), length)[:, :TOP_K])
            top_logprobs[rng.random((length, TOP_K)) < 0.1] = np.nan
            top = np.stack([top_ids, top_logprobs], axis=1).astype(np.float32)
            reward = float(rng.normal())
            verdict = Verdict(RewardStatus.OK, reward, (AdapterResult("r", RewardStatus.OK, reward),))
            samples.append(Sample(prompt, completion, verdict, teacher_logprobs=teacher, teacher_top=top))
        made.append(Group(prompt, tuple(samples), 0, ordinal))
    return made


def gradients_of_ranks(ranks, folder):
    results = {}
    for case in CASES:
        rule = GroupAdvantages(config(case))
        packer = Packer(WORLD_SIZE, 60)
        for group in rule(groups(), step=0):
            for sample in group.samples:
                if not config(case).teacher_top_k:
                    sample = replace(sample, teacher_top=None)
                if sample.advantages is not None:
                    packer.add(sample)
        policy = PolicyModel(tiny_model(), chunk_tokens=17)
        shard_policy(policy, ranks, OptimizerConfig(), "float32")
        accumulator, optimizer = recording_accumulator(policy, Objective(config(case)), ranks)
        rounds = packer.flush()
        assert len(rounds) > 1
        for micro_batches in rounds:
            accumulator.add(micro_batches[ranks.rank])
        accumulator.finish()
        results[case] = optimizer.gradients
    return results


def plain_gradients(case):
    """Arithmetic over single samples: the mean over all trained tokens of -A sg(min(ratio, 5)) log pi."""
    model = tiny_model()
    losses = []
    for group in groups():
        rewards = [sample.verdict.reward for sample in group.samples]
        for sample in group.samples:
            reward_advantage = 0.0 if case == "alone" else sample.verdict.reward - sum(rewards) / 4
            completion = sample.completion
            ids = torch.tensor([*sample.prompt.token_ids, *completion.token_ids])
            logits = model(ids[None].long()).logits[0].log_softmax(dim=-1)
            for t in range(len(completion)):
                if np.isnan(sample.teacher_logprobs[t]):
                    continue
                place = len(sample.prompt.token_ids) + t
                logprob = logits[place - 1, ids[place]]
                engine = float(completion.logprobs[t])
                advantage = reward_advantage
                forward_kl = 0.0
                if case == "most probable tokens":
                    for token_id, teacher_logprob in sample.teacher_top[t].T:
                        if not np.isnan(teacher_logprob):
                            gap = float(teacher_logprob) - logits[place - 1, int(token_id)]
                            forward_kl = forward_kl + float(np.exp(teacher_logprob)) * gap
                else:
                    advantage += COEF * (float(sample.teacher_logprobs[t]) - engine)
                weight = (logprob.detach() - engine).exp().clamp(max=5.0)
                losses.append(-advantage * weight * logprob + COEF * forward_kl)
    (sum(losses) / len(losses)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_two_ranks_and_any_packing_make_the_gradient_of_one_plain_pass(tmp_path):
    results = on_two_ranks(gradients_of_ranks, tmp_path)
    for case, gradients in results.items():
        expected = {f"model.{name}": gradient for name, gradient in plain_gradients(case).items()}
        error, worst = relative_error(gradients, expected)
        assert error < 1e-5 and worst < 1e-5, (case, error, worst)


def test_tokens_that_only_the_teacher_has_change_neither_the_loss_nor_the_gradient():
    """A teacher may have further tokens, for which the policy's head has no row."""
    objective = Objective(config("most probable tokens"))
    results = []
    for further_id in (VOCAB + 5, 0):
        (group, *_) = GroupAdvantages(config("most probable tokens"))(groups(), step=0)
        samples = []
        for sample in group.samples:
            top = sample.teacher_top.copy()
            top[:, 0, 1] = further_id
            if further_id < VOCAB:
                top[:, 1, 1] = np.nan
            samples.append(replace(sample, teacher_top=top))
        policy = PolicyModel(tiny_model())
        loss, totals = objective(policy, BatchTensors(pack(samples), torch.device("cpu")))
        loss.backward()
        gradients = [parameter.grad for parameter in policy.parameters()]
        results.append((loss.detach(), totals["teacher_forward_kl"], gradients))
    (loss, teacher_kl, gradients), (expected_loss, expected_kl, expected_gradients) = results
    assert torch.equal(loss, expected_loss) and torch.equal(teacher_kl, expected_kl) and teacher_kl != 0
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, expected)


def test_a_dummy_has_the_same_totals_in_the_same_order_so_that_ranks_add_the_same_numbers():
    """Also on a rank that gets nothing else in a step."""
    objective = Objective(config("most probable tokens"))
    (group, *_) = GroupAdvantages(config("most probable tokens"))(groups(), step=0)
    policy = PolicyModel(tiny_model())
    names = []
    for micro_batch in (pack(list(group.samples)), dummy_micro_batch(0)):
        objective.check_inputs(micro_batch)
        loss, totals = objective(policy, BatchTensors(micro_batch, torch.device("cpu")))
        loss.backward()
        names.append(list(totals))
    assert names[0] == names[1] and "teacher_forward_kl" in names[0]
    assert totals["teacher_forward_kl"] == 0


def test_samples_without_the_teachers_most_probable_tokens_are_refused():
    (group, *_) = GroupAdvantages(config("most probable tokens"))(groups(), step=0)
    samples = [replace(sample, teacher_top=None) for sample in group.samples]
    with pytest.raises(ConfigurationError, match="--teacher-top-k is 3 but the samples carry no log-probs"):
        Objective(config("most probable tokens")).check_inputs(pack(samples))
