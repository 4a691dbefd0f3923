"""Read the tokens of an unfinished request.

Written for vLLM 0.31 and 0.32. The worker reports the tokens of unfinished completions every few seconds, so that few
tokens are lost if the engine dies. vLLM can stream (`RequestOutputKind.DELTA` or `CUMULATIVE`), but then it makes an
output per token, and an output names only the last weight version. Therefore this module reads the request states of
vLLM's output processor.

Not needed any more when vLLM can return an unfinished output on request, with all its weight versions.
"""

from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.inference.vllm_edges.weight_versions import version_spans


def unfinished_output(engine: AsyncLLM, name: str, num_known: int) -> CompletionOutput | None:
    """Return the whole output so far of an unfinished request. Return None if it has no more than `num_known` tokens.

    Args:
        engine: The engine of the request.
        name: The request id that was passed to the engine.
        num_known: Number of tokens that the caller already has.
    """
    processor = engine.output_processor
    for request_id in processor.external_req_ids.get(name, ()):
        state = processor.request_states[request_id]
        if state.detokenizer.num_output_tokens() > num_known:
            output = state._new_completion_output([], None, None)
            output.weight_versions = version_spans(state)
            return output
    return None
