"""Models that are made for this comparison, with the tiny model's tokenizer. Each takes a second to make.

log-normal  The lengths of its completions have a log-normal distribution by construction. The output matrices of the layers
            are zero: the layers cost their usual time and can learn, but add nothing. So the next token depends only on the
            last one (a Markov chain). The first token chooses a class of lengths at random. Each later token names a stage
            of the class: the chain stays at a stage, or goes on to the next one, and after the last one to the end. The
            logarithm of the length has the variance trigamma(K), 0.13 for K = 8 stages. The rest of sigma^2 comes from the
            differences between the classes.
30m         Random weights, 31 M parameters. Dimension 0 of the residual stream is a constant that no layer changes. It
            gives the end tokens a logit so low that they are never sampled: every completion has its maximum length.
"""

import json
import math
import shutil
from pathlib import Path
from statistics import NormalDist

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from async_grpo.data.smollm2 import cached_smollm2
from benchmarks.against_trl.cases import DATA

MEDIAN, SIGMA = 64.0, 1.0
STAGES, CLASSES = 8, 15
STAGE_VARIANCE = 0.1331  # trigamma(8): variance of the logarithm of a sum of 8 exponential waits
STAGE_MEDIAN = 7.669  # median of that sum, in units of one wait
WIDER = 1.10  # factor that makes up for the variance that is lost because there are only a few classes
# Log-prob of each of the 145 tokens that are no state; small enough to sample none in 512 tokens
NEVER = -20.0
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def model_folder(name: str, cache: Path) -> Path:
    """Return the folder of the model `name`. Make it in `cache` if it does not exist."""
    if name == "tiny":
        return DATA / "tiny-model"
    if name == "smollm2":
        return cached_smollm2()
    folder = cache / name
    if not (folder / "model.safetensors").exists():
        transformers_logging.disable_progress_bar()
        torch.manual_seed(0)
        model = {"log-normal": log_normal, "30m": thirty_million}[name]()
        partial = cache / f".{name}"
        model.save_pretrained(partial)
        for file in COPIED:
            shutil.copyfile(DATA / "tiny-model" / file, partial / file)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def config(**changes: int | bool) -> Qwen2Config:
    """Return the tiny model's configuration with some changed values."""
    given = json.loads((DATA / "tiny-model" / "config.json").read_text())
    given.pop("layer_types")
    return Qwen2Config(**given | {"tie_word_embeddings": False} | changes)


def transitions() -> torch.Tensor:
    """Return the log-probs of the chain's transitions, (states + 1, states + 1). Row 0 is the prompt, column 0 the end."""
    states = CLASSES * STAGES
    spread = math.sqrt(SIGMA**2 - STAGE_VARIANCE)
    chain = torch.zeros(states + 1, states + 1)
    for index in range(CLASSES):
        quantile = NormalDist().inv_cdf((index + 0.5) / CLASSES)
        mean = max(1.0, MEDIAN / STAGE_MEDIAN * math.exp(spread * WIDER * quantile))
        first = 1 + index * STAGES
        chain[0, first] = 1 / CLASSES
        for state in range(first, first + STAGES):
            following = state + 1 if state + 1 < first + STAGES else 0
            chain[state, state], chain[state, following] = 1 - 1 / mean, 1 / mean
    return chain.clamp(min=math.exp(NEVER)).log()


def log_normal() -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM(config())
    width, chain = model.config.hidden_size, transitions()
    end = model.config.eos_token_id
    tokens = [end, *range(CLASSES * STAGES)]  # token of each state; the end is state 0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        # Every token first counts as one of the prompt. The loop then gives the tokens of states their own dimension
        embedding[:, 0] = 1.0
        for state, token in enumerate(tokens[1:], 1):
            embedding[token, 0], embedding[token, state] = 0.0, 1.0
        # The norm turns an embedding of 1 into sqrt(width), so divide by it
        head.fill_(NEVER / math.sqrt(width))
        for state, token in enumerate(tokens):
            head[token, : len(tokens)] = chain[:, state] / math.sqrt(width)
    return model


def thirty_million() -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM(
        config(
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=10,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        for token in json.loads((DATA / "tiny-model" / "generation_config.json").read_text())["eos_token_id"]:
            model.lm_head.weight[token] = 0.0
            # After the last norm the constant is 0.1, so the logit is -30
            model.lm_head.weight[token, 0] = -300.0
    return model
