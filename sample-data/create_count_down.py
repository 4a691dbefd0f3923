"""Make countdown tasks, in which a target must be reached with a few numbers, each used exactly once.

    python sample-data/create_count_down.py --tokenizer Qwen/Qwen2-1.5B-Instruct --num-heldout 512

The problems come from the Hugging Face hub (Jiayi-Pan/Countdown-Tasks-3to4) or are generated here from a seed.
The training file and the held-out file share no problem. Two problems are the same if they have the same target
and the same numbers, in any order.

The columns of a row are `input` (the prompt as a string, including the beginning of the answer), `input_token_ids`,
`answer` (the target), `nums`, `target`, `messages` (the chat without the beginning of the answer) and `end_token`.
The response to be scored is "<think>" plus the completion. It must look like
`<think>...</think>\\n<answer>3*(4+5)</answer>`.
"""

import importlib.util
import json
import operator
import os
import random
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.progress import track

HUB_DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"
HUB_DEADLINE_S = 5.0
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
ALL_OPERATORS = "".join(OPERATORS)
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

Source = Literal["auto", "hub", "generate"]
PromptStyle = Literal["full", "short"]


class Problem(NamedTuple):
    """A countdown problem: the numbers in the order of the prompt, and the target to reach with them.

    >>> Problem((7, 2, 3), 13).key == Problem((3, 7, 2), 13).key
    True
    """

    nums: tuple[int, ...]
    target: int

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Return the sorted numbers and the target. Two rows with the same key are the same problem."""
        return tuple(sorted(self.nums)), self.target


@dataclass(frozen=True)
class ProblemSpace:
    """The range of problems to make. All bounds are inclusive. Raises ValueError if no problem can be in the range."""

    min_nums: int = 3
    max_nums: int = 4
    min_number: int = 1
    max_number: int = 99
    min_target: int = 10
    max_target: int = 99
    operators: str = ALL_OPERATORS

    def __post_init__(self) -> None:
        for name, lowest, highest in (("nums", 2, 6), ("number", 0, inf), ("target", 0, inf)):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if not lowest <= low <= high <= highest:
                needed = f"{lowest} <= min-{name} <= max-{name} <= {highest}"
                raise ValueError(f"need {needed}, got {low} and {high}")
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise ValueError(f"operators must be some of {ALL_OPERATORS!r}, got {self.operators!r}")

    def holds(self, problem: Problem) -> bool:
        """Return whether the numbers and the target are in range. The operators of a solution are not checked."""
        return (
            self.min_nums <= len(problem.nums) <= self.max_nums
            and all(self.min_number <= number <= self.max_number for number in problem.nums)
            and self.min_target <= problem.target <= self.max_target
        )


def draw_problem(space: ProblemSpace, rng: random.Random) -> Problem | None:
    """Return a problem made from a random expression, which solves it, or None if its value is not a valid target."""
    count = rng.randint(space.min_nums, space.max_nums)
    nums = tuple(rng.randint(space.min_number, space.max_number) for _ in range(count))
    values = [Fraction(number) for number in nums]
    while len(values) > 1:
        left = values.pop(rng.randrange(len(values)))
        right = values.pop(rng.randrange(len(values)))
        try:
            values.append(OPERATORS[rng.choice(space.operators)](left, right))
        except ZeroDivisionError:
            return None
    if values[0].denominator != 1 or not space.min_target <= values[0] <= space.max_target:
        return None
    return Problem(nums, int(values[0]))


def generate_problems(space: ProblemSpace, count: int, seed: int) -> list[Problem]:
    """Return `count` distinct solvable problems in random order. Raises ValueError if too few problems are found."""
    rng = random.Random(seed)
    problems: dict[Any, Problem] = {}
    for found in track(range(count), description="generating"):
        for _ in range(STALLED_AFTER_DRAWS):
            problem = draw_problem(space, rng)
            if problem is not None and problem.key not in problems:
                problems[problem.key] = problem
                break
        else:
            why = f"{STALLED_AFTER_DRAWS} more draws gave nothing new: ask for fewer or widen {space}"
            raise ValueError(f"{count} distinct problems asked for, but {found} were found and {why}")
    # Problems with many solutions are drawn early. Without shuffling, the held-out file would have harder ones.
    shuffled = list(problems.values())
    rng.shuffle(shuffled)
    return shuffled


def hub_problems(space: ProblemSpace, count: int, seed: int) -> list[Problem]:
    """Return `count` distinct problems from the hub that are in range. Raises ValueError if the hub has fewer."""
    from datasets import load_dataset  # an optional dependency, which generated problems do not need

    problems: dict[Any, Problem] = {}
    for row in load_dataset(HUB_DATASET, split="train").shuffle(seed=seed):
        problem = Problem(tuple(row["nums"]), row["target"])
        if space.holds(problem):
            problems.setdefault(problem.key, problem)
        if len(problems) == count:
            return list(problems.values())
    there = f"{HUB_DATASET} holds {len(problems)} distinct ones in {space}"
    raise ValueError(f"{count} problems asked for, but {there}")


def why_not_hub(space: ProblemSpace) -> str | None:
    """Return why the problems of the hub cannot be used, or None if they can."""
    if set(space.operators) != set(OPERATORS):
        return f"the hub's problems need all of {ALL_OPERATORS!r}, not only {space.operators!r}"
    if importlib.util.find_spec("datasets") is None:
        return "the package `datasets` is not installed"
    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/api/datasets/{HUB_DATASET}"
    try:
        urllib.request.urlopen(url, timeout=HUB_DEADLINE_S).close()
    except OSError as error:
        return f"{url} did not answer within {HUB_DEADLINE_S:g} s ({error})"
    return None


def find_problems(source: Source, space: ProblemSpace, count: int, seed: int) -> list[Problem]:
    """Return `count` distinct problems, and print their source. Raises ValueError if there are too few problems."""
    obstacle = "asked for" if source == "generate" else why_not_hub(space)
    if source == "hub" and obstacle:
        raise ValueError(f"--source hub is impossible: {obstacle}; use --source generate")
    if obstacle:
        typer.echo(f"source: generate ({obstacle})")
        return generate_problems(space, count, seed)
    typer.echo(f"source: hub ({HUB_DATASET} is reachable)")
    return hub_problems(space, count, seed)


def chat_messages(problem: Problem, style: PromptStyle) -> list[dict[str, str]]:
    """Return the chat that asks for a solution, without the beginning of the answer.

    >>> chat_messages(Problem((7, 2, 3), 13), "short")
    [{'role': 'user', 'content': '7 2 3=13'}]
    """
    if style == "short":
        return [{"role": "user", "content": f"{' '.join(map(str, problem.nums))}={problem.target}"}]
    content = USER_PROMPT.format(nums=list(problem.nums), target=problem.target)
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def to_record(problem: Problem, tokenizer: Any, style: PromptStyle) -> dict[str, Any]:
    """Return the JSONL row of a problem, with a prompt from the tokenizer's chat template."""
    messages = chat_messages(problem, style)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt += SHORT_PREFILL if style == "short" else FULL_PREFILL
    return {
        "input": prompt,
        "input_token_ids": tokenizer.encode(prompt, add_special_tokens=False),
        "answer": problem.target,
        "nums": list(problem.nums),
        "target": problem.target,
        "messages": messages,
        "end_token": tokenizer.eos_token,
    }


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer with transformers. Raises ValueError if there is none at the path."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"no tokenizer at {path!r}: {error}") from error


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line. Raises ValueError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def main(
    tokenizer: Annotated[str, typer.Option(help="Folder or hub name; its chat template makes the prompts.")],
    output: Annotated[Path, typer.Option(help="The training file.")] = Path("countdown_train.jsonl"),
    heldout_output: Annotated[Path, typer.Option(help="The held-out file.")] = Path(
        "countdown_heldout.jsonl"
    ),
    num_train: Annotated[int, typer.Option(min=1)] = 10_000,
    num_heldout: Annotated[int, typer.Option(min=0, help="0 writes no held-out file.")] = 512,
    source: Source = "auto",
    prompt_style: Annotated[PromptStyle, typer.Option(help="`short` is for the tiny model.")] = "full",
    min_nums: int = 3,
    max_nums: int = 4,
    min_number: int = 1,
    max_number: int = 99,
    min_target: int = 10,
    max_target: int = 99,
    operators: Annotated[
        str, typer.Option(help="Operators, some of +-*/. Problems from the hub need all four.")
    ] = ALL_OPERATORS,
    seed: int = 0,
) -> None:
    """Write countdown tasks as JSONL files. No held-out problem is also a training problem."""
    try:
        space = ProblemSpace(min_nums, max_nums, min_number, max_number, min_target, max_target, operators)
        chat_tokenizer = load_tokenizer(tokenizer)
        if chat_tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer {tokenizer!r} has no chat template; use that of an instruct model"
            )
        problems = find_problems(source, space, num_train + num_heldout, seed)
        for path, part in ((output, problems[:num_train]), (heldout_output, problems[num_train:])):
            if part:
                shown = track(part, description=str(path))
                write_jsonl(path, (to_record(problem, chat_tokenizer, prompt_style) for problem in shown))
                typer.echo(f"{path}: {len(part)} problems")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
