"""Find texts that end a completion, in an engine without a tokenizer.

Written for vLLM 0.31 and 0.32. The engine reads and returns token ids, and is started with `skip_tokenizer_init`. The
worker loads the tokenizer itself, with this library's safety rules for untrusted folders. vLLM searches for
stop texts with the tokenizer of its output processor, and has no argument that sets this tokenizer.

Not needed any more when `AsyncLLM` takes a tokenizer.
"""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


def use_tokenizer(engine: AsyncLLM, tokenizer: Any) -> None:
    """Let the engine use this tokenizer to find stop texts."""
    engine.output_processor.tokenizer = tokenizer
