"""The policy: a Hugging Face causal LM seen as "token ids in, log-probs of those tokens out"."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from async_grpo.modeling import compute_device, full_tensor
from async_grpo.modeling.logprobs import chunked_logprobs
from async_grpo.modeling.packable import check_packable
from async_grpo.modeling.packed import PACKED_ATTENTION, Packing

DEFAULT_CHUNK_TOKENS = 1024  # of 152,000 logits in float32: 0.6 GB


class ValueHead(nn.Linear):
    """The critic: hidden states (M, H) -> values (M,), float32 (float64 for float64 input), zero at the start.

    Values near 1 would come out of a bfloat16 product in steps of 0.008.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(wide), self.weight.to(wide), self.bias.to(wide))[:, 0]


class PolicyModel(nn.Module):
    """Wraps body and heads in one forward, so that FSDP's root hooks gather the heads' weights as well.

    `model` becomes packed: ConfigurationError if its attention or head cannot be. value_head: add a critic,
    `value_head`. value_trunk_gradient: whether the values' gradient goes on into the model, or stops at the head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        value_head: bool = False,
        value_trunk_gradient: bool = True,
    ) -> None:
        super().__init__()
        check_packable(model)
        model.set_attn_implementation(PACKED_ATTENTION)
        for config in (model.config, model.config.get_text_config()):
            config.return_dict = (
                True  # outputs are read by name; an argument would not reach the body in the model
            )
        self.model, self.chunk_tokens = model, chunk_tokens
        self.value_head: ValueHead | None = None
        if value_head:
            hidden_size = model.config.get_text_config().hidden_size
            device = None if model.device.type == "meta" else model.device
            self.value_head = ValueHead(hidden_size, 1, device=device, dtype=torch.float32)
        self.value_trunk_gradient = value_trunk_gradient

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        """(log-probs, entropies), each (N,), of `input_ids` (N,) where `loss_mask` (N,) is True; else 0.

        With a value head also the values, of the states in which the tokens are chosen. cu_seqlens (S + 1,): boundaries of
        the packed sequences. Entry i speaks of token i given those before it in its own sequence; the first token stays 0.
        With an empty mask the results still hang on the weights: a rank with nothing to learn must run the same backward as
        the others.
        """
        packing = Packing(input_ids, cu_seqlens)
        rows = {"input_ids": input_ids[packing.tokens][None], "position_ids": packing.position_ids[None]}
        hidden = self.model.base_model(**rows, use_cache=False, packing=packing).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        first_tokens = cu_seqlens[:-1].to(loss_mask.device, torch.int64)
        positions = loss_mask.index_fill(0, first_tokens, False).nonzero().flatten()
        # What is known before the token is chosen
        states = hidden.index_select(0, packing.rows_of_tokens[positions - 1])
        results: tuple[Tensor, ...] = chunked_logprobs(
            states, head.weight, head.bias, input_ids[positions], temperature, self.chunk_tokens
        )
        if self.value_head is not None:
            results = (*results, self.value_head(states if self.value_trunk_gradient else states.detach()))
        return tuple(r.new_zeros(len(input_ids)).index_copy(0, positions, r) for r in results)

    def plain_logprobs(self, input_ids: Tensor, attention: str) -> Tensor:
        """Compute log-probs as transformers does, without packing: the reference of `forward_check`.

        input_ids (L,): one sequence. attention: one of transformers' own implementations, such as "eager". Returns (L - 1,)
        float32, of the tokens after the first. The policy is packed again afterwards.
        """
        self.model.set_attn_implementation(attention)
        try:
            logits = self.model(input_ids=input_ids[None], use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(PACKED_ATTENTION)
        logprobs = logits[:-1].log_softmax(dim=-1)
        return logprobs.gather(1, input_ids[1:, None])[:, 0]

    @property
    def device(self) -> torch.device:
        """Of the inputs and of the computation."""
        return compute_device(next(self.parameters()))


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, weight) of every weight but the value head's, in the model's order; a tied head appears once.

    The live weights, not copies; of a sharded policy its shards (DTensors).
    """
    seen: set[int] = set()
    # state_dict, not named_parameters: its hooks bring FSDP's shards back if a forward left them gathered
    for name, tensor in policy.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def named_full_tensors(policy: PolicyModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """`named_weights`, each whole, one at a time; of a sharded policy every rank must exhaust the iterator in lockstep."""
    return ((name, full_tensor(weight, dtype)) for name, weight in named_weights(policy))


def value_head_tensors(policy: PolicyModel) -> dict[str, Tensor]:
    """The value head's `weight` (1, H) and `bias` (1,), whole; {} without one. A collective of a sharded policy."""
    head = {} if policy.value_head is None else policy.value_head.state_dict(keep_vars=True)
    return {name: full_tensor(weight) for name, weight in head.items()}
