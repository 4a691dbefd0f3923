"""Pictures of shapes to count, and a tiny model that reads pictures and often counts wrongly.

A picture has 64 x 64 pixels with up to 12 circles, squares and triangles. The question is how many of one kind there are.
The model is a Qwen2.5-VL of 0.8 million parameters. It is trained with supervised learning until it gives the right
answer with a probability of about one half. So it answers in the right form and often wrongly, and reinforcement
learning has something to teach.
"""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

KINDS = ("circles", "squares", "triangles")
MAX_COUNT = 4  # highest number of shapes of one kind in a picture
MIN_SHAPES = 3  # lowest number of shapes in a picture, so that no two pictures are alike
COLORS = ("crimson", "royalblue", "seagreen", "darkorange")
BACKGROUND = "white"
NUM_CELLS = 4  # number of cells along each side of a picture; a cell holds at most one shape
CELL = 16  # width and height of a cell, in pixels
SIZE = NUM_CELLS * CELL  # width and height of a picture, in pixels
RADII = (5, 6)  # half the width of a shape, in pixels
SHIFTS = (-1, 0, 1)  # distance of a shape from the middle of its cell, in pixels, in each direction
NUM_TRAIN = 512  # number of rows for reinforcement learning
NUM_HELDOUT = 128

PATCH_SIZE = 8
MERGE_SIZE = 2  # number of patches along each side of a token, which is a cell
WIDTH = 128
VISION_WIDTH = 64
HEAD_WIDTH = 32  # vLLM's attention on a processor refuses smaller heads
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Words that are a single token each. All other texts consist of bytes
WORDS = ("user", "assistant", "system", "How many ", " are there?", *KINDS)
# As in the folder of Qwen2.5-VL
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_POSITIONS = 512
BATCH_SIZE = 64  # number of pictures, each with a question about every kind
MAX_TRAINING_STEPS = 600
NUM_WARMUP_STEPS = 40
# The training ends when the right answer to the first question has this probability, in the mean over the last
# NUM_MEAN_STEPS steps
TARGET_PROBABILITY = 0.5
NUM_MEAN_STEPS = 10
LEARNING_RATE = 2e-3
LOG_EVERY = 50
IGNORED_LABEL = -100
# Changes with the recipe above, so that files of another recipe are not taken from the cache
RECIPE = "shapes-v3"
log = logging.getLogger(__name__)


def draw_picture(source: random.Random) -> tuple[Image.Image, dict[str, int]]:
    """Return a random picture, and how many shapes of each kind it has, from 0 to MAX_COUNT."""
    counts = dict.fromkeys(KINDS, 0)
    while sum(counts.values()) < MIN_SHAPES:
        counts = {kind: source.randint(0, MAX_COUNT) for kind in KINDS}
    picture = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
    canvas = ImageDraw.Draw(picture)
    cells = iter(source.sample(range(NUM_CELLS**2), sum(counts.values())))
    for kind, count in counts.items():
        for _ in range(count):
            row, column = divmod(next(cells), NUM_CELLS)
            x = column * CELL + CELL // 2 + source.choice(SHIFTS)
            y = row * CELL + CELL // 2 + source.choice(SHIFTS)
            _draw_shape(canvas, kind, x, y, source.choice(RADII), source.choice(COLORS))
    return picture, counts


def _draw_shape(canvas: ImageDraw.ImageDraw, kind: str, x: int, y: int, radius: int, color: str) -> None:
    """Draw a shape whose middle is at (x, y)."""
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circles":
        canvas.ellipse(box, fill=color)
    elif kind == "squares":
        canvas.rectangle(box, fill=color)
    else:
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=color)


def question(kind: str) -> str:
    """Return the question about the shapes of a kind."""
    return f"How many {kind} are there?"


def write_rows(folder: Path, name: str, num_rows: int, seed: int) -> Path:
    """Write a data file `<name>.jsonl`, and its pictures as PNG files in a folder of the same name.

    Returns:
        The data file.
    """
    source = random.Random(seed)
    pictures = folder / name
    pictures.mkdir(parents=True)
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            picture, counts = draw_picture(source)
            picture.save(pictures / f"{number}.png")
            kind = KINDS[number % len(KINDS)]
            content = [
                {"type": "image", "image": f"{name}/{number}.png"},
                {"type": "text", "text": question(kind)},
            ]
            row = {"messages": [{"role": "user", "content": content}], "answer": str(counts[kind])}
            file.write(json.dumps(row) + "\n")
    return path


def cached_shapes() -> Path:
    """Return the folder with `model`, `train.jsonl` and `heldout.jsonl` in the user's cache.

    The first call trains the model, which takes one to three minutes.
    """
    # Rewards may import this package, and should not load more than they need
    from async_grpo.data.smollm2 import cache_folder, made_once

    return made_once(cache_folder("shapes", RECIPE), make_shapes)


def make_shapes(folder: Path, *, max_steps: int = MAX_TRAINING_STEPS, seed: int = 0) -> None:
    """Train the model, and write it with its data files.

    Args:
        folder: The folder to write, which must not exist.
        max_steps: Maximum number of training steps; 0 writes a random model.
        seed: Seed of the weights and of all pictures.
    """
    import torch

    torch.manual_seed(seed)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_rows(unfinished, "train", NUM_TRAIN, seed + 1)
    write_rows(unfinished, "heldout", NUM_HELDOUT, seed + 2)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model_folder = unfinished / "model"
    tokenizer.save_pretrained(model_folder)
    _write_processor(model_folder)
    train_model(model, tokenizer, model_folder, max_steps, seed)
    model.save_pretrained(model_folder)
    unfinished.rename(folder)


def make_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte, the words of the task, and the control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any) -> Any:
    """Return a Qwen2.5-VL with random float32 weights."""
    from transformers import AutoConfig, GenerationConfig, Qwen2_5_VLForConditionalGeneration

    token_id = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": WIDTH // HEAD_WIDTH,
        "num_key_value_heads": WIDTH // HEAD_WIDTH,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "initializer_range": 0.06,  # the usual 0.02 is for wider networks
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 2 * VISION_WIDTH,
        "num_heads": VISION_WIDTH // HEAD_WIDTH,
        "out_hidden_size": WIDTH,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "window_size": SIZE,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.06,
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return model


def _write_processor(folder: Path) -> None:
    """Write the file of the image processor. It leaves pictures of SIZE as they are."""
    processor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": CELL**2,
        "max_pixels": SIZE**2,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")


class Lessons:
    """Makes batches of conversations about pictures, in which each kind of shape is asked for once, in random order.

    Args:
        tokenizer: The model's tokenizer.
        model_folder: Folder with the file of the image processor.
        config: The model's configuration.
        seed: Seed of the pictures.
    """

    def __init__(self, tokenizer: Any, model_folder: Path, config: Any, seed: int) -> None:
        from transformers import AutoImageProcessor

        self._tokenizer = tokenizer
        self._processor = AutoImageProcessor.from_pretrained(model_folder, local_files_only=True)
        self._image_token_id = config.image_token_id
        self._source = random.Random(seed)
        self._digits = np.array(
            [tokenizer.encode(str(count), add_special_tokens=False)[0] for count in range(MAX_COUNT + 1)]
        )

    def batch(self, num_pictures: int) -> tuple[dict[str, Any], np.ndarray]:
        """Return arguments of the model, and the answers (num_pictures, kinds) in the order of the questions."""
        import torch

        pictures = []
        sequences = []
        right_answers = []
        for _ in range(num_pictures):
            picture, counts = draw_picture(self._source)
            kinds = self._source.sample(KINDS, len(KINDS))
            answers = [counts[kind] for kind in kinds]
            pictures.append(picture)
            right_answers.append(answers)
            sequences.append(self._conversation(kinds, answers))
        input_ids = torch.tensor(sequences)
        processed = self._processor(images=pictures, return_tensors="pt")
        arguments = {
            "input_ids": input_ids,
            "labels": torch.where(self._is_answer(input_ids), input_ids, IGNORED_LABEL),
            "mm_token_type_ids": (input_ids == self._image_token_id).int(),
            **processed,
        }
        return arguments, np.array(right_answers)

    def answer_probabilities(self, logits: Any, input_ids: Any) -> np.ndarray:
        """Return the probability of each count, (sequences, kinds, counts), in the place of each answer."""
        is_digit = self._is_answer(input_ids) & (input_ids != self._tokenizer.eos_token_id)
        before = is_digit.roll(-1, dims=1)
        probabilities = logits[before].softmax(dim=-1)[:, self._digits]
        return probabilities.reshape(len(input_ids), len(KINDS), -1).numpy()

    def _conversation(self, kinds: list[str], answers: list[int]) -> list[int]:
        """Return the token ids of questions and answers about a picture. All conversations have the same length."""
        messages: list[dict[str, Any]] = []
        for kind, answer in zip(kinds, answers, strict=True):
            content: Any = question(kind)
            if not messages:
                content = [{"type": "image"}, {"type": "text", "text": content}]
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": str(answer)})
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        text = text.replace("<|image_pad|>", "<|image_pad|>" * NUM_CELLS**2)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _is_answer(self, input_ids: Any) -> Any:
        """Return which tokens (sequences, tokens) are answers or the token after an answer, which ends it."""
        assistant = self._tokenizer.convert_tokens_to_ids("assistant")
        is_role = input_ids == assistant
        # The role, a line break, the digit, the end
        return is_role.roll(2, dims=1) | is_role.roll(3, dims=1)


def train_model(model: Any, tokenizer: Any, model_folder: Path, max_steps: int, seed: int) -> None:
    """Train the model with supervised learning, until the right answer has TARGET_PROBABILITY."""
    import torch

    lessons = Lessons(tokenizer, model_folder, model.config, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    probabilities: list[float] = []
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / NUM_WARMUP_STEPS)
        arguments, answers = lessons.batch(BATCH_SIZE)
        output = model(**arguments)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        by_count = lessons.answer_probabilities(output.logits.detach(), arguments["input_ids"])
        right = np.take_along_axis(by_count, answers[..., None], axis=2)
        # A run asks one question about each picture, which is harder to learn than the later ones
        probabilities.append(float(right[:, 0].mean()))
        mean = np.mean(probabilities[-NUM_MEAN_STEPS:])
        has_reached_target = step >= NUM_MEAN_STEPS and mean >= TARGET_PROBABILITY
        if step % LOG_EVERY == 0 or has_reached_target:
            log.info("step %d: the right answer has the probability %.2f", step, mean)
        if has_reached_target:
            return
