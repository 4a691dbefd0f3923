"""`with_images`: keep the finished groups of a resumed run whose images are there; generate the others again.

Images of environments and agents are files in the folder of the run. If a run continues in another folder, the files are
copied from the folder of the earlier run. That folder may be somebody else's: only regular files inside it are read, their
sizes are bounded, and a file counts only if its content has the digest that is its name.
"""

import logging
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.experience.run_images import images_of, write_content
from async_grpo.experience.state import ExperienceState, UnfinishedGroup
from async_grpo.processes.image_files import MAX_IMAGE_BYTES, RUN_IMAGES, decoded_image, digest_of_image
from async_grpo.processes.untrusted_files import open_inside, read_bounded, read_bytes
from async_grpo.types import Group, Prompt

MAX_COPIED_BYTES = 64 << 30  # maximum size of all images that are copied from another folder
log = logging.getLogger(__name__)


class ImageGone(Exception):
    """An image of a finished group cannot be used. The message is the reason, for a warning."""


def with_images(state: ExperienceState, earlier_run: Path, images_folder: Path) -> ExperienceState:
    """Return the state, in which finished groups without their images are unfinished.

    Such a group is generated again, with the same seeds. A warning says how many groups there are, and why.

    Args:
        state: The state of a checkpoint.
        earlier_run: Folder of the run that wrote the checkpoint.
        images_folder: Folder of the images of the run that continues.

    Raises:
        ConfigurationError: An image cannot be written.
    """
    files = RestoredImages(earlier_run, images_folder)
    alive: dict[int, Group | UnfinishedGroup] = {}
    reasons: Counter[str] = Counter()
    num_finished = 0
    for number, group in state.alive.items():
        files.remove_broken(group.prompt)
        alive[number] = group
        if not isinstance(group, Group):
            continue
        num_finished += 1
        try:
            for digest in _added_digests(group):
                files.restore(digest)
        except ImageGone as error:
            reasons[str(error)] += 1
            alive[number] = UnfinishedGroup(group.prompt, group.resampled)
    if reasons:
        described_reasons = [f"{count} because {reason}" for reason, count in reasons.most_common()]
        log.warning(
            "%d of %d finished groups of the checkpoint are generated again, because images of them are gone: %s",
            reasons.total(),
            num_finished,
            "; ".join(described_reasons),
        )
    return replace(state, alive=alive)


def _added_digests(group: Group) -> Collection[str]:
    """Return the digests of the images that the group's environment sent. Those of the prompt come from the data."""
    prompt_digests = {image.digest for image in group.prompt.images}
    digests: dict[str, None] = {}  # a dictionary, because its order does not change from run to run
    for sample in group.samples:
        digests |= dict.fromkeys(image.digest for image in images_of(sample))
    return [digest for digest in digests if digest not in prompt_digests]


class RestoredImages:
    """The images of a resumed run.

    Args:
        earlier_run: Folder of the run that wrote the checkpoint.
        images_folder: Folder of the images of the run that continues.
    """

    def __init__(self, earlier_run: Path, images_folder: Path) -> None:
        self._earlier_run = earlier_run
        self._images_folder = images_folder
        self._is_same_run = earlier_run.resolve() == images_folder.parent.resolve()
        self._present_digests: set[str] = set()
        self._num_copied_bytes = 0

    def restore(self, digest: str) -> None:
        """Make sure that the folder of the run has an image.

        Raises:
            ImageGone: Neither the folder of the run nor that of the earlier run has the image.
            ConfigurationError: The image cannot be written.
        """
        if digest in self._present_digests:
            return
        path = self._images_folder / digest
        try:
            has_image = digest_of_image(read_bytes(path, MAX_IMAGE_BYTES)) == digest
        except OSError:
            has_image = False
        if not has_image:
            write_content(path, self._earlier_content(digest))
        self._present_digests.add(digest)

    def remove_broken(self, prompt: Prompt) -> None:
        """Remove files of the prompt's images that have another content, so that the run writes them again.

        A machine that loses its power may leave such files.
        """
        for image in prompt.images:
            path = self._images_folder / image.digest
            try:
                is_broken = digest_of_image(read_bytes(path, MAX_IMAGE_BYTES)) != image.digest
            except FileNotFoundError:
                continue
            except OSError:
                is_broken = True
            if is_broken:
                log.warning("%s has another content than its name says: it is written again", path)
                with suppress(OSError):
                    path.unlink()

    def _earlier_content(self, digest: str) -> bytes:
        """Return the content of an image in the folder of the earlier run.

        Raises:
            ImageGone: The folder has no such image.
        """
        folder = self._earlier_run / RUN_IMAGES
        name = f"{RUN_IMAGES}/{digest}"
        if self._is_same_run:
            raise ImageGone(f"their files are missing in {folder}, or have been changed")
        try:
            with open_inside(self._earlier_run, name) as file:
                content = read_bounded(file, self._earlier_run / name, MAX_IMAGE_BYTES)
        except FileNotFoundError as error:
            raise ImageGone(f"their files are missing in {folder}") from error
        except OSError as error:
            raise ImageGone(f"a file in {folder} cannot be read ({error.strerror})") from error
        if digest_of_image(content) != digest:
            raise ImageGone(f"a file in {folder} has been changed: its content is not that of its name")
        try:
            # An image that engine and trainer cannot decode would end the run
            decoded_image(content)
        except ConfigurationError as error:
            raise ImageGone(f"a file in {folder} is no image that can be read") from error
        self._num_copied_bytes += len(content)
        if self._num_copied_bytes > MAX_COPIED_BYTES:
            raise ImageGone(f"at most {MAX_COPIED_BYTES >> 30} GB of images are copied")
        return content
