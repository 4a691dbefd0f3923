"""A worker extension for vLLM without the fix for tied heads: what the landing proof is there to catch."""

from async_grpo.weights import vllm_engine
from async_grpo.weights.vllm_engine import WeightReceipts

vllm_engine.repack_tied_heads = lambda model: None


class WithoutTheFix(WeightReceipts):
    pass
