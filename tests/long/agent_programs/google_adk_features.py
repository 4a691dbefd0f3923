"""Google's Agent Development Kit."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from features import main
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def events(question: str, config: RunConfig | None = None, **options) -> list:
    agent = LlmAgent(name="assistant", model=LiteLlm("openai/policy"), **options)
    return asyncio.run(InMemoryRunner(agent).run_debug(question, quiet=True, run_config=config))


def text_of(event) -> str:
    return "".join(part.text or "" for part in event.content.parts)


def chat(question: str) -> str:
    return text_of(events(question)[-1])


def streaming(question: str) -> str:
    config = RunConfig(streaming_mode=StreamingMode.SSE)
    pieces = [event for event in events(question, config, tools=[multiply]) if event.partial]
    return "".join(map(text_of, pieces))


def typed(question: str) -> dict:
    return json.loads(text_of(events(question, output_schema=Answer)[-1]))


if __name__ == "__main__":
    main(chat=chat, streaming=streaming, typed=typed)
