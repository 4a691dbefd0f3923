"""CrewAI."""

import os

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}
from crewai import LLM, Agent, Crew, Task
from crewai.types.streaming import StreamChunkType
from features import main
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def agent(**options) -> Agent:
    llm = LLM("policy", provider="openai", **options)
    return Agent(role="assistant", goal="Answer the question.", backstory="You know much.", llm=llm)


def chat(question: str) -> str:
    return agent().kickoff(question).raw


def streaming(question: str) -> str:
    player = agent(stream=True)
    task = Task(description=question, expected_output="An answer.", agent=player)
    output = Crew(agents=[player], tasks=[task], stream=True, tracing=False).kickoff()
    return "".join(chunk.content for chunk in output if chunk.chunk_type == StreamChunkType.TEXT)


def typed(question: str) -> dict:
    return agent().kickoff(question, response_format=Answer).pydantic.model_dump()


def responses(question: str) -> str:
    return agent(api="responses").kickoff(question).raw


if __name__ == "__main__":
    main(chat=chat, streaming=streaming, typed=typed, responses=responses)
