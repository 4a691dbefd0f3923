"""Teachers: their log-probs become advantages whose expected gradient is that of the KL to the teacher."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import pack
from async_grpo.experience.step_metrics import StepAlarms
from async_grpo.experience.teachers.distillation import Teachers
from async_grpo.testing import FakeLogprobs, completion
from async_grpo.types import AdapterResult, Group, Outcome, Prompt, RewardStatus, Sample, Verdict

UNSCORED = Verdict(RewardStatus.ABSTAINED, None, (AdapterResult("unscored", RewardStatus.ABSTAINED),))
ALONE = {"advantage_estimator": "teacher", "teacher": "folder"}


def sample(logprobs, teacher_logprobs=None, reward=None, row=None, **changes) -> Sample:
    """A sample whose tokens have these log-probs; without a reward it is not scored."""
    made = replace(completion(len(logprobs)), logprobs=np.array(logprobs, np.float32), **changes)
    verdict = UNSCORED
    if reward is not None:
        verdict = Verdict(RewardStatus.OK, reward, (AdapterResult("r", RewardStatus.OK, reward),))
    if teacher_logprobs is not None:
        teacher_logprobs = np.array(teacher_logprobs, np.float32)
    prompt = Prompt(0, np.array([7, 8], np.int32), row or {"input": "q"})
    return Sample(prompt, made, verdict, teacher_logprobs=teacher_logprobs)


def group(*samples) -> Group:
    return Group(samples[0].prompt, samples, 0, 0)


def trained(*samples, **options):
    """(advantages, mask) of each sample, None if it is not trained on."""
    (done,) = GroupAdvantages(BatchConfig(**options))([group(*samples)], step=0)
    return [
        None if s.advantages is None else (s.advantages.tolist(), s.loss_mask.tolist()) for s in done.samples
    ]


def test_the_advantage_of_a_token_is_the_log_prob_of_the_teacher_minus_that_of_the_engine():
    """log pi_T = -1 and log pi = -2 make +1."""
    assert trained(sample([-2.0, -1.0], [-1.0, -4.0]), **ALONE) == [([1.0, -3.0], [True, True])]
    assert trained(sample([-2.0], [-1.0]), **ALONE, teacher_coef=0.25) == [([0.25], [True])]


def test_the_teacher_is_added_to_the_advantages_of_the_rewards():
    """dr_grpo: 1 and 0 minus their mean of 0.5."""
    samples = [sample([-2.0, -1.0], [-1.0, -1.5], reward=1.0), sample([-3.0], [-3.0], reward=0.0)]
    got = trained(*samples, advantage_estimator="dr_grpo", teacher="folder", teacher_coef=2.0)
    assert got == [([2.5, -0.5], [True, True]), ([-0.5], [True])]


def test_a_token_without_a_log_prob_of_the_teacher_is_left_out_and_is_no_zero():
    got = trained(sample([-2.0, -1.0], [np.nan, -2.0]), sample([-1.0], [np.nan]), **ALONE)
    assert got == [([0.0, -1.0], [False, True]), None]
    # Its reward still counts for the others: 1 and 0 have the mean 0.5
    samples = [sample([-1.0], [-1.0], reward=1.0), sample([-1.0], [-np.inf], reward=0.0)]
    got = trained(*samples, advantage_estimator="dr_grpo", teacher="folder")
    assert got == [([0.5], [True]), None]


def test_alone_it_needs_neither_rewards_nor_a_second_sample_and_trains_no_failed_trajectory():
    lost = replace(UNSCORED, status=RewardStatus.FAILED)
    failed_reward = replace(sample([-2.0], [-1.0]), verdict=lost)
    failed_trajectory = sample([-2.0], [-1.0], outcome=Outcome(failure="AgentFailed: x"))
    assert trained(failed_reward, **ALONE) == [([1.0], [True])]
    assert trained(failed_trajectory, **ALONE) == [None]


# A policy with two choices, then three that depend on the first
LOGITS = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
TEACHER = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
OLD = LOGITS + 0.3 * torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def distributions(logits):
    """Log-probs of the first token (2,), and of the second one after each first one (2, 3)."""
    return logits[:2].log_softmax(0), logits[2:].reshape(2, 3).log_softmax(1)


def by_completion(logits):
    """Log-probs (6, 2) of both tokens of every completion."""
    first, second = distributions(logits)
    return torch.stack([torch.stack([first[i], second[i, j]]) for i in (0, 1) for j in (0, 1, 2)])


def kl_gradient(logits, teacher_logits, prefix_logits):
    """The gradient of KL(pi || pi_T) at each prefix, weighted by the probability of the prefix, which is constant."""
    logits = logits.clone().requires_grad_()
    first, second = distributions(logits)
    teacher_first, teacher_second = distributions(teacher_logits)
    prefix = distributions(prefix_logits)[0].exp().detach()
    kl = (first.exp() * (first - teacher_first)).sum()
    kl = kl + (prefix * (second.exp() * (second - teacher_second)).sum(dim=1)).sum()
    return torch.autograd.grad(kl, logits)[0]


def expected_gradient(logits, sampling_logits):
    """The expected gradient of the loss, by enumeration of all completions that the sampling policy can write."""
    sampled = by_completion(sampling_logits)
    teacher = by_completion(TEACHER)
    samples = [sample(row.tolist(), other.tolist()) for row, other in zip(sampled, teacher, strict=True)]
    # In float64, which the arrays of a sample are not
    samples = [
        replace(s, completion=replace(s.completion, logprobs=row.numpy()), teacher_logprobs=other.numpy())
        for s, row, other in zip(samples, sampled, teacher, strict=True)
    ]
    (done,) = GroupAdvantages(BatchConfig(**ALONE))([group(*samples)], step=0)
    advantages = torch.tensor(np.stack([s.advantages for s in done.samples])).double()
    logits = logits.clone().requires_grad_()
    logprobs = by_completion(logits)
    # The ratio of the token, as in a loss with importance weights and without a clip. The ratio of the prefix is left out
    ratio = (logprobs - sampled).exp()
    chance = sampled.sum(dim=1).exp()
    return torch.autograd.grad((chance * (ratio * -advantages).sum(dim=1)).sum(), logits)[0]


def test_the_expected_gradient_is_that_of_the_kl_to_the_teacher_at_every_prefix():
    got = expected_gradient(LOGITS, LOGITS)
    torch.testing.assert_close(got, kl_gradient(LOGITS, TEACHER, LOGITS), rtol=1e-6, atol=1e-7)
    assert got.abs().max() > 0.01


def test_off_policy_it_is_that_of_the_kl_to_the_teacher_minus_that_to_the_sampling_policy():
    got = expected_gradient(LOGITS, OLD)
    expected = kl_gradient(LOGITS, TEACHER, OLD) - kl_gradient(LOGITS, OLD, OLD)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert (got - kl_gradient(LOGITS, TEACHER, OLD)).abs().max() > 0.01


class Recording(FakeLogprobs):
    """Remembers what it was asked for."""

    def __init__(self, value: float = -1.0) -> None:
        super().__init__(value)
        self.asked = []

    async def logprobs(self, sequences, prompt_lengths, allowed=None):
        self.asked += [sequence.tolist() for sequence in sequences]
        return await super().logprobs(sequences, prompt_lengths, allowed)


class Top(FakeLogprobs):
    """Gives the sampled token the log-prob -1, and finds tokens 3 and 4 the most probable."""

    async def logprobs_with_top(self, sequences, prompt_lengths, k):
        assert k == 2
        rows = []
        for sequence, length in zip(sequences, prompt_lengths, strict=True):
            ids = [[token_id, 3, 4] for token_id in sequence[length:]]
            rows.append(
                np.stack([ids, np.tile([-1.0, -0.5, -1.5], (len(ids), 1))], axis=1).astype(np.float32)
            )
        return rows


def taught(config, sources, made):
    return asyncio.run(Teachers(config, sources).add_logprobs(made))


def test_each_row_is_taught_by_the_teacher_that_its_column_names():
    config = BatchConfig(teacher="maths=a,code=b", teacher_column="topic")
    sources = {"maths": Recording(-1.0), "code": Recording(-5.0)}
    for topic, value in (("maths", -1.0), ("code", -5.0)):
        made = taught(config, sources, group(sample([-2.0, -2.0], row={"input": "q", "topic": topic})))
        assert made.samples[0].teacher_logprobs.tolist() == [value, value]
    assert [source.asked for source in sources.values()] == [[[7, 8, 1, 2]], [[7, 8, 1, 2]]]
    for wrong in ("art", ["maths"]):
        shown = re.escape(repr(wrong))
        with pytest.raises(
            ConfigurationError, match=f"'topic'.*says {shown}; it must name one of the teachers maths, code"
        ):
            taught(config, sources, group(sample([-2.0], row={"topic": wrong})))


def test_only_the_teacher_reads_the_demonstration():
    config = BatchConfig(teacher="self", teacher_demonstration="solution")
    source = Recording()
    one = sample([-2.0, -2.0])
    prompt = replace(one.prompt, teacher_token_ids=np.array([7, 9, 9, 9, 8], np.int32))
    made = taught(config, {"": source}, Group(prompt, (replace(one, prompt=prompt),), 0, 0))
    assert source.asked == [[7, 9, 9, 9, 8, 1, 2]]
    assert made.samples[0].teacher_logprobs.tolist() == [-1.0, -1.0]
    assert made.samples[0].token_ids.tolist() == [7, 8, 1, 2]


def test_without_a_demonstration_the_policy_teaches_itself_exactly_nothing():
    config = BatchConfig(advantage_estimator="teacher", teacher="self", teacher_demonstration="solution")
    source = Recording()
    made = taught(config, {"": source}, group(sample([-2.123, -0.3])))
    (done,) = GroupAdvantages(config)([made], step=0)
    assert done.samples[0].advantages.tolist() == [0.0, 0.0] and source.asked == []
    # A frozen teacher is another policy than the trained one, so it is asked
    config = replace(config, teacher="initial")
    assert taught(config, {"": source}, group(sample([-2.0]))).samples[0].teacher_logprobs.tolist() == [-1.0]


def test_with_top_tokens_the_sampled_token_has_no_advantage_and_the_trainer_gets_ids_and_log_probs():
    config = BatchConfig(advantage_estimator="teacher", teacher="folder", teacher_top_k=2)
    made = taught(config, {"": Top()}, group(sample([-2.0, -2.0])))
    assert made.samples[0].teacher_logprobs.tolist() == [-1.0, -1.0]
    (done,) = GroupAdvantages(config)([made], step=0)
    assert done.samples[0].advantages.tolist() == [0.0, 0.0] and done.samples[0].loss_mask.all()
    batch = pack(list(done.samples))
    assert batch.teacher_top[2:].tolist() == [[[3, 4], [-0.5, -1.5]]] * 2 and batch.teacher_top.shape == (
        4,
        2,
        2,
    )


def test_with_top_tokens_the_policy_still_teaches_itself_exactly_nothing():
    config = BatchConfig(
        advantage_estimator="teacher", teacher="self", teacher_demonstration="solution", teacher_top_k=2
    )
    made = taught(config, {"": Top()}, group(sample([-2.0])))
    assert np.isnan(made.samples[0].teacher_top).all() and made.samples[0].teacher_top.shape == (1, 2, 2)


def test_the_metrics_are_the_kl_per_token_and_the_share_of_covered_tokens():
    config = BatchConfig(teacher="maths=a,code=b", teacher_column="topic")
    teachers = Teachers(config, {})
    maths = group(sample([-1.0, -2.0], [-2.0, -4.0], row={"topic": "maths"}), sample([-1.0], [np.nan]))
    code = group(sample([-1.0], [-0.5], row={"topic": "code"}))
    stats = teachers.stats([maths, code])
    assert stats == {
        "teacher_kl": pytest.approx((1 + 2 - 0.5) / 3),
        "teacher_kl_k3": pytest.approx(sum(np.exp(-g) - 1 + g for g in (1, 2, -0.5)) / 3),
        "teacher_kl/maths": pytest.approx(1.5),
        "teacher_kl/code": pytest.approx(-0.5),
        "teacher_covered": 0.75,
        "teacher_failures": 1,
    }


def test_a_teacher_that_fails_for_every_sample_ends_the_run_with_its_first_reason():
    class Failing(Recording):
        first_failure = "the server is gone"

    teachers = Teachers(BatchConfig(teacher="folder"), {"": Failing()})
    lost = group(sample([-1.0], [np.nan]), sample([-1.0], [np.nan]))
    with pytest.raises(
        RunFailed, match="no teacher gave log-probs for any of the 2 samples of step 4.*is gone"
    ):
        teachers.refuse_untaught(4, [lost])
    teachers.refuse_untaught(4, [lost, group(sample([-1.0], [-1.0]))])
    (alarm,) = [a for a in StepAlarms(BatchConfig()).of_step([lost], {}) if "teacher" in a]
    assert alarm == "the teacher gave no log-probs for 2 of 2 samples"
