"""Convert the output of a finished request of vLLM to a `Completion`."""

from typing import Any

from vllm.outputs import CompletionOutput

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import WorkerLost
from async_grpo.inference.char_ends import char_ends
from async_grpo.inference.requests import NO_TOKENS, tokens_of
from async_grpo.messages import SharedRunSettings
from async_grpo.types import Completion, FinishReason, Tokens


def finished_completion(
    output: CompletionOutput,
    member: int,
    tokenizer: Any,
    settings: SharedRunSettings,
    first_tokens: Tokens = NO_TOKENS,
    allowed: AllowedTokens | None = None,
) -> Completion:
    """Return the completion of a finished request.

    Args:
        output: The tokens that this engine sampled.
        member: Index of the completion in its group.
        tokenizer: The model's tokenizer.
        settings: Settings that all workers of the run share.
        first_tokens: The tokens before those of `output`, which a lost engine had sampled.
        allowed: The tokens that a grammar allowed; None without a grammar.

    Raises:
        WorkerLost: The engine ended the request for another reason than its limit, an end token or a stop text.
    """
    if output.finish_reason not in ("stop", "length"):
        raise WorkerLost(f"the engine ended a request with {output.finish_reason!r}")
    tokens = first_tokens + tokens_of(output)
    is_stopped = output.finish_reason == "stop"
    ends_with_stop_token = tokens.token_ids[-1] in settings.stop_token_ids
    # If a stop text (`Sampling.stop`) ended the completion, the completion's text includes it. It never includes an end
    # token, even if the stop text is the text of one
    is_stopped_by_text = isinstance(output.stop_reason, str)
    has_end_token = is_stopped and (ends_with_stop_token or not is_stopped_by_text)
    text_token_ids = tokens.token_ids[:-1] if has_end_token else tokens.token_ids
    text = tokenizer.decode(text_token_ids, skip_special_tokens=False)
    ends_of_tokens = None
    if settings.char_ends:
        ends_of_tokens = char_ends(tokenizer, tokens.token_ids.tolist(), text)
    return Completion(
        *tokens.arrays,
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        text=text,
        char_ends=ends_of_tokens,
        member=member,
        allowed=allowed,
    )
