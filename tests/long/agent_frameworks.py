"""Agents of 13 frameworks, in environments of their own, behind the real endpoint: a table of what works.

    python examples/agents/make_environments.py
    python -m tests.long.agent_frameworks                              # all frameworks: about ten minutes
    python -m tests.long.agent_frameworks --only openai,smolagents     # these alone
    python -m tests.long.agent_frameworks --columns "typed output"     # one column of the table alone
    python -m tests.long.agent_frameworks --typed-output hint          # forms of answers are in the prompt alone
    python -m tests.long.agent_frameworks --write                      # put the lines into the table of docs/agents.md

A scripted policy plays with each example of examples/agents, and with each program of agent_programs, one feature at a
time. A feature works if the program makes of the policy's turns what it must, each sampled token is trained on exactly
once, and the program looks for no other host. Where a program requires a form, the policy's turn must also keep to the
grammar that an engine would enforce. Mistakes and thoughts are played without, because it would prevent them. The exit
status is 1 if a feature does not work.
"""

import asyncio
import logging
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from scripted_agents import PlayedAgent, grammars_made_here, model_folder, play

from async_grpo.environments.config import ENFORCE, HINT
from examples.agents.make_environments import frameworks
from tests.long.agent_scripts import EXAMPLE, MISTAKES, ROW, THINKING, Script, scripts_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "agents"
PROGRAMS = Path(__file__).with_name("agent_programs")
PAGE = ROOT / "docs" / "agents.md"
AT_ONCE = 2  # agents that play at the same time
# Features that a grammar would prevent: mistakes, and thoughts, which the template of the policy does not write
PLAYED_FREELY = (THINKING, *MISTAKES)
# Columns of the table, and the features in each
COLUMNS = {
    "chat": ("chat",),
    "tools": (EXAMPLE, "code"),
    "streaming": ("streaming", "streamed_tools"),
    "typed output": ("typed", "typed_by_tool", "typed_by_prompt"),
    "Responses API": ("responses", "responses_streaming", "responses_typed"),
    "thoughts": (THINKING,),
    "mistakes of the policy": tuple(MISTAKES),
}


def command_of(framework: str, feature: str, environments: Path) -> str:
    """Return the shell command that uses one feature of a framework."""
    folder = environments.absolute() / framework
    is_example = feature in (EXAMPLE, THINKING, *MISTAKES)
    is_node = "npm" in frameworks()[framework]
    stem = framework.replace("-", "_")
    name = f"{stem}_{'agent' if is_example else 'features'}.{'cjs' if is_node else 'py'}"
    program = f"{(EXAMPLES if is_example else PROGRAMS) / name} {'' if is_example else feature}"
    if is_node:
        return f"NODE_PATH={folder}/node_modules exec node {program}"
    return f"PYTHONPATH={PROGRAMS / 'no_network'} exec {folder}/bin/python {program}"


def fault_of(played: PlayedAgent, script: Script) -> str:
    """Return what does not work, or "" if all does."""
    if played.failure:
        lines = played.failure.strip().splitlines()
        return next((line for line in reversed(lines) if "Error" in line), lines[-1])
    if played.reward != script.reward:
        return f"the reward is {played.reward}, not {script.reward}"
    # How often a framework asks again after a mistake is its own affair
    if script.reward and played.num_turns != len(script.turns):
        return f"the policy took {played.num_turns} turns, not {len(script.turns)}"
    if played.against_form:
        return f"an engine that enforces the form would not say {played.against_form[0]!r}"
    for turn, text in script.told:
        if text not in played.prompts[turn]:
            return f"the policy does not read {text!r} before turn {turn + 1}"
    return ""


@dataclass(frozen=True)
class Tried:
    """What became of one feature.

    Attributes:
        fault: What does not work; "" if all does.
        num_sequences: Number of sequences that the trajectory is trained as.
        num_enforced: Number of turns whose form an engine would enforce.
    """

    fault: str
    num_sequences: int
    num_enforced: int


async def try_features(
    framework: str,
    features: list[str],
    environments: Path,
    model: Path,
    typed_output: str,
) -> dict[str, Tried]:
    """Play the features of a framework, or those that are named, and print what becomes of each."""
    places = asyncio.Semaphore(AT_ONCE)

    async def tried(feature: str, script: Script) -> Tried:
        row = {**ROW, "expected": script.expected}
        async with places:
            played = await play(
                model,
                command_of(framework, feature, environments),
                script.turns,
                row,
                HINT if feature in PLAYED_FREELY else typed_output,
            )
        fault = fault_of(played, script)
        tokens = (
            f"{played.num_tokens} tokens in {played.num_turns} turns and {played.num_sequences} sequences, "
            f"{played.num_enforced} turns enforced"
        )
        print(f"{framework} {feature}: {fault or 'works'} ({tokens}, {played.seconds:.1f} s)", flush=True)
        return Tried(fault, played.num_sequences, played.num_enforced)

    scripts = {
        name: script for name, script in scripts_of(framework).items() if not features or name in features
    }
    results = await asyncio.gather(*[tried(name, script) for name, script in scripts.items()])
    return dict(zip(scripts, results, strict=True))


def cell_of(group: tuple[str, ...], tried: dict[str, Tried]) -> str:
    """Return the table's entry for a group of features."""
    results = {name: tried[name] for name in group if name in tried}
    if not results:
        return "-"
    broken = [name for name, result in results.items() if result.fault]
    if broken:
        return f"not {', '.join(broken)}"
    num_sequences = max(result.num_sequences for result in results.values())
    is_enforced = any(result.num_enforced for result in results.values())
    answer = "enforced" if is_enforced else "yes"
    return answer if num_sequences == 1 else f"{answer}, {num_sequences} sequences"


def features_of(columns: list[str]) -> list[str]:
    """Return the features in columns of the table."""
    return [feature for column in columns for feature in COLUMNS[column]]


def row_of(framework: str, tried: dict[str, Tried], columns: list[str]) -> str:
    """Return a framework's line of the table. Entries of other columns than the given ones are those of the page."""
    pins = frameworks()[framework].get("packages") or frameworks()[framework]["npm"]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    page_row = next(
        (line for line in lines[lines.index(head()[0]) :] if line.startswith(f"| {framework} |")), ""
    )
    page_cells = [cell.strip() for cell in page_row.split("|")[3:-1]]
    cells = []
    for number, (column, group) in enumerate(COLUMNS.items()):
        cells.append(cell_of(group, tried) if column in columns else page_cells[number])
    return f"| {framework} | {', '.join(pins)} | {' | '.join(cells)} |"


def head() -> list[str]:
    """Return the first two lines of the table."""
    return [f"| | packages | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]


def write_rows(rows: list[str]) -> None:
    """Replace lines of the page's table. Frameworks that were not tried keep their lines."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(head()[0])
    for row in rows:
        name = row.split("|")[1]
        place = next(number for number in range(begin, len(lines)) if lines[number].startswith(f"|{name}|"))
        lines[place] = row
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(
    only: Annotated[str, typer.Option(help="Frameworks, with commas between them; all by default.")] = "",
    features: Annotated[str, typer.Option(help="Features, with commas between them; all by default.")] = "",
    columns: Annotated[
        str, typer.Option(help="Columns of the table, with commas between; all by default.")
    ] = "",
    environments: Annotated[Path, typer.Option(help="Folder of the environments.")] = Path(".venv/agents"),
    typed_output: Annotated[str, typer.Option(help="As the option of a run: enforce or hint.")] = ENFORCE,
    write: Annotated[bool, typer.Option(help="Put the lines into docs/agents.md.")] = False,
    check_page: Annotated[bool, typer.Option(help="Fail if docs/agents.md has other lines.")] = False,
) -> None:
    logging.getLogger("async_grpo").setLevel(logging.ERROR)  # failures are printed here, in one line each
    rows = []
    num_passed = 0
    num_failed = 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = model_folder(Path(folder))
        stack.enter_context(grammars_made_here(model) if typed_output == ENFORCE else nullcontext())
        for framework in only.split(",") if only else frameworks():
            if not (environments / framework).exists():
                print(f"{framework} is left out: there is no {environments / framework}")
                continue
            tried_columns = columns.split(",") if columns else list(COLUMNS)
            names = features.split(",") if features else features_of(tried_columns)
            tried = asyncio.run(try_features(framework, names, environments, model, typed_output))
            rows.append(row_of(framework, tried, tried_columns))
            num_failed += sum(bool(result.fault) for result in tried.values())
            num_passed += sum(not result.fault for result in tried.values())
    print("\n".join([*head(), *rows]))
    if write:
        write_rows(rows)
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    other_rows = [row for row in rows if check_page and row not in lines]
    print("\n".join(["docs/agents.md does not have these lines:", *other_rows] if other_rows else []))
    print(f"{num_passed} passed, {num_failed} failed")
    raise SystemExit(bool(num_failed or other_rows))


if __name__ == "__main__":
    typer.run(main)
