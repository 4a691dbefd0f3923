"""Images that environments and agents send: read by the engine, trained on, bounded, and removed with their group."""

import hashlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
from chat_templates import Talkative
from PIL import Image
from scripted_play import run
from vision_model import encoded, picture, vision_tokenizer

from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.host import _situation
from async_grpo.environments.images import ConversationImages, row_conversation
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.openai_server.request_body import MAX_BYTES_WITH_IMAGES, max_body_bytes
from async_grpo.environments.played import Played
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.errors import ConfigurationError
from async_grpo.experience.plain_values import data_url
from async_grpo.experience.run_images import RunImages, images_of
from async_grpo.experience.state import _sample, _sample_row
from async_grpo.types import Completion, Group, ImageReference, Prompt, RewardStatus, Sample, Verdict

TOKENIZER = vision_tokenizer()
PLACEHOLDER = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
LOOK = {"type": "text", "text": "Look"}
LIMITS = TrajectoryLimits(turns=20, tokens=2000, turn_tokens=None, seconds=60, vocabulary=len(TOKENIZER))


class Reader:
    """An image processor of 28 x 28 pixels per token."""

    def num_tokens(self, width: int, height: int) -> int:
        return (width // 28) * (height // 28)


class Policy(Talkative):
    """Says "ok", and keeps the prompts that it gets."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, random.Random(0))
        self._dice.random = lambda: 0.5  # no turn is cut
        self.prompts: list[Prompt] = []

    def _says(self) -> str:
        return "ok"

    async def take_stats(self):
        return {}

    async def generate(self, prompt, count, sampling=None, session=None):
        self.prompts.append(prompt)
        async for completion in super().generate(prompt, count, sampling, session):
            yield completion


def url_of(seed: int, width: int = 56, height: int = 28) -> str:
    return data_url(encoded(picture(seed, width, height)), "image/png")


def digest_of(seed: int, width: int = 56, height: int = 28) -> str:
    return hashlib.sha256(encoded(picture(seed, width, height))).hexdigest()


def shows(*addresses: str, text: str = "What is this?"):
    """A message of the user with images, as in OpenAI's API."""
    parts = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture
def files() -> RunImages:
    return RunImages([], frozenset())


@pytest.fixture
def chat(tmp_path, files) -> Chat:
    images = ConversationImages(Reader(), PLACEHOLDER, 3, tmp_path / "images", files)
    return Chat(TOKENIZER, images=images)


def played(chat: Chat, program, prompt: Prompt | None = None) -> tuple[Completion, Policy, Prompt]:
    """Play a program, and return its trajectory, the policy with its prompts, and the first prompt."""
    prompt = prompt or Prompt(7, np.array([5, 6], np.int32), {"input": "ab"}, 0)
    policy = Policy(chat)
    playing = Played(policy, program, chat, LIMITS)

    async def play():
        return [one async for one in playing.generate(prompt, 1)]

    (trajectory,) = run(play())
    return trajectory, policy, prompt


def sample_of(trajectory: Completion, prompt: Prompt) -> Sample:
    return Sample(prompt, trajectory, Verdict(RewardStatus.OK, 1.0))


async def looks_twice(prompt, policy):
    first = await policy.complete([shows(url_of(1))])
    await policy.complete([shows(url_of(1)), first.message, shows(url_of(2, 84, 56), text="And this?")])
    return policy.trajectory(1.0)


def test_the_engine_reads_images_in_their_order_and_a_second_turn_goes_on_with_the_first(chat, tmp_path):
    trajectory, policy, prompt = played(chat, looks_twice)
    assert not trajectory.failure
    first, second = policy.prompts
    assert [image.digest for image in second.images] == [digest_of(1), digest_of(2, 84, 56)]
    assert [image.num_tokens for image in second.images] == [2, 6]
    assert first.images == second.images[:1]
    for engine_prompt in policy.prompts:
        num_expected = sum(image.num_tokens for image in engine_prompt.images)
        assert (engine_prompt.token_ids == PLACEHOLDER).sum() == num_expected
    for image in second.images:
        assert hashlib.sha256(Path(image.path).read_bytes()).hexdigest() == image.digest
    sample = sample_of(trajectory, prompt)
    assert sample.sequences == [sample] and images_of(sample) == second.images
    assert [turn.images for turn in trajectory.turns] == [second.images[:1], second.images[1:]]
    # What is trained on is what the engine read, followed by what it sampled
    assert sample.token_ids[: len(second.token_ids)].tolist() == second.token_ids.tolist()


def test_the_same_words_about_another_image_are_another_history(chat):
    async def looks_elsewhere(prompt, policy):
        first = await policy.complete([shows(url_of(1))])
        await policy.complete([shows(url_of(2)), first.message, {"role": "user", "content": "And?"}])
        return policy.trajectory(1.0)

    trajectory, _, prompt = played(chat, looks_elsewhere)
    sequences = sample_of(trajectory, prompt).sequences
    assert [[image.digest for image in images_of(sequence)] for sequence in sequences] == [
        [digest_of(1)],
        [digest_of(2)],
    ]


def test_a_question_about_another_image_is_no_retry(chat):
    async def asks_about_both(prompt, policy):
        await policy.complete([shows(url_of(1))])
        second = await policy.complete([shows(url_of(2))])
        await policy.complete([shows(url_of(2)), second.message, {"role": "user", "content": "And?"}])
        assert not policy.recorder.abandoned_numbers
        return policy.trajectory(1.0)

    trajectory, _, _ = played(chat, asks_about_both)
    assert not trajectory.failure


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([shows("https://example.com/a.png")], "is no data URL: files and remote addresses are not read"),
        ([shows("/etc/passwd")], "is no data URL"),
        ([shows("file:///etc/passwd")], "is no data URL"),
        ([shows("data:image/png;base64,AAAA")], "cannot be decoded"),
        ([shows(url_of(1)[:-200])], "cannot be decoded|not in base64"),
        ([shows(*[url_of(seed) for seed in range(4)])], "more than 3 images"),
        ([{**shows(url_of(1)), "role": "system"}], "only messages of the user may have images"),
        ([{"role": "user", "content": [{"type": "image"}]}], "names no image"),
    ],
)
def test_an_image_that_cannot_be_used_fails_its_request_alone(chat, messages, words):
    async def asks(prompt, policy):
        with pytest.raises(ConfigurationError, match=words):
            await policy.complete(messages)
        await policy.complete([shows(url_of(1))])
        return policy.trajectory(1.0)

    trajectory, policy, _ = played(chat, asks)
    assert not trajectory.failure and len(policy.prompts) == 1


def test_a_placeholder_spelled_by_an_environment_stays_text(chat):
    async def asks(prompt, policy):
        await policy.complete([shows(url_of(1), text="<|image_pad|> is a word")])
        return policy.trajectory(1.0)

    _, policy, _ = played(chat, asks)
    assert (policy.prompts[0].token_ids == PLACEHOLDER).sum() == 2


def test_a_model_of_texts_refuses_images_by_name():
    async def asks(prompt, policy):
        await policy.complete([shows(url_of(1))])

    trajectory, policy, _ = played(Chat(TOKENIZER), asks)
    assert "the model reads texts only" in trajectory.failure and not policy.prompts


def test_the_images_of_the_row_begin_the_conversation_and_are_not_stored_again(chat, tmp_path):
    image = ImageReference(str(tmp_path / "row.png"), digest_of(5), 2)
    messages = [{"role": "user", "content": [{"type": "image", "image": "row.png"}, LOOK]}]
    prompt = Prompt(7, np.array([5], np.int32), {"input": "ab", "messages": messages}, 0, (image,))

    async def plays_the_row(prompt, policy):
        await policy.complete(row_conversation(prompt))
        return policy.trajectory(1.0)

    trajectory, policy, _ = played(chat, plays_the_row, prompt)
    assert not trajectory.failure
    assert policy.prompts[0].images == (image,) and not (tmp_path / "images").exists()


def test_an_environment_may_return_images_of_pillow():
    message = {"role": "user", "content": [{"type": "image", "image": picture(1, 56, 28)}]}
    answer = _situation(object(), [message])
    sent = json.loads(json.dumps(answer))["observation"][0]["content"][0]["image"]
    assert sent == url_of(1)


def test_images_are_removed_with_their_group_and_those_of_evaluations_stay(chat, files, tmp_path):
    def stored() -> set[str]:
        return {path.name for path in (tmp_path / "images").iterdir()}

    _, _, prompt = played(chat, looks_twice)
    held_out = replace(prompt, ordinal=-1)

    async def looks_once(prompt, policy):
        await policy.complete([shows(url_of(3))])
        return policy.trajectory(1.0)

    played(chat, looks_once, held_out)
    assert stored() == {digest_of(1), digest_of(2, 84, 56), digest_of(3)}
    files.remove_unused([prompt])
    assert len(stored()) == 3
    files.remove_unused([])
    assert stored() == {digest_of(3)}


def test_a_checkpoint_has_the_images_of_turns(chat, files, tmp_path):
    trajectory, _, prompt = played(chat, looks_twice)
    sample = sample_of(trajectory, prompt)
    row = json.loads(json.dumps(_sample_row(sample)))
    row.pop("tokens")
    arrays = {name: getattr(trajectory, name) for name in ("token_ids", "logprobs", "versions")}
    restored = _sample(prompt, row, arrays, None, tmp_path / "images")
    assert images_of(restored) == images_of(sample)
    # The images of a group that a resumed run restores are not removed before its step
    resumed = RunImages([], frozenset())
    resumed.restore([Group(prompt, (restored,), 0, 0)])
    resumed.remove_unused([prompt])
    assert all(Path(image.path).exists() for image in images_of(sample))
    resumed.remove_unused([])
    assert not any(Path(image.path).exists() for image in images_of(sample))


@asynccontextmanager
async def serving(chat: Chat) -> AsyncIterator[tuple[Policy, TrajectoryClient, openai.AsyncOpenAI]]:
    """Open an endpoint of this chat with one trajectory, and yield its policy and clients."""
    endpoint = AgentEndpoint()
    await endpoint.start()
    policy = Policy(chat)
    prompt = Prompt(0, np.empty(0, np.int32), {"input": "row"}, 0)
    trajectory = TrajectoryClient(policy, TrajectoryRecorder(chat), prompt, 0, LIMITS)
    key, _ = endpoint.open(trajectory)
    try:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
            yield policy, trajectory, client
    finally:
        await endpoint.close()


def ask_endpoint(chat: Chat, body: bytes, path: str = "chat/completions") -> tuple[int, dict]:
    """Send a request to an endpoint of this chat, and return (status, answer)."""

    async def story():
        async with serving(chat) as (_, _, client), aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {client.api_key}"}
            async with session.post(f"{client.base_url}{path}", data=body, headers=headers) as answer:
                return answer.status, await answer.json()

    return run(story())


def test_the_endpoint_takes_data_urls_and_refuses_remote_addresses(chat, tmp_path):
    # A photo of ordinary size is larger than the limit of texts
    photo = picture(1, 28 * 12, 28 * 12)
    address = data_url(encoded(photo), "image/png")
    assert len(address) > max_body_bytes(LIMITS.tokens)
    status, answer = ask_endpoint(chat, json.dumps({"messages": [shows(address)]}).encode())
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 144
    (stored,) = (tmp_path / "images").iterdir()
    assert Image.open(stored).size == photo.size
    remote = json.dumps({"messages": [shows("https://example.com/a.png")]}).encode()
    status, answer = ask_endpoint(chat, remote)
    assert status == 400 and "is no data URL" in answer["error"]["message"]
    status, answer = ask_endpoint(chat, b" " * (MAX_BYTES_WITH_IMAGES + 1))
    assert status == 413 and "at most 33554432 are allowed" in answer["error"]["message"]
    status, answer = ask_endpoint(Chat(TOKENIZER), json.dumps({"messages": [shows(url_of(1))]}).encode())
    assert status == 400 and "the model reads texts only" in answer["error"]["message"]


def input_image(seed: int) -> dict:
    return {"type": "input_image", "image_url": url_of(seed), "detail": "low"}


def test_the_responses_api_takes_images_and_continues_them_by_id_or_in_full(chat):
    async def story():
        async with serving(chat) as (policy, trajectory, client):
            create = client.responses.create
            question = {"role": "user", "content": [input_image(1), {"type": "input_text", "text": "What?"}]}
            first = await create(model="policy", input=[question])
            assert first.output_text == "ok"
            more = {"role": "user", "content": [{"type": "input_text", "text": "And?"}, input_image(2)]}
            second = await create(model="policy", input=[more], previous_response_id=first.id)
            await create(model="policy", input=[question, *first.output, more, *second.output, question])
            digests = [[image.digest for image in prompt.images] for prompt in policy.prompts]
            assert digests == [
                [digest_of(1)],
                [digest_of(1), digest_of(2)],
                [digest_of(1), digest_of(2), digest_of(1)],
            ]
            # Each turn continues the tokens before it, and images stand where the messages have them
            for earlier, later in itertools.pairwise(policy.prompts):
                assert np.array_equal(later.token_ids[: len(earlier.token_ids)], earlier.token_ids)
            text = TOKENIZER.decode(policy.prompts[1].token_ids)
            assert text.index("<|image_pad|>") < text.index("What?")
            assert text.index("And?") < text.rindex("<|image_pad|>")
            assert trajectory.recorder.num_rewritten == 0

    run(story())


def test_both_apis_make_the_same_prompt_of_the_same_images(chat):
    async def story():
        async with serving(chat) as (policy, _, client):
            await client.chat.completions.create(model="policy", messages=[shows(url_of(1), text="What?")])
            parts = [input_image(1), {"type": "input_text", "text": "What?"}]
            await client.responses.create(model="policy", input=[{"role": "user", "content": parts}])
            by_chat, by_responses = policy.prompts
            assert np.array_equal(by_chat.token_ids, by_responses.token_ids)
            assert by_chat.images == by_responses.images

    run(story())


def test_the_responses_api_takes_photos_as_large_as_chat_completions_does(chat):
    address = data_url(encoded(picture(1, 28 * 12, 28 * 12)), "image/png")
    assert len(address) > max_body_bytes(LIMITS.tokens)
    content = [{"type": "input_image", "image_url": address}]
    body = json.dumps({"input": [{"role": "user", "content": content}]}).encode()
    status, answer = ask_endpoint(chat, body, "responses")
    assert status == 200 and answer["usage"]["input_tokens"] > 144


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}, "is no data URL"),
        ({"content": [{"type": "input_image", "image_url": "/etc/passwd"}]}, "is no data URL"),
        (
            {"content": [{"type": "input_image", "file_id": "file-1"}]},
            "input.0.content.0.file_id: no files are stored here: send the image as a data URL in image_url",
        ),
        ({"content": [{"type": "input_image"}]}, "input.0.content.0.image_url: Field required"),
        ({"content": [{"type": "input_file", "file_id": "a"}]}, "the type 'input_file' is not supported"),
        ({"role": "developer", "content": [input_image(1)]}, "only messages of the user may have images"),
        ({"role": "assistant", "content": [input_image(1)]}, "only messages of the user may have images"),
        (
            {"type": "function_call_output", "call_id": "a", "output": [input_image(1)]},
            "the role 'tool' has an image, and only messages of the user may have images",
        ),
    ],
)
def test_the_responses_api_refuses_images_that_it_cannot_read_by_name(chat, item, reason):
    item = item if "type" in item else {"role": "user", **item}
    status, answer = ask_endpoint(chat, json.dumps({"input": [item]}).encode(), "responses")
    assert status == 400 and reason in answer["error"]["message"], answer


def test_a_model_of_texts_refuses_images_of_the_responses_api():
    body = json.dumps({"input": [{"role": "user", "content": [input_image(1)]}]}).encode()
    status, answer = ask_endpoint(Chat(TOKENIZER), body, "responses")
    assert status == 400 and "the model reads texts only" in answer["error"]["message"]
