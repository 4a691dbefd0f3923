"""`Chat`: converts messages to text and tokens with the model's chat template, and turns of the policy to messages.

The agent receives a turn of the policy as a message with content, tool calls and thought (`call_reader`). When the agent
sends this message back, the template gets the originally sampled text in its place, or a message with these parts if the
template needs them (see `sampled_history`). So if agent and template keep the history unchanged, the rendered
conversation begins with exactly the text that the engine has already read and sampled.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from async_grpo.environments.bounded_encoding import encode_up_to
from async_grpo.environments.call_formats import THOUGHT_TAGS, ReadTurn
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.config import ENFORCE
from async_grpo.environments.control_tokens import ControlTokens, Rendered, cut, new_marker, without_markers
from async_grpo.environments.grammars import OutputGrammars
from async_grpo.environments.images import ConversationImages
from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompt_options import MODEL_DEFAULTS, PromptOptions
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_messages import Message, message_with_parts
from async_grpo.experience.template_turns import lost_roles, opening_of_turn
from async_grpo.types import ImageReference

log = logging.getLogger(__name__)

# A text is refused as too long, without tokenizing it, if it has more than this number of characters per allowed token
MAX_CHARACTERS_PER_TOKEN = 64
# Number of earlier tokens that are decoded together with new ones. Decoded alone, new tokens may lose their first
# space, because some tokenizers drop the space at the beginning of a text
LOOK_BACK_TOKENS = 8


class TrajectoryOver(Exception):
    """The trajectory has reached a limit. Its program gets no more turns, and must end."""


class Chat:
    """A tokenizer with its chat template. Without a template, prompts must be text or tokens instead of messages.

    Args:
        tokenizer: A tokenizer of the transformers library.
        longest: Maximum length of a sequence, in tokens. A text that is certainly longer is refused before
            tokenization, because tokenizing it would delay the run.
        split_control_tokens: Whether control tokens that are spelled in foreign text stay plain text (see
            `control_tokens`).
        options: Options of the chat template.
        make_reader: Function that makes the reader of the policy's turns.
        typed_output: What happens if a request requires a form of the answer, see `typed_output`.
        images: Stores images of conversations; None if the model reads none.
    """

    def __init__(
        self,
        tokenizer: Any,
        longest: int = 1 << 31,
        split_control_tokens: bool = True,
        options: PromptOptions = MODEL_DEFAULTS,
        make_reader: Callable[[PromptRenderer], CallReader] = CallReader,
        typed_output: str = ENFORCE,
        images: ConversationImages | None = None,
    ) -> None:
        self.typed_output = typed_output
        self.images = images
        self.control_tokens = ControlTokens(tokenizer) if split_control_tokens else None
        self._tokenizer = tokenizer
        self._longest = longest
        self.prompts = PromptRenderer(tokenizer, options)
        self.reader = make_reader(self.prompts)
        self.grammars = OutputGrammars(self.reader, self.prompts)
        self._lost_roles: set[str] = set()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if hasattr(backend, "encode_batch_fast") else None
        if self._backend is not None:
            # A tokenizer may have been saved with settings for training, by which it cuts and pads every text
            self._backend.no_truncation()
            self._backend.no_padding()

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text that the policy continues.

        Raises:
            ConfigurationError: There is no template, or it refuses the messages, or a message has no text.
        """
        return self.prompts.render(messages, tools)

    @cached_property
    def opening_of_turn(self) -> str:
        """Return the text with which the prompt opens the policy's turn, such as a tag for thoughts, or ""."""
        try:
            return opening_of_turn(self.prompts, [begin for begin, _ in THOUGHT_TAGS])
        except ConfigurationError:
            return ""

    def render_foreign(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_trusted: Sequence[bool] = (),
    ) -> Rendered:
        """Return the text of `render`, with a break inside each control token that is spelled in foreign text.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools.
            is_trusted: For each message, whether its control tokens are intended. This is true for messages of the
                policy and for the user's data. Messages without an entry count as foreign.

        Raises:
            ConfigurationError: The template refuses the messages, or objects and lists in them are nested too deeply.
        """
        if self.control_tokens is None:
            return Rendered(self.render(messages, tools))
        marker = new_marker()
        marked_messages: list[Message] = []
        try:
            for index, message in enumerate(messages):
                if index < len(is_trusted) and is_trusted[index]:
                    marked_messages.append(message)
                else:
                    parsed = message_with_parts(message)
                    marked_messages.append(self.control_tokens.marked(parsed, marker))
            marked_tools = self.control_tokens.marked(tools, marker) if tools else None
        except RecursionError as error:
            raise ConfigurationError(
                "objects and lists in the messages or in the tools' descriptions are nested too deeply"
            ) from error
        rendered = without_markers(self.render(marked_messages, marked_tools), marker)
        return self.control_tokens.needed(rendered)

    def warn_about_lost_roles(self, text: str, messages: Sequence[Message]) -> None:
        """Warn about each role whose messages the chat template does not write into the text, once for each role."""
        for role in lost_roles(text, messages):
            if role not in self._lost_roles and role != "assistant":
                self._lost_roles.add(role)
                log.warning(
                    "the chat template does not write the content of messages of the role %s: the policy does not read it",
                    role,
                )

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return the positions at which a foreign text must be cut, so that none of its tokens is a control token."""
        return () if self.control_tokens is None else self.control_tokens.breaks_of(text)

    def encode(self, text: str, *, begins: bool = False, breaks: Sequence[int] = ()) -> np.ndarray:
        """Return the token ids of a text, (N,) int32. A control token in it becomes one token, unless a break cuts it.

        Args:
            text: The text.
            begins: Whether the text begins a sequence. If so, the special tokens that the model expects at the
                beginning are added, unless the text already spells the first one.
            breaks: Positions that no token may span.

        Raises:
            TrajectoryOver: The text is too long.
        """
        # Each piece of the text between two breaks becomes at least one token
        has_too_many_pieces = len(breaks) >= self._longest
        if has_too_many_pieces or len(text) > MAX_CHARACTERS_PER_TOKEN * self._longest:
            raise TrajectoryOver(too_long(self._longest))
        # Text from JSON may contain a lone surrogate, which tokenizers refuse; it is replaced by a question mark
        text = text.encode(errors="replace").decode()
        ids = self.prompts.beginning_tokens(text) if begins else []
        text_ids = encode_up_to(self._encode_batch, cut(text, breaks), self._longest)
        if text_ids is None:
            raise TrajectoryOver(too_long(self._longest))
        return np.asarray(ids + text_ids, np.int32)

    def with_features(self, token_ids: np.ndarray, images: Sequence[ImageReference]) -> np.ndarray:
        """Return token ids with as many placeholders for each image as it has features; see `ConversationImages`.

        Raises:
            ConfigurationError: There are more or fewer placeholders than images.
        """
        return token_ids if self.images is None else self.images.with_features(token_ids, images)

    def images_of_tokens(
        self, token_ids: np.ndarray, prompt_images: tuple[ImageReference, ...]
    ) -> tuple[ImageReference, ...]:
        """Return the images of a history that is given as token ids: none, or those of the row.

        Raises:
            ConfigurationError: The tokens have placeholders of other images.
        """
        return () if self.images is None else self.images.images_of_tokens(token_ids, prompt_images)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        if self._backend is None:
            return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def shortened(self, text: str, max_tokens: int) -> str:
        """Return the text. If it has more than `max_tokens` tokens, return its beginning and a sentence that says so."""
        # Hardly any token has more characters than this, so the text after the beginning would be cut off anyway. A lone
        # surrogate, which tokenizers refuse, is replaced by a question mark, as in `encode`
        beginning = text[: MAX_CHARACTERS_PER_TOKEN * max_tokens].encode(errors="replace").decode()
        token_ids = self._tokenizer.encode(beginning, add_special_tokens=False)
        if len(token_ids) <= max_tokens and len(beginning) == len(text):
            return text
        beginning = self._decoded(token_ids[:max_tokens]).rstrip("\ufffd")
        return f"{beginning}\n[cut: {len(text)} characters, of which the first {len(beginning)} are here]"

    def decode(self, token_ids: np.ndarray, after: np.ndarray) -> str:
        """Return the text of `token_ids`, which come after the tokens `after` in their sequence."""
        context = after[-LOOK_BACK_TOKENS:].tolist()
        text_with_context = self._decoded([*context, *token_ids.tolist()])
        return text_with_context[len(self._decoded(context)) :]

    def _decoded(self, token_ids: list[int]) -> str:
        cleans_up_spaces = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        if self._backend is None or cleans_up_spaces:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=False)
        return text


def too_long(tokens: int) -> str:
    """Return a text for errors with the limit in tokens and the option that sets it."""
    return f"{tokens} tokens (--max-generation-tokens, and the prompt)"


def message_of(turn: ReadTurn, number: int = 0) -> dict[str, Any]:
    """Return a turn of the policy as a message of OpenAI's API.

    Args:
        turn: The parts of the turn.
        number: Number of the turn, which becomes part of the ids of its calls. The ids have nine letters and digits,
            because the templates of Mistral require this.

    >>> message_of(ReadTurn(None, "four"))
    {'role': 'assistant', 'content': 'four'}
    >>> from async_grpo.environments.call_formats import FunctionCall
    >>> message_of(ReadTurn("2 + 2", "", (FunctionCall("add", '{"a": 2}'),)))["tool_calls"][0]["id"]
    'c00000000'
    """
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.thought is not None:
        message["reasoning_content"] = turn.thought
    if turn.calls:
        message["content"] = turn.content.strip() or None
        message["tool_calls"] = [
            {
                # If the policy wrote an id, it is kept, so that the template writes the call exactly as the policy did
                "id": call.id or f"c{number:05d}{index:03d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(turn.calls)
        ]
    return message


def before_any(stop: Sequence[str], text: str) -> str:
    """Return the text before the first occurrence of any of the `stop` texts.

    >>> before_any(["Observation:"], "I look. Observation: it")
    'I look. '
    """
    end = len(text)
    for stop_text in stop:
        place = text.find(stop_text)
        if place >= 0:
            end = min(end, place)
    return text[:end]
