"""Smolagents: agents that call tools, agents that write code, and the model alone."""

from features import main
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessageStreamDelta

MODEL = OpenAIModel("policy")


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


def chat(question: str) -> str:
    return MODEL([{"role": "user", "content": [{"type": "text", "text": question}]}]).content


def streaming(question: str) -> str:
    agent = ToolCallingAgent([multiply], MODEL, stream_outputs=True, verbosity_level=0)
    num_deltas = 0
    for step in agent.run(question, stream=True):
        num_deltas += isinstance(step, ChatMessageStreamDelta)
    return str(step.output) if num_deltas else "nothing was streamed"


def code(question: str) -> str:
    return str(CodeAgent([multiply], MODEL, verbosity_level=0).run(question))


def typed(question: str) -> str:
    agent = CodeAgent([multiply], MODEL, use_structured_outputs_internally=True, verbosity_level=0)
    return str(agent.run(question))


if __name__ == "__main__":
    main(chat=chat, streaming=streaming, code=code, typed=typed)
