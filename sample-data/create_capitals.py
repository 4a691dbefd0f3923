"""Make questions about the capitals of well-known countries, on which `async-grpo demo --model smollm2` trains.

    async-grpo data capitals

A row has the question as `messages`, so that each model's own chat template makes the prompt. The reward `regex` finds
the capital's name anywhere in the completion: `--reward-fns regex --reward-options search=true`.
"""

import random
from pathlib import Path
from typing import Annotated, Any

import typer

from async_grpo.data.create_count_down import write_jsonl

# No capital's name is part of its country's name, so that a completion that repeats the question gets no reward
CAPITALS = {
    "Afghanistan": "Kabul",
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Bangladesh": "Dhaka",
    "Belgium": "Brussels",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "the Czech Republic": "Prague",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "the Netherlands": "Amsterdam",
    "New Zealand": "Wellington",
    "Nigeria": "Abuja",
    "North Korea": "Pyongyang",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "the Philippines": "Manila",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Saudi Arabia": "Riyadh",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "the United Kingdom": "London",
    "the United States": "Washington",
}
NUM_HELDOUT = 16


def to_record(country: str) -> dict[str, Any]:
    r"""Return the JSONL row of a country.

    >>> to_record("France")["messages"][0]["content"], to_record("France")["pattern"]
    ('What is the capital of France?', '(?i)\\bParis\\b')
    """
    capital = CAPITALS[country]
    return {
        "messages": [{"role": "user", "content": f"What is the capital of {country}?"}],
        "answer": capital,
        "pattern": rf"(?i)\b{capital}\b",
    }


def main(
    output: Annotated[Path, typer.Option(help="The training file.")] = Path("capitals_train.jsonl"),
    heldout_output: Annotated[Path, typer.Option(help="The held-out file.")] = Path("capitals_heldout.jsonl"),
    num_heldout: Annotated[
        int, typer.Option(min=1, max=len(CAPITALS) - 1, help="Number of countries to hold out.")
    ] = NUM_HELDOUT,
    seed: Annotated[int, typer.Option(help="Seed with which the held-out countries are chosen.")] = 0,
) -> None:
    """Write questions about capitals as JSONL files. No held-out country is also a training country."""
    countries = list(CAPITALS)
    random.Random(seed).shuffle(countries)
    try:
        for path, part in ((output, countries[num_heldout:]), (heldout_output, countries[:num_heldout])):
            write_jsonl(path, [to_record(country) for country in part])
            typer.echo(f"{path}: {len(part)} countries")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
