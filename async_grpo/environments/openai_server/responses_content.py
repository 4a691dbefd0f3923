"""Contents of messages and of tools' answers in requests of the Responses API: a text, or parts."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field

from async_grpo.environments.openai_server.openai_api import MAX_PARTS


def _refuse_file(file_id: Any) -> Any:
    """Refuse the id of a file that OpenAI's server would store. See `BeforeValidator`."""
    if file_id is not None:
        raise ValueError("no files are stored here: send the image as a data URL in image_url")
    return file_id


class InputText(BaseModel):
    """A text part."""

    type: Literal["input_text", "output_text"]
    text: str


class InputImage(BaseModel):
    """An image part, for models that read images. Its `detail` is ignored: the model's processor sets the size."""

    type: Literal["input_image"]
    # Declared before `image_url`, so that the first error of a part with the id of a file is about the id. Such a part
    # also lacks the URL
    file_id: Annotated[None, BeforeValidator(_refuse_file)] = None
    image_url: str


InputPart = Annotated[InputText | InputImage, Discriminator("type")]
InputContent = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def chat_content(content: str | Iterable[InputText | InputImage]) -> str | list[dict[str, Any]]:
    """Return a content in the form of chat completions: a text, or a list of parts if it has an image."""
    if isinstance(content, str):
        return content
    texts = []
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputText):
            texts.append(part.text)
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
    return "".join(texts) if len(texts) == len(parts) else parts
