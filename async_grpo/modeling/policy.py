"""The policy: a Hugging Face causal LM that maps token ids to the log-probs of these tokens."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.messages import Truncation
from async_grpo.modeling import MergedWeight, StoredWeight, Weight, compute_device, full_tensor, stored_weight
from async_grpo.modeling.auto_classes import reads_images
from async_grpo.modeling.four_bit import CODES, SCALES, four_bit_modules
from async_grpo.modeling.image_models import ImageInputs, ImageReader, attention_by_part, hidden_states
from async_grpo.modeling.logprobs import chunked_logprobs
from async_grpo.modeling.lora import ADAPTER_NAME, lora_modules, name_without_adapter, named_lora_tensors
from async_grpo.modeling.packable import check_packable
from async_grpo.modeling.packed import PACKED_ATTENTION, Packing
from async_grpo.modeling.token_masks import TokenMasks
from async_grpo.modeling.top_logprobs import chunked_logprobs_of, chunked_top_logprobs
from async_grpo.types import ImageReference

# Number of tokens whose logits are in memory at once. They take 0.6 GB with a vocabulary of 152,000 in float32
DEFAULT_CHUNK_TOKENS = 1024


class ValueHead(nn.Linear):
    """A critic that is part of the policy: maps hidden states to values. Its weights are initially zero.

    The values are float32, or float64 for float64 input. In bfloat16, values near 1 would be rounded to multiples of
    0.008.
    """

    def reset_parameters(self) -> None:
        """Set all parameters to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " tokens"]:
        """Return the critic's value of each hidden state."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        return values[:, 0]


class PolicyModel(nn.Module):
    """The policy's transformer body and its heads, computed in one forward pass.

    The heads are applied inside this forward pass, because FSDP gathers their weights only while it runs.

    Args:
        model: A causal LM. Its attention is replaced by packed attention.
        chunk_tokens: Number of tokens whose logits are in memory at once.
        value_head: Whether to add a critic, as the attribute `value_head`.
        value_trunk_gradient: Whether the value loss trains the whole model. If False, it trains only the value head.

    Raises:
        ConfigurationError: The model's attention or head does not work on packed sequences.
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
        self.model = model
        self.reads_images = reads_images(model.config)
        # Reads images with the processor of the model's folder, for `image_inputs`; None if the model reads no images
        self.image_reader: ImageReader | None = None
        self._set_attention(PACKED_ATTENTION)
        for config in (model.config, model.config.get_text_config()):
            # Outputs are read by name, for which return_dict must be True. Set it in the configs, because not every
            # model passes the argument return_dict on to its body
            config.return_dict = True
        self.chunk_tokens = chunk_tokens
        self.value_head: ValueHead | None = None
        if value_head:
            hidden_size = model.config.get_text_config().hidden_size
            device = None if model.device.type == "meta" else model.device
            self.value_head = ValueHead(hidden_size, 1, device=device, dtype=torch.float32)
        self.value_trunk_gradient = value_trunk_gradient

    def forward(
        self,
        input_ids: Int64[Tensor, " packed"],
        cu_seqlens: Int[Tensor, " boundaries"],
        loss_mask: Bool[Tensor, " packed"],
        temperature: float,
        masks: TokenMasks | None = None,
        images: ImageInputs | None = None,
        truncation: Truncation | None = None,
        *,
        further_ids: Int64[Tensor, "packed k"] | None = None,
        num_top: int = 0,
    ) -> tuple[Float[Tensor, " packed"], ...]:
        """Compute the log-probs and entropies of the tokens that the mask selects.

        Args:
            input_ids: Packed sequences end to end.
            cu_seqlens: Boundaries of the sequences.
            loss_mask: True at the tokens whose log-probs are needed.
            temperature: Divisor of the logits.
            masks: The tokens among which each token was sampled; None if it was always among all tokens.
            images: The images of the sequences (`image_inputs`); None if they have none.
            truncation: The rule by which the sampler keeps only probable tokens; None if it keeps all of them.
            further_ids: Further token ids at each position, whose log-probs are returned as well.
            num_top: Number k of the most probable tokens whose ids and log-probs are returned as well; 0 for none.

        Returns:
            These results, in this order, without those that were not asked for:

            - the log-probs of the tokens;
            - the entropies of their distributions;
            - with a value head, the critic's value of the state from which each token is predicted;
            - with a truncation, 1 at the tokens of `input_ids` that it excludes under this policy, although the engine
              could sample them (they keep their log-probs), and 0 at all others;
            - with `further_ids`, their log-probs (packed, k);
            - with `num_top`, the ids and log-probs (packed, 2, k) of the most probable tokens.

            Entry i describes token i given the tokens before it in its own sequence, so the first token of a sequence
            has 0. All results are 0 where the mask is False. With an empty mask they still depend on the weights, because
            a rank that has nothing to train on must run the same backward pass as the other ranks.
        """
        positions, states = self.states_before(input_ids, cu_seqlens, loss_mask, images)
        head = self.model.get_output_embeddings()
        logprobs, entropies, *outside_flags = chunked_logprobs(
            states,
            head.weight,
            head.bias,
            input_ids[positions],
            temperature,
            self.chunk_tokens,
            None if masks is None else masks[positions],
            truncation,
        )
        results = [logprobs, entropies]
        if self.value_head is not None:
            value_states = states if self.value_trunk_gradient else states.detach()
            results.append(self.value_head(value_states))
        results.extend(outside_flags)
        results.extend(self._further_results(states, positions, temperature, further_ids, num_top))
        return tuple(_at_positions(result, positions, len(input_ids)) for result in results)

    def _hidden_states(
        self, token_ids: Int64[Tensor, " states"], packing: Packing, images: ImageInputs | None
    ) -> Float[Tensor, "states hidden"]:
        """Return the last hidden state of each row of the packing. Equal beginnings of sequences share their rows."""
        if self.reads_images:
            return hidden_states(self.model, token_ids, packing, images)
        inputs = {"input_ids": token_ids[None], "position_ids": packing.position_ids[None]}
        return self.model.base_model(**inputs, use_cache=False, packing=packing).last_hidden_state[0]

    def _further_results(
        self,
        states: Float[Tensor, "positions hidden"],
        positions: Int64[Tensor, " positions"],
        temperature: float,
        further_ids: Int64[Tensor, "packed k"] | None,
        num_top: int,
    ) -> list[Float[Tensor, "positions ..."]]:
        """Return the results that `forward` adds for `further_ids` and `num_top`."""
        head = self.model.get_output_embeddings()
        head_inputs = (states, head.weight, head.bias, temperature, self.chunk_tokens)
        results = []
        if further_ids is not None:
            results.append(chunked_logprobs_of(further_ids[positions], *head_inputs))
        if num_top:
            top_ids, top_logprobs = chunked_top_logprobs(num_top, *head_inputs)
            results.append(torch.stack([top_ids.to(top_logprobs.dtype), top_logprobs], dim=1))
        return results

    def states_before(
        self,
        input_ids: Int64[Tensor, " packed"],
        cu_seqlens: Int[Tensor, " boundaries"],
        loss_mask: Bool[Tensor, " packed"],
        images: ImageInputs | None = None,
    ) -> tuple[Int64[Tensor, " selected"], Float[Tensor, "selected hidden"]]:
        """Run the transformer body, and return the hidden states from which the selected tokens are predicted.

        Args:
            input_ids: Packed sequences end to end.
            cu_seqlens: Boundaries of the sequences.
            loss_mask: True at the tokens to select.
            images: The images of the sequences; None if they have none.

        Returns:
            The positions of the selected tokens, without the first tokens of sequences, and the hidden state before each.
        """
        # Equal beginnings of sequences are computed only once. `hidden` has one row for each distinct state:
        # packing.tokens has the index of a token with this state, and packing.rows_of_tokens the row of each token. All
        # images have the same placeholder tokens, so `keys` replaces these by numbers that differ between images
        packing = Packing(input_ids if images is None else images.keys(input_ids), cu_seqlens)
        hidden = self._hidden_states(input_ids[packing.tokens], packing, images)
        first_tokens = cu_seqlens[:-1].to(loss_mask.device, torch.int64)
        positions = loss_mask.index_fill(0, first_tokens, False).nonzero().flatten()
        # A token is predicted from the hidden state of the token before it
        return positions, hidden.index_select(0, packing.rows_of_tokens[positions - 1])

    def token_masks(self, allowed: AllowedTokens) -> TokenMasks:
        """Return the masks of packed sequences on the policy's device, for `forward`."""
        return TokenMasks.of(allowed, self.vocab_size, self.device)

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the head, which is also the size of the engines' vocabulary."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def image_inputs(
        self,
        images: Sequence[Sequence[ImageReference]],
        input_ids: Int[np.ndarray, " packed"],
        cu_seqlens: Int[np.ndarray, " boundaries"],
    ) -> ImageInputs | None:
        """Read the images of packed sequences for `forward`. Return None if there are none.

        Args:
            images: The images of each sequence; () if no sequence has an image.
            input_ids: Token ids of all sequences end to end.
            cu_seqlens: Boundaries of the sequences.
        """
        if not any(images):
            return None
        assert self.image_reader is not None, "a model that reads images has an image processor"
        return self.image_reader.inputs(images, input_ids, cu_seqlens, self.device)

    def _set_attention(self, attention: str) -> None:
        self.model.set_attn_implementation(attention_by_part(attention) if self.reads_images else attention)

    def plain_logprobs(
        self, input_ids: Int64[Tensor, " tokens"], attention: str
    ) -> Float32[Tensor, " tokens-1"]:
        """Compute the log-probs of one sequence with transformers' own attention, as the reference of `forward_check`.

        Args:
            input_ids: One sequence.
            attention: One of transformers' own implementations, such as "eager". Packed attention is restored
                afterwards.

        Returns:
            The log-probs of the tokens after the first.
        """
        self._set_attention(attention)
        try:
            logits = self.model(input_ids=input_ids[None], use_cache=False).logits[0].float()
        finally:
            self._set_attention(PACKED_ATTENTION)
        logprobs = logits[:-1].log_softmax(dim=-1)
        return logprobs.gather(1, input_ids[1:, None])[:, 0]

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs and of the computation."""
        return compute_device(next(self.parameters()))


def _at_positions(
    result: Shaped[Tensor, "positions ..."], positions: Int64[Tensor, " positions"], num_tokens: int
) -> Shaped[Tensor, "packed ..."]:
    """Return the result at its positions, and 0 at all other tokens."""
    return result.new_zeros(num_tokens, *result.shape[1:]).index_copy(0, positions, result)


def stored_weights(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the module, tensor) of every tensor except the value head's, in the model's order.

    A weight in 4 bits has two tensors. Tied weights are yielded once. The tensors are not copies. If the policy is sharded,
    they are its shards (DTensors).
    """
    yielded_ids: set[int] = set()
    # A forward pass may leave weights gathered. state_dict() runs hooks that shard them again, named_parameters() does
    # not
    for name, tensor in policy.model.state_dict(keep_vars=True).items():
        if id(tensor) not in yielded_ids:
            yielded_ids.add(id(tensor))
            yield name, tensor


def _weights_in_module(policy: PolicyModel) -> dict[str, StoredWeight]:
    """Return the weights of `stored_weights` by name. The two tensors of a weight in 4 bits become one `StoredWeight`."""
    tensors = dict(stored_weights(policy))
    layers = {f"{name}.": layer for name, layer in four_bit_modules(policy.model)}
    weights: dict[str, StoredWeight] = {}
    for name, tensor in tensors.items():
        layer_name = name.removesuffix(CODES)
        if layer_name in layers:
            weights[f"{layer_name}weight"] = layers[layer_name].stored_weight
        elif name.removesuffix(SCALES) not in layers:
            weights[name] = tensor
    return weights


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, Weight]]:
    """Yield (Hugging Face name, weight) of every weight except the value head's, in the model's order.

    Tied weights are yielded once. The weights are not copies. If the policy is sharded, they are its shards (DTensors).
    The weight of a layer with a LoRA adapter is yielded as a `MergedWeight`, and the adapter's own tensors are left out.
    """
    weights = _weights_in_module(policy)
    merged = {}
    adapter_ids = set()
    for layer_name, layer in lora_modules(policy.model):
        lora_a = layer.lora_A[ADAPTER_NAME].weight
        lora_b = layer.lora_B[ADAPTER_NAME].weight
        name = f"{layer_name}.base_layer.weight"
        merged[name] = MergedWeight(weights[name], lora_a, lora_b, layer.scaling[ADAPTER_NAME])
        adapter_ids |= {id(lora_a), id(lora_b)}
    for name, weight in weights.items():
        if id(weight) not in adapter_ids:
            yield name_without_adapter(name), merged.get(name, weight)


def named_weights_and_adapters(policy: PolicyModel) -> Iterator[tuple[str, Weight]]:
    """Yield (Hugging Face name, weight) of the frozen weights, and then (name in peft's file, tensor) of the adapters.

    They are sent to engines that apply the adapter in their layers, and do not add it to the weights.
    """
    for name, weight in named_weights(policy):
        yield name, stored_weight(weight)
    yield from named_adapters(policy)


def named_adapters(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in peft's file, tensor) of the LoRA adapters, in the model's order."""
    return named_lora_tensors(policy.model)


def named_full_tensors(policy: PolicyModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over `named_weights` that gathers one weight at a time.

    If the policy is sharded, each step of the iterator is a collective, so every rank must iterate to the end.
    """
    return ((name, full_tensor(weight, dtype)) for name, weight in named_weights(policy))


def value_head_tensors(policy: PolicyModel) -> dict[str, Tensor]:
    """Return the gathered `weight` (1, hidden) and `bias` (1,) of the value head; {} if there is none. A collective."""
    if policy.value_head is None:
        return {}
    weights = policy.value_head.state_dict(keep_vars=True)
    return {name: full_tensor(weight) for name, weight in weights.items()}
