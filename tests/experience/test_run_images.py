"""The images of a group are files from its admission until its step is over, and come back with a resumed run."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from vision_model import encoded, picture

from async_grpo.errors import ConfigurationError
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.experience.plain_values import data_url
from async_grpo.experience.run_images import ImageSource, RunImages
from async_grpo.experience.state import ExperienceState
from async_grpo.messages import StepEnd
from async_grpo.testing import FakeGeneration, FakeVerification
from async_grpo.types import ImageReference, Prompt

NUM_QUESTIONS = 6


def question_of(number: int, folder: Path) -> Question:
    """A question with a picture of its own: of even numbers as a data URL, of odd numbers as a file."""
    content = encoded(picture(number, 28, 28))
    digest = hashlib.sha256(content).hexdigest()
    value = data_url(content, "image/png")
    if number % 2:
        value = f"{number}.png"
        (folder / value).write_bytes(content)
    return Question(
        np.array([50 + number], np.int32),
        {"input": f"q{number}", "answer": str(number)},
        images=(ImageReference(str(folder / "images" / digest), digest, 1),),
        image_sources=(ImageSource.of(value, folder),),
    )


@pytest.fixture
def questions(tmp_path) -> list[Question]:
    (tmp_path / "images").mkdir()
    return [question_of(number, tmp_path) for number in range(NUM_QUESTIONS)]


class WatchedGeneration(FakeGeneration):
    """Notes whether the images of each prompt are there when it is generated."""

    def __init__(self) -> None:
        super().__init__(length=lambda ordinal, member: 1 + member)
        self.had_images: list[bool] = []

    def generate(self, prompt, *arguments, **options):
        self.had_images.append(all(Path(image.path).is_file() for image in prompt.images))
        return super().generate(prompt, *arguments, **options)


def batcher_of(questions, **changes) -> ExperienceBatcher:
    """Three steps of two groups."""
    options = dict(num_training_batches=3, batch_size=2, samples_per_question=2, max_tokens_per_gpu=1000)
    options |= dict(experience_timeout_s=5.0, infinite_sampler_seed=0, keep_sample_groups=0, max_staleness=0)
    kept = changes.pop("kept", frozenset())
    config = BatchConfig(**options | changes)
    facts = RunFacts(kept_images=kept)
    return ExperienceBatcher(config, questions, WatchedGeneration(), FakeVerification(), facts=facts)


async def train(batcher: ExperienceBatcher, num_steps: int) -> None:
    await batcher.start()
    for _ in range(num_steps):
        while not isinstance(message := await batcher.next_message(0), StepEnd):
            pass
        batcher.generation.live = message.step + 1
        await batcher.weights_live(message.step + 1)


def stored(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "images").iterdir()}


def digests(questions: list[Question]) -> list[str]:
    return [question.images[0].digest for question in questions]


async def test_images_are_there_while_a_group_is_alive_and_gone_after_its_step(questions, tmp_path):
    batcher = batcher_of(questions)
    assert not stored(tmp_path)
    await train(batcher, 3)
    assert batcher.generation.had_images == [True] * 6
    assert not stored(tmp_path)
    # The user's own files, to which the run only had links, stay
    assert len(list(tmp_path.glob("*.png"))) == NUM_QUESTIONS // 2
    await batcher.close()


@pytest.mark.parametrize(
    ("options", "num_shown"), [({"keep_sample_groups": 1}, 3), ({"dump_samples_filename": "all.jsonl"}, 6)]
)
async def test_images_of_samples_that_people_see_stay(questions, tmp_path, options, num_shown):
    batcher = batcher_of(questions, **options)
    await train(batcher, 3)
    assert len(stored(tmp_path)) == num_shown
    await batcher.close()


async def test_images_that_an_evaluation_shares_with_the_training_stay(questions, tmp_path):
    kept = digests(questions)[:2]
    batcher = batcher_of(questions, kept=frozenset(kept))
    await train(batcher, 3)
    assert stored(tmp_path) == set(kept)
    await batcher.close()


async def test_a_resumed_run_writes_the_images_of_the_groups_that_were_alive(questions, tmp_path):
    first = batcher_of(questions, max_staleness=1)
    await train(first, 1)
    await asyncio.sleep(0.05)  # the groups of the next two steps end
    state = first.state(1)
    await first.close()
    state.save(tmp_path / "state")
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    second = batcher_of(questions, max_staleness=1)
    second.generation.live = 1
    second.restore(ExperienceState.load(tmp_path / "state", second.cursor.prompt))
    alive = {image for group in state.alive.values() for image in group.prompt.images}
    assert len(alive) >= 2
    await second.start()
    assert all(Path(image.path).is_file() for image in alive)
    await second.close()


async def test_an_image_of_two_groups_stays_until_both_are_over(questions, tmp_path):
    images = RunImages(questions, frozenset())
    prompts = [Prompt(number, questions[0].token_ids, {}, 0, questions[0].images) for number in range(2)]
    for prompt in prompts:
        await images.write(prompt)
    images.remove_unused(prompts[1:])
    assert stored(tmp_path) == {prompts[0].images[0].digest}
    images.remove_unused([])
    assert not stored(tmp_path)


async def test_a_file_that_vanished_during_the_run_is_named(questions, tmp_path):
    images = RunImages(questions, frozenset())
    (tmp_path / "1.png").unlink()
    prompt = Prompt(0, questions[1].token_ids, {}, 1, questions[1].images)
    with pytest.raises(ConfigurationError, match="1.png cannot be written to the run's folder"):
        await images.write(prompt)
    assert not stored(tmp_path)


def test_sources_are_absolute_because_another_process_writes_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shape.png").write_bytes(b"")
    source = ImageSource.of("shape.png", Path())
    assert source == ImageSource(tmp_path / "shape.png", None)
    assert replace(source, path=None).value is None
