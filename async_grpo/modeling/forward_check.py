"""Run a forward pass of a few tokens when a program starts, to detect models that the packed forward computes wrongly.

The rules in `packable` only detect properties of models that are known to cause wrong results. This check compares the
results themselves, so it also detects other causes.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.policy import PolicyModel

LENGTHS = (13, 15)  # lengths of the two sequences, in tokens
# Number of tokens with which both sequences begin. The packed forward computes them once, and this must be tested as
# well
SHARED_TOKENS = 6
# Differences that are always accepted as rounding (root mean square over the tokens, in nats), by compute dtype. A
# larger difference is accepted if two attention implementations of transformers differ by a similar amount
SMALL_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01, torch.float64: 1e-6}
ROUNDINGS = 4.0  # accepted multiple of the difference between transformers' two attention implementations
# Accepted difference in nats in half precision, if a model has only one attention implementation. Its rounding cannot
# be measured, because there is no second implementation to compare with
UNMEASURED_ROUNDING = 0.1
WAY_OUT = "use a model of another family (docs/models.md lists those that work)"

_Result = TypeVar("_Result")


@torch.no_grad()
def check_forward(
    policy: PolicyModel,
    compute_dtype: torch.dtype,
    max_over_ranks: Callable[[list[float]], list[float]] = list,
) -> None:
    """Check that packed sequences give the same log-probs as each sequence alone.

    Two sequences are computed twice in one packed row, and then each alone with transformers' own attention: at most 6
    forwards of about 20 tokens. Call this function after the weights are loaded, in the mode (training or evaluation)
    in which the policy will be used. With a sharded policy it is a collective.

    Args:
        policy: The policy.
        compute_dtype: The dtype of the policy's computations.
        max_over_ranks: Returns the element-wise maximum over all ranks, so that all ranks raise an error if one finds a
            problem.

    Raises:
        ConfigurationError: Log-probs are random, or those of packed sequences differ from those of each sequence alone.
    """
    name = type(policy.model).__name__
    sequences = _sequences(policy)
    with torch.compiler.set_stance("force_eager"):  # compiling for 30 tokens would take minutes
        packed = _refusing_failures(name, lambda: _packed_logprobs(policy, sequences))
        repeated = _refusing_failures(name, lambda: _packed_logprobs(policy, sequences))
        error, allowed = _refusing_failures(
            name, lambda: _error_of_packing(policy, sequences, packed, compute_dtype)
        )
    randomness = _rms(repeated - packed)
    # Two forward passes of the same input may differ by rounding, because some GPU kernels sum in no fixed order. So
    # compare results with a tolerance. Whether random numbers were drawn says nothing: OPT draws one in each layer even
    # if layer drop is off
    allowed_randomness = SMALL_DIFFERENCE[compute_dtype]
    is_random = randomness > allowed_randomness
    is_wrong = not error <= allowed  # unlike error > allowed, this is also True for NaN
    is_random_somewhere, is_wrong_somewhere = max_over_ranks([float(is_random), float(is_wrong)])
    if is_random_somewhere:
        mode = "training" if policy.training else "evaluation"
        raise ConfigurationError(
            f"{name} is random in {mode} mode: two forwards of the same tokens differ by {randomness:.3g} on this rank "
            f"(root mean square of their log-probs; allowed: {allowed_randomness:g}). Set the value that causes it "
            f"(dropout, jitter, noise) to 0 in config.json; if there is no such value, {WAY_OUT}"
        )
    if is_wrong_somewhere:
        raise ConfigurationError(
            f"{name} cannot be packed: log-probs of {len(packed)} tokens in one row differ from those of each sequence "
            f"alone by {error:.3g} on this rank (root mean square; allowed: {allowed:.3g}). Its attention, "
            f"its positions or its head are not what the packed forward computes: {WAY_OUT}"
        )


def _sequences(policy: PolicyModel) -> list[Int64[Tensor, " _tokens"]]:
    """Return two sequences of random tokens, always the same two. Both begin with the same SHARED_TOKENS tokens."""
    vocab_size = policy.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]
    sequences[-1][:SHARED_TOKENS] = sequences[0][:SHARED_TOKENS]
    return [sequence.to(policy.device) for sequence in sequences]


def _packed_logprobs(
    policy: PolicyModel, sequences: Sequence[Int64[Tensor, " _tokens"]]
) -> Float32[Tensor, " tokens"]:
    """Return the log-probs from one packed forward, end to end, without the first token of each sequence."""
    lengths = [len(sequence) for sequence in sequences]
    input_ids = torch.cat(list(sequences))
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    logprobs, *_ = policy(input_ids, boundaries, torch.ones_like(input_ids, dtype=torch.bool), 1.0)
    return torch.cat([part[1:] for part in logprobs.split(lengths)]).float()


def _refusing_failures(name: str, compute: Callable[[], _Result]) -> _Result:
    """Return the result of `compute`, or raise ConfigurationError if the model's own code fails in it."""
    try:
        return compute()
    except (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, ConfigurationError):
        raise
    except (TypeError, AttributeError, LookupError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{name} cannot compute sequences both packed and alone ({type(error).__name__}: {reason}): {WAY_OUT}"
        ) from error


def _error_of_packing(
    policy: PolicyModel,
    sequences: Sequence[Int64[Tensor, " _tokens"]],
    packed: Float32[Tensor, " tokens"],
    compute_dtype: torch.dtype,
) -> tuple[float, float]:
    """Compare packed log-probs with those of transformers' own forward of each sequence alone.

    transformers' forward runs in evaluation mode, as an inference engine does.

    Returns:
        The root mean square of the differences, and its allowed maximum.
    """
    was_training = policy.training
    has_fused = policy.model._supports_sdpa
    policy.eval()
    try:
        eager = _plain_logprobs(policy, sequences, "eager")
        fused = _plain_logprobs(policy, sequences, "sdpa") if has_fused else eager
    finally:
        policy.train(was_training)
    error = min(_rms(packed - eager), _rms(packed - fused))
    allowed = max(SMALL_DIFFERENCE[compute_dtype], ROUNDINGS * _rms(fused - eager))
    if not has_fused and compute_dtype.itemsize == 2:
        allowed = UNMEASURED_ROUNDING
    return error, allowed


def _plain_logprobs(
    policy: PolicyModel, sequences: Sequence[Int64[Tensor, " _tokens"]], attention: str
) -> Float32[Tensor, " tokens"]:
    """Return the log-probs that transformers computes for each sequence alone, concatenated."""
    return torch.cat([policy.plain_logprobs(sequence, attention) for sequence in sequences])


def _rms(differences: Float[Tensor, " tokens"]) -> float:
    """Return the root mean square of the differences."""
    return float(differences.square().mean().sqrt())
