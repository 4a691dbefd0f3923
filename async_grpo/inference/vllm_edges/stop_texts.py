"""Texts that end a completion, in an engine without a tokenizer.

Written for vLLM 0.31 and 0.32. The engine reads and returns token ids, and is started with `skip_tokenizer_init`: the
worker loads the tokenizer itself, once, by the library's own rules for folders of others. vLLM looks for stop texts with
the tokenizer that its output processor holds, and has no argument by which one is given to it.

Not needed any more when `AsyncLLM` takes a tokenizer.
"""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


def use_tokenizer(engine: AsyncLLM, tokenizer: Any) -> None:
    """Let the engine look for stop texts with this tokenizer."""
    engine.output_processor.tokenizer = tokenizer
