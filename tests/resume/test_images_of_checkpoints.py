"""A run that goes on finds the images of its finished groups, or generates these groups again and says why."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_model import encoded, picture

from async_grpo.cluster.controller import _saved_state
from async_grpo.errors import CheckpointBroken
from async_grpo.experience import restored_images
from async_grpo.experience.dataset import PromptCursor, Question
from async_grpo.experience.run_images import images_of
from async_grpo.experience.state import ExperienceState, UnfinishedGroup
from async_grpo.types import (
    Completion,
    FinishReason,
    Group,
    ImageReference,
    RewardStatus,
    Sample,
    Turn,
    Verdict,
)

WARNING = "1 of 3 finished groups of the checkpoint are generated again, because images of them are gone: 1 because "
ROW_IMAGE = hashlib.sha256(encoded(picture(90, 28, 28))).hexdigest()
MEMBERS = 2


def questions_in(run: Path) -> list[Question]:
    """Questions whose rows have an image each. The run writes these images from its data."""
    images = (ImageReference(str(run / "images" / ROW_IMAGE), ROW_IMAGE, 1),)
    return [Question(np.array([n, 1], np.int32), {"input": f"q{n}"}, images=images) for n in range(5)]


def cursor_in(run: Path) -> PromptCursor:
    return PromptCursor(questions_in(run), 3)


def content_of(number: int) -> bytes:
    return encoded(picture(number, 28, 28))


def digest_of(number: int) -> str:
    return hashlib.sha256(content_of(number)).hexdigest()


def trajectory(prompt, number: int, run: Path) -> Sample:
    """A trajectory whose second turn begins with an image of the environment, which is written."""
    digest = digest_of(number)
    path = run / "images" / digest
    path.write_bytes(content_of(number))
    turns = (
        Turn(np.array([5], np.int32), 2, True, "x", "y", images=prompt.images),
        Turn(np.array([7], np.int32), 2, text="z", number=1, images=(ImageReference(str(path), digest, 4),)),
    )
    completion = Completion(
        token_ids=np.arange(4, dtype=np.int32) + number,
        logprobs=np.full(4, -0.5, np.float32),
        versions=np.zeros(4, np.int32),
        finish_reason=FinishReason.STOP,
        text="yz",
        member=number % MEMBERS,
        turns=turns,
    )
    return Sample(prompt, completion, Verdict(RewardStatus.OK, 0.5))


@pytest.fixture
def earlier_run(tmp_path) -> Path:
    """A run with three finished groups of two trajectories, each with an image of its own, and an unfinished group."""
    run = tmp_path / "earlier"
    (run / "images").mkdir(parents=True)
    cursor = cursor_in(run)
    alive: dict[int, Group | UnfinishedGroup] = {}
    for number in range(3):
        prompt = next(cursor)
        samples = tuple(trajectory(prompt, MEMBERS * number + member, run) for member in range(MEMBERS))
        alive[number] = Group(prompt, samples, 0, number, resampled=number)
    alive[3] = UnfinishedGroup(next(cursor))
    ExperienceState(0, 4, cursor.state(), alive).save(run / "checkpoints" / "step_000000000")
    return run


def resumed(earlier_run: Path, run: Path) -> ExperienceState:
    """The state with which a run in a folder goes on."""
    return _saved_state(earlier_run / "checkpoints" / "step_000000000", cursor_in(run).prompt, run / "images")


def finished(state: ExperienceState) -> list[int]:
    return [number for number, group in state.alive.items() if isinstance(group, Group)]


def stored(run: Path) -> set[str]:
    return {path.name for path in (run / "images").glob("*")}


def test_a_run_in_another_folder_has_copies_of_the_images_even_after_the_earlier_folder_is_gone(
    earlier_run, tmp_path, caplog
):
    run = tmp_path / "new"
    state = resumed(earlier_run, run)
    shutil.rmtree(earlier_run)
    assert finished(state) == [0, 1, 2] and not caplog.text
    assert stored(run) == {digest_of(number) for number in range(3 * MEMBERS)}
    for group in state.alive.values():
        for sample in group.samples if isinstance(group, Group) else ():
            row_image, image = images_of(sample)
            assert row_image == group.prompt.images[0]
            assert Path(image.path).parent == run / "images"
            assert hashlib.sha256(Path(image.path).read_bytes()).hexdigest() == image.digest
            assert image.num_tokens == 4


def test_a_run_in_its_own_folder_keeps_its_groups_and_writes_nothing(earlier_run, caplog):
    before = {path: path.stat().st_mtime_ns for path in (earlier_run / "images").iterdir()}
    assert finished(resumed(earlier_run, earlier_run)) == [0, 1, 2] and not caplog.text
    assert {path: path.stat().st_mtime_ns for path in (earlier_run / "images").iterdir()} == before


def test_a_checkpoint_without_its_run_has_its_groups_generated_again(earlier_run, tmp_path, caplog):
    shutil.rmtree(earlier_run / "images")
    state = resumed(earlier_run, tmp_path / "new")
    assert finished(state) == []
    assert (
        "3 of 3 finished groups of the checkpoint are generated again, because images of them are gone: "
        f"3 because their files are missing in {earlier_run}/images" in caplog.text
    )
    # The groups keep their places, prompts and counts, so that the order of the data and the seeds stay the same
    assert list(state.alive) == [0, 1, 2, 3]
    cursor = cursor_in(tmp_path / "new")
    assert [(group.prompt.ordinal, group.prompt.question) for group in state.alive.values()] == [
        (prompt.ordinal, prompt.question) for prompt in (next(cursor) for _ in range(4))
    ]
    assert [group.resampled for group in state.alive.values()] == [0, 1, 2, 0]


def overwrite(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


def link_elsewhere(path: Path) -> None:
    """Replace the file by a link to a file outside of the folder, which even has the right content."""
    outside = path.parents[2] / "outside.png"
    path.rename(outside)
    path.symlink_to(outside)


def link_the_folder(path: Path) -> None:
    outside = path.parents[2] / "outside"
    path.parent.rename(outside)
    path.parent.symlink_to(outside)


def grow(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate((32 << 20) + 1)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "removed": (lambda path: path.unlink(), "their files are missing in"),
    "another picture": (overwrite(content_of(50)), "its content is not that of its name"),
    "cut short": (overwrite(content_of(2)[:-9]), "its content is not that of its name"),
    "empty": (overwrite(b""), "its content is not that of its name"),
    "a link": (link_elsewhere, "is a link, and links are not followed"),
    "too large": (grow, "is larger than 32 MB"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_group_whose_image_was_changed_is_generated_again_and_the_others_are_kept(
    earlier_run, tmp_path, caplog, kind
):
    change, reason = CHANGES[kind]
    change(earlier_run / "images" / digest_of(2))
    state = resumed(earlier_run, tmp_path / "new")
    assert finished(state) == [0, 2]
    assert WARNING in caplog.text and reason in caplog.text
    assert digest_of(2) not in stored(tmp_path / "new")


def test_a_changed_image_in_the_run_s_own_folder_is_noticed_before_it_is_trained_on(earlier_run, caplog):
    (earlier_run / "images" / digest_of(4)).write_bytes(content_of(50))
    assert finished(resumed(earlier_run, earlier_run)) == [0, 1]
    assert WARNING in caplog.text and "or have been changed" in caplog.text


def test_a_changed_copy_in_the_new_folder_is_copied_again(earlier_run, tmp_path):
    run = tmp_path / "new"
    resumed(earlier_run, run)
    path = run / "images" / digest_of(0)
    path.write_bytes(b"")  # as after a loss of power
    assert finished(resumed(earlier_run, run)) == [0, 1, 2]
    assert path.read_bytes() == content_of(0)


def test_a_folder_of_images_that_is_a_link_is_not_followed(earlier_run, tmp_path, caplog):
    link_the_folder(earlier_run / "images" / digest_of(0))
    assert finished(resumed(earlier_run, tmp_path / "new")) == []
    assert "3 of 3 finished groups" in caplog.text and not stored(tmp_path / "new")


def test_no_more_is_copied_than_the_limit(earlier_run, tmp_path, caplog, monkeypatch):
    sizes = [len(content_of(number)) for number in range(4)]
    monkeypatch.setattr(restored_images, "MAX_COPIED_BYTES", sum(sizes))
    assert finished(resumed(earlier_run, tmp_path / "new")) == [0, 1]
    assert WARNING in caplog.text and "of images are copied" in caplog.text


def change_rows(earlier_run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the first image of the checkpoint that an environment sent."""
    path = earlier_run / "checkpoints" / "step_000000000" / "experience.json"
    content = json.loads(path.read_text())
    change(content["groups"][0]["samples"][0]["turns"][1]["images"][0])
    path.write_text(json.dumps(content))


def test_a_checkpoint_names_images_by_digest_alone(earlier_run):
    rows: list[dict[str, Any]] = []
    change_rows(earlier_run, rows.append)
    assert rows == [{"digest": digest_of(0), "num_tokens": 4}]
    text = (earlier_run / "checkpoints" / "step_000000000" / "experience.json").read_text()
    assert str(earlier_run) not in text


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "/nowhere/images/x"])
def test_the_path_in_a_checkpoint_of_an_earlier_version_is_ignored(earlier_run, tmp_path, path):
    change_rows(earlier_run, lambda image: image.update(path=path))
    state = resumed(earlier_run, tmp_path / "new")
    group = state.alive[0]
    assert isinstance(group, Group)
    image = images_of(group.samples[0])[1]
    assert image.path == str(tmp_path / "new" / "images" / digest_of(0))


@pytest.mark.parametrize(
    "digest",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "../" * 20 + "etc",
        "a/" + "0" * 62,
        "0" * 63,
        "\ud800" * 64,
        "0" * 63 + "\n",
        ["0" * 64],
        None,
        7,
    ],
)
def test_a_checkpoint_whose_image_is_no_digest_is_refused_by_name(earlier_run, tmp_path, digest):
    change_rows(earlier_run, lambda image: image.update(digest=digest))
    with pytest.raises(CheckpointBroken, match="is not the digest of an image"):
        resumed(earlier_run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("num_tokens", [-1, True, 1.5, "4", None])
def test_a_checkpoint_whose_image_has_no_number_of_tokens_is_refused(earlier_run, tmp_path, num_tokens):
    change_rows(earlier_run, lambda image: image.update(num_tokens=num_tokens))
    with pytest.raises(CheckpointBroken, match="num_tokens is"):
        resumed(earlier_run, tmp_path / "new")


def test_a_run_whose_model_reads_no_images_refuses_a_checkpoint_with_images(earlier_run):
    checkpoint = earlier_run / "checkpoints" / "step_000000000"
    with pytest.raises(CheckpointBroken, match="a turn has an image"):
        _saved_state(checkpoint, cursor_in(earlier_run).prompt, None)


def test_a_group_is_generated_again_if_the_data_has_another_image_for_its_prompt(
    earlier_run, tmp_path, caplog
):
    """The data file is the same, and a file that it names was replaced by another one."""
    run = tmp_path / "new"
    other = ImageReference(str(run / "images" / digest_of(91)), digest_of(91), 1)
    questions = questions_in(run)
    first = cursor_in(run)
    changed_question = next(first).question
    questions[changed_question] = replace(questions[changed_question], images=(other,))
    checkpoint = earlier_run / "checkpoints" / "step_000000000"
    state = _saved_state(checkpoint, PromptCursor(questions, 3).prompt, run / "images")
    assert finished(state) == [1, 2]
    assert state.alive[0].prompt.images == (other,)
    assert (
        "1 finished groups of the checkpoint are generated again, because the data has other" in caplog.text
    )


def test_a_broken_file_of_a_prompt_s_image_is_removed_so_that_it_is_written_again(earlier_run):
    path = earlier_run / "images" / ROW_IMAGE
    path.write_bytes(b"")
    assert finished(resumed(earlier_run, earlier_run)) == [0, 1, 2]
    assert not path.exists()
    path.write_bytes(encoded(picture(90, 28, 28)))
    resumed(earlier_run, earlier_run)
    assert path.exists()
