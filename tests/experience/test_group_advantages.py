"""Verdicts -> advantages on the way to the trainer: process rewards, length, KL, staleness, filters, whole minibatches."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.config.rewards import ResolvedRewards
from async_grpo.config.run import RunConfig
from async_grpo.experience.config import NO_FACTS, BatchConfig, RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.experience.staleness import StalenessBudget, StepAssembler, StepComplete
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.testing import completion
from async_grpo.types import AdapterResult, Group, Prompt, RewardStatus, Sample, Verdict

OK, FAILED = RewardStatus.OK, RewardStatus.FAILED


def sample(length, reward=None, *, steps=(), outcome=None, version=0, truncated=False, ref=None):
    """`reward`: of the adapter "judge"; `steps`: of the process adapter "prm"; None: it failed."""
    results = []
    if steps is None or steps:
        status = OK if steps is not None else FAILED
        total = sum(r for _, r in steps) if steps else None
        results.append(AdapterResult("prm", status, total, steps=tuple(steps or ())))
    if reward is not None:
        results.append(AdapterResult("judge", OK, reward))
    rewards = [result.reward for result in results if result.reward is not None]
    failed = not results or any(result.status is FAILED for result in results)
    verdict = Verdict(FAILED, None, tuple(results)) if failed else Verdict(OK, max(rewards), tuple(results))
    ref = None if ref is None else np.full(length, ref, np.float32)
    prompt = Prompt(0, np.ones(2, np.int32), {"input": "q"})
    return Sample(prompt, completion(length, version, truncated=truncated), verdict, ref_logprobs=ref)


def judged(**rewards):
    """A sample of one token and the reward of each adapter by name; None: it abstained."""
    results = tuple(
        AdapterResult(name, RewardStatus.ABSTAINED if reward is None else OK, reward)
        for name, reward in rewards.items()
    )
    best = max(reward for reward in rewards.values() if reward is not None)
    return Sample(Prompt(0, np.ones(1, np.int32), {}), completion(1), Verdict(OK, best, results))


def group(*samples, sequence_number=0, baseline=None):
    return Group(samples[0].prompt, samples, 0, sequence_number, baseline)


def rule(facts: RunFacts = NO_FACTS, **options) -> GroupAdvantages:
    return GroupAdvantages(BatchConfig(**options), facts)


def advantages(plan, *groups, step=0):
    """One row per sample, None where it is not trained on."""
    with_advantages = plan(groups, step)
    return [
        None if s.advantages is None else s.advantages.tolist() for g in with_advantages for s in g.samples
    ]


def test_outcome_rewards_become_the_estimators_advantages_on_every_token():
    plan = rule(advantage_estimator="dr_grpo")
    assert advantages(plan, group(sample(2, 1.0), sample(3, 0.0))) == [[0.5, 0.5], [-0.5, -0.5, -0.5]]


def test_the_length_penalty_is_part_of_the_reward_that_is_compared():
    facts = RunFacts(max_completion_tokens=10)
    plan = rule(
        facts, advantage_estimator="dr_grpo", overlong_buffer=0.4, overlong_penalty=0.5, mask_truncated=False
    )
    # 6 tokens cost nothing, 8 tokens half of the penalty, 10 tokens all of it
    by_hand = [0.0, -0.25, -0.5]
    got = advantages(plan, group(*(sample(n, 1.0) for n in (6, 8, 10))))
    assert [row[0] for row in got] == pytest.approx([r - sum(by_hand) / 3 for r in by_hand], abs=1e-6)


def test_the_length_penalty_costs_where_rewards_are_taken_apart():
    facts = RunFacts(max_completion_tokens=10)
    plan = rule(facts, advantage_estimator="gdpo", overlong_buffer=0.4, mask_truncated=False)
    short, long = advantages(plan, group(sample(6, 1.0), sample(10, 1.0)))
    # one judge, who sees no difference; the penalty takes 0 and 1: +-z over 6 and 10 tokens, whitened
    values = [1.0] * 6 + [-1.0] * 10
    deviation = np.std(values, ddof=1)
    assert short == pytest.approx([(1 - np.mean(values)) / deviation] * 6, rel=1e-5)
    assert long == pytest.approx([(-1 - np.mean(values)) / deviation] * 10, rel=1e-5)


def test_a_kl_in_the_reward_is_taken_off_token_by_token():
    plan = rule(advantage_estimator="remax", kl_coef=0.1, kl_kind="k1", kl_in_reward=True)
    # fakes sample at log-prob -0.5; the reference says -1.5: k1 = 1 per token. Greedy completion: reward 0
    rows = [sample(3, 1.0, ref=-1.5), sample(1, 1.0, ref=-1.5)]
    got = advantages(plan, group(*rows, baseline=Verdict(OK, 0.0)))
    assert got[0] == pytest.approx([1 - 0.3, 1 - 0.2, 1 - 0.1]) and got[1] == pytest.approx([0.9])


@pytest.mark.parametrize("estimator", ["remax", "dr_grpo"])
def test_a_kl_in_the_reward_is_held_by_its_clamp(estimator):
    """One estimator that reads every token, and one that reads sums."""
    options = {"kl_coef": 0.1, "kl_kind": "k1", "kl_in_reward": True, "kl_clamp": 2.0}
    plan = rule(advantage_estimator=estimator, **options)
    # fakes sample at log-prob -0.5: k1 is 4 per token, held at 2, and 1
    rows = [sample(3, 1.0, ref=-4.5), sample(1, 1.0, ref=-1.5)]
    got = advantages(plan, group(*rows, baseline=Verdict(OK, 0.0)))
    if estimator == "remax":
        assert got[0] == pytest.approx([1 - 0.6, 1 - 0.4, 1 - 0.2]) and got[1] == pytest.approx([0.9])
    else:
        assert got[0] == pytest.approx([-0.25] * 3) and got[1] == pytest.approx([0.25])


def test_without_a_score_for_the_greedy_completion_remax_leaves_the_group_out():
    plan = rule(advantage_estimator="remax")
    rows = [sample(2, 1.0), sample(2, 0.0)]
    assert advantages(plan, group(*rows, baseline=Verdict(FAILED, None))) == [None, None]
    assert advantages(plan, group(*rows, baseline=Verdict(OK, 0.25))) == [[0.75, 0.75], [-0.25, -0.25]]


def test_process_rewards_stand_on_their_tokens_and_stay_there():
    facts = RunFacts(process_rewards=("prm",))
    plan = rule(facts, advantage_estimator="grpo_process")
    rows = [sample(4, steps=[(1, 1.0), (3, 0.0)]), sample(3, steps=[(0, 0.0), (2, 1.0)])]
    got = advantages(plan, group(*rows))
    # pool 1 0 0 1: mean 1/2, deviation sqrt(1/3); z = +-0.866; the sum of the steps ahead of each token
    z = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    assert got[0] == pytest.approx([0, 0, -z, -z], abs=1e-6)
    assert got[1] == pytest.approx([0, z, z], abs=1e-6)


def test_an_outcome_beside_process_rewards_is_a_step_at_the_end():
    facts = RunFacts(process_rewards=("prm",), weights={"prm": 2.0})
    plan = rule(facts, advantage_estimator="gae")  # carries token rewards to the trainer
    got = advantages(plan, group(sample(3, 1.0, steps=[(0, 0.25)]), sample(2, 0.0, steps=[(1, 0.5)])))
    assert got == [[0.5, 0.0, 1.0], [0.0, 1.0]]


def test_prime_takes_process_and_outcome_as_two_sources():
    facts = RunFacts(process_rewards=("prm",), weights={"outcome": 3.0})
    plan = rule(facts, advantage_estimator="prime_rloo")
    rows = [sample(3, 1.0, steps=[(0, 0.5)]), sample(2, 0.0, steps=[(1, 0.25)])]
    # A step less that of the other sample: .25 0 3 and 0 -.25-3; what is still to come, whitened over all tokens
    returns = np.array([3.25, 3.0, 3.0, -3.25, -3.25])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    assert np.concatenate(advantages(plan, group(*rows))) == pytest.approx(expected)


def test_gdpo_normalises_every_adapter_and_needs_all_of_them():
    plan = rule(advantage_estimator="gdpo")
    got = advantages(plan, group(judged(a=1.0, b=10.0), judged(a=0.0, b=0.0), judged(a=5.0, b=None)))
    assert got[2] is None and got[0] == pytest.approx([-got[1][0]])
    assert advantages(plan, group(judged(a=1.0, b=0.0), judged(a=0.0, b=1.0)))[0] == [0.0]


def test_tokens_of_policies_that_are_too_old_leave_the_loss_and_the_rest_of_their_sample_stays():
    plan = rule(advantage_estimator="dr_grpo", max_token_staleness=1)
    mixed = completion(3)
    mixed.versions[:] = [2, 3, 4]
    first = Sample(Prompt(0, np.ones(1, np.int32), {}), mixed, Verdict(OK, 1.0))
    (with_advantages,) = plan([group(first, sample(2, 0.0, version=4))], 4)
    assert with_advantages.samples[0].loss_mask.tolist() == [False, True, True]
    assert with_advantages.samples[0].advantages.tolist() == [0.0, 0.5, 0.5]
    assert with_advantages.samples[1].group_tokens == 4


def test_filtering_takes_groups_of_equal_rewards_out_of_the_loss():
    groups = [group(sample(2, 1.0), sample(2, 1.0)), group(sample(2, 1.0), sample(2, 0.0), sequence_number=1)]
    assert advantages(rule(), *groups)[:2] == [[0, 0], [0, 0]]
    assert advantages(rule(zero_variance="filter"), *groups)[:2] == [None, None]
    assert advantages(rule(zero_variance="filter"), *groups)[2] is not None


OUTCOME_ESTIMATORS = [
    name
    for name, e in ADVANTAGE_ESTIMATORS.items()
    # Those with a critic, a greedy completion or a memory have tests of their own
    if e.outcome and name not in ("remax", "gdpo", "gae", "decoupled_gae", "running_mean")
]


@given(
    rewards=st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4), min_size=4, max_size=4
    ),
    name=st.sampled_from(OUTCOME_ESTIMATORS),
    order=st.permutations(range(4)),
)
@settings(max_examples=40, deadline=None)
def test_whatever_the_order_of_arrival_a_step_has_the_advantages_of_its_whole_minibatch(rewards, name, order):
    """Batch-coupled estimators wait for all groups; the others may not depend on them."""
    groups = [
        group(*(sample(1 + i, r) for i, r in enumerate(row)), sequence_number=n)
        for n, row in enumerate(rewards)
    ]
    plan = rule(advantage_estimator=name)
    assembler = StepAssembler(StalenessBudget(4, 0), Packer(2, 10_000), plan)
    events = [event for n in order for event in assembler.offer(groups[n])]
    assert isinstance(events[-1], StepComplete) and all(isinstance(event, list) for event in events[:-1])
    expected = dict(enumerate(plan(groups, 0)))
    for closed in events[-1].groups:
        for got, wanted in zip(closed.samples, expected[closed.sequence_number].samples, strict=True):
            assert got.advantages == pytest.approx(wanted.advantages, abs=1e-6)


def test_a_batch_coupled_estimator_hands_out_nothing_before_its_minibatch_is_whole():
    plan = rule(advantage_estimator="reinforce_plus_plus_baseline")
    assembler = StepAssembler(StalenessBudget(3, 0), Packer(1, 8), plan)  # every sample fills a micro-batch
    three = [group(sample(5, 1.0), sample(5, 0.0), sequence_number=n) for n in range(3)]
    assert assembler.offer(three[2]) == [] and assembler.offer(three[0]) == []
    assert len(assembler.offer(three[1])) == 7  # six micro-batches and the end of the step


def test_who_abstained_beside_a_process_reward_has_said_nothing_and_no_zero():
    plan = rule(RunFacts(process_rewards=("prm",)), advantage_estimator="grpo_process")
    alone = [sample(3, steps=((0, 1.0),)), sample(3, steps=((0, 0.0),))]
    nothing = AdapterResult("judge", RewardStatus.ABSTAINED)
    beside = [replace(s, verdict=Verdict(OK, 1.0, (*s.verdict.results, nothing))) for s in alone]
    assert advantages(plan, group(*beside)) == advantages(plan, group(*alone))


def test_a_group_that_is_filtered_out_moves_no_statistic_of_the_batch():
    plan = rule(advantage_estimator="reinforce_plus_plus_baseline", zero_variance="filter")
    varied = group(sample(2, 1.0), sample(2, 0.0))
    dull = group(sample(4, 1.0), sample(4, 1.0), sequence_number=1)
    assert advantages(plan, varied, dull)[:2] == advantages(plan, varied)
    unfiltered = rule(advantage_estimator="reinforce_plus_plus_baseline")
    assert advantages(unfiltered, varied, dull)[:2] != advantages(unfiltered, varied)


ONE, NONE = sample(1, 1.0), sample(1)
EARLY, LATE = sample(2, steps=[(0, 1.0), (1, 0.0)]), sample(2, steps=[(0, 0.0), (1, 1.0)])
BEATEN, NO_GREEDY = Verdict(OK, 0.0), Verdict(FAILED, None)


@pytest.mark.parametrize(
    ("estimator", "members", "baseline", "signal"),
    [
        ("grpo", [judged(a=1.0, b=0.0), judged(a=1.0, b=0.5)], None, False),  # the best of each is the same
        ("gdpo", [judged(a=1.0, b=0.0), judged(a=1.0, b=0.5)], None, True),
        ("gdpo", [judged(a=1.0, b=0.5), judged(a=1.0, b=0.5), judged(a=0.0, b=None)], None, False),
        ("gdpo", [judged(a=1.0, b=0.5), judged(a=1.0, b=0.0), judged(a=0.0, b=None)], None, True),
        ("grpo_process", [EARLY, LATE], None, True),  # one total, earned in different places
        ("grpo", [ONE, ONE], BEATEN, False),
        ("remax", [ONE, ONE], BEATEN, True),  # all better than the greedy completion
        ("remax", [ONE, sample(1, 0.0)], NO_GREEDY, False),  # nothing to compare with
        ("remax", [NONE, NONE], BEATEN, False),  # every reward failed, whatever the greedy completion got
    ],
)
def test_what_counts_as_signal_is_what_the_estimator_reads(estimator, members, baseline, signal):
    facts = RunFacts(process_rewards=("prm",) if estimator == "grpo_process" else ())
    plan = rule(facts, advantage_estimator=estimator)
    assert plan.has_signal(group(*members, baseline=baseline)) == signal


def test_the_weights_of_the_command_line_reach_an_estimator_that_takes_rewards_apart():
    """gdpo: 1 and 0 by one adapter, 0 and 1 by the other cancel, unless one weighs more."""

    def by(**options):
        config = RunConfig(
            model_name_or_path="m", data_path="d", advantage_estimator="gdpo", reward_fns="a,b", **options
        )
        adapters = {"a": lambda sample: 0.0, "b": lambda sample: 0.0}
        source = RewardRegistrySource("page_of_weights", "")
        facts = ResolvedRewards(source, adapters, adapters).facts(config, 16)
        return advantages(GroupAdvantages(config, facts), group(judged(a=1.0, b=0.0), judged(a=0.0, b=1.0)))

    assert by() == [[0.0], [0.0]]
    assert by(reward_weights="a=3")[0][0] > 0.5 > -0.5 > by(reward_weights="b=3")[0][0]


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "grpo_batch_std"])
def test_a_large_minibatch_of_outcomes_takes_no_column_per_token(estimator):
    """128 groups of 32 samples of 8,192 tokens: a (B, T) tensor in float64 is 268 MB."""
    prompt, long = Prompt(0, np.ones(1, np.int32), {}), completion(8192)
    groups = [
        Group(prompt, tuple(Sample(prompt, long, Verdict(OK, float(n % 3))) for n in range(32)), 0, slot)
        for slot in range(128)
    ]
    plan = rule(advantage_estimator=estimator)
    tracemalloc.start()
    (first, *_) = plan(groups, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # bytes; torch's own are not among them, but the samples' arrays are
    assert first.samples[0].advantages.shape == (8192,) and first.samples[0].group_tokens == 32 * 8192


def test_a_group_with_fewer_rewards_than_asked_for_is_left_out():
    three = group(sample(1, 1.0), sample(1, 0.0), sample(1))
    assert advantages(rule(), three)[0] is not None
    assert advantages(rule(min_valid_samples=3), three) == [None, None, None]


@pytest.mark.parametrize(
    ("culprits", "policies", "filled"),
    [
        ("a", {"a": "group_mean"}, 2.0),
        ("a", {}, None),
        ("ab", {"a": "group_mean", "b": "group_mean"}, 2.0),
        ("ab", {"a": "group_mean"}, None),  # b's failure is to be masked
    ],
)
def test_the_mean_of_the_group_stands_in_only_if_every_failure_asks_for_it(culprits, policies, filled):
    lost = Verdict(FAILED, None, tuple(AdapterResult(name, FAILED) for name in culprits))
    three = group(sample(3, 1.0), sample(3, 3.0), replace(sample(3), verdict=lost))
    changed = rule(RunFacts(failure_policies=policies)).with_group_mean(three).samples[2].verdict
    assert changed.reward == filled and changed.filled == (filled is not None)


SAMPLES = st.builds(
    lambda length, steps, reward, ref: sample(
        length, reward, steps=[(at % length, paid) for at, paid in steps], ref=ref
    ),
    length=st.integers(1, 6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=3),
    reward=st.sampled_from([None, 0.0, 1.0]),
    ref=st.sampled_from([-1.0, -0.5, 0.0]),
)


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("process", [(), ("prm",)])
@pytest.mark.parametrize(
    "name", [n for n, e in ADVANTAGE_ESTIMATORS.items() if e.flat_between_rewards or e.sums]
)
@settings(max_examples=8, deadline=None)
@given(groups=st.lists(st.lists(SAMPLES, min_size=2, max_size=4), min_size=1, max_size=3))
def test_columns_of_runs_and_scores_give_what_columns_of_tokens_give(name, process, kl, groups):
    greedy = sample(2, 0.5).verdict
    groups = [group(*samples, sequence_number=n, baseline=greedy) for n, samples in enumerate(groups)]
    plan = rule(
        RunFacts(process_rewards=process), advantage_estimator=name, kl_coef=kl, kl_in_reward=bool(kl)
    )
    coarse = advantages(plan, *groups)
    plan.estimator = replace(plan.estimator, flat_between_rewards=False, sums=False)
    plan.restore({})  # running means begin anew
    for got, expected in zip(coarse, advantages(plan, *groups), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or np.allclose(got, expected, atol=1e-6)


def alone(length, reward, number, *, agent="a", question=0):
    """A group of a single sample, of one agent's row."""
    prompt = Prompt(number, np.ones(2, np.int32), {"input": "q", "agent": agent}, question)
    one = replace(sample(length, reward), prompt=prompt)
    return Group(prompt, (one,), 0, number)


def test_with_one_sample_per_question_flash_reinforce_compares_with_the_mean_of_the_batch():
    plan = rule(advantage_estimator="flash_reinforce", samples_per_question=1)
    groups = [alone(2, 1.0, 0), alone(1, 0.0, 1), alone(3, 0.5, 2), alone(2, None, 3)]
    # The sample without a reward counts in no mean, and is not trained on
    assert advantages(plan, *groups) == [[0.5, 0.5], [-0.5], [0.0, 0.0, 0.0], None]
    assert [plan.has_signal(group) for group in groups] == [True, True, True, False]
    assert [plan.mean_reward(group) for group in groups] == [1.0, 0.0, 0.5, None]


def test_with_one_sample_per_question_remax_compares_with_its_greedy_completion():
    plan = rule(advantage_estimator="remax", samples_per_question=1)
    better, same = Verdict(OK, 0.25), Verdict(OK, 1.0)
    assert advantages(plan, group(sample(2, 1.0), baseline=better)) == [[0.75, 0.75]]
    assert plan.has_signal(group(sample(2, 1.0), baseline=better))
    assert not plan.has_signal(group(sample(2, 1.0), baseline=same))


def test_with_one_sample_per_question_a_critic_gets_the_rewards_of_every_token():
    plan = rule(advantage_estimator="gae", samples_per_question=1)
    assert advantages(plan, alone(3, 1.0, 0)) == [[0.0, 0.0, 1.0]]
    assert advantages(plan, alone(3, None, 0)) == [None]


def test_a_group_that_is_larger_still_needs_as_many_rewards_as_the_option_says():
    groups = group(sample(2, 1.0), sample(2, None))
    assert advantages(rule(advantage_estimator="flash_reinforce"), groups) == [None, None]
    allowing = rule(advantage_estimator="flash_reinforce", min_valid_samples=1)
    assert advantages(allowing, groups) == [[0.0, 0.0], None]


MEANS = dict(advantage_estimator="running_mean", samples_per_question=1, estimator_options="decay=0.5")


def test_a_running_mean_is_read_before_the_reward_changes_it_in_the_order_of_admission():
    plan = rule(running_mean_column="agent", **MEANS)
    assembler = StepAssembler(StalenessBudget(3, 0), Packer(1, 10_000), plan)
    step = [alone(1, 1.0, 0), alone(1, 0.5, 1, agent="b"), alone(1, 0.0, 2)]
    done = [event for n in (2, 0, 1) for event in assembler.offer(step[n])][-1]
    # Agent a: 1 - 0, then 0 - 0.5; agent b: 0.5 - 0
    assert [g.samples[0].advantages.tolist() for g in done.groups] == [[1.0], [0.5], [-0.5]]
    assert plan.memory(1) == {"a": 0.25, "b": 0.25}
    (later,) = plan([alone(1, 1.0, 3)], 1)
    assert later.samples[0].advantages.tolist() == [0.75]


def test_a_checkpoint_has_the_running_means_before_the_groups_that_are_still_alive():
    plan = rule(**MEANS)  # by question
    plan([alone(1, 1.0, 0, question=4)], 0)
    plan([alone(1, 0.0, 1, question=4), alone(1, 3.0, 2, question=9)], 1)
    assert plan.memory(0) == {} and plan.memory(1) == {"4": 0.5}
    assert plan.memory(2) == {"4": 0.25, "9": 1.5}
    resumed = rule(**MEANS)
    resumed.restore(plan.memory(1))
    groups = [alone(1, 0.0, 1, question=4), alone(1, 3.0, 2, question=9)]
    assert advantages(resumed, *groups, step=1) == [[-0.5], [3.0]]
    assert resumed.memory(2) == plan.memory(2)
    plan.weights_live(1)
    assert plan.memory(1) == {"4": 0.5}  # step 1 is still alive


def test_a_checkpoint_has_the_running_means_before_all_minibatches_of_a_batch_with_several_passes():
    """Two minibatches and two passes: the last step of both minibatches of the second batch is 7."""
    plan = rule(**MEANS)
    plan([alone(1, 1.0, 0, question=4)], 3)
    plan([alone(1, 0.0, 1, question=4), alone(1, 1.0, 2, question=5)], 7)
    plan([alone(1, 0.0, 3, question=4), alone(1, 3.0, 4, question=9)], 7)
    assert plan.memory(4) == {"4": 0.5}
    assert plan.memory(8) == {"4": 0.125, "5": 0.5, "9": 1.5}


def test_a_sample_without_a_reward_changes_no_running_mean():
    plan = rule(**MEANS)
    assert advantages(plan, alone(1, None, 0), alone(1, 1.0, 1)) == [None, [1.0]]
    assert plan.memory(1) == {"0": 0.5}
