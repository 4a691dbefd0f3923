"""LiteLLM."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from features import main
from litellm import completion
from litellm import responses as create_response
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


def messages(question: str) -> list:
    return [{"role": "user", "content": question}]


def chat(question: str) -> str:
    return completion("openai/policy", messages(question)).choices[0].message.content


def streaming(question: str) -> str:
    chunks = completion("openai/policy", messages(question), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def typed(question: str) -> dict:
    answer = completion("openai/policy", messages(question), response_format=Answer)
    return Answer.model_validate_json(answer.choices[0].message.content).model_dump()


def by_responses(question: str) -> str:
    answer = create_response(model="openai/policy", input=question)
    return answer.output[-1].content[0].text


if __name__ == "__main__":
    main(chat=chat, streaming=streaming, typed=typed, responses=by_responses)
