"""The tokens of a request that is still under way.

Written for vLLM 0.31 and 0.32. So that little is lost with an engine, the worker reports every few seconds what unfinished
completions have so far. vLLM can stream (`RequestOutputKind.DELTA` or `CUMULATIVE`), but then makes an output per token,
and leaves out the weight versions before the last one. This module reads the states of its output processor when they are
wanted.

Not needed any more when an unfinished output has its weight versions, and can be asked for now and then.
"""

from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.inference.vllm_edges.weight_versions import version_spans


def unfinished_output(engine: AsyncLLM, name: str, num_known: int) -> CompletionOutput | None:
    """Return all output so far of an unfinished request; None if it has no more than `num_known` tokens.

    Args:
        engine: The engine that holds the request.
        name: The request's id, as the engine was given it.
        num_known: Number of tokens that the caller has already.
    """
    processor = engine.output_processor
    for request_id in processor.external_req_ids.get(name, ()):
        state = processor.request_states[request_id]
        if state.detokenizer.num_output_tokens() > num_known:
            output = state._new_completion_output([], None, None)
            output.weight_versions = version_spans(state)
            return output
    return None
