"""Answers of OpenAI's Responses API: the policy's turn as a list of items, and the events of a streamed answer."""

import time
from typing import Any

import numpy as np

from async_grpo.environments.openai_server.event_stream import pieces_of
from async_grpo.environments.openai_server.responses_request import (
    CALL_PREFIX,
    ChosenFunction,
    ResponsesRequest,
    TextSettings,
)
from async_grpo.environments.trajectory_client import Reply
from async_grpo.environments.typed_output import PlainText


def response_of(request: ResponsesRequest, turn_id: str, reply: Reply) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        request: The request.
        turn_id: Part of all ids in the answer.
        reply: The policy's turn.
    """
    is_cut_off = reply.completion.truncated
    output_tokens = len(reply.completion)
    return _without_output(request, turn_id) | {
        "status": "incomplete" if is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "output": _output_of(reply, turn_id),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": _thought_tokens(reply)},
            "total_tokens": reply.prompt_tokens + output_tokens,
        },
    }


def _without_output(request: ResponsesRequest, turn_id: str) -> dict[str, Any]:
    """Return the fields of an answer that are known before the policy has written its output."""
    tools = [tool.model_dump() | {"strict": False} for tool in request.tools or ()]
    settings = request.text or TextSettings()
    text_format = settings.format or PlainText(type="text")
    choice = request.tool_choice or "auto"
    return {
        "id": f"resp_{turn_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": request.store is not False,
        "temperature": None,
        "text": {"format": text_format.model_dump(by_alias=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, ChosenFunction) else choice,
        "tools": tools,
        "top_p": None,
        "truncation": request.truncation or "disabled",
        "usage": None,
    }


def _output_of(reply: Reply, turn_id: str) -> list[dict[str, Any]]:
    """Return the turn's items: its thought, its text, and its calls."""
    message = reply.message
    thought = message.get("reasoning_content")
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if thought is not None:
        items.append(
            {
                "id": f"rs_{turn_id}",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thought}],
                "encrypted_content": None,
            }
        )
    # A turn that was cut off within its thought has no text
    has_only_thought = thought is not None and reply.completion.truncated
    if content or not (calls or has_only_thought):
        part: dict[str, Any] = {
            "type": "output_text",
            "text": content or "",
            "annotations": [],
            "logprobs": [],
        }
        items.append({"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "content": [part]})
    for number, call in enumerate(calls):
        items.append(
            {
                "id": f"{CALL_PREFIX}{turn_id}_{number}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    for item in items:
        item["status"] = "completed"
    if reply.completion.truncated:
        items[-1]["status"] = "incomplete"
    return items


def _thought_tokens(reply: Reply) -> int:
    """Return the number of tokens until the end of the thought; 0 if it is not known at which characters tokens end."""
    thought = reply.message.get("reasoning_content")
    char_ends = reply.completion.char_ends
    if not thought or char_ends is None:
        return 0
    begin = reply.text.find(thought)
    return int(np.count_nonzero(char_ends <= begin + len(thought))) if begin >= 0 else 0


def response_events(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events that clients of a stream expect. The answer is complete, and its texts are divided into pieces."""
    unanswered = response | {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    events = [
        {"type": "response.created", "response": unanswered},
        {"type": "response.in_progress", "response": unanswered},
    ]
    for output_index, item in enumerate(response["output"]):
        events += _events_of_item(output_index, item)
    # "response.completed" or "response.incomplete"
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _events_of_item(output_index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of one item of the output, without their sequence numbers."""
    place = {"item_id": item["id"], "output_index": output_index}
    if item["type"] == "function_call":
        empty_item = item | {"arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        kind = "response.function_call_arguments"
        pieces = [
            {"type": f"{kind}.delta", **place, "delta": arguments},
            {"type": f"{kind}.done", **place, "arguments": arguments, "name": item["name"]},
        ]
    else:
        empty_item = item | {"content": [], "status": "in_progress"}
        pieces = _events_of_part(place | {"content_index": 0}, item["content"][0])
    return [
        {"type": "response.output_item.added", "output_index": output_index, "item": empty_item},
        *pieces,
        {"type": "response.output_item.done", "output_index": output_index, "item": item},
    ]


def _events_of_part(place: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of one content part of an item: of a message's text, or of a thought's text.

    Args:
        place: Fields that every event has, to say to which part it belongs: the item's id, and two indices.
        part: The complete part.
    """
    kind = f"response.{part['type']}"
    # In OpenAI's API, only texts of messages have a list of log probabilities
    further: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    deltas = [
        {"type": f"{kind}.delta", **place, "delta": piece, **further} for piece in pieces_of(part["text"])
    ]
    return [
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        *deltas,
        {"type": f"{kind}.done", **place, "text": part["text"], **further},
        {"type": "response.content_part.done", **place, "part": part},
    ]
