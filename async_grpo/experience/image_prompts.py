"""`ImagePrompts`: turns the messages of a row with images into token ids, and stores the images of a run."""

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_images import ImageRow, image_content, image_row
from async_grpo.experience.row_messages import IMAGE_PART, row_tools, template_message
from async_grpo.experience.run_images import ImageSource
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import digest_of_image, image_size
from async_grpo.types import ImageReference

if TYPE_CHECKING:  # not imported at run time, because it imports torch, which the controller does not need
    from async_grpo.modeling.image_models import ImageReader

MOST_IMAGES = 64  # maximum number of images in one prompt


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images.

    Attributes:
        token_ids: Its token ids, with as many placeholders for each image as the image has features.
        text_token_ids: The same token ids with a single placeholder for each image, so that people can read the text.
        images: The images, in the order of their tokens.
        sources: Where the content of each image comes from.
    """

    token_ids: list[int]
    text_token_ids: list[int]
    images: tuple[ImageReference, ...]
    sources: tuple[ImageSource, ...]


class ImagePrompts:
    """Renders prompts with images.

    Args:
        tokenizer: The model's tokenizer.
        renderer: Renders the messages.
        reader: The model's image processor.
        image_token_id: The placeholder of images.
        folder: Folder for the images of the run, which need not exist yet.
    """

    def __init__(
        self,
        tokenizer: Any,
        renderer: PromptRenderer,
        reader: "ImageReader",
        image_token_id: int,
        folder: Path,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._reader = reader
        self._image_token_id = image_token_id
        self._folder = folder.absolute()
        self._sources: dict[str, ImageSource] = {}  # by digest

    @property
    def processor_name(self) -> str:
        """Return the class of the image processor, which engines and trainer must share."""
        return self._reader.name

    def prompt(self, row: Any, max_prompt_tokens: int, place: str, data_folder: Path) -> ImagePrompt | None:
        """Return the prompt of a row with images; None if the row has none.

        Args:
            row: The row.
            max_prompt_tokens: Maximum length of a prompt. A prompt with more image tokens is refused.
            place: File and line of the row, for warnings.
            data_folder: Folder of the data file, in which relative paths of images begin.

        Raises:
            ConfigurationError: An image cannot be read, or the chat template does not write the images.
        """
        if not isinstance(row, Mapping):
            return None
        row_with_images = image_row(row)
        if row_with_images is None:
            return None
        images, sources = self._references(row_with_images.sources, data_folder)
        num_image_tokens = sum(image.num_tokens for image in images)
        refuse(
            num_image_tokens > max_prompt_tokens,
            f"{len(images)} images of {num_image_tokens} tokens; {max_prompt_tokens} tokens fit this model and "
            "--max-generation-tokens. Give smaller images, or lower max_pixels in the model's preprocessor_config.json",
        )
        text_token_ids = self._text_tokens(row_with_images, row, max_prompt_tokens, place)
        num_places = text_token_ids.count(self._image_token_id)
        refuse(
            num_places != len(images),
            f"the chat template writes {num_places} image tokens for {len(images)} images: give a template that writes "
            "one for each (--chat-template), and no text that spells such a token",
        )
        return ImagePrompt(self._expanded(text_token_ids, images), text_token_ids, images, sources)

    def add(self, content: bytes) -> ImageReference:
        """Register an encoded image that belongs to no row, so that `store` can write it, and return its reference."""
        digest = digest_of_image(content)
        self._sources[digest] = ImageSource(None, {"bytes": base64.b64encode(content).decode()})
        return ImageReference(
            str(self._folder / digest), digest, self._reader.num_tokens(*image_size(content))
        )

    def refuse_placeholders(self, token_ids: Iterable[int]) -> None:
        """Raise ConfigurationError if the prompt of a row without images has the placeholder of an image."""
        refuse(
            self._image_token_id in token_ids,
            "the prompt spells the token that stands for an image "
            f"({self._tokenizer.decode([self._image_token_id])}), and the row has no images: write an image part",
        )

    def store(self, digests: Collection[str]) -> None:
        """Write some images to the folder of the run, which is created if there are any images.

        Raises:
            ConfigurationError: The folder cannot be written, or an image has vanished.
        """
        if not self._sources:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the folder {self._folder} cannot be created: {error}") from error
        for digest in digests:
            self._sources[digest].write(self._folder / digest)

    def _references(
        self, row_sources: Sequence[Any], data_folder: Path
    ) -> tuple[tuple[ImageReference, ...], tuple[ImageSource, ...]]:
        """Return references and sources of a row's images, after checking each image without decoding it."""
        refuse(
            len(row_sources) > MOST_IMAGES,
            f"{len(row_sources)} images; at most {MOST_IMAGES} are read per prompt",
        )
        references = []
        sources = []
        for number, row_source in enumerate(row_sources, start=1):
            try:
                content = image_content(row_source, data_folder)
                num_tokens = self._reader.num_tokens(*image_size(content))
            except ConfigurationError as error:
                raise ConfigurationError(f"image {number} of {len(row_sources)}: {error}") from error
            digest = digest_of_image(content)
            source = self._sources.setdefault(digest, ImageSource.of(row_source, data_folder))
            references.append(ImageReference(str(self._folder / digest), digest, num_tokens))
            sources.append(source)
        return tuple(references), tuple(sources)

    def _text_tokens(
        self, row_with_images: ImageRow, row: Mapping[str, Any], max_tokens: int, place: str
    ) -> list[int]:
        """Return the token ids of the prompt with a single placeholder for each image."""
        texts = [_without_images(message) for message in row_with_images.messages]
        # This call only checks the messages. It gets texts, because the checks cannot read lists of parts
        self._renderer.prompt_tokens({**row, "messages": texts}, max_tokens, place)
        messages = []
        for message in row_with_images.messages:
            has_images = isinstance(message.get("content"), list) and IMAGE_PART in message["content"]
            messages.append(message if has_images else template_message(message))
        text = self._renderer.text_with_parts(messages, row_tools(row))
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _expanded(self, token_ids: Iterable[int], images: Iterable[ImageReference]) -> list[int]:
        """Return the token ids with as many placeholders for each image as it has features."""
        remaining = iter(images)
        expanded: list[int] = []
        for token_id in token_ids:
            is_image = token_id == self._image_token_id
            num_copies = next(remaining).num_tokens if is_image else 1
            expanded += [token_id] * num_copies
        return expanded


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its images. If nothing is left, it gets a text, because an empty message is refused."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or IMAGE_PART not in content:
        return dict(message)
    texts = [part for part in content if part != IMAGE_PART]
    return {**message, "content": texts or "image"}
