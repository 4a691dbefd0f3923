"""Make a tiny chat model that answers countdown problems in the right format and is seldom right.

    python sample-data/create_tiny_model.py --output tiny-model --train sample-data/countdown_train.jsonl

The model is a Qwen2 with tied embeddings and a byte-level tokenizer; reinforcement learning is shown to
improve it within minutes on a CPU. The warm-up is supervised: in a fraction of the examples the answer is
correct, in the others it is a random expression that uses each number once. With `--warmup-steps 0` no
problems are needed and the weights stay random; the tokenizer is there to make the problems with.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from async_grpo.data.create_count_down import (
    SHORT_PREFILL,
    Problem,
    PromptStyle,
    apply_operator,
    chat_messages,
)

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


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the network. Raises ValueError for a head size that vLLM's CPU attention refuses."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_positions: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads < 32:
            raise ValueError(
                f"hidden-size / num-heads must be a whole number of at least 32 "
                f"(vLLM's CPU attention refuses less), got {self.hidden_size} / {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num-heads {self.num_heads} is no multiple of num-kv-heads {self.num_kv_heads}")


@dataclass(frozen=True)
class Expression:
    """An arithmetic expression as text with as few parentheses as possible, and its exact value."""

    text: str
    value: Fraction
    precedence: int


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """One token per byte, so any text survives encoding and decoding, plus those of the chat format.

    The roles are single tokens because every token of a prompt is paid for in each of thousands of samples.
    """
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL_TOKENS)
    # Not special: decoding skips special tokens, and without its tags no response would look well-formed.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in FORMAT_TOKENS + ROLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 with random float32 weights, tied embeddings, and both end tokens in its generation config."""
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        initializer_range=0.06,  # the usual 0.02 suits wider networks; sqrt(1 / 128) is 0.09
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return model


def combine(operator: str, left: Expression, right: Expression) -> Expression | None:
    """`left operator right`, parenthesised where the text needs it; None for a division by zero.

    >>> two, three = (Expression(str(n), Fraction(n), 2) for n in (2, 3))
    >>> combine("*", combine("+", two, three), two).text
    '(2+3)*2'
    """
    value = apply_operator(operator, left.value, right.value)
    if value is None:
        return None
    precedence = PRECEDENCE[operator]
    left_text = f"({left.text})" if left.precedence < precedence else left.text
    right_binds = right.precedence > precedence or (right.precedence == precedence and operator in "+*")
    right_text = right.text if right_binds else f"({right.text})"
    return Expression(left_text + operator + right_text, value, precedence)


@cache
def ordered_expressions(nums: tuple[int, ...], operators: str) -> tuple[Expression, ...]:
    """Every expression over `nums` in this order."""
    if len(nums) == 1:
        return (Expression(str(nums[0]), Fraction(nums[0]), 2),)
    found = []
    for split in range(1, len(nums)):
        sides = ordered_expressions(nums[:split], operators), ordered_expressions(nums[split:], operators)
        for operator, left, right in itertools.product(operators, *sides):
            found.append(combine(operator, left, right))
    return tuple(expression for expression in found if expression is not None)


@cache
def all_expressions(sorted_nums: tuple[int, ...], operators: str) -> dict[str, Fraction]:
    """Text -> value of every expression that uses each number exactly once."""
    orders = sorted(set(itertools.permutations(sorted_nums)))
    return {e.text: e.value for order in orders for e in ordered_expressions(order, operators)}


def choose_expression(problem: Problem, operators: str, correct: bool, rng: random.Random) -> str:
    """A random expression over the problem's numbers, or a random one among those that reach the target.

    Raises:
        ValueError: a correct one is asked for, and these operators have none.
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
    """Endless (prompt ids, response ids) pairs; the numbers of each prompt come in a fresh order.

    Correct answers use `operators`, guesses `guess_operators`.
    """
    while True:
        nums, target = rng.choice(problems)
        problem = Problem(tuple(rng.sample(nums, len(nums))), target)
        messages = chat_messages(problem, PromptStyle.short)
        prompt = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            + SHORT_PREFILL
        )
        correct = rng.random() < correct_fraction
        answer = choose_expression(problem, operators if correct else guess_operators, correct, rng)
        response = f"</think>\n<answer>{answer}</answer>{tokenizer.eos_token}"
        yield tokenizer.encode(prompt), tokenizer.encode(response)


def collate(examples: list[tuple[list[int], list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids`, `attention_mask`, `labels` (batch, tokens); only responses are labelled."""
    length = max(len(prompt) + len(response) for prompt, response in examples)
    input_ids = torch.full((len(examples), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    for row, (prompt, response) in enumerate(examples):
        end = len(prompt) + len(response)
        input_ids[row, :end] = torch.tensor(prompt + response)
        attention_mask[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(response)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def warm_up(
    model: Qwen2ForCausalLM,
    examples: Iterator[tuple[list[int], list[int]]],
    steps: int,
    batch_size: int,
    lr: float,
) -> float:
    """Supervised AdamW steps, the rate falling linearly to zero; returns the last loss in nats per token."""
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
    """The `nums` and `target` of each JSONL row. Raises ValueError for a missing file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; make it with create_count_down.py, or use --warmup-steps 0")
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Problem(tuple(row["nums"]), row["target"]) for row in rows]


def make_deterministic(seed: int, threads: int) -> None:
    """Same seed, same machine, same bytes: sums must not depend on how threads share them."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def main(
    output: Annotated[Path, typer.Option(help="The model's folder.")],
    train: Annotated[Path, typer.Option(help="Problems to warm up on.")] = Path("countdown_train.jsonl"),
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
    threads: Annotated[int, typer.Option(min=1, help="Another number may change the last bits.")] = 1,
    seed: int = 0,
) -> None:
    """Write a Hugging Face folder with a tiny warmed-up model and its tokenizer."""
    make_deterministic(seed, threads)
    tokenizer = build_tokenizer(max_positions)
    try:
        shape = ModelShape(hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size, max_positions)
        model = build_model(shape, tokenizer)
        if warmup_steps:
            problems = read_problems(train)
            rng = random.Random(seed)
            examples = warmup_examples(problems, tokenizer, operators, guess_operators, correct_fraction, rng)
            loss = warm_up(model, examples, warmup_steps, batch_size, lr)
            typer.echo(f"last warm-up loss: {loss:.4f} nats per token")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    typer.echo(f"{output}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    typer.run(main)
