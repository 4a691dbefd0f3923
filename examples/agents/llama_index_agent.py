"""An agent with LlamaIndex."""

import asyncio
import json
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from workflows.errors import WorkflowRuntimeError


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def play(question: str) -> str:
    address = os.environ["OPENAI_BASE_URL"]
    policy = OpenAILike("policy", api_base=address, is_chat_model=True, is_function_calling_model=True)
    agent = FunctionAgent(tools=[multiply], llm=policy)
    return str(await agent.run(question, max_iterations=4))


row = json.load(sys.stdin)
try:
    answer = asyncio.run(play(row["input"]))
except WorkflowRuntimeError:  # the policy does not come to an end: reward 0, not a failure
    sys.exit(100)
sys.exit(0 if row["answer"] in answer else 100)
