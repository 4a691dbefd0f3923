"""Many micro-batches, one optimizer step whose gradient does not know how many there were.

Gradients are summed un-normalised; the count that divides them is all-reduced once, at the end of the step.
A mean per micro-batch or per rank would weigh a token by the company it was packed with.
"""

import math
import resource
import sys

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from async_grpo.algorithm.diagnostics import mismatch_report, mismatch_sums
from async_grpo.algorithm.value_loss import explained_variance
from async_grpo.errors import NonFiniteGradient
from async_grpo.modeling.policy import PolicyModel
from async_grpo.modeling.shards import local_shard
from async_grpo.training.distributed import Ranks
from async_grpo.training.norms import UpdateStatistics, tensor_norms
from async_grpo.training.objective import Objective, StepTerms
from async_grpo.training.whole_step import step_terms
from async_grpo.types import MicroBatch

# Reported by every step, also where the loss in use does not compute them
ALWAYS_REPORTED = (
    "avg_kl_div",
    "clip_frac_low",
    "clip_frac_high",
    "entropy",
    "ratio_mean",
    "ratio_max",
)


NOTHING_COMPARED = {name: value.item() for name, value in mismatch_sums(*[torch.zeros(0, 0)] * 3).items()}


class GradientAccumulator:
    """`add` micro-batches, then `finish` the step; both are collectives of a sharded policy.

    Every rank must add the same number of micro-batches per step (dummies where it has none): each one is a
    round of all-gathers and reduce-scatters that all ranks take part in.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        objective: Objective,
        ranks: Ranks,
        *,
        max_grad_norm: float = 1.0,
        update_stats: bool = False,
    ) -> None:
        self._policy, self._optimizer, self._scheduler = policy, optimizer, scheduler
        self._objective, self._ranks = objective, ranks
        self._max_grad_norm, self._update_stats = max_grad_norm, update_stats
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        self._waiting: list[MicroBatch] = []  # for the end of their step
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._histogram: Tensor | float = 0.0

    def add(self, batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch; or keep it, if the objective must see its whole step first."""
        if self._objective.needs_whole_step:
            self._objective.check_inputs(batch)
            self._waiting.append(batch)
        else:
            self._backward(batch)

    def _backward(self, batch: MicroBatch, terms: StepTerms | None = None) -> None:
        """What it adds to the metrics stays on the device."""
        contribution = self._objective(self._policy, batch, terms)
        contribution.loss.backward()
        self._histogram = self._histogram + contribution.ratio_histogram
        for name, value in contribution.sums.items():
            self._sums[name] = self._sums.get(name, 0) + value.double()
        for name, value in contribution.maxima.items():
            previous = self._maxima.get(name)
            self._maxima[name] = value if previous is None else torch.maximum(previous, value)

    def finish(self) -> dict[str, float]:
        """Scale, clip and apply the summed gradient; the step's metrics, the same on every rank.

        A step without one loss token changes no weight and says so (`update_skipped` 1). NonFiniteGradient:
        on all ranks alike, before anything was changed.
        """
        if self._waiting:
            batches, self._waiting = self._waiting, []
            all_terms = step_terms(self._policy, self._objective, batches, self._ranks, self._steps)
            for batch, terms in zip(batches, all_terms, strict=True):
                self._backward(batch, terms)
        self._steps += 1
        sums, maxima, histogram = self._reduce()
        lr = self._scheduler.get_last_lr()[0]
        count = (
            sums.get(self._objective.unit, 0.0) if self._objective.unit else float(sums.get("tokens", 0) > 0)
        )
        update = self._update(count, sums["backward_loss"]) if count else {"grad_norm": 0.0}
        self._optimizer.zero_grad(set_to_none=True)
        report = _metrics(sums, maxima, histogram, count) | update | self._peak_memory()
        return report | {"lr": float(lr), "update_skipped": float(count == 0)}

    def _reduce(self) -> tuple[dict[str, float], dict[str, float], Tensor]:
        """This step's sums, maxima and histogram over all ranks; forgets them."""
        sums, maxima = self._sums, self._maxima
        counts = torch.as_tensor(self._histogram).flatten().tolist()
        self._forget()
        total, highest = self._ranks.sum(_read(sums)), self._ranks.max(_read(maxima))
        histogram = torch.tensor(self._ranks.sum(counts))
        return dict(zip(sums, total, strict=True)), dict(zip(maxima, highest, strict=True)), histogram

    def _update(self, count: float, loss: float) -> dict[str, float]:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        scale = self._ranks.world_size / count  # FSDP averaged over ranks what has to be a sum
        grad_norm = scale * tensor_norms(gradients, self._ranks).norm().item()
        # The loss too: a NaN log-ratio lies outside every clip, where the gradient is 0, and go unseen
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            self._optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                f"over {count:.0f} {self._objective.unit or 'step'} the loss sums to {loss} and the gradient norm is "
                f"{grad_norm}; the step was not taken. Look for NaN or inf in its log-probs and advantages"
            )
        clip = min(1.0, self._max_grad_norm / (grad_norm + 1e-6))
        torch._foreach_mul_([local_shard(gradient) for gradient in gradients], scale * clip)
        statistics = UpdateStatistics(self._parameters, self._ranks) if self._update_stats else None
        self._optimizer.step()
        self._scheduler.step()
        return {"grad_norm": grad_norm} | (statistics.after_step() if statistics else {})

    def _peak_memory(self) -> dict[str, float]:
        """The highest of all ranks: the GPU's allocator since the last step; on a CPU, the process."""
        device = self._ranks.device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"peak_memory_usage_GB": self._ranks.max([peak / 1e9])[0]}


def _read(scalars: dict[str, Tensor]) -> list[float]:
    return torch.stack(list(scalars.values())).tolist() if scalars else []


def _metrics(
    sums: dict[str, float], maxima: dict[str, float], histogram: Tensor, count: float
) -> dict[str, float]:
    """Token sums -> token means; the losses are divided by what divides their gradient."""
    mismatch = {name: sums.pop(name) for name in list(sums) if name.startswith("mismatch_")}
    report = mismatch_report(mismatch or NOTHING_COMPARED, histogram)
    tokens, sequences = sums.pop("tokens", 0.0), sums.pop("sequences", 0.0)
    sums.pop("groups", None)
    losses = {name: sums.pop(name, 0.0) / (count or 1.0) for name in ("avg_loss", "backward_loss")}
    means = dict.fromkeys(ALWAYS_REPORTED, 0.0) | {
        name: total / max(1.0, tokens) for name, total in sums.items()
    }
    if "value_error" in means:
        report["explained_variance"] = explained_variance(means)
    compared = mismatch.get("mismatch_tokens_sum", 0.0)
    return {
        **losses,
        **means,
        **maxima,
        **report,
        "avg_pg_clip": means["clip_frac_low"] + means["clip_frac_high"],
        "rejected_share": 1 - tokens / compared if compared else 0.0,
        "num_non_masked_tokens": tokens,
        "total_non_masked_tokens": tokens,
        "num_non_masked_sequences": sequences,
    }
