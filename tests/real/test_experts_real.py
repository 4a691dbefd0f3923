"""A mixture of experts in a real vLLM engine: its experts and its router take new weights, and the proof sees both."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_thread import CANARY, MODEL, EngineThread, hf_logprobs, send
from real_fleet import LoraTrainer, RealFleet
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_grpo.messages import LoraSettings
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.lora import linear_layers
from async_grpo.modeling.policy import PolicyModel, named_weights

pytestmark = pytest.mark.real
# Of one expert. vLLM's kernels for the CPU want multiples of 32: they pad the second with zeros while they pack it
ALIGNED_WIDTH, PADDED_WIDTH = 64, 40


def save_fresh_experts(folder: Path, expert_width: int) -> None:
    """Save a fresh Qwen3-MoE of 2 layers and 4 experts, with the sample model's tokenizer."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        moe_intermediate_size=expert_width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)


@pytest.mark.parametrize(
    "expert_width", [ALIGNED_WIDTH, pytest.param(PADDED_WIDTH, marks=pytest.mark.exhaustive)]
)
def test_experts_and_their_router_compute_with_the_weights_of_every_update(
    engine_environment, tmp_path, expert_width
):
    save_fresh_experts(tmp_path, expert_width)
    policy = PolicyModel(Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    reference = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def change_weights() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        reference.load_state_dict(policy.model.state_dict())
        return {name: weight.detach().clone() for name, weight in named_weights(policy)}

    with closing(EngineThread(tmp_path, extension="lossy_extension.Lossy")) as engine:

        def update(version: int, *lost: str) -> tuple[float, set[str]]:
            """Largest difference of the canary's log-probs, and the tensors that are said not to be in use."""
            tensors = change_weights() if version else dict(named_weights(policy))
            engine.run(engine.worker.engine.collective_rpc("lose", args=(lost,)))
            received, logprobs = send(engine, tensors, version)
            difference = np.abs(logprobs - hf_logprobs(reference, CANARY)).max()
            return float(difference), {name for name, record in received.items() if not record.in_use}

        for version in range(3):
            difference, unused = update(version)
            assert difference < 1e-4 and not unused
        assert engine.worker._received.read_back._unreadable == {
            f"model.layers.{layer}.mlp.experts" for layer in range(2)
        }
        router = "model.layers.1.mlp.gate.weight"
        assert update(3, router)[1] == {router}
        assert update(4)[0] < 1e-4
        # A vLLM that is right without us needs `vllm_edges/experts.py` no more
        if expert_width == ALIGNED_WIDTH:
            assert update(5, "packed experts")[0] > 0.1
        else:  # it cannot go unseen: unpacked experts are not padded either, and vLLM has no room of their shape
            with pytest.raises(
                Exception, match=r"size of tensor a \(128\) must match the size of tensor b \(80\)"
            ):
                update(5, "packed experts")


def test_an_adapter_of_the_attention_is_merged_beside_the_frozen_experts(engine_environment, tmp_path):
    save_fresh_experts(tmp_path, ALIGNED_WIDTH)
    layers = linear_layers(load_causal_lm(tmp_path, "float32"))
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    lora = LoraSettings(4, 2.0, tuple(sorted(layers)), "merged")
    with closing(EngineThread(tmp_path, lora=lora)) as engine:
        fleet = RealFleet(early=engine)
        trainer = LoraTrainer(tmp_path, lora, fleet)
        before = trainer.logprobs()
        for _ in range(3):
            trainer.step()
            logprobs = engine.run(engine.worker.canary(CANARY))
            assert np.abs(logprobs - trainer.logprobs()).max() < 1e-4
        assert not fleet.fenced and np.abs(trainer.logprobs() - before).max() > 0.01
