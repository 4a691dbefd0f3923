"""Models that are made for a benchmark, with the tiny model's tokenizer. Each takes a second to make.

log-normal  Its completions have log-normal lengths by construction. The layers write nothing into the residual stream
            (their output matrices are zero, so they cost what they cost and learn from there), so the next token depends
            on the last one alone: a Markov chain. The first token draws a class of length, the token then says the stage
            within the class; each token stays or goes on to the next stage, the last one to the end. With K stages of
            mean m tokens a length has log-variance trigamma(K), 0.13 for 8; the classes' own variance fills up to sigma^2.
30m         Random weights, 31 M parameters; dimension 0 of the residual stream is a constant that no layer writes to, by
            which the end tokens are never drawn: every completion has all its tokens.
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
STAGE_VARIANCE = 0.1331  # trigamma(8), of the logarithm of a sum of 8 exponential waits
STAGE_MEDIAN = 7.669  # the median of that sum, in units of one wait
WIDER = 1.10  # by what the classes, being few, fall short of
NEVER = -20.0  # log-probability of each of 145 tokens that are no state, at each of up to 512 tokens
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def model_folder(name: str, cache: Path) -> Path:
    """The folder of the model `name`; made in `cache` if it is not there."""
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
    """The tiny model's, with changes."""
    given = json.loads((DATA / "tiny-model" / "config.json").read_text())
    given.pop("layer_types")
    return Qwen2Config(**given | {"tie_word_embeddings": False} | changes)


def transitions() -> torch.Tensor:
    """Log-probabilities of the chain, (states + 1, states + 1): row 0 is the prompt, column 0 the end."""
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
    tokens = [end, *range(CLASSES * STAGES)]  # of each state
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        embedding[:, 0] = 1.0  # any token of a prompt
        for state, token in enumerate(tokens[1:], 1):
            embedding[token, 0], embedding[token, state] = 0.0, 1.0
        head.fill_(NEVER / math.sqrt(width))  # the norm makes a one of width ** 0.5
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
            model.lm_head.weight[
                token, 0
            ] = -300.0  # the constant is 0.1 after the last norm: -30 in the logits
    return model
