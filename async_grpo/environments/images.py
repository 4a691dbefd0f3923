"""Read, check and store the images in conversations of environments and agents, and expand their placeholders.

Images in messages are data URLs. Before a conversation is rendered, each image becomes an IMAGE_PART, for which the chat
template writes one placeholder, and an `ImageReference`, which engine and trainer get together with the tokens.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.experience.row_images import (
    IMAGE_FIELDS,
    content_of_data_url,
    image_row,
    image_value,
    is_image_part,
)
from async_grpo.experience.row_messages import IMAGE_PART, Message, messages_of, template_message
from async_grpo.experience.run_images import RunImages
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import decoded_image, digest_of_image
from async_grpo.types import ImageReference, Prompt

if TYPE_CHECKING:  # not imported at run time: it imports torch, which the controller needs only for images
    from async_grpo.modeling.image_models import ImageReader

MAX_DISTINCT_IMAGES = 1024  # maximum number of different images in one trajectory


class ConversationImages:
    """Stores the images of conversations, and expands their placeholders.

    Args:
        reader: The model's image processor.
        image_token_id: The placeholder of images.
        most_images: Maximum number of images that the engine accepts in one request.
        folder: Folder of the run's images.
        files: The files of the run's images.
    """

    def __init__(
        self,
        reader: "ImageReader",
        image_token_id: int,
        most_images: int,
        folder: Path,
        files: RunImages,
    ) -> None:
        self.most_images = most_images
        self._reader = reader
        self._image_token_id = image_token_id
        self._folder = folder
        self._files = files

    async def store(self, content: bytes, ordinal: int) -> ImageReference:
        """Write an image to the folder of the run, and return its reference.

        Args:
            content: The encoded image.
            ordinal: Number of the prompt to whose group the image belongs.

        Raises:
            ConfigurationError: The image cannot be decoded, or is too large.
        """
        # An image that engine and trainer cannot decode would end the run, so it is decoded here once
        image = await asyncio.to_thread(decoded_image, content)
        digest = digest_of_image(content)
        num_tokens = self._reader.num_tokens(*image.size)
        reference = ImageReference(str(self._folder / digest), digest, num_tokens)
        await self._files.add(ordinal, reference, content)
        return reference

    def with_features(self, token_ids: np.ndarray, images: Sequence[ImageReference]) -> np.ndarray:
        """Return token ids (N,) int32 with as many placeholders for each image as it has features.

        Args:
            token_ids: Token ids with one placeholder for each image.
            images: The images, in their order.

        Raises:
            ConfigurationError: There are more or fewer placeholders than images.
        """
        is_placeholder = token_ids == self._image_token_id
        num_placeholders = int(is_placeholder.sum())
        refuse(
            num_placeholders != len(images),
            f"the conversation has {num_placeholders} image tokens for {len(images)} images: the chat template must write "
            "one for each, and no text may spell such a token",
        )
        num_copies = np.ones(len(token_ids), np.int64)
        num_copies[is_placeholder] = [image.num_tokens for image in images]
        return np.repeat(token_ids, num_copies)

    def images_of_tokens(
        self, token_ids: np.ndarray, prompt_images: tuple[ImageReference, ...]
    ) -> tuple[ImageReference, ...]:
        """Return the images of a history that is given as token ids: none, or those of the row.

        Raises:
            ConfigurationError: The tokens have placeholders of other images.
        """
        num_placeholders = int((token_ids == self._image_token_id).sum())
        if not num_placeholders:
            return ()
        num_expected = sum(image.num_tokens for image in prompt_images)
        refuse(
            num_placeholders != num_expected,
            f"the token ids have {num_placeholders} image tokens, and the images of the row have {num_expected}: send "
            "messages with images instead of token ids",
        )
        return prompt_images


class TrajectoryImages:
    """The images of one trajectory. An image that is sent again with each request is read once.

    Args:
        images: Stores the images.
        ordinal: Number of the trajectory's prompt.
    """

    def __init__(self, images: ConversationImages, ordinal: int) -> None:
        self._images = images
        self._ordinal = ordinal
        self._references: dict[bytes, ImageReference] = {}  # by digest of the data URL

    async def taken_from(
        self, messages: Sequence[Message]
    ) -> tuple[list[Message], tuple[ImageReference, ...]]:
        """Return the messages with an IMAGE_PART in the place of each image, and the images in their order.

        Raises:
            ConfigurationError: An image cannot be read, or there are too many.
        """
        plain_messages: list[Message] = []
        images: list[ImageReference] = []
        for message in messages:
            if not has_image(message):
                plain_messages.append(message)
                continue
            refuse(
                message.get("role") != "user",
                f"a message of the role {message.get('role')!r:.40} has an image, and only messages of the user may have "
                "images",
            )
            parts = []
            for part in message["content"]:
                if is_image_part(part):
                    images.append(await self._reference(part))
                    parts.append(IMAGE_PART)
                else:
                    parts.append(_text_part(part))
                refuse(
                    len(images) > self._images.most_images,
                    f"the conversation has more than {self._images.most_images} images",
                )
            plain_messages.append({**message, "content": parts})
        return plain_messages, tuple(images)

    async def _reference(self, part: Mapping[str, Any]) -> ImageReference:
        """Return the reference of the image in a message part. If the image is new, store it first."""
        value = image_value(part)
        if isinstance(value, ImageReference):
            return value
        refuse(
            not isinstance(value, str),
            f"an image part names no image: give a data URL in one of the fields {', '.join(IMAGE_FIELDS)}",
        )
        key = hashlib.sha256(value.encode(errors="replace")).digest()
        if key not in self._references:
            refuse(
                len(self._references) >= MAX_DISTINCT_IMAGES,
                f"the trajectory has sent more than {MAX_DISTINCT_IMAGES} different images",
            )
            content = await asyncio.to_thread(content_of_data_url, value)
            self._references[key] = await self._images.store(content, self._ordinal)
        return self._references[key]


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise ConfigurationError if a message has an image, because the model reads none."""
    refuse(
        any(has_image(message) for message in messages),
        "a message has an image, and the model reads texts only: send texts, or train a model that reads images",
    )


def has_image(message: Message) -> bool:
    """Return whether the content of a message has an image part."""
    content = message.get("content")
    return isinstance(content, list | tuple) and any(is_image_part(part) for part in content)


def _text_part(part: Any) -> dict[str, Any]:
    """Return a part as a text part."""
    return {"type": "text", "text": template_message({"role": "user", "content": [part]})["content"]}


def row_conversation(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the messages of the prompt's row, in which the images are references; [] if the prompt is a text."""
    if not prompt.images:
        return messages_of(prompt.row)
    row = image_row(prompt.row)
    if row is None:
        raise ConfigurationError("the row has images, and its messages have none")
    remaining = iter(prompt.images)
    conversation = []
    for message in row.messages:
        if not has_image(message):
            conversation.append(template_message(message))
            continue
        parts = []
        for part in message["content"]:
            is_image = is_image_part(part)
            parts.append({**IMAGE_PART, "image": next(remaining)} if is_image else _text_part(part))
        conversation.append({**message, "content": parts})
    return conversation


def without_values(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in which each image part is an IMAGE_PART."""
    plain_messages = []
    for message in messages:
        content = message.get("content")
        if has_image(message):
            content = [IMAGE_PART if is_image_part(part) else part for part in message["content"]]
        plain_messages.append({**message, "content": content})
    return plain_messages
