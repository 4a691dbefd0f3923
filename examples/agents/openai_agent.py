"""An agent with OpenAI's own client. It starts once for each trajectory, and its exit status is the reward."""

import json
import sys

from openai import OpenAI

INTEGERS = {name: {"type": "integer"} for name in ("a", "b")}
PARAMETERS = {"type": "object", "properties": INTEGERS, "required": ["a", "b"]}
FUNCTION = {"name": "multiply", "description": "Multiply two integers.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def result_of(arguments: str) -> str:
    """Return the product, or the error if the policy called the tool wrongly."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


row = json.load(sys.stdin)
client = OpenAI()  # the run sets OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": row["input"]}]
for _ in range(4):
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        result = result_of(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        break
sys.exit(0 if row["answer"] in (message.content or "") else 100)
