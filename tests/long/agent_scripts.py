"""What the scripted policy says to each program of `agent_programs`, and what the program must make of it."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

QUESTION = "What is 17 * 23?"
ROW = {"input": QUESTION, "answer": "391"}
TEXT = "It is 391."
NUMBER = {"number": 391}
THOUGHT = "<think>\nI think about it.\n</think>\n\n"
EXAMPLE = "tools"  # the feature that the examples themselves show
THINKING = "thinking"  # the examples again, with a thought before each turn of the policy


@dataclass(frozen=True)
class Script:
    """One conversation of a program with the policy.

    Attributes:
        turns: What the policy says, turn by turn.
        expected: The program's result. Examples end with an exit status instead.
        told: Texts that the policy must read: of each, the number of the turn and the text.
        reward: The trajectory's reward. It is 0 where the policy makes a mistake, which must not count as a failure.
    """

    turns: tuple[str, ...]
    expected: Any = None
    told: tuple[tuple[int, str], ...] = field(default=())
    reward: float = 1.0


def call_text(name: str, **arguments: Any) -> str:
    """Return a call of a tool as the policy writes it, in the format of the template."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def fields_text(**fields: str) -> str:
    """Return an answer in the format of DSPy's adapter."""
    sections = [f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()]
    return "\n\n".join([*sections, "[[ ## completed ## ]]"])


def bash_text(command: str) -> str:
    """Return a command in the format of mini-swe-agent without tools."""
    return f"I run it.\n\n```mswea_bash_command\n{command}\n```"


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 391"
MULTIPLY = call_text("multiply", a=17, b=23)
TYPED = json.dumps(NUMBER)
CALLS = Script((MULTIPLY, TEXT), TEXT, ((0, "Multiply two integers."), (1, "391")))
SPEAKS = Script((TEXT,), TEXT)
TYPES = Script((TYPED,), NUMBER)
# Names of the features, and what the policy says where a framework has no script of its own
COMMON = {
    EXAMPLE: CALLS,
    "chat": SPEAKS,
    "streaming": CALLS,
    "typed": TYPES,
    "responses": CALLS,
    "responses_streaming": CALLS,
    "responses_typed": TYPES,
}
ANSWERS_BY_TOOL = Script((call_text("answer", number=391),), NUMBER)
OWN: dict[str, dict[str, Script]] = {
    "openai": {
        "streaming": SPEAKS,
        "streamed_tools": ANSWERS_BY_TOOL,
        "typed_by_tool": ANSWERS_BY_TOOL,
        "responses": Script(
            (call_text("answer", number=391), TEXT), {**NUMBER, "text": TEXT}, ((1, "noted"),)
        ),
        "responses_streaming": SPEAKS,
    },
    "openai-agents": {"chat": CALLS},
    "pydantic-ai": {
        "typed_by_tool": Script((call_text("final_result", number=391),), NUMBER),
        "typed_by_prompt": TYPES,
        "responses_typed": Script((call_text("final_result", number=391),), NUMBER),
    },
    "langgraph": {"typed_by_tool": Script((call_text("Answer", number=391),), NUMBER)},
    "smolagents": {
        EXAMPLE: Script((MULTIPLY, call_text("final_answer", answer="391")), None, ((1, "391"),)),
        "streaming": Script((MULTIPLY, call_text("final_answer", answer="391")), "391", ((1, "391"),)),
        "code": Script(("Thought: I multiply.\n<code>\nfinal_answer(multiply(17, 23))\n</code>",), "391"),
        "typed": Script((json.dumps({"thought": "", "code": "final_answer(multiply(17, 23))"}),), "391"),
    },
    "dspy": {
        EXAMPLE: Script(
            (
                fields_text(
                    next_thought="I multiply.", next_tool_name="multiply", next_tool_args='{"a": 17, "b": 23}'
                ),
                fields_text(next_thought="I know it.", next_tool_name="finish", next_tool_args="{}"),
                fields_text(reasoning="17 * 23 = 391", answer="391"),
            ),
            None,
            ((0, "Multiply two integers."), (1, "391")),
        ),
        "chat": Script((fields_text(answer=TEXT),), TEXT),
        "streaming": Script((fields_text(answer=TEXT),), TEXT),
        "responses": Script((fields_text(answer=TEXT),), TEXT),
    },
    "crewai": {"streaming": SPEAKS, "responses": SPEAKS},
    "mini-swe-agent": {
        EXAMPLE: Script(
            (call_text("bash", command="expr 17 \\* 23"), call_text("bash", command=SUBMIT)),
            None,
            ((1, "391"),),
        ),
        "chat": Script((bash_text("expr 17 \\* 23"), bash_text(SUBMIT)), "391\n", ((1, "391"),)),
        "responses": Script(
            (call_text("bash", command="expr 17 \\* 23"), call_text("bash", command=SUBMIT)),
            "391\n",
            ((1, "391"),),
        ),
    },
    "litellm": {"streaming": SPEAKS, "responses": SPEAKS},
    "llama-index": {
        "typed_by_tool": Script((call_text("Answer", number=391),), NUMBER),
        "responses": SPEAKS,
    },
    "ag2": {},
    "google-adk": {},
    "node": {
        "streaming": SPEAKS,
        "streamed_tools": ANSWERS_BY_TOOL,
        "typed_by_tool": ANSWERS_BY_TOOL,
        "responses": SPEAKS,
        "responses_streaming": SPEAKS,
    },
}
# Mistakes of the policy, in the examples. The reward is 0, and the trajectory must not fail
WRONG = "I do not know."
MISTAKES = {
    "mistake_arguments": (call_text("multiply", a="many"), WRONG),
    "mistake_json": ("<tool_call>{no json</tool_call>", WRONG),
    "mistake_tool": (call_text("divide", a=1, b=2), WRONG),
    "mistake_empty": ("",),
    "mistake_endless": (MULTIPLY,) * 20,
}
# Features that a framework does not have, and that the table therefore shows as "-"
ABSENT: dict[str, tuple[str, ...]] = {
    "langgraph": ("responses_typed",),
    "smolagents": ("responses", "responses_streaming", "responses_typed"),
    "dspy": ("responses_streaming", "responses_typed"),
    "crewai": ("responses_streaming", "responses_typed"),
    "ag2": ("responses_typed",),
    "mini-swe-agent": ("streaming", "typed", "responses_streaming", "responses_typed"),
    "litellm": ("responses_streaming", "responses_typed"),
    "llama-index": ("responses_streaming", "responses_typed"),
    "google-adk": ("responses", "responses_streaming", "responses_typed"),
    "node": ("responses_typed",),
}


def scripts_of(framework: str) -> dict[str, Script]:
    """Return the scripts of a framework's features by their names."""
    scripts = COMMON | OWN[framework]
    for name in ABSENT.get(framework, ()):
        del scripts[name]
    example = scripts[EXAMPLE]
    thoughtful_turns = tuple(THOUGHT + turn for turn in example.turns)
    scripts[THINKING] = replace(example, turns=thoughtful_turns)
    for name, turns in MISTAKES.items():
        scripts[name] = Script(turns, reward=0.0)
    return scripts
