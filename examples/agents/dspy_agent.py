"""An agent with DSPy."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise LiteLLM downloads a table of prices
import dspy
from dspy.utils.exceptions import AdapterParseError


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


row = json.load(sys.stdin)
# Without cache=False, DSPy answers a repeated prompt itself, and the policy does not take its turn
dspy.configure(lm=dspy.LM("openai/policy", cache=False, num_retries=0))
agent = dspy.ReAct("question -> answer", tools=[multiply], max_iters=4)
try:
    answer = agent(question=row["input"]).answer
except AdapterParseError:  # the policy's mistake, so a reward of 0 instead of a failure
    sys.exit(100)
sys.exit(0 if row["answer"] in str(answer) else 100)
