"""Asynchronous GRPO from scratch: generation, scoring and training run at the same time, each at its own pace.

The names in `__all__` are public. Each is imported on first use: `from async_grpo import VerifierPool` imports neither
torch nor Ray.

>>> from async_grpo import VerifierPool
>>> VerifierPool.__module__
'async_grpo.rewards.pool'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from async_grpo.options.version import VERSION

if TYPE_CHECKING:  # only type checkers read these imports; `X as X` tells them that X is public
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
    from async_grpo.inference.generation_worker import GenerationWorker as GenerationWorker
    from async_grpo.inference.logprob_worker import LogprobWorker as LogprobWorker
    from async_grpo.launch.from_python import TrainResult as TrainResult
    from async_grpo.launch.from_python import train as train
    from async_grpo.launch.local_config import LocalConfig as LocalConfig
    from async_grpo.launch.local_run import run_locally as run_locally
    from async_grpo.launch.trl_names import AsyncGRPOTrainer as AsyncGRPOTrainer
    from async_grpo.launch.trl_names import accuracy_reward as accuracy_reward
    from async_grpo.rewards.pool import VerifierPool as VerifierPool
    from async_grpo.types import AdapterResult as AdapterResult
    from async_grpo.types import RewardStatus as RewardStatus
    from async_grpo.types import Verdict as Verdict

__version__ = VERSION

_MODULES = {
    "algorithm.advantages": ("ADVANTAGE_ESTIMATORS",),
    "algorithm.aggregation": ("aggregate_loss",),
    "algorithm.kl": ("kl_penalty",),
    "algorithm.losses": ("POLICY_LOSSES",),
    "algorithm.off_policy": ("importance_weights", "rejection_mask"),
    "config.run": ("RunConfig", "WorkerConfig"),
    "data.reward_registry": ("REWARD_ADAPTERS", "RewardType"),
    "errors": ("AsyncGrpoError", "ConfigurationError"),
    "experience.batcher": ("ExperienceBatcher",),
    "experience.worker_registry": ("WorkerRegistry",),
    "inference.generation_worker": ("GenerationWorker",),
    "launch.from_python": ("TrainResult", "train"),
    "launch.local_config": ("LocalConfig",),
    "launch.local_run": ("run_locally",),
    "launch.trl_names": ("AsyncGRPOTrainer", "accuracy_reward"),
    "inference.logprob_worker": ("LogprobWorker",),
    "rewards.pool": ("VerifierPool",),
    "types": ("AdapterResult", "RewardStatus", "Verdict"),
}
_HOME = {name: f"async_grpo.{module}" for module, names in _MODULES.items() for name in names}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'async_grpo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
