"""A checkpoint is whole and as it was written, or it is refused by name, and the one before it is used."""

import logging
import shutil
from pathlib import Path

import pytest
from saved_checkpoints import save_checkpoint

from async_grpo.errors import CheckpointBroken, ConfigurationError
from async_grpo.training.checkpoint_folder import (
    MANIFEST,
    Manifest,
    checkpoints_of,
    complete,
    discard_partial,
    newest,
    partial_folder,
    prune,
    set_aside_newer,
    verify_checkpoint,
)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def reworded(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


SHARD = "training/shard-00001.safetensors"
DAMAGES = {
    "a shard cut short": lambda c: (c / SHARD).write_bytes((c / SHARD).read_bytes()[:-1]),
    "an empty shard": lambda c: (c / SHARD).write_bytes(b""),
    "a longer shard": lambda c: (c / SHARD).write_bytes((c / SHARD).read_bytes() + b"\0"),
    "the first bit of a shard": lambda c: flip(c / SHARD, 0),
    "a bit in the middle of a shard": lambda c: flip(c / SHARD, 512),
    "the last bit of a shard": lambda c: flip(c / SHARD, -1),
    "a shard deleted": lambda c: (c / SHARD).unlink(),
    "the folder of the shards deleted": lambda c: shutil.rmtree(c / "training"),
    "a folder in place of a shard": lambda c: ((c / SHARD).unlink(), (c / SHARD).mkdir()),
    "the experience cut short": lambda c: (c / "experience.json").write_text("{"),
    "the experience of another step": lambda c: reworded(c / "experience.json", "2", "3"),
    "the experience deleted": lambda c: (c / "experience.json").unlink(),
    "the manifest cut short": lambda c: (c / MANIFEST).write_text((c / MANIFEST).read_text()[:-20]),
    "an empty manifest": lambda c: (c / MANIFEST).write_text(""),
    "a manifest that is no object": lambda c: (c / MANIFEST).write_text("[]"),
    "the manifest deleted": lambda c: (c / MANIFEST).unlink(),
    "another step in the manifest": lambda c: reworded(c / MANIFEST, '"step": 2', '"step": 3'),
    "another option in the manifest": lambda c: reworded(c / MANIFEST, '"batch_size": 2', '"batch_size": 4'),
    "a manifest of zeros": lambda c: (c / MANIFEST).write_bytes(bytes(300)),
    "a manifest that is no text": lambda c: (c / MANIFEST).write_bytes(b"\xff\xfe" * 50),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, caplog, damage):
    before, damaged = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 2)
    assert newest(tmp_path)[0] == damaged
    DAMAGES[damage](damaged)
    with pytest.raises(CheckpointBroken, match="step_000000002"):
        verify_checkpoint(damaged)
    with caplog.at_level(logging.ERROR, "async_grpo"):
        folder, manifest = newest(tmp_path)
    assert folder == before and manifest.step == 1 and manifest.samples == 8
    assert "step_000000002" in caplog.text and "the checkpoint before it is used" in caplog.text


@pytest.mark.parametrize("name", [".DS_Store", ".nfs000000012", "notes.txt", "desktop.ini", "plots/loss.png"])
def test_a_file_that_no_reader_opens_is_named_and_the_newest_checkpoint_is_used(tmp_path, caplog, name):
    newer = [save_checkpoint(tmp_path, step) for step in (1, 2)][-1]
    (newer / name).parent.mkdir(exist_ok=True)
    (newer / name).write_bytes(b"what a system or a person leaves")
    with caplog.at_level(logging.WARNING, "async_grpo"):
        folder, manifest = newest(tmp_path)
    assert folder == newer and manifest.step == 2
    assert f"{newer} holds {name!r}" in caplog.text and "ignored" in caplog.text


ADDED = (
    *("training/.DS_Store", "training/shard-00002.safetensors", "training/more/notes.txt"),
    *(
        "weights.safetensors",
        "deep/weights.SafeTensors",
        "experience.safetensors",
        "optimizer.pt",
        ".metadata",
    ),
)


@pytest.mark.parametrize("name", ADDED)
def test_with_a_file_that_a_reader_might_take_no_older_checkpoint_is_used_instead(tmp_path, name):
    newer = [save_checkpoint(tmp_path, step) for step in (1, 2)][-1]
    (newer / name).parent.mkdir(exist_ok=True)
    (newer / name).write_bytes(b"")
    with pytest.raises(
        ConfigurationError, match=f"step_000000002 holds '{name}'.*: remove it from the folder"
    ):
        newest(tmp_path)
    (newer / name).unlink()
    assert newest(tmp_path)[0] == newer


def test_with_a_link_in_the_newest_checkpoint_no_older_one_is_used_instead(tmp_path):
    newer = [save_checkpoint(tmp_path, step) for step in (1, 2)][-1]
    (newer / "training" / "latest").symlink_to("shard-00001.safetensors")
    with pytest.raises(
        ConfigurationError, match="holds 'training/latest', a link.*remove it from the folder"
    ):
        newest(tmp_path)


def test_a_checkpoint_of_another_format_says_which_version_wrote_it(tmp_path):
    partial = partial_folder(tmp_path, 1)
    partial.mkdir(parents=True)
    told = {"step": 1, "samples": 8, "world_size": 1, "options": {}, "inputs": {}}
    folder = complete(partial, Manifest(**told, versions={"async-grpo": "9.1"}, format=7))
    with pytest.raises(
        CheckpointBroken, match="has format 7.* reads 1: resume with the version that wrote it .9.1."
    ):
        verify_checkpoint(folder)


def test_what_is_not_whole_is_never_seen_and_is_discarded(tmp_path):
    partial = partial_folder(tmp_path, 3)
    partial.mkdir(parents=True)
    (partial / "x").write_text("half")
    assert checkpoints_of(tmp_path) == [] and newest(tmp_path) is None
    discard_partial(tmp_path)
    assert not partial.exists()


def test_the_newest_are_kept_and_later_ones_than_the_one_gone_on_from_are_set_aside(tmp_path):
    first, second, third = (save_checkpoint(tmp_path, step) for step in (9, 10, 100))
    set_aside_newer(tmp_path, 10)
    assert checkpoints_of(tmp_path) == [second, first]
    assert third.with_name("unused_step_000000100").is_dir()
    prune(tmp_path, 1)
    assert checkpoints_of(tmp_path) == [second]


def test_a_step_that_is_saved_again_has_a_newer_checkpoint(tmp_path):
    saved = [save_checkpoint(tmp_path, step) for step in (1, 1, 1, 2)]
    assert checkpoints_of(tmp_path) == saved[::-1] and newest(tmp_path)[0].name == "step_000000002"
    set_aside_newer(tmp_path, 1)
    assert newest(tmp_path)[0].name == "step_000000001.003" and verify_checkpoint(saved[2]).step == 1


def test_a_step_that_is_saved_often_keeps_its_newest_checkpoints(tmp_path):
    """The name of a checkpoint that was removed was used again, and was then the oldest of its step."""
    for save in range(1, 6):
        newest_folder = save_checkpoint(tmp_path, 7)
        prune(tmp_path, keep=2)
        assert newest(tmp_path)[0] == newest_folder, save
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step_000000007.005", "step_000000007.004"]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("step_000000009", "step_10"),
        ("step_5", "step_000000010"),
        ("step_999999999", "step_1000000000"),
        ("step_000000007.999", "step_000000007.1000"),
        ("step_7.9", "step_000000007.010"),
    ],
)
def test_checkpoints_are_ordered_by_their_numbers_whatever_their_leading_zeros(tmp_path, older, newer):
    saved = save_checkpoint(tmp_path, 7)
    for name in (newer, older):
        shutil.copytree(saved, saved.with_name(name))
    shutil.rmtree(saved)
    assert [path.name for path in checkpoints_of(tmp_path)] == [newer, older]


def test_only_later_steps_are_set_aside_whatever_their_leading_zeros(tmp_path):
    saved = save_checkpoint(tmp_path, 7)
    for name in ("step_5", "step_10", "step_1000000000"):
        shutil.copytree(saved, saved.with_name(name))
    set_aside_newer(tmp_path, 7)
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step_000000007", "step_5"]


@pytest.mark.parametrize(
    "name", ["step_", "step_x", "step_7.", "step_7.0000001", "step_\u0663", "step_7~", "step_\u00b2"]
)
def test_folders_of_other_names_are_no_checkpoints(tmp_path, name):
    saved = save_checkpoint(tmp_path, 7)
    saved.rename(saved.with_name(name))
    assert checkpoints_of(tmp_path) == []
