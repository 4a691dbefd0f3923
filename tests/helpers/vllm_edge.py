"""What the tests of vLLM's edges share: the sentence of an edge that is needed no more, and vLLM's source."""

import importlib.util
from pathlib import Path

import vllm

from async_grpo.inference.vllm_edges import KNOWN_VERSIONS

OLDEST_KNOWN = min(KNOWN_VERSIONS)


def assert_needed(is_needed: bool, news: str, edge: str) -> None:
    """Fail with the good news if vLLM does by itself what an edge of ours is for."""
    assert is_needed, f"vLLM {vllm.__version__} now {news}: remove async_grpo/inference/vllm_edges/{edge}"


def source_of(module: str) -> str:
    """The source of a module of vLLM, which is not imported."""
    return Path(importlib.util.find_spec(module).origin).read_text()
