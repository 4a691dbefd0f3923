"""The largest possible micro-batch is tried before the first step, and leaves no trace in what is trained."""

import dataclasses

import numpy as np
import pytest
import torch
from fake_chain import SETTINGS, chain_config
from tiny_policy import pack, random_sequence, save_tiny_model

from async_grpo.cluster.make_critic import load_critic
from async_grpo.cluster.make_trainer import is_trial_cheap
from async_grpo.cluster.policy_kinds import load_language_policy, make_accumulator
from async_grpo.errors import OutOfMemory
from async_grpo.messages import LoraSettings
from async_grpo.modeling import full_tensor
from async_grpo.training.distributed import distributed_run
from async_grpo.training.largest_trial import largest_micro_batch, try_largest
from async_grpo.training.objective import Objective

VOCAB = SETTINGS.vocab_size
LORA = LoraSettings(rank=2, scaling=1.0, layers=("model.layers.0.self_attn.q_proj",))


TOO_LARGE = (
    "the largest micro-batch that this run may have does not fit .*--no-longest-first.*: out of memory in the forward "
    "pass of a micro-batch of 256 tokens in 4 sequences"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trained(model):
    """The metrics of two steps and the weights after them, with or without a trial before."""

    def train(*, with_trial, lora=None, **options):
        config = chain_config(model_name_or_path=str(model), **options)
        settings = dataclasses.replace(SETTINGS, lora=lora)
        rng = np.random.default_rng(3)
        torch.manual_seed(0)
        with distributed_run("cpu") as ranks:
            policy = load_language_policy(config, settings, ranks)
            accumulator = make_accumulator(config, settings, policy, ranks)
            if with_trial:
                try_largest(accumulator, VOCAB, config, settings.max_total_tokens)
            metrics = []
            for _ in range(2):
                batches = []
                for _ in range(3):
                    sequences = [
                        {**random_sequence(rng, 12, with_ref=True), "group": number, "group_tokens": 5}
                        for number in range(4)
                    ]
                    batches.append(pack(sequences))
                for batch in batches:
                    accumulator.add(batch)
                metrics.append(accumulator.finish())
            weights = {name: full_tensor(weight).clone() for name, weight in policy.named_parameters()}
        for line in metrics:
            line.pop("memory")
            line.pop("peak_memory_usage_GB")
        return metrics, weights

    return train


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy_loss": "clip_cov"},
        {"kl_coef": 0.1},
        {"advantage_estimator": "gae"},
        {"gradient_checkpointing": True, "importance_level": "token", "importance_normalize": True},
        {"kl_coef": 0.1, "lora": LORA, "lora_rank": 2},
    ],
    ids=str,
)
def test_the_steps_after_a_trial_are_bit_for_bit_those_without_one(trained, options):
    metrics, weights = trained(with_trial=True, **options)
    usual_metrics, usual_weights = trained(with_trial=False, **options)
    assert metrics == usual_metrics
    assert all(torch.equal(weights[name], weight) for name, weight in usual_weights.items())
    assert metrics[0]["grad_norm"] > 0


def test_gradients_do_not_depend_on_the_order_of_the_micro_batches(model):
    """--longest-first changes nothing else."""
    config = chain_config(model_name_or_path=str(model))
    rng = np.random.default_rng(3)
    batches = [pack([random_sequence(rng, 12) for _ in range(number)]) for number in (2, 5, 3)]
    gradients = []
    with distributed_run("cpu") as ranks:
        for order in (1, -1):
            policy = load_language_policy(config, SETTINGS, ranks)
            accumulator = make_accumulator(config, SETTINGS, policy, ranks)
            for batch in batches[::order]:
                accumulator.add(batch)
            gradients.append({name: weight.grad.clone() for name, weight in policy.named_parameters()})
    largest = max(gradient.abs().max().item() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("max_tokens", "longest", "groups", "lengths"),
    [
        (256, 64, 50, [64] * 4),
        (200, 64, 50, [64, 64, 64, 8]),
        (256, 64, 1, [64] * 2),  # a step has no more samples
        (50, 64, 50, [50]),  # longer samples are refused
    ],
)
def test_its_size_is_the_largest_that_the_options_allow(max_tokens, longest, groups, lengths):
    config = chain_config(max_tokens_per_gpu=max_tokens, batch_size=groups, samples_per_question=2)
    batch = largest_micro_batch(config, VOCAB, longest)
    assert np.diff(batch.cu_seqlens).tolist() == lengths
    assert len(batch.input_ids) == sum(lengths) and batch.loss_mask.all()
    first_ids = batch.input_ids[batch.cu_seqlens[:-1]].tolist()
    assert len(set(first_ids)) == len(first_ids), "equal beginnings would be computed once"


def test_a_lack_of_memory_shows_before_the_first_step(model, monkeypatch):
    config = chain_config(model_name_or_path=str(model))
    with distributed_run("cpu") as ranks:
        accumulator = make_accumulator(config, SETTINGS, load_language_policy(config, SETTINGS, ranks), ranks)
        moments = []

        def exhausted(*_):
            moments.extend(accumulator.optimizer.state.values())
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Objective, "__call__", exhausted)
        with pytest.raises(OutOfMemory, match=TOO_LARGE):
            try_largest(accumulator, VOCAB, config, SETTINGS.max_total_tokens)
    assert len(moments) == len(list(accumulator.policy.parameters()))  # as from the second step on


def test_it_is_tried_only_where_it_takes_seconds():
    """On the CPU it would take minutes, and swapping would slow down the whole machine."""
    config = chain_config()
    assert is_trial_cheap(config, torch.device("cuda", 0))
    assert not is_trial_cheap(config, torch.device("cpu"))
    asleep = dataclasses.replace(config, engine_sleep="1", max_staleness=0)
    assert not is_trial_cheap(asleep, torch.device("cuda", 0))  # its engine is still awake
    without = dataclasses.replace(config, longest_first=False)
    assert not is_trial_cheap(without, torch.device("cuda", 0))


def test_the_trial_trains_the_policy_even_if_the_first_steps_train_the_critic_alone(model):
    options = {"advantage_estimator": "gae", "critic_model": "same", "critic_warmup_steps": 2}
    config = chain_config(model_name_or_path=str(model), dtype="float32", **options)
    with distributed_run("cpu") as ranks:
        policy = load_language_policy(config, SETTINGS, ranks)
        accumulator = make_accumulator(config, SETTINGS, policy, ranks)
        accumulator.critic = load_critic(config, SETTINGS, ranks)
        trained_parameters = set()
        for model_name, trained in (("policy", policy), ("critic", accumulator.critic.model)):
            parameter = trained.model.get_input_embeddings().weight
            parameter.register_hook(lambda gradient, name=model_name: trained_parameters.add(name))
        try_largest(accumulator, VOCAB, config, SETTINGS.max_total_tokens)
        assert trained_parameters == {"policy", "critic"}
        assert accumulator.steps == 0
