"""Two ranks read their own rows of a model's weights, and have together what one has that reads them all."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import SETTINGS, save_tiny_model
from two_ranks import full, on_two_ranks

from async_grpo.cluster import policy_kinds
from async_grpo.config.run import RunConfig
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.export import VALUE_HEAD_FILE

IDS = torch.arange(1, 30)
SEQUENCE = IDS, torch.tensor([0, len(IDS)]), torch.ones(len(IDS), dtype=torch.bool), 1.0


def policy_of_ranks(ranks, folder):
    """Its weights and the log-probs of a text; whether it was loaded whole; and its critic's weights."""
    whole = []
    policy_kinds.load_causal_lm = lambda *given: whole.append(1) or load_causal_lm(*given)
    options = {"model_name_or_path": str(folder / "model"), "data_path": "x", "advantage_estimator": "gae"}
    policy = policy_kinds.load_language_policy(RunConfig(**options, reward_fns="format"), SETTINGS, ranks)
    logprobs, *_ = policy(*SEQUENCE)
    logprobs.sum().backward()
    gradients = {name: full(p.grad).clone() for name, p in policy.named_parameters() if p.grad is not None}
    weights = {name: full(p.detach()).clone() for name, p in policy.named_parameters()}
    return weights, logprobs.detach(), gradients, bool(whole)


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_that_read_their_own_rows_have_the_model(tmp_path, tied):
    folder = save_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    whole = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(whole)}
    for file in set(files.values()):  # as large models have theirs
        save_file({n: whole[n] for n in whole if files[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files, "metadata": {}}))
    (folder / "model.safetensors").unlink()
    (folder / VALUE_HEAD_FILE).parent.mkdir()
    critic = {"weight": torch.randn(1, 64), "bias": torch.ones(1)}
    save_file(critic, folder / VALUE_HEAD_FILE)
    weights, logprobs, gradients, was_whole = on_two_ranks(policy_of_ranks, tmp_path)
    expected = PolicyModel(load_causal_lm(folder, "float32"), value_head=True)
    expected_logprobs, *_ = expected(*SEQUENCE)
    expected_logprobs.sum().backward()
    assert not was_whole and torch.equal(logprobs, expected_logprobs)
    assert torch.equal(weights["value_head.weight"], critic["weight"])
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(weights[f"model.{name}"], parameter), name
        torch.testing.assert_close(gradients[f"model.{name}"], parameter.grad, msg=name)
    assert set(weights) == {name for name, _ in expected.named_parameters()}  # a tied head is one weight


def test_weights_with_other_names_are_read_whole_by_each_rank(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    expected = load_causal_lm(folder, "float32").state_dict()
    renamed = {
        name.removeprefix("model."): weight for name, weight in weights.items()
    }  # as of the body alone
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    found, _, _, was_whole = on_two_ranks(policy_of_ranks, tmp_path)
    assert was_whole and torch.equal(found["model.model.norm.weight"], expected["model.norm.weight"])
