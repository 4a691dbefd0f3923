"""Several passes over a batch: which messages the trainer gets, and the gradient of every pass.

The gradients are those of two FSDP ranks with random packing, computed in float64 and summed in float32: over several
passes, the rounding errors of some losses would exceed the tolerance. The reference is one padded pass for each step, with
an old policy that it keeps itself (`padded_step`).
"""

from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from dealt_micro_batches import deal
from padded_step import (
    add_teacher,
    own_critic,
    padded_step_gradients,
    plain_in_float64,
    policy_of,
    sharded_in_float64,
)
from tiny_policy import pack, random_sequence, tiny_model
from torch.distributed.tensor import DTensor, distribute_tensor
from two_ranks import full, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.pass_plan import PassPlan
from async_grpo.messages import MicroBatch, SaveRequested, StepEnd, WorkersJoined, dummy_micro_batch
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.critic import Critic
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_critic_optimizer, build_policy_optimizer
from async_grpo.training.passes import Passes
from async_grpo.training.trainer import Trainer
from async_grpo.types import PROMPT_TOKEN

NOISE = 0.01  # standard deviation of what a step adds to the weights: enough to move the policy between two passes
PLAN = PassPlan(num_minibatches=2, num_passes=3)
WEIGHTS = dict(importance_level="token", importance_high=2.0)
CASES = {
    "the policy at the start": dict(old_policy="current", clip_low=0.05, clip_high=0.05),
    "the engine": dict(clip_low=0.3, clip_high=0.3),
    "weights beside a ratio": dict(WEIGHTS, old_policy="current"),
    "weights in place of a ratio": dict(WEIGHTS, policy_loss="gpg", importance_normalize=True),
    "rejected tokens": dict(
        old_policy="current", rejection_statistic="token_k1", rejection_low=0.3, rejection_high=3.0
    ),
    "rejected tokens of groups": dict(
        loss_aggregation="prompt_mean", rejection_statistic="token_k2", rejection_high=2.0
    ),
    "sequences": dict(policy_loss="gspo", old_policy="current", clip_low=0.01, clip_high=0.01),
    "a penalty of selected tokens": dict(
        policy_loss="kl_cov", old_policy="current", loss_options="ratio=0.2"
    ),
    "a critic": dict(
        advantage_estimator="gae", estimator_options="lam=0.8", critic_clip=0.05, critic_coef=0.7
    ),
    "a critic of its own": dict(
        advantage_estimator="decoupled_gae",
        estimator_options="alpha=0.3",
        critic_model="same",
        critic_clip=0.05,
        old_policy="current",
    ),
    "masks and penalties": dict(
        old_policy="current",
        policy_loss="vespo",
        kl_coef=0.2,
        unbiased_kl=True,
        log_ratio_coef=0.1,
        off_policy_mask_threshold=0.05,
        top_entropy_quantile=0.5,
        observation_coef=0.1,
    ),
    "sequence weights of probable tokens": dict(
        old_policy="current",
        importance_level="sequence",
        importance_mode="mask",
        importance_high=3.0,
        top_p=0.95,
        clip_low=0.05,
        clip_high=0.05,
    ),
    "a moved binary divergence": dict(
        old_policy="current", policy_loss="dppo_tv", loss_options="eps_low=0.001"
    ),
    "tokens of a teacher": dict(teacher="x", teacher_top_k=3, old_policy="current", kl_coef=0.2),
}


class Script:
    """An `ExperienceSource` that returns the messages of a list."""

    def __init__(self, messages):
        self.messages = list(messages)

    def start(self):
        """Nothing starts."""

    def next_message(self, rank):
        return self.messages.pop(0)


def batch_tensors(micro_batch: MicroBatch, logprob: float = -1.0) -> BatchTensors:
    """A micro-batch as it is after its backward pass."""
    batch = BatchTensors(micro_batch, torch.device("cpu"))
    batch.logprobs = torch.full(batch.mask.shape, logprob)
    return batch


def trained(passes: Passes, count: int) -> list:
    """The next `count` messages, each of them trained as the trainer does."""
    messages = []
    for _ in range(count):
        message = passes.next_message(0)
        if isinstance(message, MicroBatch):
            passes.keep_results(batch_tensors(message, -float(message.input_ids[0])))
        messages.append(message)
    return messages


def step_messages(number: int) -> list:
    """Two micro-batches, whose tokens are `number`, and the end of their step."""
    ages = {
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "staleness_tokens": {"0": 4},
        "staleness_fraction": 0.0,
    }
    return [
        *[dummy_micro_batch(number)] * 2,
        StepEnd(number, 2, 8, {**ages, "avg_reward": 0.5, "alarms": ["!"]}),
    ]


def test_later_passes_return_the_minibatches_in_a_seeded_order_with_the_log_probs_of_the_first():
    plan = PassPlan(num_minibatches=4, num_passes=3)
    orders = []
    for seed in (0, 0, 1):
        passes = Passes(Script(message for n in range(8) for message in step_messages(n)), plan, seed)
        first, second, third, next_batch = (trained(passes, 12) for _ in range(4))
        for messages in (first, second, third, next_batch):
            kinds = [type(message) for message in messages]
            assert kinds == [MicroBatch, MicroBatch, StepEnd] * 4
        assert all(
            message.first_pass is None for message in first + next_batch if isinstance(message, MicroBatch)
        )
        for message in second + third:
            if isinstance(message, MicroBatch):
                assert set(message.first_pass.logprobs.tolist()) == {-float(message.input_ids[0])}
        numbers = [
            [m.step for m in messages if isinstance(m, StepEnd)] for messages in (first, second, third)
        ]
        assert numbers[0] == [0, 1, 2, 3] and sorted(numbers[1]) == sorted(numbers[2]) == [0, 1, 2, 3]
        orders.append(numbers)
    assert orders[0] == orders[1] != orders[2]


def test_samples_count_once_and_tokens_grow_older():
    passes = Passes(Script(step_messages(0)), PassPlan(1, 2), seed=0)
    first, again = trained(passes, 3)[-1], trained(passes, 3)[-1]
    assert (first.num_samples, first.stats["pass"], first.stats["avg_reward"]) == (8, 1, 0.5)
    assert (again.num_samples, again.num_groups) == (0, 0)
    assert again.stats == {
        "iteration": 0,
        "batch_done": True,
        "pass": 2,
        "staleness_mean": 1.0,
        "staleness_max": 1,
        "staleness_fraction": 1.0,
        "staleness_tokens": {"1": 4},
    }


def test_requests_within_a_batch_wait_for_its_end():
    requests = [SaveRequested("told to end"), WorkersJoined()]
    early = SaveRequested()
    script = Script([early, *step_messages(0), *requests, *step_messages(1), *step_messages(2)])
    # With --weight-sync-deltas, the other workers would not have the weights to which the next changes apply
    passes = Passes(script, PassPlan(2, 2), seed=0, late_workers_wait=True)
    kinds = [type(message).__name__ for message in trained(passes, 1 + 12 + 2)]
    step = ["MicroBatch", "MicroBatch", "StepEnd"]
    assert kinds == ["SaveRequested", *step * 4, "SaveRequested", "WorkersJoined"]
    # With a single minibatch, the first pass has changed nothing before its end: nothing has to wait
    passes = Passes(Script([dummy_micro_batch(1), early, *step_messages(0)]), PassPlan(1, 2), seed=0)
    assert [type(message) for message in trained(passes, 2)] == [MicroBatch, SaveRequested]


def test_workers_that_join_in_the_first_pass_get_weights_before_the_rest_of_it_is_needed(ranks):
    """If the only engine is lost, another one has to generate the second minibatch."""
    script = Mock()
    messages = [*step_messages(0), WorkersJoined(), *step_messages(1)]
    passes = Passes(Script(messages), PassPlan(2, 2), seed=0)
    script.add.side_effect = lambda micro_batch: passes.keep_results(batch_tensors(micro_batch))
    script.publish.return_value = dict
    script.finish.return_value = {"num_non_masked_tokens": 4.0}
    roles = dict.fromkeys(("accumulator", "publisher", "exporter"), script)
    trainer = Trainer("the policy", source=passes, ranks=ranks, num_steps=4, plan=PassPlan(2, 2), **roles)
    trainer.run()
    sent = [(sent.args[1], sent.kwargs["self_test"]) for sent in script.publish.call_args_list]
    assert sent == [(0, True), (1, True), (4, False)]
    names = [name for name, _, _ in script.mock_calls if name in ("add", "publish")]
    assert names == ["publish", "add", "add", "publish", *["add"] * 6, "publish"]


def test_a_batch_that_ends_early_is_followed_by_the_next():
    passes = Passes(Script([*step_messages(0), *step_messages(1)]), PassPlan(1, 4), seed=0)
    trained(passes, 6)
    passes.end_batch()
    ends = [message for message in trained(passes, 6) if isinstance(message, StepEnd)]
    assert [(end.step, end.stats["pass"]) for end in ends] == [(1, 1), (1, 2)]


def test_the_engines_get_weights_after_the_last_pass_and_a_stopped_batch_keeps_its_versions(ranks):
    """Two batches of three passes; the second is stopped in its second pass."""
    script = Mock()
    passes = Passes(Script([*step_messages(0), *step_messages(1)]), PassPlan(1, 3), seed=0)
    script.add.side_effect = lambda micro_batch: passes.keep_results(batch_tensors(micro_batch))
    script.publish.return_value = lambda: {"weight_sync_s": 0.1}

    def finish():
        stops = script.finish.call_count == 5
        if stops:
            passes.end_batch()
        return {
            "num_non_masked_tokens": 4.0,
            **({"update_skipped": 1.0, "passes_stopped": 1.0} if stops else {}),
        }

    script.finish.side_effect = finish
    roles = dict.fromkeys(("accumulator", "publisher", "exporter"), script)
    trainer = Trainer(
        "the policy",
        source=passes,
        ranks=ranks,
        num_steps=6,
        plan=PassPlan(1, 3),
        write=script.write,
        **roles,
    )
    trainer.run()
    sent = [sent.args[1] for sent in script.publish.call_args_list]
    assert sent == [0, 3, 6]
    assert script.save_if_due.call_args_list == [call("the policy", 8), call("the policy", 16)]
    lines = [line.args[0] for line in script.write.call_args_list]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6]
    assert [line["total_samples_accumulated"] for line in lines] == [8, 8, 8, 16, 16]
    assert [line["pass"] for line in lines] == [1, 2, 3, 1, 2]
    assert ["weight_sync_s" in line for line in lines] == [True, False, True, False, True]
    assert [line["alarms"] for line in lines] == [["!"], [], [], ["!"], []]
    assert script.steps == 6
    assert script.advance_schedules.call_args_list == [call(2)]  # its second and third pass


# The gradients


@torch.no_grad()
def move(policy, step):
    """Change the weights by noise that follows from their names and the step, so that two policies move alike."""
    for name, parameter in policy.named_parameters():
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
        noise = NOISE * torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
        # A policy in float64 moves to the float32 weights of the trainer's
        parameter.copy_(parameter.float() + noise)


class MovingOptimizer(torch.optim.SGD):
    """Keeps the full gradients of every step, and moves the weights by noise."""

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=0.0)
        self.policy, self.gradients = policy, []

    def step(self):
        trained = [(name, p.grad) for name, p in self.policy.named_parameters() if p.grad is not None]
        self.gradients.append({name: full(gradient).clone() for name, gradient in trained})
        move(self.policy, len(self.gradients))


def objective_of(case):
    return Objective(AlgorithmConfig(**CASES[case]))


def minibatches(case):
    """Two minibatches of random sequences in groups of three, by engines whose log-probs are near the trainer's."""
    rng = np.random.default_rng(list(CASES).index(case))
    model = tiny_model()
    result = []
    for _ in range(PLAN.num_minibatches):
        sequences = [random_sequence(rng, 24) for _ in range(9)]
        for number, sequence in enumerate(sequences):
            sequence["group"] = number // 3
            ids = torch.tensor(sequence["ids"])[None]
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
            noisy = np.pad(logprobs, (1, 0)) + rng.normal(0, 0.4, len(sequence["ids"]))
            sequence["behaviour"] = np.where(sequence["mask"], noisy, np.nan)
            reference = np.pad(logprobs, (1, 0)) + rng.normal(0, 0.4, len(sequence["ids"]))
            sequence["ref"] = np.where(sequence["mask"], reference, np.nan)
            is_sampled = sequence["mask"] | (rng.random(len(sequence["ids"])) < 0.5)
            sequence["versions"] = np.where(is_sampled, 0, PROMPT_TOKEN)
        if "of a teacher" in case:
            add_teacher(sequences, rng, CASES[case]["teacher_top_k"])
        for sequence in sequences:
            members = [other for other in sequences if other["group"] == sequence["group"]]
            sequence["group_tokens"] = sum(int(member["mask"][1:].sum()) for member in members)
        result.append(sequences)
    return result


def pass_gradients(ranks, case, cut):
    """(gradients of every step, minibatch of every step, metrics) of all passes over one batch."""
    objective = objective_of(case)
    policy = sharded_in_float64(policy_of(objective), ranks)
    accumulator, _ = recording_accumulator(policy, objective, ranks)
    optimizer = MovingOptimizer(policy)
    accumulator.optimizer = optimizer
    if objective.config.critic_model:
        accumulator.critic = moving_critic(ranks)
    messages = []
    for number, sequences in enumerate(minibatches(case)):
        messages += [*cut(sequences, number), StepEnd(number, 3, 9, {})]
    passes = Passes(Script(messages), PLAN, seed=1)
    accumulator.observers.append(passes.keep_results)
    order, metrics = [], []
    while len(order) < PLAN.cycle_steps:
        message = passes.next_message(ranks.rank)
        if isinstance(message, MicroBatch):
            accumulator.add(message)
            continue
        order.append(message.step)
        metrics.append(accumulator.finish())
    if accumulator.critic is not None:
        for gradients, of_critic in zip(
            optimizer.gradients, accumulator.critic.optimizer.gradients, strict=True
        ):
            gradients |= {f"critic.{name}": gradient for name, gradient in of_critic.items()}
    return optimizer.gradients, order, metrics


def moving_critic(ranks):
    model = sharded_in_float64(own_critic(), ranks)
    optimizer = MovingOptimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Critic(model, optimizer, scheduler, max_grad_norm=1e9)


def work(ranks, folder):
    results = {}
    for case in CASES:
        cut = lambda sequences, seed: deal(sequences, seed, ranks.world_size)[ranks.rank]  # noqa: E731
        results[case] = pass_gradients(ranks, case, cut)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"), deadline_s=240)


@pytest.mark.parametrize("case", CASES)
def test_every_pass_on_two_ranks_has_the_gradient_of_one_padded_pass(two_ranks, case):
    gradients, order, metrics = two_ranks[case]
    objective = objective_of(case)
    policy = plain_in_float64(policy_of(objective))
    critic = plain_in_float64(own_critic()) if objective.config.critic_model else None
    batch, first_passes = minibatches(case), [{}, {}]
    assert order[:2] == [0, 1] and len(order) == 6
    for step, number in enumerate(order):
        expected = padded_step_gradients(objective, policy, batch[number], critic, first_passes[number])
        overall, worst = relative_error(gradients[step], expected)
        assert overall < 1e-5 and worst < 1e-5, (step, overall, worst)
        move(policy, step + 1)
        if critic is not None:
            move(critic, step + 1)
    assert "pass_kl" not in metrics[0] and all(line["pass_kl"] > 1e-5 for line in metrics[2:])


def test_the_clip_holds_tokens_from_the_second_pass_on(two_ranks):
    _, _, metrics = two_ranks["the policy at the start"]
    held = [line["avg_pg_clip"] for line in metrics]
    assert held[:2] == [0, 0] and all(share > 0.01 for share in held[2:])
    assert [line["ratio_mean"] for line in metrics[:2]] == [1, 1]


def test_passes_stop_before_the_step_whose_kl_exceeds_the_bound(ranks):
    """The KL is that of the weights before the step; the weights stay as they are."""
    sequences = minibatches("the policy at the start")[0]
    kls = {}
    for max_kl in (None, 1e-4):
        policy = PolicyModel(tiny_model(), chunk_tokens=13)
        objective = Objective(AlgorithmConfig(old_policy="current", passes_max_kl=max_kl))
        accumulator, _ = recording_accumulator(policy, objective, ranks)
        accumulator.optimizer = MovingOptimizer(policy)
        passes = Passes(Script([pack(sequences), StepEnd(0, 3, 9, {})]), PassPlan(1, 2), seed=0)
        accumulator.observers.append(passes.keep_results)
        accumulator.on_passes_stopped = passes.end_batch
        for _ in range(2):
            accumulator.add(passes.next_message(0))
            passes.next_message(0)
            before = [parameter.clone() for parameter in policy.parameters()]
            metrics = accumulator.finish()
        kls[max_kl] = metrics["pass_kl"]
        is_same = all(map(torch.equal, before, policy.parameters()))
        assert (
            is_same
            == (max_kl is not None)
            == ("passes_stopped" in metrics)
            == (metrics["update_skipped"] == 1)
        )
        assert len(accumulator.optimizer.gradients) == (1 if max_kl else 2)
    assert kls[None] == kls[1e-4] > 1e-4


def test_the_learning_rates_of_a_batch_that_ends_early_end_with_the_run():
    """A policy and a critic, four passes over each of two batches, stopped in the second pass of each."""
    rates_of = {"learning_rate": 1.0, "critic_learning_rate": 0.5}
    config = OptimizerConfig(lr_scheduler="linear", num_warmup_steps=0, **rates_of)
    policy = PolicyModel(tiny_model())
    critic = Mock(scheduler=build_critic_optimizer(own_critic(), config, total_steps=8)[1])
    optimizer, scheduler = build_policy_optimizer(policy, config, total_steps=8)
    ranks = Mock(device=torch.device("cpu"))
    accumulator = GradientAccumulator(policy, optimizer, scheduler, Mock(), ranks, config, critic=critic)
    rates = []
    for _ in range(2):
        rates.append((scheduler.get_last_lr()[0], critic.scheduler.get_last_lr()[0]))
        for part in (scheduler, critic.scheduler):
            part.optimizer.step()
            part.step()
        accumulator.advance_schedules(3)
    assert rates == [(1.0, 0.5), (0.5, 0.25)]
    assert scheduler.get_last_lr() == critic.scheduler.get_last_lr() == [0.0]
