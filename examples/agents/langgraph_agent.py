"""An agent with LangGraph, made by LangChain's `create_agent`."""

import json
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


row = json.load(sys.stdin)
agent = create_agent(ChatOpenAI(model="policy"), tools=[multiply])
messages = [{"role": "user", "content": row["input"]}]
try:
    # The limit allows four turns of the policy, and the tool calls between them
    result = agent.invoke({"messages": messages}, {"recursion_limit": 9})
except GraphRecursionError:  # the policy does not come to an end: reward 0, not a failure
    sys.exit(100)
sys.exit(0 if row["answer"] in result["messages"][-1].text else 100)
