"""An agent with smolagents."""

import json
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


row = json.load(sys.stdin)
agent = ToolCallingAgent(tools=[multiply], model=OpenAIModel("policy"), max_steps=4, verbosity_level=0)
answer = agent.run(row["input"])
sys.exit(0 if row["answer"] in str(answer) else 100)
