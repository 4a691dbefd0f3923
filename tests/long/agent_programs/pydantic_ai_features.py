"""Pydantic AI: typed output by a tool, which is its default, by a response format, and by the prompt."""

import asyncio

from features import main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent(model=OpenAIChatModel, **options) -> Agent:
    return Agent(model("policy"), **options)


def chat(question: str) -> str:
    return agent().run_sync(question).output


def streaming(question: str, **options) -> str:
    async def streamed() -> str:
        async with agent(tools=[multiply], **options).run_stream(question) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    return asyncio.run(streamed())


def typed(question: str) -> dict:
    return agent(output_type=NativeOutput(Answer)).run_sync(question).output.model_dump()


def typed_by_tool(question: str) -> dict:
    return agent(output_type=Answer).run_sync(question).output.model_dump()


def typed_by_prompt(question: str) -> dict:
    return agent(output_type=PromptedOutput(Answer)).run_sync(question).output.model_dump()


def responses(question: str) -> str:
    return agent(OpenAIResponsesModel, tools=[multiply]).run_sync(question).output


def responses_streaming(question: str) -> str:
    return streaming(question, model=OpenAIResponsesModel)


def responses_typed(question: str) -> dict:
    return agent(OpenAIResponsesModel, output_type=Answer).run_sync(question).output.model_dump()


if __name__ == "__main__":
    main(
        chat=chat,
        streaming=streaming,
        typed=typed,
        typed_by_tool=typed_by_tool,
        typed_by_prompt=typed_by_prompt,
        responses=responses,
        responses_streaming=responses_streaming,
        responses_typed=responses_typed,
    )
