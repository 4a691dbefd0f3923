"""Which families of causal language models the packed forward computes rightly: all that transformers has, made tiny.

    python -m tests.long.model_families                        # all: a table for docs/models.md, some minutes
    python -m tests.long.model_families --only llama,phi3      # some
    python -m tests.long.model_families --csv families.csv     # every single model that was tried

Of each family a tiny model with random weights is made in several forms: as its configuration is by default (with
windows, caps and so on as small as the model), with full attention and a plain head, with each setting that makes a
training forward random, and with each type of rotary positions. Each is refused by a ConfigurationError, or its packed
log-probs, in training mode, are compared with transformers' own of each sequence alone. Nothing may be WRONG: neither
refused nor right. Lengths go beyond every window, index and original context of the tiny models.
"""

import copy
import csv
import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.packable import RANDOMNESS
from async_grpo.modeling.policy import PolicyModel

VOCABULARY, CONTEXT, SHORT = 100, 128, 6  # SHORT: windows, indices and original contexts, in tokens
LENGTHS, SHARED_TOKENS = (61, 23, 40), 20
LARGEST_PARAMETERS = 40_000_000  # of what counts as tiny
TOLERANCE = 1e-3  # nats, of any token, in float32
RIGHT, WRONG, REFUSED, BROKEN, LARGE = "right", "WRONG", "refused", "cannot be made", "not made: too large"
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "dff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_size", "kv_channels", "global_head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk", "index_block_size"), SHORT),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_key_value_heads"), 1),
    **dict.fromkeys(("num_kv_heads", "moe_layer_start_index"), 1),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "initializer_range": 0.2,
    "rotary_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "vocab_size": VOCABULARY,
    "original_max_position_embeddings": SHORT,
}
# What a family needs beyond the sizes above
ONE_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
NEEDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ONE_ROPE, "sliding_attention": ONE_ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "diffllama": {"num_key_value_heads": 2, "num_attention_heads": 4},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 1},
    "minimax_m3_vl_text": {"index_topk_blocks": 1, "index_head_dim": 32, "index_n_heads": 1},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
ABSENT_BY_DEFAULT = {"sliding_window", "attention_chunk_size"}  # None says that there is none
PLAIN_HEAD = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1.0}
REASONS = {  # what a refusal says, and what the table says
    "attention interface": "its attention is not reached through transformers' attention interface",
    "a mask of its own": "makes a mask of its own",
    "later tokens": "attends to later tokens",
    "sequences begin": "does not tell its attention where sequences begin",
    "s_aux": "has attention sinks",
    "ndices": "has a sparse attention",
    "packed attention sees": "has layers with a window, a recurrence or a convolution",
    "attend to each other in both directions": "the tokens of an image attend to each other in both directions",
    "packed row": "its layers, or its body without the head, cannot compute a packed row",
    "plain linear head": "has a factor on its logits that its configuration cannot take away",
    "its head are not": "its head is more than a linear layer, or it mixes the tokens of a row",
}


@dataclass(frozen=True)
class Attempt:
    """One tiny model of a family, and what became of it."""

    family: str
    class_name: str
    form: str  # which of the family's models
    verdict: str
    detail: str  # of a refusal its reason, else the largest difference in nats


def tiny_config(
    family: str, config_class: type[PreTrainedConfig] | None = None, **changes: Any
) -> PreTrainedConfig:
    """Return the family's default configuration with tiny sizes and no dropout; `changes` override."""
    config_class = config_class or CONFIG_MAPPING[family]
    default = config_class()
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, float) and RANDOMNESS.search(name):
            values[name] = 0.0
    settable = {name for name in vars(default) if not name.startswith("_")}
    settable |= set(inspect.signature(config_class.__init__).parameters)
    for name, size in SIZES.items():
        is_absent = name in ABSENT_BY_DEFAULT and getattr(default, name, None) is None
        if name in settable and not is_absent:
            values[name] = size
    for name, part in vars(default).items():  # of a model that also sees or hears
        if isinstance(part, PreTrainedConfig):
            values[name] = tiny_config(part.model_type, type(part)).to_dict()
    if getattr(default, "kv_lora_rank", None):  # latent attention: as many key heads as query heads
        values |= {"num_key_value_heads": 2, "head_dim": 16}
    layer_types = getattr(default, "layer_types", None)
    if layer_types:  # one layer of each type, two at least
        kinds = list(dict.fromkeys(layer_types))
        values["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        values["num_hidden_layers"] = len(values["layer_types"])
    return config_class(**(values | NEEDS.get(family, {}) | changes))


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights; biases and norms too, whose initial 0 and 1 would hide that one is lost."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST_PARAMETERS:
        raise OverflowError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def texts() -> list[Tensor]:
    """Return random sequences, each (L,); the last begins as the first one does."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    sequences[-1][:SHARED_TOKENS] = sequences[0][:SHARED_TOKENS]
    return sequences


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel) -> Tensor:
    """Return the log-probs of all texts but their first tokens, by transformers, one sequence at a time."""
    logprobs = []
    for ids in texts():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(logprobs)


@torch.no_grad()
def packed_logprobs(policy: PolicyModel) -> Tensor:
    """Return the same from one packed row."""
    ids = texts()
    boundaries = torch.tensor([0, *map(len, ids)]).cumsum(0)
    mask = torch.ones(int(boundaries[-1]), dtype=torch.bool)
    logprobs, _ = policy(torch.cat(ids), boundaries, mask, 1.0)
    return torch.cat([part[1:] for part in logprobs.split([len(text) for text in ids])])


def attempt(family: str, form: str, **changes: Any) -> Attempt:
    """Make one model, and say whether it is refused, right or wrong."""

    def outcome(verdict: str, detail: object) -> Attempt:
        text = str(detail).strip().partition("\n")[0]
        return Attempt(family, FAMILIES[family], form, verdict, text)

    if not getattr(transformers, FAMILIES[family])._supports_attention_backend:
        return outcome(REFUSED, f"{FAMILIES[family]} does not use transformers' attention interface")
    try:
        model = tiny_model(tiny_config(family, **changes))
        model.set_attn_implementation("eager")
        expected = plain_logprobs(model.eval())
    except OverflowError as error:
        return outcome(LARGE, error)
    except Exception as error:  # whatever a configuration that nobody tried raises
        return outcome(BROKEN, f"{type(error).__name__}: {error}")
    try:
        policy = PolicyModel(model).train()
        check_forward(policy, torch.float32)
        error = float((packed_logprobs(policy) - expected).abs().max())
    except ConfigurationError as refusal:
        return outcome(REFUSED, refusal)
    return outcome(RIGHT if error < TOLERANCE else WRONG, f"{error:.2g}")


def attempts(family: str, *, is_quick: bool = False) -> Iterator[Attempt]:
    """Try a family in all forms; `is_quick`: in the two that the table shows."""
    default = attempt(family, "as it is")
    yield default
    if not getattr(transformers, FAMILIES[family])._supports_attention_backend or default.verdict == LARGE:
        return
    config = CONFIG_MAPPING[family]()
    plain = plain_changes(config)
    plain_attempt = attempt(family, "plain", **plain)
    if plain_attempt.verdict == BROKEN:  # some cannot be made without a window that no layer has
        plain.pop("sliding_window", None)
        plain_attempt = attempt(family, "plain", **plain)
    yield plain_attempt
    if is_quick:
        return
    if getattr(config, "sliding_window", 0) is None:
        yield attempt(family, "with a window", sliding_window=SHORT)
    for name, value in vars(config).items():
        if RANDOMNESS.search(name) and (value is None or isinstance(value, float)):
            yield attempt(family, f"{name} 0.4", **plain, **{name: 0.4})
    if isinstance(getattr(config, "rope_parameters", None), dict):
        for rope_type in ROPE_INIT_FUNCTIONS:
            yield attempt(family, f"rope {rope_type}", **plain, rope_parameters=rope_parameters(rope_type))


def plain_changes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what makes a configuration one of full, causal attention and a plain head, as the refusals ask for."""
    changes = {name: value for name, value in PLAIN_HEAD.items() if getattr(config, name, value) != value}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = ["full_attention"] * 2
        changes["num_hidden_layers"] = 2
    if getattr(config, "sliding_window", None):
        changes["sliding_window"] = None
    if hasattr(config, "is_decoder"):
        changes["is_decoder"] = True
    return changes


def rope_parameters(rope_type: str) -> dict[str, Any]:
    """Return parameters of a type, with an original context that the texts exceed."""
    half = SIZES["head_dim"] // 2
    return {
        "rope_type": rope_type,
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": SHORT,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "max_position_embeddings": SHORT,
    }


def table(found: list[Attempt]) -> str:
    """Return the families by what becomes of them."""
    groups: dict[str, list[str]] = {}
    for family in dict.fromkeys(item.family for item in found):
        forms = {item.form: item for item in found if item.family == family}
        groups.setdefault(outcome_of(forms), []).append(family)
    lines = ["| outcome | families |", "|---|---|"]
    for outcome, families in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines.append(f"| {outcome} ({len(families)}) | {', '.join(families)} |")
    return "\n".join(lines)


def outcome_of(forms: dict[str, Attempt]) -> str:
    """Return what becomes of a family, in words that are the same for all families of one kind."""
    default = forms["as it is"]
    plain = forms.get("plain", default)
    if WRONG in {item.verdict for item in forms.values()}:
        return WRONG
    if default.verdict == RIGHT:
        return "right as it is by default"
    if plain.verdict == RIGHT:
        return "right with full attention in all layers, no window and no factor or cap on its logits"
    refusals = [item.detail for item in (plain, default) if item.verdict == REFUSED]
    for sign, words in REASONS.items():
        if refusals and sign in refusals[0]:
            return f"refused: {words}"
    return f"{default.verdict} here; the forward at the start decides"


def main(
    only: Annotated[str, typer.Option(help="Families, with commas between them; all by default.")] = "",
    csv_file: Annotated[str, typer.Option("--csv", help="Write every attempt to this file.")] = "",
    quick: Annotated[bool, typer.Option(help="Try the two forms that the table shows.")] = False,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: list[Attempt] = []
    for family in only.split(",") if only else FAMILIES:
        found += attempts(family, is_quick=quick)
    if csv_file:
        with Path(csv_file).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Attempt))
            writer.writerows(map(astuple, found))
    print(table(found))
    for verdict in (RIGHT, REFUSED, BROKEN, LARGE, WRONG):
        families = {item.family for item in found if item.verdict == verdict}
        count = sum(item.verdict == verdict for item in found)
        print(f"{verdict}: {count} models of {len(families)} families", file=sys.stderr)
    for item in found:
        if item.verdict == WRONG:
            print("WRONG:", *astuple(item), file=sys.stderr)
    raise SystemExit(any(item.verdict == WRONG for item in found))


if __name__ == "__main__":
    typer.run(main)
