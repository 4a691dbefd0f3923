"""The images of samples, as data URLs for the page of samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.experience.plain_values import data_url, image_type
from async_grpo.processes.image_files import RUN_IMAGES, is_digest
from async_grpo.processes.untrusted_files import open_inside, read_bounded

# Limits of the page's size, because a browser keeps the whole page in memory
MAX_IMAGE_BYTES = 4 << 20
MAX_PAGE_BYTES = 64 << 20


def images_of_samples(rows: Sequence[dict[str, Any]], run_folder: Path) -> dict[str, str]:
    """Return the images of the newest samples as data URLs, by digest. Remove all other images from the rows.

    Images that are missing, too large or of an unknown format are left out, and so are all images beyond
    `MAX_PAGE_BYTES`.

    Args:
        rows: The samples, oldest first. The folder may be somebody else's, so their `images` may be anything.
        run_folder: Folder of the run.
    """
    urls: dict[str, str] = {}
    num_bytes = 0
    for row in reversed(rows):
        digests = row.pop("images", None)
        if not isinstance(digests, list):
            continue
        for digest in digests:
            if not is_digest(digest) or digest in urls:
                continue
            url = _url_of(run_folder, digest)
            num_bytes += len(url)
            if url and num_bytes <= MAX_PAGE_BYTES:
                urls[digest] = url
        row["images"] = [digest for digest in digests if isinstance(digest, str) and digest in urls]
    return urls


def _url_of(run_folder: Path, digest: str) -> str:
    """Return an image of the run as a data URL, or "" if it cannot be shown."""
    name = f"{RUN_IMAGES}/{digest}"
    try:
        with open_inside(run_folder, name) as file:
            content = read_bounded(file, run_folder / name, MAX_IMAGE_BYTES)
    except OSError:
        return ""
    media_type = image_type(content)
    return data_url(content, media_type) if media_type else ""
