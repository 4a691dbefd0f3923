"""A scripted run that can be killed and started again.

    python scripted_run.py FOLDER STALENESS STEPS [RANK WORLD_SIZE LORA_RANK PASSES]

`draw` is a run of one rank whose policy draws. Its engine draws one picture at a time, because the last bits of a forward
pass depend on the number of pictures in it. `see` is a run of one rank whose prompts have images.

Generation takes its time, so that groups are finished, under way and not begun when it ends. Ranks but the first ask rank 0
for their messages, through a socket in FOLDER.
"""

import asyncio
import os
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from fake_chain import Chain, chain_config
from flow_chain import FlowChain, darkness
from image_chain import ImageChain
from tiny_policy import SETTINGS

from async_grpo.cluster.make_trainer import make_trainer
from async_grpo.config.base_weights import base_digest
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.inference.drawing.engine import DrawingEngine
from async_grpo.messages import Message
from async_grpo.processes.image_files import read_image
from async_grpo.testing import FakeEngine, FakeVerification
from async_grpo.training.distributed import distributed_run, leave


class SlowEngine(FakeEngine):
    """Takes up to 30 ms for a completion, by its seed."""

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        for member, seed in seeds.items():
            await asyncio.sleep(0.03 * (seed % 97) / 97)
            async for completion in super().complete(prompt_token_ids, {member: seed}, sampling):
                yield completion


class SlowImageEngine(FakeEngine):
    """Takes up to 30 ms for a completion, by its seed, and reads the images of its prompt."""

    async def complete(self, prompt_token_ids, seeds, sampling=None, first_tokens=None, images=()):
        for image in images:
            read_image(image)
        for member, seed in seeds.items():
            await asyncio.sleep(0.03 * (seed % 97) / 97)
            async for completion in super().complete(prompt_token_ids, {member: seed}, sampling):
                yield completion


class SlowDrawing(DrawingEngine):
    """Takes up to 30 ms more for a picture, by its seed."""

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        for member, seed in seeds.items():
            await asyncio.sleep(0.03 * (seed % 97) / 97)
            async for picture in super().complete(prompt_token_ids, {member: seed}, sampling):
                yield picture


class SlowFlowChain(FlowChain):
    """A run that draws, one picture at a time."""

    engine_class = SlowDrawing
    max_pictures = 1


def draw(folder: Path, steps: int, *, by_nft: bool = False) -> None:
    """Train a policy that draws, or continue the run in the folder.

    Args:
        folder: The folder of the run.
        steps: Number of steps.
        by_nft: Whether to train by DiffusionNFT, with an old policy that differs from the trained one.
    """
    torch.set_num_threads(1)
    flow, options = {}, {}
    if by_nft:
        flow = {"trains_finished": True, "window": 0}
        options = {"flow_loss": "diffusion_nft", "temperature": 1.0, "kl_coef": 0.0}
        options["nft_old_decay_growth"] = 0.1
    chain = SlowFlowChain(
        folder,
        steps,
        flow,
        **options,
        max_staleness=0,
        checkpoint_every_s=0.3,
        deterministic=True,
        update_stats=False,
    )
    chain.train(lambda: FakeVerification(darkness))
    leave()


def see(folder: Path, steps: int) -> None:
    """Train a policy whose prompts have images, or continue the run in the folder."""
    torch.set_num_threads(1)
    options = {
        "max_staleness": 0,
        "checkpoint_every_s": 0.3,
        "deterministic": True,
        "update_stats": False,
        "keep_sample_groups": 0,
    }
    ImageChain(folder, steps, SlowImageEngine, **options).train()
    leave()


def scripted_config(staleness: int, steps: int, **changes: Any) -> RunConfig:
    options = {"checkpoint_every_s": 0.3, "deterministic": True, "update_stats": False} | changes
    return chain_config(num_training_batches=steps, max_staleness=staleness, **options)


class AskRank0:
    """`ExperienceSource` of a rank that has no controller; says first what to resume from."""

    def __init__(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.05)
        self._connection = Client(str(path))
        self.checkpoint: str = self._connection.recv()

    def start(self) -> None:
        """Rank 0 does."""

    def next_message(self, rank: int) -> Message:
        self._connection.send(rank)
        return self._connection.recv()


def serve(chain: Chain, path: Path, others: int) -> None:
    """Answer `AskRank0`, in threads."""
    listener = Listener(str(path))

    def answer(connection: Connection) -> None:
        connection.send(chain.settings.checkpoint)
        while True:
            try:
                connection.send(chain.link.next_message(connection.recv()))
            except EOFError:
                return

    def accept() -> None:
        for _ in range(others):
            threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def main(
    folder: Path,
    staleness: int,
    steps: int,
    rank: int = 0,
    world_size: int = 1,
    lora_rank: int = 0,
    passes: int = 1,
) -> None:
    torch.set_num_threads(1)
    if world_size > 1:  # MASTER_ADDR and MASTER_PORT are given
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    # Some of the runs compute log-probs over the most probable tokens
    options: dict[str, Any] = {"lora_rank": lora_rank, "top_p": 0.9 if staleness == 2 else 1.0}
    if passes > 1:  # each over a batch of two minibatches
        options |= {"passes_per_batch": passes, "old_policy": "current", "train_minibatch_size": 4}
    config = scripted_config(staleness, steps, **options)
    messages = folder / "messages"
    if rank == 0:
        messages.unlink(missing_ok=True)
        chain = Chain(folder, engine=SlowEngine, config=config, num_ranks=world_size)
        chain.settings = replace(chain.settings, lora=lora_settings(config, str(chain.folder)))
        if lora_rank:
            chain.digests_read = {"model_name_or_path": base_digest(str(chain.folder))}
        serve(chain, messages, world_size - 1)
        chain.train()
    else:
        source, model = AskRank0(messages), folder / "model"
        config = replace(config, model_name_or_path=str(model), output_dir=str(model / "out"))
        with distributed_run("cpu", timeout_s=60) as ranks:
            lora = lora_settings(config, config.model_name_or_path)
            settings = replace(SETTINGS, checkpoint=source.checkpoint, lora=lora)
            make_trainer(config, settings, ranks, source).run()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
