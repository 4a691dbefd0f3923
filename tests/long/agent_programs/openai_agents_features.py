"""OpenAI's Agents SDK, with the chat API and with the Responses API, which it uses by default."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from features import main
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

set_tracing_disabled(True)


class Answer(BaseModel):
    """The answer to a question."""

    number: int


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent(**options) -> Agent:
    return Agent(name="assistant", model="policy", **options)


def responses(question: str) -> str:
    return Runner.run_sync(agent(tools=[multiply]), question).final_output


def responses_streaming(question: str) -> str:
    return asyncio.run(streamed(question))


async def streamed(question: str) -> str:
    text = ""
    async for event in Runner.run_streamed(agent(tools=[multiply]), question).stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            text += event.data.delta
    return text


def responses_typed(question: str) -> dict:
    return Runner.run_sync(agent(output_type=Answer), question).final_output.model_dump()


def by_chat(feature):
    """Return the feature with the chat API instead."""

    def use(question: str):
        set_default_openai_api("chat_completions")
        return feature(question)

    return use


if __name__ == "__main__":
    main(
        chat=by_chat(responses),
        streaming=by_chat(responses_streaming),
        typed=by_chat(responses_typed),
        responses=responses,
        responses_streaming=responses_streaming,
        responses_typed=responses_typed,
    )
