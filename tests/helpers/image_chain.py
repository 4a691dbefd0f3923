"""A whole run whose prompts have images, in one process: the trainer reads them, and the engine draws tokens at random."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_chain import Chain, chain_config
from tiny_policy import SETTINGS
from vision_model import save_vision_model, vision_tokenizer
from vision_prompts import image_prompts, picture_row, question

from async_grpo.cluster.controller import RunController
from async_grpo.experience.dataset import Question
from async_grpo.modeling.image_models import unsampled_token_ids
from async_grpo.modeling.load import load_config
from async_grpo.processes.image_files import RUN_IMAGES
from async_grpo.testing import InProcessRun, InProcessWorker
from async_grpo.training.checkpoint_folder import newest

MAX_TOKENS = 256
NUM_ROWS = 6


class ImageChain(Chain):
    """A `Chain` whose model is a tiny Qwen2.5-VL. Its prompts have no, one or two images."""

    def __init__(self, folder: Path, steps: int, engine: Any, **changes: Any) -> None:
        self.num_ranks = 1
        self.lines = []
        self.folder = folder / "model"
        if not self.folder.exists():
            # The run may be killed while the model is being written
            save_vision_model(folder / "unfinished").rename(self.folder)
        options = {
            "num_training_batches": steps,
            "max_tokens_per_gpu": 4 * MAX_TOKENS,
            "model_name_or_path": str(self.folder),
            "output_dir": str(folder / "out"),
        }
        self.config = chain_config(**options | changes)
        found = newest(self.config.output_path)
        model = load_config(self.folder)
        tokenizer = vision_tokenizer()
        self.settings = replace(
            SETTINGS,
            vocab_size=len(tokenizer),
            stop_token_ids=(tokenizer.eos_token_id,),
            max_total_tokens=MAX_TOKENS,
            checkpoint=str(found[0]) if found else "",
            deterministic=self.config.deterministic,
            image_token_id=model.image_token_id,
            unsampled_token_ids=unsampled_token_ids(model),
            most_images=2,
            image_processor=image_prompts(self.folder, folder).processor_name,
        )
        self._shared = self.settings
        self.images_folder = self.config.output_path.absolute() / RUN_IMAGES
        self.controller = RunController(self.settings, 20.0, InProcessWorker.connect, self.config.scheduling)
        self.digests_read = {}
        self.link = InProcessRun(self.controller)
        self.workers = [self.join("g0", engine)]

    def questions(self) -> list[Question]:
        rows = [picture_row(range(number, number + number % 3)) for number in range(NUM_ROWS)]
        return [question(self.folder, self.images_folder, row) for row in rows]
