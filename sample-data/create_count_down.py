"""Make countdown tasks: reach a target with a few numbers, each used exactly once.

    python sample-data/create_count_down.py --tokenizer Qwen/Qwen2-1.5B-Instruct --num-heldout 512

The problems come from the hub (Jiayi-Pan/Countdown-Tasks-3to4) or are generated here from a seed. The two
files share no problem: a problem is its numbers in any order plus its target, however a row orders them.

A row holds `input` (the prompt as a string, assistant prefill included), `input_token_ids`, `answer` (the
target), `nums`, `target`, `messages` (the chat without the prefill) and `end_token`. The response to be
scored is "<think>" plus the completion; it must look like `<think>...</think>\\n<answer>3*(4+5)</answer>`.
"""

import importlib.util
import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import Progress, track

HUB_DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"
HUB_DEADLINE_S = 5.0
OPERATORS = "+-*/"
STALLED_AFTER_DRAWS = 200_000

SYSTEM_PROMPT = (
    "You are a helpful assistant. You first think about the reasoning process in your mind and then provide "
    "the user with the answer."
)
USER_PROMPT = (
    "Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic "
    "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. "
    "And return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
FULL_PREFILL = "Let me solve this step by step.\n<think>"
SHORT_PREFILL = "<think>"


class Source(str, Enum):
    auto = "auto"
    hub = "hub"
    generate = "generate"


class PromptStyle(str, Enum):
    full = "full"
    short = "short"


class Problem(NamedTuple):
    """The numbers in the order in which the prompt shows them, and the value to reach.

    >>> Problem((7, 2, 3), 13).key == Problem((3, 7, 2), 13).key
    True
    """

    nums: tuple[int, ...]
    target: int

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What makes two rows the same problem: the sorted numbers and the target."""
        return tuple(sorted(self.nums)), self.target


@dataclass(frozen=True)
class ProblemSpace:
    """Which problems are wanted; every bound is inclusive. Raises ValueError where no problem can exist."""

    min_nums: int = 3
    max_nums: int = 4
    min_number: int = 1
    max_number: int = 99
    min_target: int = 10
    max_target: int = 99
    operators: str = OPERATORS

    def __post_init__(self) -> None:
        if not 2 <= self.min_nums <= self.max_nums <= 6:
            raise ValueError(f"need 2 <= min-nums <= max-nums <= 6, got {self.min_nums} and {self.max_nums}")
        if not 0 <= self.min_number <= self.max_number:
            raise ValueError(
                f"need 0 <= min-number <= max-number, got {self.min_number} and {self.max_number}"
            )
        if not 0 <= self.min_target <= self.max_target:
            raise ValueError(
                f"need 0 <= min-target <= max-target, got {self.min_target} and {self.max_target}"
            )
        unknown = set(self.operators) - set(OPERATORS)
        if unknown or not self.operators:
            raise ValueError(f"operators must be some of {OPERATORS!r}, got {self.operators!r}")

    def holds(self, problem: Problem) -> bool:
        """Whether the counts and ranges fit; says nothing about which operators a solution needs."""
        return (
            self.min_nums <= len(problem.nums) <= self.max_nums
            and all(self.min_number <= number <= self.max_number for number in problem.nums)
            and self.min_target <= problem.target <= self.max_target
        )


def apply_operator(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    """Exact value of `left operator right`, None for a division by zero.

    >>> apply_operator("/", Fraction(7), Fraction(2))
    Fraction(7, 2)
    """
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left / right if right else None


def draw_problem(space: ProblemSpace, rng: random.Random) -> Problem | None:
    """A problem solved by the random expression that made it; None where its value is no allowed target."""
    count = rng.randint(space.min_nums, space.max_nums)
    nums = tuple(rng.randint(space.min_number, space.max_number) for _ in range(count))
    values = [Fraction(number) for number in nums]
    while len(values) > 1:
        left = values.pop(rng.randrange(len(values)))
        right = values.pop(rng.randrange(len(values)))
        value = apply_operator(rng.choice(space.operators), left, right)
        if value is None:
            return None
        values.append(value)
    if values[0].denominator != 1 or not space.min_target <= values[0] <= space.max_target:
        return None
    return Problem(nums, int(values[0]))


def generate_problems(
    space: ProblemSpace, count: int, seed: int, on_found: Callable[[], Any] = lambda: None
) -> list[Problem]:
    """`count` distinct solvable problems, in random order; the same seed gives the same list.

    Raises:
        ValueError: long drawing finds nothing new, so fewer than `count` problems exist.
    """
    rng = random.Random(seed)
    problems: dict[tuple[tuple[int, ...], int], Problem] = {}
    draws_without_new = 0
    while len(problems) < count:
        problem = draw_problem(space, rng)
        if problem is not None and problem.key not in problems:
            problems[problem.key] = problem
            draws_without_new = 0
            on_found()
        else:
            draws_without_new += 1
        if draws_without_new == STALLED_AFTER_DRAWS:
            raise ValueError(
                f"{count} distinct problems asked for, but {len(problems)} were found and "
                f"{STALLED_AFTER_DRAWS} more draws gave nothing new: ask for fewer or widen {space}"
            )
    # Early draws favour problems with many solutions: unshuffled, the held-out file would be the harder one.
    found = list(problems.values())
    rng.shuffle(found)
    return found


def hub_problems(space: ProblemSpace, count: int, seed: int) -> list[Problem]:
    """`count` distinct problems of the hub that fit the counts and ranges of `space`, in random order.

    Raises:
        ValueError: the data set holds fewer such problems.
    """
    from datasets import load_dataset  # an optional dependency: generated problems do not need it

    problems: dict[tuple[tuple[int, ...], int], Problem] = {}
    for row in load_dataset(HUB_DATASET, split="train").shuffle(seed=seed):
        problem = Problem(tuple(row["nums"]), row["target"])
        if space.holds(problem):
            problems.setdefault(problem.key, problem)
        if len(problems) == count:
            return list(problems.values())
    raise ValueError(
        f"{count} problems asked for, but {HUB_DATASET} holds {len(problems)} distinct ones in {space}"
    )


def why_not_hub(space: ProblemSpace) -> str | None:
    """Why the hub's problems cannot be had, None when they can."""
    if set(space.operators) != set(OPERATORS):
        return f"the hub's problems need all of {OPERATORS!r}, not only {space.operators!r}"
    if importlib.util.find_spec("datasets") is None:
        return "the package `datasets` is not installed"
    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/api/datasets/{HUB_DATASET}"
    try:
        urllib.request.urlopen(url, timeout=HUB_DEADLINE_S).close()
    except (urllib.error.URLError, OSError) as error:
        return f"{url} did not answer within {HUB_DEADLINE_S:g} s ({error})"
    return None


def choose_source(source: Source, space: ProblemSpace) -> tuple[Source, str]:
    """The source to use, never `auto`, and why. Raises ValueError where the hub is asked for in vain."""
    if source is Source.generate:
        return source, "asked for"
    obstacle = why_not_hub(space)
    if obstacle is None:
        return Source.hub, f"{HUB_DATASET} is reachable"
    if source is Source.hub:
        raise ValueError(f"--source hub is impossible: {obstacle}; use --source generate")
    return Source.generate, obstacle


def chat_messages(problem: Problem, style: PromptStyle) -> list[dict[str, str]]:
    """The chat that asks for `problem`, without the assistant's prefill.

    >>> chat_messages(Problem((7, 2, 3), 13), PromptStyle.short)
    [{'role': 'user', 'content': '7 2 3=13'}]
    """
    if style is PromptStyle.short:
        return [{"role": "user", "content": f"{' '.join(map(str, problem.nums))}={problem.target}"}]
    content = USER_PROMPT.format(nums=list(problem.nums), target=problem.target)
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def to_record(problem: Problem, tokenizer: Any, style: PromptStyle) -> dict[str, Any]:
    """The JSONL row of a problem, its prompt made by the tokenizer's chat template."""
    messages = chat_messages(problem, style)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt += SHORT_PREFILL if style is PromptStyle.short else FULL_PREFILL
    return {
        "input": prompt,
        "input_token_ids": tokenizer.encode(prompt, add_special_tokens=False),
        "answer": problem.target,
        "nums": list(problem.nums),
        "target": problem.target,
        "messages": messages,
        "end_token": tokenizer.eos_token,
    }


def load_chat_tokenizer(path: str) -> Any:
    """A tokenizer that has a chat template. Raises ValueError for anything else."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"no tokenizer at {path!r}: {error}") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer {path!r} has no chat template; use that of an instruct model")
    return tokenizer


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def find_problems(source: Source, space: ProblemSpace, count: int, seed: int) -> list[Problem]:
    """`count` distinct problems from a source other than `auto`, generated under a progress bar."""
    if source is Source.hub:
        return hub_problems(space, count, seed)
    with Progress() as progress:
        task = progress.add_task("generating", total=count)
        return generate_problems(space, count, seed, lambda: progress.advance(task))


def main(
    tokenizer: Annotated[str, typer.Option(help="Folder or hub name; its chat template makes the prompts.")],
    output: Annotated[Path, typer.Option(help="The training file.")] = Path("countdown_train.jsonl"),
    heldout_output: Annotated[Path, typer.Option(help="The held-out file.")] = Path(
        "countdown_heldout.jsonl"
    ),
    num_train: Annotated[int, typer.Option(min=1)] = 10_000,
    num_heldout: Annotated[int, typer.Option(min=0, help="0 writes no held-out file.")] = 512,
    source: Source = Source.auto,
    prompt_style: Annotated[
        PromptStyle, typer.Option(help="`short` is for the tiny model.")
    ] = PromptStyle.full,
    min_nums: int = 3,
    max_nums: int = 4,
    min_number: int = 1,
    max_number: int = 99,
    min_target: int = 10,
    max_target: int = 99,
    operators: Annotated[
        str, typer.Option(help="Some of +-*/; all four are needed for the hub.")
    ] = OPERATORS,
    seed: int = 0,
) -> None:
    """Write countdown tasks as JSONL, the held-out problems disjoint from the training problems."""
    try:
        space = ProblemSpace(min_nums, max_nums, min_number, max_number, min_target, max_target, operators)
        chat_tokenizer = load_chat_tokenizer(tokenizer)
        source, reason = choose_source(source, space)
        typer.echo(f"source: {source.value} ({reason})")
        problems = find_problems(source, space, num_train + num_heldout, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for path, part in ((output, problems[:num_train]), (heldout_output, problems[num_train:])):
        if part:
            rows = (to_record(problem, chat_tokenizer, prompt_style) for problem in part)
            try:
                write_jsonl(path, track(rows, description=str(path), total=len(part)))
            except OSError as error:
                raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from error
            typer.echo(f"{path}: {len(part)} problems")


if __name__ == "__main__":
    typer.run(main)
