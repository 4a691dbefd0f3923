r"""Make a tiny chat model that knows the rules of a game in async_grpo.environments, but plays it badly.

    python scripts/create_game_model.py --output sample-data/guess-model
    python scripts/create_game_model.py --game countdown_tools --output sample-data/tools-model --thoughtful 0.25 \
    --warmup-steps 1500 --hidden-size 96 --num-layers 4 --num-heads 3 --intermediate-size 288

This is like scripts/create_tiny_model.py, but the warm-up (supervised training) uses whole games, turn by turn. Their
messages have the right form, but most moves are bad.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from create_tiny_model import IGNORED_LABEL, build_model, build_tokenizer, choose_expression, read_problems
from rich.progress import track
from tokenizers import AddedToken
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from async_grpo.environments.games.countdown_tools import calc
from async_grpo.environments.games.guess import Guess

# Text before and after the expression in a call of the calculator. Each is a single token of this model
CALL = '<tool_call>{"name": "calc", "arguments": {"e": "', '"}}</tool_call>'


def guess_games(thoughtful: float, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Yield games without end.

    A fraction `thoughtful` of the guesses fits the answers so far. The other guesses are random numbers.
    """
    while True:
        game = Guess()
        messages = [{"role": "user", "content": game.reset({}, rng.randrange(2**31))}]
        low = 1
        high = 16
        is_over = False
        while not is_over:
            guess = rng.randint(low, high) if rng.random() < thoughtful else rng.randint(1, 16)
            observation, _, is_over = game.step(str(guess))
            messages.append({"role": "assistant", "content": str(guess)})
            messages.append({"role": "user", "content": observation})
            low, high = game._known
        yield messages[:-1]


def calculations(thoughtful: float, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Yield countdown tasks without end.

    In a fraction `thoughtful` of the tasks, the calculator is called up to four times, until an expression has the
    right value, and this expression is the answer. In the other tasks, the answer is a random expression at once.
    """
    problems = read_problems(Path(__file__).parents[1] / "sample-data" / "countdown_train.jsonl")
    while True:
        problem = rng.choice(problems)
        nums = " ".join(map(str, rng.sample(problem.nums, len(problem.nums))))
        messages = [{"role": "user", "content": f"{nums}={problem.target}"}]
        answer = choose_expression(problem, "+-*", False, rng)
        for _ in range(4 if rng.random() < thoughtful else 0):
            answer = choose_expression(problem, "+-*", rng.random() < 0.3, rng)
            value = calc(answer)
            call = f"{CALL[0]}{answer}{CALL[1]}"
            messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": value}]
            if value == str(problem.target):
                break
        messages.append({"role": "assistant", "content": f"</think>\n<answer>{answer}</answer>"})
        yield messages


GAMES = {"guess": guess_games, "countdown_tools": calculations}


def labelled(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Return token ids and labels. The labels are the ids of the assistant's words, and `IGNORED_LABEL` elsewhere."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        is_answer = message["role"] == "assistant"
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
        body = tokenizer.encode(f"{message['content']}<|im_end|>")
        ids += head + body
        labels += [IGNORED_LABEL] * len(head) + (body if is_answer else [IGNORED_LABEL] * len(body))
    return ids, labels


def main(
    output: Annotated[Path, typer.Option(help="The model's folder.")],
    game: Annotated[str, typer.Option(help="Game: guess or countdown_tools.")] = "guess",
    warmup_steps: Annotated[int, typer.Option(min=0)] = 600,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    lr: float = 2e-3,
    thoughtful: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.2,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    intermediate_size: int = 192,
    max_positions: int = 512,
    seed: int = 0,
) -> None:
    """Write a Hugging Face folder with a tiny warmed-up model and its tokenizer."""
    torch.set_num_threads(1)  # with the same seed, the model must have the same bytes on the same machine
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(max_positions)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL if game == "countdown_tools"])
    model = build_model(
        tokenizer,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
    )
    rng = random.Random(seed)
    # The model first learns to use the calculator, from games in which it is called often. In the end, it learns to
    # call it only as often as `thoughtful` says
    first = GAMES[game](0.8 if game == "countdown_tools" else thoughtful, rng)
    last = GAMES[game](thoughtful, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / warmup_steps)
    )
    model.train()
    for step in track(range(warmup_steps), description="warming up"):
        games = first if step < 0.8 * warmup_steps else last
        rows = [labelled(next(games), tokenizer) for _ in range(batch_size)]
        ids, labels = (
            pad_sequence([torch.tensor(row[part]) for row in rows], batch_first=True, padding_value=padding)
            for part, padding in ((0, tokenizer.pad_token_id), (1, IGNORED_LABEL))
        )
        # The model is causal and the rows are padded on the right, so no attention mask is needed
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    typer.echo(f"last warm-up loss: {loss.item():.4f} nats per token")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    typer.echo(f"{output}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    typer.run(main)
