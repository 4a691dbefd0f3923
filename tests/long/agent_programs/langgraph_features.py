"""LangGraph and LangChain."""

from features import main
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def asked(question: str) -> dict:
    return {"messages": [{"role": "user", "content": question}]}


def chat(question: str) -> str:
    return ChatOpenAI(model="policy").invoke(question).text


def streaming(question: str, **options) -> str:
    agent = create_agent(ChatOpenAI(model="policy", **options), tools=[multiply])
    pieces = agent.stream(asked(question), stream_mode="messages")
    return "".join(message.text for message, _ in pieces if message.type == "AIMessageChunk")


def typed(question: str) -> dict:
    agent = create_agent(ChatOpenAI(model="policy"), response_format=ProviderStrategy(Answer))
    return agent.invoke(asked(question))["structured_response"].model_dump()


def typed_by_tool(question: str) -> dict:
    agent = create_agent(ChatOpenAI(model="policy"), response_format=ToolStrategy(Answer))
    return agent.invoke(asked(question))["structured_response"].model_dump()


def responses(question: str) -> str:
    agent = create_agent(ChatOpenAI(model="policy", use_responses_api=True), tools=[multiply])
    return agent.invoke(asked(question))["messages"][-1].text


def responses_streaming(question: str) -> str:
    return streaming(question, use_responses_api=True)


if __name__ == "__main__":
    main(
        chat=chat,
        streaming=streaming,
        typed=typed,
        typed_by_tool=typed_by_tool,
        responses=responses,
        responses_streaming=responses_streaming,
    )
