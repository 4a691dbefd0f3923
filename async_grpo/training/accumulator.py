"""Many micro-batches, one optimizer step whose gradient does not know how many there were: a sum, divided once."""

import logging
import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.algorithm.off_policy import mismatch_report
from async_grpo.algorithm.process_advantages import explained_variance
from async_grpo.errors import NonFiniteGradient
from async_grpo.messages import MicroBatch, dummy_micro_batch
from async_grpo.modeling import copies, local_shard
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks
from async_grpo.training.objective import BatchTensors, Objective
from async_grpo.training.whole_step import add_step_terms

log = logging.getLogger(__name__)
# Reported by every step, also where the loss in use does not compute them
ALWAYS_REPORTED = ("avg_kl_div", "clip_frac_low", "clip_frac_high", "entropy", "ratio_mean", "ratio_max")


@dataclass
class GradientAccumulator:
    """`add` micro-batches, as many on every rank, then `finish` the step: collectives."""

    policy: PolicyModel
    optimizer: Optimizer
    scheduler: LambdaLR
    objective: Objective
    ranks: Ranks
    config: OptimizerConfig
    steps: int = 0  # taken
    on_logprobs: Callable[[Tensor], None] = lambda logprobs: None  # (1, N), of each row, in order

    def __post_init__(self) -> None:
        self._left_out = 0  # steps, in a row so far
        self._parameters = [p for p in self.policy.parameters() if p.requires_grad]
        self._copies = copies(self._parameters[0])  # of each part, whose squares all ranks add up
        self._waiting: list[BatchTensors] = []  # for the end of their step
        self._totals: dict[str, Tensor] = {}  # of this step, on the device

    def add(self, batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch; or keep it for the end of its step."""
        self.objective.check_inputs(batch)
        row = BatchTensors(batch, self.policy.device)
        if self.objective.needs_whole_step:
            self._waiting.append(row)
        else:
            self._backward(row)

    def _backward(self, row: BatchTensors) -> None:
        loss, totals = self.objective(self.policy, row)
        loss.backward()
        self.on_logprobs(row.logprobs)
        for name, value in totals.items():
            combine = torch.maximum if name.endswith("_max") else torch.add
            before = self._totals.get(name)
            self._totals[name] = value.double() if before is None else combine(before, value)

    def finish(self) -> dict[str, float]:
        """Scale, clip and apply the summed gradient; the step's metrics, the same on every rank.

        Without one loss token nothing changes (`update_skipped` 1), nor where the gradient is not finite: then one of these
        too many in a row is a NonFiniteGradient, on all ranks.
        """
        if not self._waiting and not self._totals:  # every sample of the step was left out
            self.add(dummy_micro_batch(token_id=0))
        if rows := self._waiting:
            add_step_terms(self.policy, self.objective, rows, self.ranks, self.steps)
        for row in rows:
            self._backward(row)
        self._waiting, self.steps = [], self.steps + 1
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        totals, histogram = self._reduce(gradients)
        lr, unit = self.scheduler.get_last_lr()[0], self.objective.unit
        count = totals[unit] if unit else float(totals["tokens"] > 0)
        square, memory = totals.pop("gradient_square"), totals.pop("memory_max")
        update = {"grad_norm": 0.0, "peak_memory_usage_GB": memory, "update_skipped": float(count == 0)}
        if count:
            update |= self._update(gradients, count, totals["backward_loss"], square)
        self.optimizer.zero_grad(set_to_none=True)
        report = _metrics(totals, histogram, count) | update
        return report | {"lr": float(lr)}

    def _reduce(self, gradients: list[Tensor]) -> tuple[dict[str, float], Tensor]:
        """This step's totals, with the gradient's square and the memory, and histogram, over all ranks; forgets them."""
        totals, self._totals = self._totals, {}
        histogram = totals.pop("histogram")
        totals["gradient_square"] = _squares(gradients).sum().to(histogram.device) / self._copies
        totals["memory_max"] = histogram.new_tensor(self._peak_memory_GB())
        maxima = [name for name in totals if name.endswith("_max")]
        sums = [name for name in totals if name not in maxima]
        row = torch.cat([torch.stack([totals[name] for name in sums]), histogram])
        summed, highest = self.ranks.sum_and_max(row, torch.stack([totals[name] for name in maxima]))
        values = summed[: len(sums)].tolist() + highest.tolist()
        return dict(zip(sums + maxima, values, strict=True)), summed[len(sums) :]

    def _update(self, gradients: list[Tensor], count: float, loss: float, square: float) -> dict[str, float]:
        scale = self.ranks.world_size / count  # FSDP averaged over ranks what has to be a sum
        grad_norm = scale * math.sqrt(square)
        # The loss too: a NaN log-ratio lies outside every clip, where the gradient is 0, and go unseen
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            self._left_out += 1
            error = NonFiniteGradient(
                f"over {count:.0f} {self.objective.unit or 'step'} the loss sums to {loss} and the gradient norm is "
                f"{grad_norm}; the step was not taken. Look for NaN or inf in its log-probs and advantages"
            )
            if self._left_out > self.config.nonfinite_steps:
                self.optimizer.zero_grad(set_to_none=True)
                raise error
            which = f"{self._left_out} of --nonfinite-steps {self.config.nonfinite_steps}"
            log.error("%s; the run goes on, %s", error, which)
            return {"grad_norm": grad_norm, "update_skipped": 1.0}
        self._left_out = 0
        clip = min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6))
        torch._foreach_mul_([local_shard(gradient) for gradient in gradients], scale * clip)
        shards = [local_shard(parameter.detach()) for parameter in self._parameters]
        before = [shard.clone() for shard in shards] if self.config.update_stats else []
        self.optimizer.step()
        self.scheduler.step()
        return {"grad_norm": grad_norm} | (self._moved(before, shards) if before else {})

    def _moved(self, before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
        """model_norm (before the step), model_delta_norm, quantiles over tensors of |delta| / |weight|.

        `before` becomes the difference, so that there is no third copy.
        """
        squares = _squares(before)
        torch._foreach_sub_(before, after)
        both = torch.cat([squares, _squares(before)]) / self._copies
        model_norms, delta_norms = self.ranks.sum_and_max(both, both[:0])[0].sqrt().chunk(2)
        moved = model_norms > 0  # a value head begins at zero: nothing to compare its first update with
        quantiles = torch.linspace(0, 1, 5, dtype=torch.float64)
        ratios = torch.quantile((delta_norms / model_norms)[moved], quantiles).tolist()
        names = ("min", "p25", "p50", "p75", "max")
        return {
            "model_norm": model_norms.norm().item(),
            "model_delta_norm": delta_norms.norm().item(),
            **{f"update_ratio_{name}": ratio for name, ratio in zip(names, ratios, strict=True)},
        }

    def _peak_memory_GB(self) -> float:
        """Of this rank: the GPU's allocator since the step before came to this point; on a CPU, the process."""
        device = self.ranks.device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e9


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """(len(tensors),) float64: the squared L2 norm of this rank's part of each tensor."""
    local = torch._foreach_norm([local_shard(tensor) for tensor in tensors], 2, dtype=torch.float32)
    return torch.stack(local).double().square()


def _metrics(totals: dict[str, float], histogram: Tensor, count: float) -> dict[str, float]:
    """Token sums -> token means; the losses are divided by what divides their gradient."""
    mismatch = {name: totals.pop(name) for name in list(totals) if name.startswith("mismatch_")}
    report = mismatch_report(mismatch, histogram)
    tokens, sequences = totals.pop("tokens"), totals.pop("sequences")
    totals.pop("groups", None)
    losses = {name: totals.pop(name) / (count or 1.0) for name in ("avg_loss", "backward_loss")}
    means = dict.fromkeys(ALWAYS_REPORTED, 0.0) | {
        name: total if name.endswith("_max") else total / max(1.0, tokens) for name, total in totals.items()
    }
    if "value_error" in means:
        report["explained_variance"] = explained_variance(means)
    compared = mismatch["mismatch_tokens_sum"]
    return {
        **losses,
        **means,
        **report,
        "avg_pg_clip": means["clip_frac_low"] + means["clip_frac_high"],
        "rejected_share": 1 - tokens / compared if compared else 0.0,
        "num_non_masked_tokens": tokens,
        "total_non_masked_tokens": tokens,
        "num_non_masked_sequences": sequences,
    }
