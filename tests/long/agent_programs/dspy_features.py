"""DSPy, with its adapters."""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy
from features import main

dspy.configure(lm=dspy.LM("openai/policy", cache=False, num_retries=0))


def chat(question: str) -> str:
    return dspy.Predict("question -> answer")(question=question).answer


def streaming(question: str) -> str:
    async def streamed() -> str:
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
        text = ""
        async for piece in program(question=question):
            if isinstance(piece, dspy.streaming.StreamResponse):
                text += piece.chunk
        return text

    return asyncio.run(streamed())


def typed(question: str) -> dict:
    with dspy.context(adapter=dspy.JSONAdapter()):
        return {"number": dspy.Predict("question -> number: int")(question=question).number}


def responses(question: str) -> str:
    with dspy.context(lm=dspy.LM("openai/policy", model_type="responses", cache=False, num_retries=0)):
        return chat(question)


if __name__ == "__main__":
    main(chat=chat, streaming=streaming, typed=typed, responses=responses)
