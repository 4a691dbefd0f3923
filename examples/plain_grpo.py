r"""GRPO in one file of torch and transformers. Read it before the library, which does the same on many machines.

    python examples/plain_grpo.py --model sample-data/tiny-model --output plain_grpo.jsonl \
        --train sample-data/countdown_train.jsonl --heldout sample-data/countdown_heldout.jsonl

A step consists of these functions, in the order of this file:

    sample            generates n completions for each of P prompts, with the log-prob of every sampled token
    score             returns a completion's reward by two rules: is the arithmetic right, and is the format right
    group_advantages  compares a reward with those of the prompt's other completions: A = (r - mean) / std, no critic
    policy_loss       - min(ratio * A, clip(ratio) * A) on every token, with ratio = pi(token) / pi_when_sampled(token)
    train_step        backward pass, clipping of the gradient's norm, AdamW

The library adds engines that generate while the trainer trains, rewards that may be slow or fail, packing without
padding, sharding, and other estimators and losses. Because engines generate during training, the library trains on
tokens that are a bounded number of steps old. This file imitates that with `--staleness`.

This file shares no code with the library, so that both cannot contain the same mistake. `benchmarks/learning_curve.py`
compares their learning curves.
"""

import ast
import itertools
import json
import random
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

RESPONSE = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORMAT_REWARD = 0.1
CLIP = 0.2
EVAL_BATCH = 256

Row = dict[str, Any]


@dataclass
class Rollout:
    """The completions of one batch, grouped by prompt. Prompts are padded on the left, completions on the right."""

    token_ids: torch.Tensor  # (samples, prompt tokens + completion tokens)
    attention: torch.Tensor  # same shape as token_ids; 0 marks padding
    mask: torch.Tensor  # (samples, completion tokens), bool: True up to and including the end token
    logprobs: torch.Tensor  # (samples, completion tokens), under the policy that sampled the tokens
    texts: list[str]  # completions without their end token


# 1. Sample: one completion per row, all rows together ---------------------------------------------------------


def pad_left(prompts: list[list[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both (prompts, tokens)."""
    length = max(map(len, prompts))
    token_ids = torch.tensor([[pad_token_id] * (length - len(prompt)) + prompt for prompt in prompts])
    attention = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return token_ids, attention


def positions(attention: torch.Tensor) -> torch.Tensor:
    return (attention.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, rows: list[Row], max_new_tokens: int) -> Rollout:
    """Generate one completion per row at temperature 1, all rows together, with one KV cache."""
    ends = torch.tensor(model.generation_config.eos_token_id)
    pad = tokenizer.pad_token_id
    token_ids, attention = pad_left([row["input_token_ids"] for row in rows], pad)
    cache = DynamicCache(config=model.config)
    inputs = token_ids
    alive = torch.ones(len(rows), dtype=torch.bool)
    tokens = []
    masks = []
    logprobs = []
    while alive.any() and len(tokens) < max_new_tokens:
        position_ids = positions(attention)[:, -inputs.shape[1] :]
        output = model(
            inputs,
            attention_mask=attention,
            position_ids=position_ids,
            past_key_values=cache,
            logits_to_keep=1,
        )
        distribution = output.logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(distribution.exp(), 1)
        tokens.append(torch.where(alive, token.squeeze(1), pad))
        masks.append(alive)
        logprobs.append(distribution.gather(1, token).squeeze(1))
        attention = torch.cat([attention, alive[:, None].long()], 1)
        alive = alive & ~torch.isin(tokens[-1], ends)
        inputs = tokens[-1][:, None]
    completions = torch.stack(tokens, 1)
    mask = torch.stack(masks, 1)
    texts = []
    for ids, keep in zip(completions, mask, strict=True):
        text_ids = [token for token in ids[keep].tolist() if token not in ends]
        texts.append(tokenizer.decode(text_ids, skip_special_tokens=False))
    return Rollout(torch.cat([token_ids, completions], 1), attention, mask, torch.stack(logprobs, 1), texts)


# 2. Score: the task is countdown: reach a target from three numbers with + - * --------------------------------


def evaluate_expression(node: ast.AST) -> tuple[int, list[int]]:
    """Return the value and the integers of an expression that consists of + - * and non-negative integers.

    >>> evaluate_expression(ast.parse("(1+2)*3", mode="eval"))
    (9, [1, 2, 3])

    Raises:
        ValueError: The expression contains anything else.
    """
    match node:
        case ast.Expression(body=body):
            return evaluate_expression(body)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value, [value]
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as operator, right=right):
            left_value, left_nums = evaluate_expression(left)
            right_value, right_nums = evaluate_expression(right)
            if isinstance(operator, ast.Add):
                return left_value + right_value, left_nums + right_nums
            if isinstance(operator, ast.Sub):
                return left_value - right_value, left_nums + right_nums
            return left_value * right_value, left_nums + right_nums
    raise ValueError(f"no plain arithmetic: {ast.dump(node)}")


def score(completion: str, row: Row) -> tuple[float, float]:
    r"""Return (correct, well-formed), each 0.0 or 1.0.

    The response is "<think>" + completion, because the prompt ends with "<think>".

    >>> score("</think>\n<answer>3*4+1</answer>", {"nums": [1, 3, 4], "target": 13})
    (1.0, 1.0)
    """
    response = "<think>" + completion
    well_formed = float(RESPONSE.match(response) is not None)
    answer = ANSWER.search(response)
    if answer is None or len(answer[1]) > 100:
        return 0.0, well_formed
    try:
        value, nums = evaluate_expression(ast.parse(answer[1].strip(), mode="eval"))
    except (ValueError, SyntaxError):
        return 0.0, well_formed
    return float(value == row["target"] and sorted(nums) == sorted(row["nums"])), well_formed


# 3. Advantages and loss: the algorithm ------------------------------------------------------------------------


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return (reward - group mean) / (group standard deviation + 1e-6), with ddof 1, for each sample."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def policy_loss(model: Any, rollout: Rollout, advantages: torch.Tensor) -> torch.Tensor:
    """Return the clipped PPO loss (Schulman et al. 2017, eq. 7), averaged over all completion tokens of the batch."""
    length = rollout.mask.shape[1]
    logits = model(
        rollout.token_ids,
        attention_mask=rollout.attention,
        position_ids=positions(rollout.attention),
        logits_to_keep=length + 1,
    ).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(2, rollout.token_ids[:, -length:, None]).squeeze(2)
    ratio = torch.where(rollout.mask, logprobs - rollout.logprobs, 0.0).exp()
    advantages = advantages[:, None]
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (per_token * rollout.mask).sum() / rollout.mask.sum()


# 4. The loop around it: data, evaluation, command line --------------------------------------------------------


def heldout_scores(
    model: Any, tokenizer: Any, rows: list[Row], repeats: int, max_new_tokens: int
) -> tuple[float, float]:
    """Generate `repeats` completions per row at temperature 1, and return the fractions (correct, well-formed)."""
    scores = []
    repeated_rows = rows * repeats
    for start in range(0, len(repeated_rows), EVAL_BATCH):
        part = repeated_rows[start : start + EVAL_BATCH]
        texts = sample(model, tokenizer, part, max_new_tokens).texts
        scores += map(score, texts, part)
    correct, well_formed = torch.tensor(scores).mean(0).tolist()
    return correct, well_formed


def prompt_batches(rows: list[Row], prompts_per_step: int, seed: int) -> Iterator[list[Row]]:
    """Yield batches without end, in a new order in each epoch."""
    rng = random.Random(seed)
    epochs = (rng.sample(rows, len(rows)) for _ in itertools.count())
    stream = itertools.chain.from_iterable(epochs)
    while True:
        yield list(itertools.islice(stream, prompts_per_step))


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder.")],
    train: Annotated[Path, typer.Option(help="JSONL of countdown problems.")],
    heldout: Annotated[Path, typer.Option(help="JSONL of held-out problems.")],
    output: Annotated[Path, typer.Option(help="File of metrics, a JSON line per step.")] = Path(
        "plain_grpo.jsonl"
    ),
    steps: Annotated[int, typer.Option(min=0)] = 100,
    prompts_per_step: Annotated[int, typer.Option(min=1)] = 32,
    group_size: Annotated[int, typer.Option(min=2)] = 8,
    lr: float = 2e-4,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps in which the learning rate rises to lr.")
    ] = 5,
    staleness: Annotated[
        int,
        typer.Option(
            min=0, help="Steps from the sampling of a batch to its training; fewer for the first batches."
        ),
    ] = 0,
    max_new_tokens: int = 24,
    eval_every: Annotated[int, typer.Option(min=1)] = 25,
    eval_repeats: Annotated[int, typer.Option(min=1, help="Completions per held-out problem.")] = 2,
    seed: int = 0,
) -> None:
    """Train with GRPO, and write the metrics of each step. Held-out accuracy is sampled at temperature 1."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    heldout_rows = read_rows(heldout)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (warmup_steps + 1))
    )
    batches = prompt_batches(read_rows(train), prompts_per_step, seed)
    pending: deque[tuple[Rollout, torch.Tensor, dict[str, float]]] = deque()

    def sample_batch() -> None:
        rows = [row for row in next(batches) for _ in range(group_size)]
        rollout = sample(policy, tokenizer, rows, max_new_tokens)
        correct, well_formed = torch.tensor(list(map(score, rollout.texts, rows))).unbind(1)
        rewards = correct + FORMAT_REWARD * well_formed
        columns = {
            "accuracy": correct,
            "format": well_formed,
            "reward": rewards,
            "tokens": rollout.mask.sum(1).float(),
        }
        metrics = {name: values.mean().item() for name, values in columns.items()}
        pending.append((rollout, group_advantages(rewards, group_size), metrics))

    def train_step() -> dict[str, float]:
        rollout, advantages, metrics = pending.popleft()
        loss = policy_loss(policy, rollout, advantages)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return {**metrics, "loss": loss.item(), "grad_norm": grad_norm}

    with output.open("w", encoding="utf-8") as file, Progress() as progress:
        task = progress.add_task("training", total=steps)
        for step in range(steps + 1):
            started = time.perf_counter()
            record: dict[str, float] = {"step": step}
            if step:  # before step 1, only evaluate the initial policy
                # After each step, `staleness` batches remain in the queue. So each batch waits for this number of steps
                while len(pending) <= staleness:
                    sample_batch()
                record |= train_step() | {"seconds": time.perf_counter() - started}
                progress.advance(task)
            if step % eval_every == 0 or step == steps:
                names = ("heldout_accuracy", "heldout_format")
                scores = heldout_scores(policy, tokenizer, heldout_rows, eval_repeats, max_new_tokens)
                record |= dict(zip(names, scores, strict=True))
                progress.console.print(
                    f"step {step}: held-out accuracy {scores[0]:.3f}, well-formed {scores[1]:.3f}"
                )
            file.write(json.dumps(record) + "\n")
            file.flush()


if __name__ == "__main__":
    typer.run(main)
