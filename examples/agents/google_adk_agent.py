"""An agent with Google's Agent Development Kit, through LiteLLM."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise LiteLLM downloads a table of prices
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


row = json.load(sys.stdin)
agent = LlmAgent(name="calculator", model=LiteLlm("openai/policy"), tools=[multiply])
events = asyncio.run(InMemoryRunner(agent).run_debug(row["input"], quiet=True))
parts = events[-1].content.parts if events and events[-1].content else []
answer = "".join(part.text or "" for part in parts or [])
sys.exit(0 if row["answer"] in answer else 100)
