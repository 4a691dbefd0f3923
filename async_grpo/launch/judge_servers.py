"""The judge that `async-grpo run` serves on this machine: its options and its servers."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from async_grpo.config.rules import BrokenRules, idle
from async_grpo.options.fields import (
    LIST,
    POSITIVE,
    POSITIVE_SHARE,
    option,
)
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.judges.server import JudgeServer

log = logging.getLogger(__name__)
_judge = partial(option, panel="Judge")


@dataclass(frozen=True, kw_only=True)
class LocalJudge(RewardConfig):
    """Options of rewards, and of the judge model that `async-grpo run` serves for them."""

    judge_model: str | None = _judge(
        None,
        "Folder of a model to serve as a judge, for the rewards llm_judge, generative_rm or reward_model. By default "
        "no judge is served.",
    )
    judge_replicas: int = _judge(
        1, "Number of servers of the judge. Calls are balanced among them.", range=POSITIVE
    )
    judge_runner: str = _judge(
        "auto", "vLLM runner (--runner) of the judge's servers.", choices=("auto", "generate", "pooling")
    )
    judge_max_model_len: int | None = _judge(
        None,
        "Maximum length of the judge's prompt and reply together, in tokens. By default vLLM reads it from the model's "
        "configuration.",
        range=POSITIVE,
    )
    judge_gpus: str | None = _judge(
        None,
        "Comma list of visible GPUs, one for each judge server. Other programs may share these GPUs. By default each "
        "judge server gets one of the last GPUs exclusively.",
        form=LIST,
    )
    judge_gpu_memory_utilization: float | None = _judge(
        None,
        "Fraction of a GPU's memory that a judge server may take. On a shared GPU it must be less than the other "
        "programs leave free. By default vLLM decides.",
        range=POSITIVE_SHARE,
    )

    @property
    def model_urls(self) -> tuple[str, ...]:
        """URLs of the judges' servers. A server that the run will start has no port yet, so its URL is a placeholder."""
        return ("http://127.0.0.1",) if self.judge_model else super().model_urls

    @property
    def shared_gpus(self) -> list[str]:
        """The GPU ids in `--judge-gpus`, one for each server."""
        return [] if self.judge_gpus is None else [gpu.strip() for gpu in self.judge_gpus.split(",")]

    @property
    def judge_gpus_alone(self) -> int:
        """Number of GPUs that only the judge uses."""
        return self.judge_replicas if self.judge_model and self.judge_gpus is None else 0


def broken_judge(config: LocalJudge, visible_gpus: Sequence[str]) -> BrokenRules:
    """Yield the names of the judge's options that cannot work, each with the reason.

    Args:
        config: The options.
        visible_gpus: Ids of the GPUs that this process may use.
    """
    if config.judge_model is None:
        flags = "judge_replicas judge_runner judge_max_model_len judge_gpus judge_gpu_memory_utilization"
        yield from idle(config, flags, "without --judge-model")
        if not config.judge_urls:
            yield from idle(config, "judge_idle_sleep_s", "without --judge-model or --judge-urls")
        return
    if config.judge_urls:
        yield "judge_urls", "cannot be combined with --judge-model: leave one of the two out"
    if not Path(config.judge_model).is_dir():
        yield "judge_model", "is no folder here"
    # Refuse GPUs that are not visible, because another user may work on them
    invisible_gpus = [repr(gpu) for gpu in config.shared_gpus if gpu not in visible_gpus]
    if invisible_gpus:
        explanation = "because there is none: leave it out, and the CPU serves"
        if visible_gpus:
            explanation = f"which are {', '.join(visible_gpus)}"
        names = ", ".join(invisible_gpus)
        yield "judge_gpus", f"names {names}, none of the visible GPUs, {explanation} (CUDA_VISIBLE_DEVICES)"
    if config.shared_gpus and len(config.shared_gpus) != config.judge_replicas:
        yield "judge_gpus", f"must name one GPU for each of the {config.judge_replicas} servers"


@contextmanager
def serving(config: LocalJudge, gpus: list[str], log_folder: Path, eager: bool) -> Iterator[dict[str, str]]:
    """Run the judge's servers, and yield the options that name their addresses to the run's rewards.

    Without `--judge-model` no server is started, and the options are empty.

    Args:
        config: The options.
        gpus: Ids of the GPUs that this process may use; the last ones serve the judge unless `--judge-gpus` is set.
        log_folder: Folder of the servers' logs.
        eager: Start vLLM without compilation and CUDA graphs.

    Raises:
        ConfigurationError: The servers cannot work with these options.
        WorkerLost: A server ended while it was starting.
        DeadlineExceeded: A server did not start in time.
    """
    if not config.judge_model:
        yield {}
        return
    log.info("starting %d server(s) of the judge %s", config.judge_replicas, config.judge_model)
    server_options = {
        "enforce-eager": eager,
        "max-model-len": config.judge_max_model_len,
        "gpu-memory-utilization": config.judge_gpu_memory_utilization,
    }
    with JudgeServer(
        config.judge_model,
        log_folder=log_folder,
        replicas=config.judge_replicas,
        devices=config.shared_gpus or gpus[-config.judge_replicas :] or None,
        runner=config.judge_runner,
        options={name: value for name, value in server_options.items() if value is not None},
        sleep_mode=config.judge_idle_sleep_s is not None,
    ) as server:
        if server.sleep_mode:
            # Let the server sleep. Otherwise other programs on its GPUs might not have enough memory to start
            server.sleep()
        yield {"judge_urls": ",".join(server.urls), "judge_model_id": folder_id(config.judge_model)}


def folder_id(folder: str | os.PathLike[str]) -> str:
    """Return a digest of the names, sizes and modification times of a folder's files.

    The path of the folder does not matter.
    """
    listing = []
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        status = path.stat()
        listing.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(listing).encode()).hexdigest()
