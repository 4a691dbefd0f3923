"""`RunImages`: the files of a run's images. Those of a group are written at its admission, and removed after its step."""

import asyncio
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from async_grpo.errors import ConfigurationError
from async_grpo.experience.row_images import image_content, image_path
from async_grpo.types import Group, ImageReference, Prompt, Sample


@dataclass(frozen=True)
class ImageSource:
    """Where the content of an image of the data set comes from.

    Attributes:
        path: Absolute path of its file; None if the row contains the image itself.
        value: The image as it stands in the row; None if it is a file.
    """

    path: Path | None
    value: Any

    @classmethod
    def of(cls, value: Any, folder: Path) -> Self:
        """Return the source of an image.

        Args:
            value: The image as it stands in its row.
            folder: Folder of the data file, in which relative paths begin.
        """
        path = image_path(value, folder)
        if path is None:
            return cls(None, value)
        # The path must be absolute, because another process reads it, whose current folder may differ
        return cls(path.absolute(), None)

    def write(self, path: Path) -> None:
        """Write the image to a file, unless it exists. A file on the same file system is linked and takes no space.

        Raises:
            ConfigurationError: The file cannot be written, or the image has vanished.
        """
        if path.exists():
            return
        with _new_file(path, str(self.path or path)) as partial:
            if self.path is None:
                partial.write_bytes(image_content(self.value, Path()))
                return
            with suppress(OSError):
                os.link(self.path.resolve(), partial)
            if not partial.exists():
                shutil.copyfile(self.path, partial)


@contextmanager
def _new_file(path: Path, name: str) -> Iterator[Path]:
    """Yield the path of a temporary file to write. At the end of the `with` block it is renamed to the file of an image.

    Args:
        path: The file of the image.
        name: Name of the image, for the error message.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigurationError(
            f"the image {name} cannot be written to the run's folder {path.parent}: {error}"
        ) from error


def write_content(path: Path, content: bytes) -> None:
    """Write an image that an environment sent. A file that exists is replaced.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the folder {path.parent} cannot be created: {error}") from error
    with _new_file(path, str(path)) as partial:
        partial.write_bytes(content)


class HasImageSources(Protocol):
    """A question with the sources of its images, in the order of the images."""

    @property
    def image_sources(self) -> tuple[ImageSource, ...]:
        """Return the sources of the images."""
        ...


def images_of(sample: Sample) -> tuple[ImageReference, ...]:
    """Return the images that the engine read for a sample, in the order of their tokens, sequence by sequence."""
    turns = sample.completion.turns
    if not turns:
        return sample.prompt.images
    return tuple(image for turn in turns for image in turn.images)


class RunImages:
    """Writes the images of groups, and removes images that no group needs any more.

    Args:
        questions: The data set. `Prompt.question` is an index in it.
        kept_digests: Digests of images of the data that stay for the whole run.
        keeps_all: Whether images that environments send stay for the whole run, too.
    """

    def __init__(
        self,
        questions: Sequence[HasImageSources],
        kept_digests: Iterable[str],
        *,
        keeps_all: bool = False,
    ) -> None:
        self._keeps_all = keeps_all
        self._questions = questions
        self._kept_digests = set(kept_digests)
        self._paths: dict[str, Path] = {}  # files that groups needed and that were not removed yet, by digest
        # Digests of the images of each group's environment, by the ordinal of the group's prompt
        self._added_digests: dict[int, set[str]] = {}

    async def write(self, prompt: Prompt) -> None:
        """Write the images of a group's prompt, unless they are there.

        Raises:
            ConfigurationError: An image cannot be written, or has vanished.
        """
        if not prompt.images:
            return
        sources = self._questions[prompt.question].image_sources
        for image, source in zip(prompt.images, sources, strict=True):
            path = Path(image.path)
            self._paths[image.digest] = path
            # A thread writes it, because a large image would block the event loop
            await asyncio.to_thread(source.write, path)

    async def write_all(self, prompts: Iterable[Prompt]) -> None:
        """Write the images of several prompts; see `write`."""
        for prompt in prompts:
            await self.write(prompt)

    async def add(self, ordinal: int, image: ImageReference, content: bytes) -> None:
        """Write an image that an environment or an agent sent, unless it is there.

        Args:
            ordinal: Number of the prompt to whose group the image belongs. Images of evaluations, whose ordinals are
                negative, stay for the whole run.
            image: The image.
            content: The encoded image.

        Raises:
            ConfigurationError: The image cannot be written.
        """
        self._note(ordinal, image)
        path = Path(image.path)
        if not path.exists():
            await asyncio.to_thread(write_content, path, content)

    def restore(self, groups: Iterable[Group]) -> None:
        """Note which images the finished groups of a resumed run need. `with_images` has made sure that they exist."""
        for group in groups:
            for sample in group.samples:
                for image in images_of(sample):
                    self._note(group.prompt.ordinal, image)

    def _note(self, ordinal: int, image: ImageReference) -> None:
        """Note that a group needs an image. A negative ordinal belongs to an evaluation."""
        if ordinal < 0 or self._keeps_all:
            self._kept_digests.add(image.digest)
            return
        self._paths[image.digest] = Path(image.path)
        self._added_digests.setdefault(ordinal, set()).add(image.digest)

    def keep(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Let the images of these groups stay for the whole run, because people look at their samples.

        Returns:
            The groups.
        """
        for group in groups:
            self._kept_digests.update(image.digest for image in group.prompt.images)
            for sample in group.samples:
                self._kept_digests.update(image.digest for image in images_of(sample))
        return groups

    def remove_unused(self, prompts: Iterable[Prompt]) -> None:
        """Remove the images that groups needed, except those of these prompts and those that stay for the whole run."""
        if not self._paths:
            return
        used_digests: set[str] = set()
        added_digests = {}
        for prompt in prompts:
            used_digests.update(image.digest for image in prompt.images)
            if prompt.ordinal in self._added_digests:
                added_digests[prompt.ordinal] = self._added_digests[prompt.ordinal]
        self._added_digests = added_digests
        used_digests.update(*added_digests.values())
        for digest in self._paths.keys() - used_digests - self._kept_digests:
            self._paths.pop(digest).unlink(missing_ok=True)
