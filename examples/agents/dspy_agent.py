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
# Without cache=False, DSPy would answer a repeated prompt from its cache, and the policy would not take its turn
dspy.configure(lm=dspy.LM("openai/policy", cache=False, num_retries=0))
agent = dspy.ReAct("question -> answer", tools=[multiply], max_iters=4)
try:
    answer = agent(question=row["input"]).answer
except AdapterParseError:  # a mistake of the policy: reward 0, not a failure
    sys.exit(100)
sys.exit(0 if row["answer"] in str(answer) else 100)
