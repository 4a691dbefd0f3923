"""OpenAI's client: both APIs, streams, and both ways to typed output."""

import json

from features import main
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to a question."""

    number: int


CLIENT = OpenAI()
TOOL = pydantic_function_tool(Answer, name="answer")
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}


def messages(question: str) -> list:
    return [{"role": "user", "content": question}]


def chat(question: str) -> str:
    answer = CLIENT.chat.completions.create(model="policy", messages=messages(question))
    return answer.choices[0].message.content


def streaming(question: str) -> str:
    chunks = CLIENT.chat.completions.create(model="policy", messages=messages(question), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def streamed_tools(question: str) -> dict:
    with CLIENT.chat.completions.stream(model="policy", messages=messages(question), tools=[TOOL]) as stream:
        answer = stream.get_final_completion()
    return answer.choices[0].message.tool_calls[0].function.parsed_arguments.model_dump()


def typed(question: str) -> dict:
    answer = CLIENT.chat.completions.parse(
        model="policy", messages=messages(question), response_format=Answer
    )
    return answer.choices[0].message.parsed.model_dump()


def typed_by_tool(question: str) -> dict:
    choice = {"type": "function", "function": {"name": "answer"}}
    answer = CLIENT.chat.completions.create(
        model="policy", messages=messages(question), tools=[TOOL], tool_choice=choice
    )
    return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


def responses(question: str) -> dict:
    """A call, its answer by the conversation, and a second turn."""
    first = CLIENT.responses.create(model="policy", input=question, tools=[RESPONSES_TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
    conversation = [*messages(question), *first.output, output]
    second = CLIENT.responses.create(model="policy", input=conversation, tools=[RESPONSES_TOOL])
    return {**json.loads(call.arguments), "text": second.output_text}


def responses_streaming(question: str) -> str:
    text = ""
    for event in CLIENT.responses.create(model="policy", input=question, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    return text


def responses_typed(question: str) -> dict:
    answer = CLIENT.responses.parse(model="policy", input=question, text_format=Answer)
    return answer.output_parsed.model_dump()


if __name__ == "__main__":
    main(
        chat=chat,
        streaming=streaming,
        streamed_tools=streamed_tools,
        typed=typed,
        typed_by_tool=typed_by_tool,
        responses=responses,
        responses_streaming=responses_streaming,
        responses_typed=responses_typed,
    )
