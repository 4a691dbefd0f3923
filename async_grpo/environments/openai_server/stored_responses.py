"""`StoredResponses`: answers of the Responses API in one trajectory, which later requests continue or refer to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from async_grpo.environments.openai_server.openai_api import MAX_MESSAGES
from async_grpo.environments.openai_server.request_body import MAX_BYTES, max_body_bytes
from async_grpo.environments.openai_server.responses_request import (
    Item,
    ReferenceItem,
    ResponsesRequest,
    messages_of_input,
)
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

MAX_STORED = 1024  # answers that are stored
MAX_STORED_BYTES = MAX_BYTES  # maximum size of all stored conversations together
BYTES_PER_VALUE = 32  # allowance for the fields around a text
MAX_ID_CHARACTERS = 64  # maximum number of characters of an id that an error message shows

_ITEM = TypeAdapter[Any](Item)


class ResponseNotFound(ConfigurationError):
    """A request names an answer that is not stored in this trajectory."""


@dataclass(frozen=True)
class Conversation:
    """The conversation that a request continues, and its size in bytes. Instructions are not part of it."""

    messages: list[dict[str, Any]]
    num_bytes: int


@dataclass(frozen=True)
class StoredResponse:
    """An answer, and the conversation that ends with it."""

    text: str  # the answer as JSON
    conversation: Conversation
    items: dict[str, dict[str, Any]]  # items of the answer, by their ids

    @property
    def num_bytes(self) -> int:
        """Return the size of the answer and its conversation."""
        return len(self.text) + self.conversation.num_bytes


class StoredResponses:
    """The newest answers of a trajectory. The oldest answers are dropped when there are too many answers or bytes.

    Args:
        context_tokens: Maximum length of a sequence, in tokens. It limits the size of a conversation. The limit is the
            same for the conversation of a single request and for one that several requests have continued.
        has_images: Whether the conversation may have images.
    """

    def __init__(self, context_tokens: int, *, has_images: bool = False) -> None:
        self._max_bytes = max_body_bytes(context_tokens, has_images=has_images)
        self._responses: dict[str, StoredResponse] = {}  # from the oldest to the newest
        self._num_bytes = 0

    def conversation(self, request: ResponsesRequest) -> Conversation:
        """Return the conversation of a request: the conversation of the previous answer, followed by the input.

        Raises:
            ResponseNotFound: The request names an answer that is not stored.
            ConfigurationError: The conversation is too long.
        """
        earlier = Conversation([], 0)
        if request.previous_response_id is not None:
            earlier = self._response("previous_response_id", request.previous_response_id).conversation
        request_input = request.input
        if not isinstance(request_input, str):
            request_input = self._resolved(request_input)
        new_messages = messages_of_input(request_input, earlier.messages)
        num_bytes = earlier.num_bytes + sum(_num_bytes(message) for message in new_messages)
        messages = [*earlier.messages, *new_messages]
        for unit, size, limit in (
            ("bytes", num_bytes, self._max_bytes),
            ("messages", len(messages), MAX_MESSAGES),
        ):
            refuse(
                size > limit,
                f"the conversation with its stored part has {size} {unit}, but at most {limit} are allowed",
            )
        return Conversation(messages, num_bytes)

    def add(
        self, response: dict[str, Any], text: str, conversation: Conversation, message: dict[str, Any]
    ) -> None:
        """Store an answer.

        Args:
            response: The answer.
            text: The answer as JSON.
            conversation: The conversation of its request.
            message: The policy's turn as a message.
        """
        whole = Conversation([*conversation.messages, message], conversation.num_bytes + _num_bytes(message))
        items = {item["id"]: item for item in response["output"]}
        stored_response = StoredResponse(text, whole, items)
        self._responses[response["id"]] = stored_response
        self._num_bytes += stored_response.num_bytes
        while len(self._responses) > 1 and (
            len(self._responses) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES
        ):
            self._drop(next(iter(self._responses)))

    def text(self, response_id: str) -> str:
        """Return an answer as JSON.

        Raises:
            ResponseNotFound: There is no stored answer with this id.
        """
        return self._response("id", response_id).text

    def remove(self, response_id: str) -> None:
        """Remove a stored answer. Its tokens are trained on nevertheless.

        Raises:
            ResponseNotFound: There is no stored answer with this id.
        """
        self._response("id", response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._responses.pop(response_id).num_bytes

    def _response(self, field_name: str, response_id: str) -> StoredResponse:
        response = self._responses.get(response_id)
        if response is None:
            raise ResponseNotFound(
                f"{field_name}: this trajectory has no stored response with the id "
                f"{response_id[:MAX_ID_CHARACTERS]!r}. It may be another trajectory's, have been requested with store "
                "false, or have been dropped for newer ones: send the whole conversation as input"
            )
        return response

    def _resolved(self, items: Sequence[Item]) -> list[Item]:
        """Return the items, with each reference replaced by the item that it refers to.

        Raises:
            ResponseNotFound: A reference is to an item that is not stored.
            ConfigurationError: The items are too large together.
        """
        resolved: list[Item] = []
        num_bytes = 0
        for item in items:
            if isinstance(item, ReferenceItem):
                fields = self._item(item.id)
                # A few short references may refer to more text than fits into a request
                num_bytes += len(json.dumps(fields))
                refuse(
                    num_bytes > self._max_bytes,
                    f"input: the items to which references refer have more than {self._max_bytes} bytes together",
                )
                item = _ITEM.validate_python(fields)
            resolved.append(item)
        return resolved

    def _item(self, item_id: str) -> dict[str, Any]:
        """Return the stored item with this id, which contains the id of its answer, as in msg_1f2e and fc_1f2e_0."""
        _, _, turn_id = item_id.partition("_")
        response = self._response("input", f"resp_{turn_id.partition('_')[0]}")
        if item_id not in response.items:
            raise ResponseNotFound(
                f"input: there is no stored item with the id {item_id[:MAX_ID_CHARACTERS]!r}"
            )
        return response.items[item_id]


def _num_bytes(message: Mapping[str, Any]) -> int:
    """Return the size of a message, with an allowance for the fields around its texts."""
    texts = [message.get("reasoning_content")]
    content = message.get("content")
    if isinstance(content, list):
        # The parts are texts, and images as data URLs
        texts += [part["text"] if part["type"] == "text" else part["image_url"]["url"] for part in content]
    else:
        texts.append(content)
    for call in message.get("tool_calls") or ():
        texts += [call["id"], call["function"]["name"], call["function"]["arguments"]]
    num_text_bytes = sum(len(text.encode(errors="replace")) for text in texts if text)
    return num_text_bytes + BYTES_PER_VALUE * len(texts)
