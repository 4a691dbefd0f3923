"""An agent with CrewAI."""

import json
import os
import sys

for name in ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED"):
    os.environ[name] = "true"  # otherwise CrewAI tries to send data about each run
from crewai import LLM, Agent
from crewai.tools import tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


row = json.load(sys.stdin)
agent = Agent(
    role="calculator",
    goal="Answer the question.",
    backstory="You use your tools.",
    tools=[multiply],
    llm=LLM("policy", provider="openai"),
    max_iter=4,
)
try:
    answer = agent.kickoff(row["input"]).raw
except ValueError as error:
    if "None or empty" not in str(error):
        raise
    sys.exit(100)  # the policy said nothing: reward 0, not a failure
sys.exit(0 if row["answer"] in answer else 100)
