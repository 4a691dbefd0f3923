"""Describe a trajectory as text for the terminal, turn by turn (`async-grpo try-environment`)."""

from collections.abc import Mapping
from typing import Any

from async_grpo.processes.untrusted_files import printable
from async_grpo.types import Completion, Sample, Turn

MAX_SHOWN_CHARACTERS = 4000  # maximum number of characters of each text that are shown


def turn_text(turn: Turn, message: Mapping[str, Any]) -> str:
    """Describe a turn with what is known about it directly after the policy has taken it.

    Args:
        turn: The turn.
        message: The turn as a message of OpenAI's API, with its thought and its calls of tools.
    """
    lines = [f"turn {turn.number + 1}{' (begins a sequence)' if turn.fresh else ''}"]
    lines.append(f"  read: {len(turn.before)} tokens, not trained on")
    lines += _quoted(turn.before_text)
    lines.append(f"  said: {turn.num_tokens} tokens, trained on")
    lines += _quoted(turn.text)
    thought = message.get("reasoning_content")
    if thought:
        lines.append("  thought, which agents receive apart from the content:")
        lines += _quoted(thought)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        lines.append(
            f"  calls the tool {printable(function['name'])} with {_shortened(function['arguments'])}"
        )
    return "\n".join(lines)


def outcome_text(trajectory: Completion, sample: Sample) -> str:
    """Describe how a trajectory ended: rewards and states of its turns, reward, numbers, tokens.

    Args:
        trajectory: The trajectory.
        sample: The same trajectory as a sample, which has its sequences.
    """
    outcome = trajectory.outcome
    assert outcome is not None, "a trajectory has an outcome"
    lines = []
    for index in trajectory.turn_order:
        values = []
        if outcome.turn_rewards:
            values.append(f"reward {outcome.turn_rewards[index]:g}")
        if outcome.states:
            values.append(f"state {_shortened(repr(outcome.states[index]))}")
        if values:
            lines.append(f"  turn {trajectory.turns[index].number + 1}: {', '.join(values)}")
    if lines:
        lines.insert(0, "of the turns")
    if outcome.failure:
        lines.append("FAILED: such a trajectory is not trained on, and has no reward. The reason:")
        lines += _quoted(outcome.failure)
    elif outcome.reward is None:
        lines.append("reward: none of the environment's own; the run's --reward-fns score the last turn")
    else:
        lines.append(f"reward: {outcome.reward:g}")
    if trajectory.truncated and not outcome.failure:
        lines.append("truncated: a limit of the trajectory ended it, or its last turn")
    if trajectory.abandoned:
        numbers_of_turns = ", ".join(str(turn.number + 1) for turn in trajectory.abandoned)
        lines.append(
            f"abandoned: turn {numbers_of_turns}, not trained on, because the agent went on with another one"
        )
    numbers = ", ".join(f"{printable(name)} {value:g}" for name, value in outcome.numbers.items())
    lines.append(f"numbers for the metrics: {numbers or 'none'}")
    if trajectory.turns:
        lines.append(_tokens_line(trajectory, sample))
    return "\n".join(lines)


def _tokens_line(trajectory: Completion, sample: Sample) -> str:
    num_sequences = len(sample.sequences)
    num_read = sample.num_tokens - len(trajectory)
    sequences = "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    reason = "" if num_sequences == 1 else "; a sequence begins where the history was rewritten"
    return (
        f"tokens: {len(trajectory)} sampled, trained on; {num_read} read, not trained on; "
        f"{len(trajectory.turns)} turns in {sequences}{reason}"
    )


def _quoted(text: str) -> list[str]:
    """Return the lines of a text with a margin, without control characters."""
    return [f"    | {printable(line)}" for line in _shortened(text, keeps_lines=True).split("\n")]


def _shortened(text: str, *, keeps_lines: bool = False) -> str:
    """Return the beginning of a text. If the text is longer, say how many characters are missing."""
    beginning = text[:MAX_SHOWN_CHARACTERS]
    if len(beginning) < len(text):
        beginning += f" [and {len(text) - len(beginning)} more characters]"
    return beginning if keeps_lines else printable(beginning)
