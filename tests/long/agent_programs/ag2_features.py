"""AG2."""

import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from features import main
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def reply_text(question: str, config, **options) -> str:
    agent = Agent("assistant", config=config, **options)
    return asyncio.run(agent.ask(question)).body


def chat(question: str) -> str:
    return reply_text(question, OpenAIConfig("policy"))


def streaming(question: str) -> str:
    return reply_text(question, OpenAIConfig("policy", streaming=True), tools=[multiply])


def typed(question: str) -> dict:
    async def content() -> Answer:
        reply = await Agent("assistant", config=OpenAIConfig("policy"), response_schema=Answer).ask(question)
        return await reply.content()

    return asyncio.run(content()).model_dump()


def responses(question: str) -> str:
    return reply_text(question, OpenAIResponsesConfig("policy"), tools=[multiply])


def responses_streaming(question: str) -> str:
    return reply_text(question, OpenAIResponsesConfig("policy", streaming=True), tools=[multiply])


if __name__ == "__main__":
    main(
        chat=chat,
        streaming=streaming,
        typed=typed,
        responses=responses,
        responses_streaming=responses_streaming,
    )
