"""Turn GSM8K's own JSONL files into prompts for a tokenizer.

    python sample-data/create_gsm8k.py --tokenizer Qwen/Qwen2-1.5B-Instruct \\
        --input train.jsonl --output gsm8k_train.jsonl

The columns of a row are `input` (the prompt as a string), `input_token_ids`, `answer` (the number after `####`,
without commas), `question` and `messages`. The prompt asks for the final answer in \\boxed{}, from which the
`mathd` reward reads it.
"""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from async_grpo.data.create_count_down import load_tokenizer, write_jsonl

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\d(?:\.\d+)?)\s*$")


def parse_row(line: str) -> tuple[str, str]:
    """Return (question, final answer) of one line of GSM8K. Raises ValueError if the line is invalid.

    >>> parse_row('{"question": "How many?", "answer": "500 + 700 = 1200\\\\n#### 1,200"}')
    ('How many?', '1200')
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
        raise ValueError("expected an object with the strings `question` and `answer`")
    final = FINAL_ANSWER.search(row["answer"])
    if final is None:
        raise ValueError(f"the answer does not end in `#### number`: {row['answer'][-60:]!r}")
    return row["question"], final[1].replace(",", "")


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """Return (question, final answer) of each line. Raises ValueError with file and line number for an invalid line."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for line_number, line in enumerate(file, start=1):
            try:
                rows.append(parse_row(line))
            except ValueError as error:
                raise ValueError(f"{path}:{line_number}: {error}") from error
    return rows


def to_record(question: str, answer: str, tokenizer: Any) -> dict[str, Any]:
    """Return the JSONL row of a question. If the tokenizer has no chat template, the prompt is plain text."""
    messages = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    if tokenizer.chat_template is None:
        prompt = f"Question: {question}\n{INSTRUCTION}\nAnswer:"
        token_ids = tokenizer.encode(prompt)
    else:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The chat template has already added the special tokens, which must not be added again.
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {
        "input": prompt,
        "input_token_ids": token_ids,
        "answer": answer,
        "question": question,
        "messages": messages,
    }


def main(
    input: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="GSM8K's train.jsonl or test.jsonl.")
    ],
    tokenizer: Annotated[str, typer.Option(help="Folder or hub name.")],
    output: Annotated[Path, typer.Option(help="The JSONL file to write.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Keep only this number of first rows.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out longer prompts.")] = None,
) -> None:
    """Write GSM8K questions as prompts."""
    try:
        questions = read_gsm8k(input)
        chat_tokenizer = load_tokenizer(tokenizer)
        if chat_tokenizer.chat_template is None:
            typer.echo(f"{tokenizer} has no chat template: the prompts are plain text", err=True)
        all_records = (to_record(*one, chat_tokenizer) for one in track(questions, description=str(input)))
        longest = math.inf if max_prompt_tokens is None else max_prompt_tokens
        short = (record for record in all_records if len(record["input_token_ids"]) <= longest)
        records = list(itertools.islice(short, limit))
        if not records:
            raise ValueError(f"{input} has no rows, or all prompts are longer than --max-prompt-tokens")
        write_jsonl(output, records)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{output}: {len(records)} of {len(questions)} rows")


if __name__ == "__main__":
    typer.run(main)
