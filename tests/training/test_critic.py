"""A critic that is a model of its own: it trains alone first, and is saved, resumed and exported with the policy.

Its gradient over two ranks is a case of test_whole_step.py.
"""

import numpy as np
import pytest
import torch
from fake_chain import Chain, chain_config
from safetensors.numpy import load_file
from tiny_policy import SETTINGS, pack, random_sequence, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM

from async_grpo.cluster.make_critic import load_critic
from async_grpo.config.critic_model import check_critic_model
from async_grpo.config.memory_plan import critic_rank_bytes
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.critic import CriticModel
from async_grpo.training.batch_tensors import BatchTensors

OWN_CRITIC = {
    "advantage_estimator": "decoupled_gae",
    "estimator_options": "lam=0.8",
    "critic_model": "same",
    "critic_learning_rate": 1e-3,
}
ALONE = {"samples_per_question": 1, "batch_size": 8, "mask_truncated": False}
WARMUP_STEPS = 2


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def exported(chain, kind, samples):
    return load_file(chain.config.output_path / kind / f"samples_{samples}" / "model.safetensors")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Three steps of eight questions with one sample each. The first two train the critic alone."""
    config = chain_config(
        **OWN_CRITIC, **ALONE, critic_warmup_steps=WARMUP_STEPS, save_every=1, dtype="float32", record=True
    )
    chain = Chain(tmp_path_factory.mktemp("run"), config=config)
    chain.train()
    return chain


def test_steps_that_train_the_critic_alone_leave_the_policy_as_it_is_to_the_bit(chain):
    initial = load_file(chain.folder / "model.safetensors")
    policies = [exported(chain, "hf_format", samples) for samples in (8, 16, 24)]
    assert same(policies[0], initial) and same(policies[1], initial) and not same(policies[2], initial)
    critics = [exported(chain, "critic", samples) for samples in (8, 16, 24)]
    # In the first step the value head is zero, so the layers before it feel nothing
    assert same(critics[0], initial) and not same(critics[1], critics[0])
    assert not same(critics[2], critics[1])


def test_the_metrics_tell_the_critics_steps_from_those_of_the_policy(chain):
    assert [line["grad_norm"] > 0 for line in chain.lines] == [False, False, True]
    assert [line["lr"] > 0 for line in chain.lines] == [False, False, True]
    assert all(line["critic_grad_norm"] > 0 and line["critic_lr"] == 1e-3 for line in chain.lines)
    assert all(line["update_skipped"] == 0 and line["value_loss"] > 0 for line in chain.lines)


def test_with_one_sample_per_question_every_group_has_signal_and_is_trained_on(chain):
    for line in chain.lines:
        assert (line["groups_in_batch"], line["samples_in_batch"], line["samples_trained"]) == (8, 8, 8)
        assert (line["groups_without_signal"], line["groups_too_small"]) == (0, 0)


def test_the_learning_rate_of_the_policy_warms_up_after_the_critics_steps(tmp_path):
    config = chain_config(**OWN_CRITIC, critic_warmup_steps=1, num_warmup_steps=2, learning_rate=1.0e-3)
    lines = Chain(tmp_path, config=config).train()
    assert [line["lr"] for line in lines] == pytest.approx([0.0, 0.5e-3, 1e-3])
    assert [line["critic_lr"] for line in lines] == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_a_run_in_two_parts_ends_with_the_policy_and_the_critic_of_one_that_was_not_interrupted(tmp_path):
    """With the critic's steps on both sides of the break, and a schedule that has not ended."""
    options = {
        **OWN_CRITIC,
        **ALONE,
        "critic_warmup_steps": 2,
        "max_staleness": 0,
        "deterministic": True,
        "num_warmup_steps": 6,
    }
    whole = Chain(tmp_path / "whole", config=chain_config(**options, num_training_batches=5))
    whole.train()
    for break_after in (1, 3):
        folder = tmp_path / f"parts_{break_after}"
        Chain(folder, config=chain_config(**options, num_training_batches=break_after)).train()
        second = Chain(folder, config=chain_config(**options, num_training_batches=5))
        second.train()
        assert [line["step"] for line in second.lines] == list(range(break_after + 1, 6))
        for kind in ("hf_format", "critic"):
            assert same(exported(second, kind, 40), exported(whole, kind, 40))


def test_every_pass_over_a_batch_trains_the_critic_towards_the_returns_of_the_first(tmp_path):
    config = chain_config(**OWN_CRITIC, passes_per_batch=2, num_training_batches=2)
    lines = Chain(tmp_path, config=config).train()
    assert [line["pass"] for line in lines] == [1, 2, 1, 2]
    assert all(line["critic_grad_norm"] > 0 for line in lines)
    for first, second in ((0, 1), (2, 3)):
        assert lines[second]["return_mean"] == pytest.approx(lines[first]["return_mean"], rel=1e-5)
        assert lines[second]["value_loss"] < lines[first]["value_loss"]


def test_an_exported_critic_is_a_whole_model_that_starts_another_critic(chain, ranks):
    folder = chain.config.output_path / "critic" / "samples_24"
    AutoModelForCausalLM.from_pretrained(folder)  # transformers can load it
    expected = chain.trainer.accumulator.critic.model
    config = chain_config(
        **OWN_CRITIC | {"critic_model": str(folder)}, model_name_or_path=str(chain.folder), dtype="float32"
    )
    critic = load_critic(config, SETTINGS, ranks)
    again = dict(critic.model.named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(again[name], parameter), name
    assert again["value_head.weight"].count_nonzero()


def test_a_policy_that_cannot_be_written_does_not_keep_the_ranks_from_gathering_the_critic(
    chain, monkeypatch
):
    """Otherwise the other ranks would wait in the critic's export for rank 0, which has given up."""

    def full_disk(*_arguments):
        raise OSError("no space left")

    exporter = chain.trainer.exporter
    critics = []
    monkeypatch.setattr(exporter, "_write", full_disk)
    monkeypatch.setattr(exporter, "also_save", critics.append)
    exporter.save_if_due(chain.trainer.policy, 10**9)
    assert critics == [10**9]


def test_a_value_does_not_depend_on_the_packing_and_is_read_before_its_token():
    critic = CriticModel(tiny_model(seed=4))
    torch.nn.init.normal_(critic.value_head.weight)
    eager = tiny_model(seed=4)
    rng = np.random.default_rng(0)
    batch = BatchTensors(pack([random_sequence(rng, 20) for _ in range(4)]), torch.device("cpu"))
    with torch.no_grad():
        values = critic(batch.input_ids, batch.cu_seqlens, batch.mask[0])[None]
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids = batch.input_ids[begin:end]
            states = eager(ids[None], output_hidden_states=True).hidden_states[-1][0]
            expected = torch.nn.functional.pad(critic.value_head(states[:-1]), (1, 0))
            is_trained = batch.mask[0, begin:end]
            expected = torch.where(is_trained, expected, 0)
            torch.testing.assert_close(values[0, begin:end], expected, atol=1e-5, rtol=1e-5)


def test_a_critic_that_cannot_read_the_policys_tokens_is_refused(tmp_path):
    policy = save_tiny_model(tmp_path / "policy")
    other = save_tiny_model(tmp_path / "other", vocab_size=90)
    config = chain_config(**OWN_CRITIC | {"critic_model": str(other)}, model_name_or_path=str(policy))
    with pytest.raises(ConfigurationError, match="has a vocabulary of 90 tokens, but .* has 100"):
        check_critic_model(config)
    check_critic_model(chain_config(**OWN_CRITIC, model_name_or_path=str(policy)))


@pytest.mark.parametrize("folder", ["", "no/such/folder"])
def test_a_critic_whose_folder_does_not_exist_is_refused_by_the_name_of_its_option(folder):
    with pytest.raises(ConfigurationError, match=f"--critic-model {folder}: there is no such folder"):
        check_critic_model(chain_config(**OWN_CRITIC | {"critic_model": folder}))


def test_the_plan_counts_weights_gradients_and_moments_of_the_critic():
    assert critic_rank_bytes(chain_config(**OWN_CRITIC), 2, 1000) == 16 * 1000 / 2
    assert critic_rank_bytes(chain_config(**OWN_CRITIC, optimizer="adamw_8bit"), 1, 1000) == 10 * 1000
    assert critic_rank_bytes(chain_config(**OWN_CRITIC, cpu_offload=True), 1, 1000) == 0
