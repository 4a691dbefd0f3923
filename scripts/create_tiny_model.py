"""Make a tiny chat model that answers countdown problems in the right format, but seldom correctly.

    python scripts/create_tiny_model.py --output tiny-model --train sample-data/countdown_train.jsonl

The model is a Qwen2 with tied embeddings and a byte-level tokenizer. Reinforcement learning improves it within minutes
on a CPU. The warm-up is supervised: in a fraction of the examples the answer is correct, and in the others it is a
random expression that uses each number once. With `--warmup-steps 0`, no problems are needed and the weights stay
random. Use this for the first model, whose tokenizer is needed to make the problems.
"""

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from async_grpo.data.create_count_down import OPERATORS, Problem, to_record

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FORMAT_TOKENS = ["<think>", "</think>", "<answer>", "</answer>"]
ROLE_TOKENS = ["system", "user", "assistant"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORED_LABEL = -100
PRECEDENCE = {"+": 0, "-": 0, "*": 1, "/": 1}


class Expression(NamedTuple):
    """An arithmetic expression as text with as few parentheses as possible, and its exact value."""

    text: str
    value: Fraction
    precedence: int


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and the tokens of the chat format.

    Any text survives encoding and decoding. The roles are single tokens, because every additional token of a prompt
    must be computed in each of thousands of samples.
    """
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL_TOKENS)
    # These must not be special tokens, because decoding skips special tokens, and a response without its tags counts as
    # badly formed
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in FORMAT_TOKENS + ROLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, **sizes: int) -> Qwen2ForCausalLM:
    """Return a Qwen2 with random float32 weights, tied embeddings, and both end tokens in its generation config.

    Raises:
        ValueError: vLLM's CPU attention refuses the size of a head, or the numbers of heads do not fit together.
    """
    width, heads, kv_heads = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if width % heads or width // heads < 32:
        raise ValueError(
            f"hidden-size / num-heads must be a whole number of at least 32 "
            f"(vLLM's CPU attention refuses less), got {width} / {heads}"
        )
    if heads % kv_heads:
        raise ValueError(f"num-heads {heads} is no multiple of num-kv-heads {kv_heads}")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        initializer_range=0.06,  # the usual 0.02 is for wider networks; for a width of 128, sqrt(1 / 128) is 0.09
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **sizes,
    )
    model = Qwen2ForCausalLM(config)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return model


def combine(operator: str, left: Expression, right: Expression) -> Expression:
    """Return the expression `left operator right`. Raise ZeroDivisionError if it divides by 0."""
    value = OPERATORS[operator](left.value, right.value)
    precedence = PRECEDENCE[operator]
    left_text = f"({left.text})" if left.precedence < precedence else left.text
    right_binds = right.precedence > precedence or (right.precedence == precedence and operator in "+*")
    right_text = right.text if right_binds else f"({right.text})"
    return Expression(left_text + operator + right_text, value, precedence)


@cache
def ordered_expressions(nums: tuple[int, ...], operators: str) -> tuple[Expression, ...]:
    """Return every expression that uses all of `nums` once, in this order."""
    if len(nums) == 1:
        return (Expression(str(nums[0]), Fraction(nums[0]), 2),)
    expressions = []
    for split in range(1, len(nums)):
        left_sides = ordered_expressions(nums[:split], operators)
        right_sides = ordered_expressions(nums[split:], operators)
        for operator, left, right in itertools.product(operators, left_sides, right_sides):
            with suppress(ZeroDivisionError):
                expressions.append(combine(operator, left, right))
    return tuple(expressions)


@cache
def all_expressions(sorted_nums: tuple[int, ...], operators: str) -> dict[str, Fraction]:
    """Return the value of every expression that uses each number exactly once, by the expression's text."""
    orders = sorted(set(itertools.permutations(sorted_nums)))
    return {e.text: e.value for order in orders for e in ordered_expressions(order, operators)}


def choose_expression(problem: Problem, operators: str, correct: bool, rng: random.Random) -> str:
    """Return a random expression over the problem's numbers. If `correct` is True, it reaches the target.

    Raises:
        ValueError: `correct` is True, but no expression with these operators reaches the target.
    """
    expressions = all_expressions(tuple(sorted(problem.nums)), operators)
    choices = [text for text, value in expressions.items() if not correct or value == problem.target]
    if not choices:
        raise ValueError(f"{problem} has no solution with the operators {operators!r}; widen --operators")
    return rng.choice(choices)


def warmup_examples(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerFast,
    operators: str,
    guess_operators: str,
    correct_fraction: float,
    rng: random.Random,
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt ids, response ids) without end. Each prompt has the problem's numbers in a new random order.

    Correct answers use `operators`, and random answers use `guess_operators`.
    """
    while True:
        nums, target = rng.choice(problems)
        problem = Problem(tuple(rng.sample(nums, len(nums))), target)
        correct = rng.random() < correct_fraction
        answer = choose_expression(problem, operators if correct else guess_operators, correct, rng)
        response = f"</think>\n<answer>{answer}</answer>{tokenizer.eos_token}"
        prompt = to_record(problem, tokenizer, "short")["input_token_ids"]
        yield prompt, tokenizer.encode(response)


def collate(examples: list[tuple[list[int], list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `attention_mask` and `labels` (batch, tokens), padded on the right.

    Only the tokens of responses have labels.
    """

    def padded(rows: list[list[int]], padding: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)

    return {
        "input_ids": padded([prompt + response for prompt, response in examples], pad_token_id),
        "attention_mask": padded([[1] * len(prompt + response) for prompt, response in examples], 0),
        "labels": padded([[IGNORED_LABEL] * len(p) + response for p, response in examples], IGNORED_LABEL),
    }


def warm_up(
    model: Qwen2ForCausalLM,
    examples: Iterator[tuple[list[int], list[int]]],
    steps: int,
    batch_size: int,
    lr: float,
) -> float:
    """Train with AdamW on the examples, with a linear decay to zero, and return the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / steps)
    )
    loss = torch.tensor(float("nan"))
    model.train()
    for _ in track(range(steps), description="warming up"):
        batch = collate(list(itertools.islice(examples, batch_size)), model.config.pad_token_id)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


def read_problems(path: Path) -> list[Problem]:
    """Return the `nums` and `target` of each JSONL row. Raise ValueError if the file is missing."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; make it with create_count_down.py, or use --warmup-steps 0")
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Problem(tuple(row["nums"]), row["target"]) for row in rows]


def main(
    output: Annotated[Path, typer.Option(help="The model's folder.")],
    train: Annotated[Path, typer.Option(help="Problems for the warm-up.")] = Path("countdown_train.jsonl"),
    warmup_steps: Annotated[int, typer.Option(min=0)] = 1000,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    lr: float = 1.5e-3,
    correct_fraction: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.4,
    operators: Annotated[str, typer.Option(help="Operators of the correct answers.")] = "+-",
    guess_operators: Annotated[str, typer.Option(help="Operators of the random answers.")] = "+-*",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 384,
    max_positions: int = 1024,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; changes the last bits of weights.")] = 1,
    seed: int = 0,
) -> None:
    """Write a Hugging Face folder with a tiny warmed-up model and its tokenizer."""
    # With the same seed, the model must have the same bytes on the same machine. Sums depend on the number of threads
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(max_positions)
    try:
        model = build_model(
            tokenizer,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            max_position_embeddings=max_positions,
        )
        if warmup_steps:
            rng = random.Random(seed)
            examples = warmup_examples(
                read_problems(train), tokenizer, operators, guess_operators, correct_fraction, rng
            )
            loss = warm_up(model, examples, warmup_steps, batch_size, lr)
            typer.echo(f"last warm-up loss: {loss:.4f} nats per token")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    typer.echo(f"{output}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    typer.run(main)
