"""An agent with Pydantic AI."""

import json
import sys

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), retries=2)


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


row = json.load(sys.stdin)
try:
    answer = agent.run_sync(row["input"], usage_limits=UsageLimits(request_limit=4)).output
except (
    UnexpectedModelBehavior,
    UsageLimitExceeded,
):  # a mistake of the policy: reward 0, not a failure
    sys.exit(100)
sys.exit(0 if row["answer"] in answer else 100)
