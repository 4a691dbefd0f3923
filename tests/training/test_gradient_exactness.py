"""The gradient of a step equals that of one pass over the whole minibatch, whatever ranks and packing.

Two real gloo ranks under FSDP2 train on random batches, cut into random micro-batches, dealt out in random
order and filled up with dummies. The reference is transformers' eager forward, one sequence at a time, and a
loss written out token by token; it shares no code with the library. One spawn serves every batch.
"""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from dealt_micro_batches import deal
from supports import in_support
from tiny_policy import VOCAB, pack, random_sequence, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM
from two_ranks import WORLD_SIZE, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.errors import ConfigurationError, NonFiniteGradient
from async_grpo.messages import dummy_micro_batch
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, named_weights
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.export import ModelExporter, load_value_head
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import canary_logprobs, shard_policy
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.publisher import Publisher

NUM_BATCHES = 16
TRUNCATIONS = ({}, {}, {"top_p": 0.9}, {"top_p": 0.95, "top_k": 20, "min_p": 0.01})
CANARY = np.arange(1, 40, dtype=np.int32)


def accumulator_of(ranks, options, *, tied=True, dtype="float32", checkpointing=False, **more):
    policy = PolicyModel(tiny_model(tie_word_embeddings=tied), chunk_tokens=37)
    shard_policy(policy, ranks, OptimizerConfig(gradient_checkpointing=checkpointing), dtype)
    return recording_accumulator(policy, Objective(AlgorithmConfig(**options)), ranks, **more)


def random_batch(seed):
    """(sequences, objective options, model options) of one random minibatch."""
    rng = np.random.default_rng(seed)
    objective = {
        "policy_loss": ("ppo_clip", "grpo")[seed % 2],
        "loss_aggregation": ("token_mean", "sequence_mean_token_mean")[seed // 2 % 2],
        "kl_coef": (0.0, 0.3)[seed // 4 % 2],
        "kl_clamp": 10.0,
        "temperature": (1.0, 0.7)[seed % 3 == 0],
        **TRUNCATIONS[seed % 4],
    }
    sequences = [random_sequence(rng, with_ref=objective["kl_coef"] > 0) for _ in range(rng.integers(3, 20))]
    for sequence in sequences[:: 1 + seed % 2]:  # of one prompt
        ids = sequences[0]["ids"][: len(sequence["ids"])]
        sequence["ids"][: len(ids) // 2] = ids[: len(ids) // 2]
    return sequences, objective, {"tied": seed % 5 > 0, "checkpointing": seed % 3 == 1}


def reference_gradients(sequences, objective, tied):
    """Plain transformers and arithmetic: loss of the whole minibatch, one backward."""
    model = tiny_model(tie_word_embeddings=tied)
    model.set_attn_implementation("eager")
    truncation = {name: objective[name] for name in ("top_p", "top_k", "min_p") if name in objective}
    sequence_losses, token_losses = [], []
    for sequence in sequences:
        ids = torch.tensor(sequence["ids"])
        logits = model(ids[None]).logits[0] / objective["temperature"]
        losses = []
        for t in range(1, len(ids)):
            if not sequence["mask"][t]:
                continue
            is_kept = in_support(logits[t - 1 : t], ids[t : t + 1], **truncation)[0]
            logprob = logits[t - 1, ids[t]] - logits[t - 1, is_kept].logsumexp(0)
            advantage = float(np.float32(sequence["advantages"][t]))
            if objective["policy_loss"] == "grpo":
                loss = -advantage * logprob
            else:
                ratio = torch.exp(logprob - float(np.float32(sequence["behaviour"][t])))
                loss = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.28))
            if objective["kl_coef"]:
                d = float(np.float32(sequence["ref"][t])) - logprob
                loss = loss + objective["kl_coef"] * torch.clamp(torch.exp(d) - d - 1, max=10.0)
            losses.append(loss)
        if losses:
            token_losses += losses
            sequence_losses.append(torch.stack(losses).mean())
    terms = token_losses if objective["loss_aggregation"] == "token_mean" else sequence_losses
    torch.stack(terms).mean().backward()
    gradients = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return gradients, len(token_losses)


def work(ranks, folder):
    results = {
        "bfloat16": step_of_batch(ranks, 1, dtype="bfloat16")[0],
        "update": adamw_update(ranks),
        "skipped": skipped_step(ranks),
        "non_finite": non_finite_step(ranks),
        "reduced": reduced_step(ranks),
    }
    results |= {seed: step_of_batch(ranks, seed) for seed in range(NUM_BATCHES)}
    results["canary"], results["engine names"], results["after"] = canary_and_checkpoint(ranks, folder)
    return results


def step_of_batch(ranks, seed, **options):
    """(gradients, metrics) of the second step with a random minibatch; sometimes a worker joins in its middle."""
    sequences, objective, model_options = random_batch(seed)
    accumulator, optimizer = accumulator_of(ranks, objective, **model_options, **options)
    accumulator.add(pack(sequences))
    accumulator.finish()  # a step before, of which nothing must be left behind
    for number, micro_batch in enumerate(deal(sequences, seed, ranks.world_size)[ranks.rank]):
        accumulator.add(micro_batch)
        if number == 0 and seed % 4 == 1:
            publish_with_self_test(optimizer.policy, ranks)
    metrics = accumulator.finish()
    return optimizer.gradients, metrics


def publish_with_self_test(policy, ranks):
    """To an engine that is always right, and reads nothing back: rank 0 alone knows, and both need the same rounds."""
    link = Mock(put=lambda chunk: chunk, deliver=lambda p: {"g0": (p.manifest, p.canary_logprobs)})
    engines, canary = (link if ranks.is_main else None), Canary([CANARY], canary_logprobs, ranks.max)
    publisher = Publisher(engines, named_weights, canary, torch.bfloat16, ranks.rank, WeightConfig())
    publisher.publish(policy, 1, self_test=True)()
    # As they are, outside the layers, two layers, all changed, version 1
    assert link.commit.call_count == 6 * ranks.is_main


def sequence_of_rank(rank):
    """Nine tokens, of which eight are trained: the count of both ranks is a power of 2 and rounds nothing."""
    rng = np.random.default_rng(rank)
    mask = np.arange(9) > 0
    return {
        "ids": rng.integers(0, VOCAB, 9),
        "mask": mask,
        "advantages": np.where(mask, rng.normal(), np.nan),
        "behaviour": np.where(mask, rng.normal(-3.0, 1.5, 9), np.nan),
    }


def reduced_step(ranks, rank=None):
    """The gradients of one sequence on each rank, computed in bfloat16; or of that of `rank` alone."""
    accumulator, optimizer = accumulator_of(ranks, {"policy_loss": "gpg"}, dtype="bfloat16")
    accumulator.add(pack([sequence_of_rank(ranks.rank if rank is None else rank)]))
    accumulator.finish()
    return optimizer.gradients


def adamw_update(ranks):
    """Metrics of one real AdamW step, and the weights before and after."""
    sequences, _, _ = random_batch(0)
    policy = shard_policy(PolicyModel(tiny_model()), ranks)
    config = OptimizerConfig(learning_rate=1e-3, lr_scheduler="constant")
    optimizer, scheduler = build_policy_optimizer(policy, config)
    accumulator = GradientAccumulator(
        policy, optimizer, scheduler, Objective(AlgorithmConfig()), ranks, config
    )
    before = {name: tensor.clone() for name, tensor in named_full_tensors(policy)}
    for micro_batch in deal(sequences, 0, WORLD_SIZE)[ranks.rank]:
        accumulator.add(micro_batch)
    metrics = accumulator.finish()
    return metrics, before, dict(named_full_tensors(policy))


def skipped_step(ranks):
    """(metrics, gradients, the schedule's steps) where every sample was truncated."""
    accumulator, optimizer = accumulator_of(ranks, {})
    return accumulator.finish(), optimizer.gradients, accumulator.scheduler.last_epoch


def non_finite_step(ranks):
    """What a NaN log-prob on one rank raises on both, and the gradients."""
    accumulator, optimizer = accumulator_of(ranks, {})
    broken = {"mask": np.arange(4) > 1, "advantages": np.ones(4), "behaviour": np.full(4, np.nan)}
    hands = [dummy_micro_batch(token_id=5), pack([{"ids": np.arange(4), **broken}])]
    accumulator.add(hands[ranks.rank])
    with pytest.raises(NonFiniteGradient) as raised:
        accumulator.finish()
    return str(raised.value), optimizer.gradients


def canary_and_checkpoint(ranks, folder):
    """Canary log-probs of a sharded policy, a checkpoint of it, and a training step after both."""
    policy = shard_policy(PolicyModel(tiny_model(), value_head=True), ranks)
    with torch.no_grad():
        policy.value_head.weight.fill_(0.5)
    canary = canary_logprobs(policy, CANARY, temperature=0.7)
    assert all(hasattr(p, "full_tensor") for p in policy.parameters()), "the canary left weights gathered"
    ModelExporter(folder, folder / "model", ranks, dtype="float32").save(policy, 77)
    policy(torch.arange(4), torch.tensor([0, 4]), torch.ones(4, dtype=torch.bool), 1.0)[0].sum().backward()
    names = [name for name, _ in named_full_tensors(policy)]
    return torch.tensor(canary), names, all(p.grad is not None for p in policy.model.parameters())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model")
    return folder, on_two_ranks(work, folder)


@pytest.mark.parametrize("seed", range(NUM_BATCHES))
def test_two_ranks_with_any_packing_give_the_gradient_of_one_pass_over_the_minibatch(two_ranks, seed):
    sequences, objective, model_options = random_batch(seed)
    expected, num_tokens = reference_gradients(sequences, objective, model_options["tied"])
    gradients, metrics = two_ranks[1][seed]
    overall, worst = relative_error(gradients, expected)
    assert overall < 1e-5 and worst < 1e-5
    assert metrics["num_non_masked_tokens"] == metrics["total_non_masked_tokens"] == num_tokens
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_one_process_reports_the_same_metrics_as_two(two_ranks, ranks, seed):
    sequences, objective, model_options = random_batch(seed)
    accumulator, _ = accumulator_of(ranks, objective, **model_options)
    accumulator.add(pack(sequences))
    metrics = accumulator.finish()
    other = two_ranks[1][seed][1]
    assert metrics.keys() == other.keys()
    for name in metrics.keys() - {"peak_memory_usage_GB", "memory"}:
        assert metrics[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_bfloat16_compute_keeps_float32_gradients_close_to_the_exact_ones(two_ranks):
    sequences, objective, _ = random_batch(1)
    expected, _ = reference_gradients(sequences, objective, tied=True)
    gradients = two_ranks[1]["bfloat16"]
    flat = [torch.cat([tensors[name].flatten() for name in expected]) for tensors in (gradients, expected)]
    assert flat[0].dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.995


def test_the_gradients_of_ranks_that_compute_in_bfloat16_are_added_in_float32(two_ranks, ranks):
    """The two that are added come from one process, whose only rounding is that of its own computation."""
    alone = [reduced_step(ranks, rank) for rank in range(WORLD_SIZE)]
    expected = {name: (gradient + alone[1][name]) / 2 for name, gradient in alone[0].items()}
    overall, worst = relative_error(two_ranks[1]["reduced"], expected)
    assert overall < 1e-6 and worst < 1e-6  # a sum that is rounded to bfloat16 is wrong by 1e-3


def test_update_statistics_are_those_of_the_full_tensors(two_ranks):
    metrics, before, after = two_ranks[1]["update"]
    weights = torch.stack([tensor.norm() for tensor in before.values()])
    deltas = torch.stack([(after[name] - tensor).norm() for name, tensor in before.items()])
    assert metrics["model_norm"] == pytest.approx(weights.norm().item(), rel=1e-5)
    assert metrics["model_delta_norm"] == pytest.approx(deltas.norm().item(), rel=1e-5)
    ratios = (deltas / weights).numpy()
    for name, quantile in (("min", 0), ("p25", 25), ("p50", 50), ("p75", 75), ("max", 100)):
        assert metrics[f"update_ratio_{name}"] == pytest.approx(np.percentile(ratios, quantile), rel=1e-3)
    assert metrics["lr"] == 1e-3


def test_a_step_without_loss_tokens_changes_nothing_and_says_so(two_ranks):
    metrics, gradients, schedule_steps = two_ranks[1]["skipped"]
    assert gradients is None and schedule_steps == 0
    assert metrics["update_skipped"] == 1 and metrics["num_non_masked_tokens"] == 0
    mismatch = {name for name in metrics if name.startswith(("mismatch", "ess", "chi2", "ratio_p"))}
    assert all(np.isnan(metrics[name]) for name in mismatch)  # nothing was compared: null, and no zero
    assert all(np.isfinite(metrics[name]) for name in metrics.keys() - mismatch - {"memory"})


def test_a_nan_on_one_rank_is_refused_on_every_rank(two_ranks):
    message, gradients = two_ranks[1]["non_finite"]
    assert "the step was not taken" in message and gradients is None


def test_a_sharded_policy_answers_the_canary_and_reloads_from_its_checkpoint(two_ranks):
    folder, results = two_ranks
    model = tiny_model()
    model.set_attn_implementation("eager")
    ids = torch.tensor(CANARY, dtype=torch.int64)
    with torch.no_grad():
        expected = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(results["canary"][1:], expected, atol=1e-5, rtol=1e-5)
    assert results["canary"][0] == 0
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "hf_format" / "samples_77")
    assert [name for name, _ in reloaded.named_parameters()] == results["engine names"]
    critic = PolicyModel(tiny_model(), value_head=True)
    assert load_value_head(critic, folder / "hf_format" / "samples_77")
    assert (critic.value_head.weight == 0.5).all()
    for (name, weight), (_, original) in zip(
        reloaded.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(weight, original), name
    assert results["after"], "training goes on after a forward without a backward"


def test_the_gradient_is_clipped_to_the_global_norm_after_it_was_scaled(ranks):
    sequences, objective, _ = random_batch(2)
    accumulator, optimizer = accumulator_of(ranks, objective, max_grad_norm=1e-3)
    accumulator.add(pack(sequences))
    metrics = accumulator.finish()
    norm = torch.stack([gradient.norm() for gradient in optimizer.gradients.values()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3) and metrics["grad_norm"] > 1e-2


def test_metrics_of_a_hand_made_micro_batch(ranks):
    """Two loss tokens whose ratios are e (clipped, A > 0) and 1/e (clipped, A < 0)."""
    policy = PolicyModel(tiny_model())
    ids, bounds = torch.tensor([4, 9, 30]), torch.tensor([0, 3])
    with torch.no_grad():
        logprobs, entropy = policy(ids, bounds, torch.tensor([False, True, True]), 1.0)
    sequence = {
        "ids": ids.numpy(),
        "mask": np.array([False, True, True]),
        "advantages": np.array([0, 1.0, -2.0]),
        "behaviour": logprobs.numpy() + np.array([0, -1.0, 1.0]),
        "ref": logprobs.numpy() - 0.25,
    }
    accumulator, _ = accumulator_of(ranks, {"kl_coef": 0.1, "kl_kind": "k1"})
    accumulator.add(pack([sequence]))
    metrics = accumulator.finish()
    policy_loss = (-1.28 + 2 * 0.8) / 2
    assert metrics["avg_loss"] == pytest.approx(policy_loss, rel=1e-4)
    assert metrics["avg_kl_div"] == pytest.approx(0.25, rel=1e-4)
    assert metrics["backward_loss"] == pytest.approx(policy_loss + 0.1 * 0.25, rel=1e-4)
    assert metrics["clip_frac_low"] == metrics["clip_frac_high"] == 0.5 and metrics["avg_pg_clip"] == 1
    assert metrics["ratio_max"] == pytest.approx(np.e, rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx((np.e + 1 / np.e) / 2, rel=1e-4)
    # k3 of KL(engine || trainer): with x = log pi - log mu, e^x - 1 - x
    assert metrics["mismatch_kl"] == pytest.approx(((np.e - 2) + (1 / np.e)) / 2, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(entropy[1:].mean().item(), rel=1e-4)


def test_a_kl_term_without_reference_logprobs_says_what_to_run(ranks):
    accumulator, _ = accumulator_of(ranks, {"kl_coef": 0.1})
    accumulator.add(dummy_micro_batch(token_id=VOCAB - 1))  # a dummy has nothing to refer to
    with pytest.raises(ConfigurationError, match="reference logprob worker"):
        accumulator.add(pack([random_sequence(np.random.default_rng(0))]))


def test_steps_whose_gradient_is_not_finite_are_left_out_as_often_as_allowed_in_a_row(ranks, caplog):
    accumulator, optimizer = accumulator_of(ranks, {}, nonfinite_steps=1)
    broken = {"mask": np.arange(4) > 1, "advantages": np.ones(4), "behaviour": np.full(4, np.nan)}
    broken, fine = pack([{"ids": np.arange(4), **broken}]), pack(random_batch(0)[0])
    told = []
    for batch in (broken, fine, broken):
        optimizer.gradients = None
        accumulator.add(batch)
        metrics = accumulator.finish()
        told.append((metrics["update_skipped"], optimizer.gradients is not None))
        assert (
            metrics["num_non_masked_tokens"] > 0
        )  # by which the trainer's alarm tells why a step was skipped
    assert told == [(1.0, False), (0.0, True), (1.0, False)]
    assert caplog.text.count("the run goes on, 1 of --nonfinite-steps 1") == 2
    accumulator.add(broken)
    with pytest.raises(NonFiniteGradient, match="the step was not taken"):
        accumulator.finish()
