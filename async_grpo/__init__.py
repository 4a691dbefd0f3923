"""Asynchronous GRPO from scratch: generation, scoring and training each at their own pace, one step apart.

The names in `__all__` are the public ones. Each is imported on first use: `from async_grpo import VerifierPool`
brings in neither torch nor Ray.

>>> from async_grpo import VerifierPool
>>> VerifierPool.__module__
'async_grpo.rewards.pool'
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the list of the public names, which is read below: `X as X` says that X is one
    from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
    from async_grpo.algorithm.aggregation import aggregate_loss as aggregate_loss
    from async_grpo.algorithm.kl import kl_penalty as kl_penalty
    from async_grpo.algorithm.losses import POLICY_LOSSES as POLICY_LOSSES
    from async_grpo.algorithm.off_policy import importance_weights as importance_weights
    from async_grpo.algorithm.off_policy import rejection_mask as rejection_mask
    from async_grpo.config.run import RunConfig as RunConfig
    from async_grpo.config.run import WorkerConfig as WorkerConfig
    from async_grpo.data.reward_registry import REWARD_ADAPTERS as REWARD_ADAPTERS
    from async_grpo.data.reward_registry import RewardType as RewardType
    from async_grpo.errors import AsyncGrpoError as AsyncGrpoError
    from async_grpo.errors import ConfigurationError as ConfigurationError
    from async_grpo.experience.batcher import ExperienceBatcher as ExperienceBatcher
    from async_grpo.experience.worker_registry import WorkerRegistry as WorkerRegistry
    from async_grpo.generation.generation_worker import GenerationWorker as GenerationWorker
    from async_grpo.launch.local_run import LocalConfig as LocalConfig
    from async_grpo.launch.local_run import run_locally as run_locally
    from async_grpo.logprob.logprob_worker import LogprobWorker as LogprobWorker
    from async_grpo.rewards.pool import VerifierPool as VerifierPool
    from async_grpo.types import AdapterResult as AdapterResult
    from async_grpo.types import RewardStatus as RewardStatus
    from async_grpo.types import Verdict as Verdict

__version__ = "0.1.0"

_SOURCE = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
_IMPORTS = [node for node in _SOURCE if isinstance(node, ast.ImportFrom)]
_HOME = {one.name: node.module for node in _IMPORTS for one in node.names if one.asname}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'async_grpo' has no attribute {name!r}")
    return getattr(import_module(str(_HOME[name])), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
