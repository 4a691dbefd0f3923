"""LlamaIndex."""

import asyncio
import os

from features import main
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def policy(**options) -> OpenAILike:
    address = os.environ["OPENAI_BASE_URL"]
    return OpenAILike(
        "policy", api_base=address, is_chat_model=True, is_function_calling_model=True, **options
    )


def chat(question: str) -> str:
    return policy(max_retries=0).complete(question).text


def streaming(question: str) -> str:
    async def streamed() -> str:
        run = FunctionAgent(tools=[multiply], llm=policy(), streaming=True).run(question)
        text = ""
        async for event in run.stream_events():
            if isinstance(event, AgentStream):
                text += event.delta
        await run
        return text

    return asyncio.run(streamed())


def typed(question: str) -> dict:
    llm = policy(should_use_structured_outputs=True).as_structured_llm(Answer)
    return llm.complete(question).raw.model_dump()


def typed_by_tool(question: str) -> dict:
    return policy().as_structured_llm(Answer).complete(question).raw.model_dump()


def responses(question: str) -> str:
    address = os.environ["OPENAI_BASE_URL"]
    return OpenAILikeResponses("policy", api_base=address).complete(question).text


if __name__ == "__main__":
    main(
        chat=chat,
        streaming=streaming,
        typed=typed,
        typed_by_tool=typed_by_tool,
        responses=responses,
    )
