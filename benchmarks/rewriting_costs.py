"""Measure how many more tokens are read if a chat template rewrites the history: the table of docs/environments.md.

    python -m benchmarks.rewriting_costs FOLDER

The folder contains chat templates (NAME.jinja). The policy plays a chat and a tool loop under each template. It thinks
in each turn if the template writes thoughts and the prompt does not end with an empty one. If the template rewrites the
history in a request, a new sequence begins, and all sequences are trained on. The program prints (number of tokens of
all sequences) / (number of tokens of one sequence to which each message is only appended). The tokenizer is that of the
tiny model, with the control tokens of the template; a token is about one letter.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import model_families

from async_grpo.environments import call_reader
from async_grpo.environments.call_formats import THOUGHT_TAGS
from async_grpo.environments.chat import Chat
from async_grpo.environments.sampled_history import THOUGHT_FIELDS
from async_grpo.errors import ConfigurationError
from async_grpo.experience.template_turns import _common_beginning

TURNS = 8  # turns of the policy, in the chat and in the tool loop
WORDS_OF_THOUGHT = 120
WORDS_OF_ANSWER = 60
ENDS = (*model_families.ENDS, "<|return|>")
WORDS_OF_MESSAGE = 30  # words of a user's message, and of a tool's answer


def words(count: int, seed: int) -> str:
    """Return a text of `count` words, another one for each seed."""
    return " ".join(f"word{seed}x{number}" for number in range(count))


def turn(
    chat: Chat, content: str, calls: list[dict[str, Any]], seed: int, tools: list[dict[str, Any]] | None
) -> str:
    """Return a turn of the policy as the template writes it, with a thought if the template writes thoughts.

    Raises:
        ConfigurationError: The template does not write such a turn.
    """
    question = chat.prompts.whole_text([model_families.QUESTION], tools, begins_turn=True)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    essential = calls[0]["function"]["name"] if calls else content
    thought = words(WORDS_OF_THOUGHT, 100 + seed)
    text = ""
    # A prompt that ends with an empty thought asks the policy not to think
    may_think = not any(question.rstrip().endswith(end) for _, end in THOUGHT_TAGS)
    names = ("reasoning_content", *THOUGHT_FIELDS) if may_think else ()
    thoughts = [{name: thought} for name in names]
    for further in (*thoughts, {}):
        whole = chat.prompts.whole_text([model_families.QUESTION, message | further], tools)
        text = without_end(whole[_common_beginning(question, whole) :], essential)
        if essential in text and not may_think:
            return text
        if essential in text and (thought in text or not further):
            return with_thought(chat, question, text, thought)
    raise ConfigurationError("the template does not write such a turn")


def without_end(text: str, essential: str) -> str:
    """Return a turn without the token that ends it and the text that the template writes after it.

    Args:
        text: The turn.
        essential: A part of the turn. The end is searched after it.
    """
    begin = text.find(essential) + len(essential)
    places = [text.find(end, begin) for end in ENDS]
    return text[: min((place for place in places if place >= 0), default=len(text))].rstrip()


def with_thought(chat: Chat, question: str, text: str, thought: str) -> str:
    """Return a turn with the thought, if the template has tags for thoughts but does not write them itself."""
    if thought in text:
        return text
    for begin, end in THOUGHT_TAGS:
        text = text.removeprefix(f"{begin}\n\n{end}").removeprefix(f"{begin}{end}").lstrip()
        if question.rstrip().endswith(begin):
            return f"{thought}\n{end}\n\n{text.rpartition(end)[2].lstrip()}"
        if begin in chat.prompts.template_text and end in chat.prompts.template_text:
            return f"{begin}\n{thought}\n{end}\n\n{text}"
    return text


def answer(chat: Chat, seed: int, tools: list[dict[str, Any]] | None = None) -> str:
    """Return a turn of the policy without a call."""
    return turn(chat, words(WORDS_OF_ANSWER, seed), [], seed, tools)


def call(chat: Chat, name: str, seed: int) -> str:
    """Return a turn of the policy with a call of a tool."""
    if name in model_families.FROM_MODEL_CARDS:
        question = chat.prompts.whole_text([model_families.QUESTION], model_families.TOOLS, begins_turn=True)
        native = model_families.FROM_MODEL_CARDS[name]
        return with_thought(chat, question, native, words(WORDS_OF_THOUGHT, 100 + seed))
    return turn(chat, "", [model_families.CALL], seed, model_families.TOOLS)


async def play(chat: Chat, turns: list[str], is_tool_loop: bool) -> float:
    """Play a conversation, and return (tokens of all sequences) / (tokens of one sequence that is only appended to)."""
    policy, client = model_families.talk(chat, turns)
    tools = model_families.TOOLS if is_tool_loop else None
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(WORDS_OF_MESSAGE, 0)}]
    num_appended = 0
    for number in range(len(turns)):
        reply = await client.complete(messages, tools=tools)
        if number == 0:
            num_appended += len(policy.inputs[0])
        num_appended += len(reply.completion)
        if number + 1 == len(turns):
            break
        text = words(WORDS_OF_MESSAGE, number + 1)
        added = [{"role": "user", "content": text}]
        if is_tool_loop:
            calls = reply.message["tool_calls"]
            added = [
                {"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"], "content": text}
                for one in calls
            ]
        num_appended += num_added_tokens(chat, reply.message, added, tools)
        messages += [reply.message, *added]
    sequences = client.recorder._sequences
    return sum(len(sequence.token_ids) for sequence in sequences) / num_appended


def num_added_tokens(
    chat: Chat, message: dict[str, Any], added: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> int:
    """Return the number of tokens that messages add after a turn of the policy, up to its next turn."""
    history = [
        model_families.QUESTION,
        {name: message[name] for name in message if name != "reasoning_content"},
    ]
    before = chat.prompts.whole_text(history, tools)
    after = chat.prompts.whole_text([*history, *added], tools, begins_turn=True)
    return max(0, len(chat.encode(after)) - len(chat.encode(before)))


async def cost_in_chat(chat: Chat) -> float:
    """Return the cost of a template in a chat."""
    return await play(chat, [answer(chat, number) for number in range(TURNS)], is_tool_loop=False)


async def cost_in_loop(chat: Chat, name: str) -> float:
    """Return the cost of a template in a tool loop."""
    calls = [call(chat, name, number) for number in range(TURNS - 1)]
    return await play(chat, [*calls, answer(chat, TURNS, model_families.TOOLS)], is_tool_loop=True)


def shown_costs(path: Path) -> tuple[str, str]:
    """Return the costs of a template in the chat and in the tool loop, as the table shows them."""
    with tempfile.TemporaryDirectory() as folder:
        chat = model_families.family_chat(path.stem, Path(folder))
        shown = []
        for cost in (cost_in_chat(chat), cost_in_loop(chat, path.stem)):
            try:
                shown.append(f"{asyncio.run(cost):.1f}")
            except ConfigurationError:
                shown.append("refused")
    return shown[0], "no tools" if path.stem in model_families.WITHOUT_TOOLS else shown[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with chat templates")
    options = parser.parse_args()
    model_families.TEMPLATES = options.folder
    call_reader.ParserProcess = model_families.ParserHere
    names_by_costs: dict[tuple[str, str], list[str]] = {}
    for path in sorted(options.folder.glob("*.jinja")):
        names_by_costs.setdefault(shown_costs(path), []).append(path.stem)
    print("| templates | chat | tool loop |\n|---|---|---|")
    for (in_chat, in_loop), names in sorted(names_by_costs.items()):
        print(f"| {', '.join(names)} | {in_chat} | {in_loop} |")


if __name__ == "__main__":
    main()
