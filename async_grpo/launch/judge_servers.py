"""The judge of a run on this machine: what may be said of it on the command line, and its servers."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from async_grpo.config.compatibility import Broken, idle
from async_grpo.options.fields import POSITIVE, POSITIVE_SHARE, option
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.judges.server import JudgeServer

log = logging.getLogger(__name__)
_judge = partial(option, panel="Judge")


@dataclass(frozen=True, kw_only=True)
class LocalJudge(RewardConfig):
    """A model that `async-grpo run` serves for the judges of the registry file."""

    judge_model: str | None = _judge(
        None,
        "Model folder to serve for llm_judge, generative_rm or reward_model. By default no judge is served.",
    )
    judge_replicas: int = _judge(
        1, "Number of judge servers, among which calls are balanced.", range=POSITIVE
    )
    judge_runner: str = _judge(
        "auto", "vLLM's runner for the judge.", choices=("auto", "generate", "pooling")
    )
    judge_max_model_len: int | None = _judge(
        None,
        "Maximum tokens of the judge's prompt and reply together. The default is vLLM's for the model.",
        range=POSITIVE,
    )
    judge_gpus: str | None = _judge(
        None,
        "Comma list of visible GPUs, one for each judge server, which other programs may use, too. By default each "
        "judge server has one of the last GPUs to itself.",
    )
    judge_gpu_memory_utilization: float | None = _judge(
        None,
        "Share of a GPU's memory that a judge server may take. On a shared GPU it must be less than the others "
        "leave. The default is vLLM's.",
        range=POSITIVE_SHARE,
    )

    @property
    def model_urls(self) -> tuple[str, ...]:
        """As of any run; of servers that will be started it is only known that they will be here."""
        return ("http://127.0.0.1",) if self.judge_model else super().model_urls

    @property
    def shared_gpus(self) -> list[str]:
        """The ids in `--judge-gpus`, a server each."""
        return [] if self.judge_gpus is None else [gpu.strip() for gpu in self.judge_gpus.split(",")]

    @property
    def judge_gpus_alone(self) -> int:
        """How many GPUs belong to the judge alone."""
        return self.judge_replicas if self.judge_model and self.judge_gpus is None else 0


def broken_judge(c: LocalJudge, visible: Sequence[str]) -> Broken:
    """Yield what can never work; `visible` holds the ids of the GPUs that this process may use."""
    if c.judge_model is None:
        flags = "judge_replicas judge_runner judge_max_model_len judge_gpus judge_gpu_memory_utilization"
        yield from idle(c, flags, "without --judge-model")
        if not c.judge_urls:
            yield from idle(c, "judge_idle_sleep_s", "without --judge-model or --judge-urls")
        return
    if c.judge_urls:
        yield "judge_urls", "stands beside --judge-model: leave one of the two out"
    if not Path(c.judge_model).is_dir():
        yield "judge_model", "is no folder here"
    # By any other id a server may take a GPU that somebody else works on
    if unknown := ", ".join(repr(gpu) for gpu in c.shared_gpus if gpu not in visible):
        none = "for there is none: leave it out, and the CPU serves"
        shown = f"which are {', '.join(visible)}" if visible else none
        yield "judge_gpus", f"names {unknown}, none of the visible GPUs, {shown} (CUDA_VISIBLE_DEVICES)"
    if c.shared_gpus and len(c.shared_gpus) != c.judge_replicas:
        yield "judge_gpus", f"must name one GPU for each of the {c.judge_replicas} servers"


@contextmanager
def serving(config: LocalJudge, gpus: list[str], log_folder: Path, eager: bool) -> Iterator[dict[str, str]]:
    """Start the judge's servers if there are to be any, and yield the options by which the run's judges find them.

    ConfigurationError: the servers cannot work so. WorkerLost, DeadlineExceeded: one of them did not start.
    """
    if not config.judge_model:
        yield {}
        return
    log.info("starting %d server(s) of the judge %s", config.judge_replicas, config.judge_model)
    length, share = config.judge_max_model_len, config.judge_gpu_memory_utilization
    options = {"enforce-eager": eager, "max-model-len": length, "gpu-memory-utilization": share}
    with JudgeServer(
        config.judge_model,
        log_folder=log_folder,
        replicas=config.judge_replicas,
        devices=config.shared_gpus or gpus[-config.judge_replicas :] or None,
        runner=config.judge_runner,
        options={name: value for name, value in options.items() if value is not None},
        sleep_mode=config.judge_idle_sleep_s is not None,
    ) as server:
        if server.sleep_mode:
            server.sleep()  # or those who share its GPUs would find no room when they start
        yield {"judge_urls": ",".join(server.urls), "judge_model_id": folder_id(config.judge_model)}


def folder_id(folder: str | os.PathLike[str]) -> str:
    """Tells a folder from another with other files (their names, sizes and times), wherever it lies."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    listing = [(str(one.relative_to(folder)), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return hashlib.sha256(repr(listing).encode()).hexdigest()
