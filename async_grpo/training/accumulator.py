"""Sum the gradients of many micro-batches, and divide the sum once, at the end of the optimizer step."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.errors import NonFiniteGradient
from async_grpo.messages import MicroBatch, dummy_micro_batch
from async_grpo.metrics.memory_report import PEAK, memory_entry
from async_grpo.modeling import copies, local_shard
from async_grpo.modeling.policy import PolicyModel
from async_grpo.processes.memory_use import FreedMemory
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.training.base_reference import add_base_logprobs
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.critic import Critic
from async_grpo.training.distributed import Ranks
from async_grpo.training.gradient_norms import squared_norms
from async_grpo.training.memory_cures import micro_batch_cure, update_cure
from async_grpo.training.metric_totals import step_metrics
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import create_moments
from async_grpo.training.rank_memory import RankMemory
from async_grpo.training.sharding import release_gathered
from async_grpo.training.whole_step import add_step_terms

log = logging.getLogger(__name__)


@dataclass
class GradientAccumulator:
    """Adds up the gradient of many micro-batches and takes one optimizer step.

    Both `add` and `finish` are collectives: every rank calls `add` the same number of times, and then `finish`.
    """

    policy: PolicyModel
    optimizer: Optimizer
    scheduler: LambdaLR
    objective: Objective
    ranks: Ranks
    config: OptimizerConfig
    steps: int = 0  # number of finished steps
    critic: Critic | None = None  # the critic, if it is a separate model
    # Measures the peak memory of this rank; None makes one without a planned size
    memory: RankMemory | None = None
    # Functions that are called with each micro-batch after its backward pass
    observers: list[Callable[[BatchTensors], None]] = field(default_factory=list)
    # Called when an optimizer step is skipped because the policy has moved further than `--passes-max-kl` since the
    # first pass over the batch
    on_passes_stopped: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.memory is None:
            self.memory = RankMemory(self.ranks.device)
        # Number of steps that were skipped one after the other until now, because their loss or gradient was not finite
        self._nonfinite_in_a_row = 0
        self._parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        # Number of ranks that have the same shard. A sum of squares over all ranks counts each shard this many times,
        # so it is divided by this number
        self._num_copies = copies(self._parameters[0])
        self._waiting: list[BatchTensors] = []  # micro-batches that are kept until the end of their step
        # Sums and maxima over the micro-batches of this step, on the device
        self._totals: dict[str, Tensor] = {}
        # Returns unused main memory to the system after each micro-batch; None if micro-batches are computed on a GPU
        self._freed_memory = FreedMemory() if self.ranks.device.type == "cpu" else None

    def make_moments(self) -> None:
        """Create the moments of the optimizers, which are otherwise created at the end of the first step.

        Raises:
            OutOfMemory: They do not fit into the memory.
        """
        with self._naming_lack_for_update("while the optimizer's moments were created"):
            create_moments(self.optimizer)
            if self.critic is not None:
                create_moments(self.critic.optimizer)

    def add(self, micro_batch: MicroBatch) -> None:
        """Run forward and backward of a micro-batch, or keep it until `finish` if the loss needs the whole step.

        Raises:
            OutOfMemory: The micro-batch does not fit into the memory.
        """
        self.objective.check_inputs(micro_batch)
        with self._naming_out_of_memory("before the forward pass", micro_batch):
            batch = BatchTensors(micro_batch, self.policy.device)
        if self.objective.needs_whole_step:
            self._waiting.append(batch)
        else:
            self._backward(batch)

    def _backward(self, batch: BatchTensors) -> None:
        totals = self.compute_gradient(batch)
        if self._freed_memory is not None:
            self._freed_memory.release_within_step()
        for observe in self.observers:
            observe(batch)
        for name, value in totals.items():
            if name not in self._totals:
                self._totals[name] = value.double()
            elif name.endswith("_max"):
                self._totals[name] = torch.maximum(self._totals[name], value)
            else:
                self._totals[name] = torch.add(self._totals[name], value)

    def compute_gradient(self, batch: BatchTensors) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch to the gradients of the parameters, and return the totals of the objective.

        Raises:
            OutOfMemory: The micro-batch does not fit into the memory.
        """
        with self._naming_out_of_memory("in the forward pass", batch):
            if self.objective.needs_base_logprobs:
                add_base_logprobs(self.policy, self.objective, batch)
            with torch.set_grad_enabled(not self._trains_critic_alone):
                loss, totals = self.objective(self.policy, batch)
        if self._trains_critic_alone:
            release_gathered(self.policy)
        else:
            with self._naming_out_of_memory("in the backward pass", batch):
                loss.backward()
        if self.critic is not None:
            with self._naming_out_of_memory("in the critic's forward and backward pass", batch):
                totals |= self.critic.add_gradient(self.objective, batch)
        return totals

    @property
    def _trains_critic_alone(self) -> bool:
        """Return whether this step trains only the critic and leaves the policy unchanged (`--critic-warmup-steps`)."""
        return self.critic is not None and self.critic.trains_alone(self.steps)

    def _naming_out_of_memory(
        self, activity: str, batch: MicroBatch | BatchTensors
    ) -> AbstractContextManager[None]:
        """Return a context in which a lack of memory names the activity and the size of the micro-batch."""
        return naming_out_of_memory(
            f"{activity} of a micro-batch of {len(batch.input_ids):,} tokens in {len(batch.cu_seqlens) - 1:,} sequences, "
            f"on trainer rank {self.ranks.rank} at step {self.steps + 1}",
            micro_batch_cure(self.config, on_gpu=self.ranks.device.type == "cuda"),
        )

    def _naming_lack_for_update(self, activity: str) -> AbstractContextManager[None]:
        """Return a context in which a lack of memory names the activity, which is part of an update of the weights."""
        return naming_out_of_memory(
            f"{activity}, on trainer rank {self.ranks.rank}",
            update_cure(self.config, on_gpu=self.ranks.device.type == "cuda"),
        )

    def finish(self) -> dict[str, Any]:
        """Scale, clip and apply the summed gradient.

        If no token is trained on, or the gradient is not finite, the weights stay unchanged and `update_skipped` is 1.
        The weights also stay unchanged if the policy has moved further than `--passes-max-kl` since the first pass over
        the batch. In this case `passes_stopped` is 1 as well.

        Returns:
            The metrics of the step, the same on every rank.

        Raises:
            NonFiniteGradient: More than `--nonfinite-steps` steps in a row had no finite gradient. Raised on all ranks.
            OutOfMemory: The update, or a micro-batch that was kept until now, does not fit into the memory.
        """
        if not self._waiting and not self._totals:
            # No sample of this step is trained on, so no rank got a micro-batch. All ranks compute a dummy, which gives
            # the totals from which the metrics are computed
            self.add(dummy_micro_batch(token_id=0))
        if self._waiting:
            longest = max(self._waiting, key=lambda batch: len(batch.input_ids))
            with self._naming_out_of_memory("in the forward pass that precedes the gradients", longest):
                add_step_terms(
                    self.policy, self.objective, self._waiting, self.ranks, self.steps, self.critic
                )
            for batch in self._waiting:
                self._backward(batch)
            self._waiting = []
        learning_rate = 0.0 if self._trains_critic_alone else float(self.scheduler.get_last_lr()[0])
        self.steps += 1

        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        totals, histogram = self._reduce(gradients)
        gradient_square = totals.pop("gradient_square")
        critic_square = totals.pop("critic_gradient_square", 0.0)
        count = self._loss_count(totals)
        update = {"grad_norm": 0.0, "update_skipped": 1.0}
        if self._is_past_max_kl(totals):
            update["passes_stopped"] = 1.0
            self.on_passes_stopped()
        elif count > 0:
            with self._naming_lack_for_update(f"in the optimizer step {self.steps}"):
                update = self._update(
                    gradients, count, totals["backward_loss"], gradient_square, critic_square
                )
        self.discard_gradients()
        if self._freed_memory is not None:
            self._freed_memory.release_after_step()

        report: dict[str, Any] = step_metrics(totals, histogram, count)
        report |= update
        report["memory"] = self._memory_of_ranks()
        report["peak_memory_usage_GB"] = max(entry[PEAK] for entry in report["memory"].values())
        report["lr"] = learning_rate
        return report

    def _loss_count(self, totals: dict[str, float]) -> float:
        """Return the number by which the step's loss is divided. It is 0 if no token is trained on.

        Depending on the loss, it is the number of tokens, sequences or groups.
        """
        if self.objective.unit:
            return totals[self.objective.unit]
        return 1.0 if totals["tokens"] > 0 else 0.0

    def _is_past_max_kl(self, totals: dict[str, float]) -> bool:
        """Return whether the policy has moved further than `--passes-max-kl` since the first pass over the batch.

        During the first pass the totals contain no `pass_kl`, and the answer is False.
        """
        max_kl = self.objective.config.passes_max_kl
        if max_kl is None or not totals["tokens"]:
            return False
        return totals.get("pass_kl", 0.0) / totals["tokens"] > max_kl

    def _reduce(self, gradients: list[Tensor]) -> tuple[dict[str, float], Float64[Tensor, " bins"]]:
        """Return the totals and the ratio histogram of the step, reduced over all ranks, and reset them.

        The totals include the squared norms of the gradients.
        """
        totals = self._totals
        self._totals = {}
        histogram = totals.pop("histogram")
        totals["gradient_square"] = squared_norms(gradients).sum().to(histogram.device) / self._num_copies
        if self.critic is not None:
            totals["critic_gradient_square"] = self.critic.gradient_square().to(histogram.device)

        max_names = [name for name in totals if name.endswith("_max")]
        sum_names = [name for name in totals if not name.endswith("_max")]
        own_sums = torch.stack([totals[name] for name in sum_names])
        own_maxima = torch.stack([totals[name] for name in max_names])
        sums, maxima = self.ranks.sum_and_max(torch.cat([own_sums, histogram]), own_maxima)

        reduced = dict(zip(sum_names, sums[: len(sum_names)].tolist(), strict=True))
        reduced |= dict(zip(max_names, maxima.tolist(), strict=True))
        return reduced, sums[len(sum_names) :]

    def advance_schedules(self, count: int) -> None:
        """Advance the learning-rate schedules by a number of steps that are not taken, so that they still end with the run.

        Call it when `finish` has returned `passes_stopped`. The steps are the skipped one and the rest of the batch.
        """
        schedulers = [self.scheduler] if self.critic is None else [self.scheduler, self.critic.scheduler]
        for scheduler in schedulers:
            for _ in range(count):
                scheduler.step()

    def discard_gradients(self) -> None:
        """Free the gradients after a step."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.discard_gradient()

    def _update(
        self,
        gradients: list[Tensor],
        count: float,
        loss_sum: float,
        gradient_square: float,
        critic_square: float,
    ) -> dict[str, float]:
        """Take the optimizer step if loss and gradients are finite, and return the metrics of the update.

        Args:
            gradients: The gradients of the policy; [] if the step trains the critic alone.
            count: Number of units by which the loss is divided.
            loss_sum: Sum of the losses of the step.
            gradient_square: Squared norm of the policy's gradient.
            critic_square: Squared norm of the gradient of a separate critic model; 0 if there is none.
        """
        # FSDP has averaged the gradients over the ranks, but the step needs their sum
        scale = self.ranks.world_size / count
        grad_norm = scale * math.sqrt(gradient_square)
        # Check the loss as well, because the gradient may be finite although the loss is not. For example, if a
        # log-ratio is NaN, clamping it gives NaN, but the gradient of the clamp is 0
        if not (math.isfinite(grad_norm) and math.isfinite(loss_sum) and math.isfinite(critic_square)):
            self._note_skipped_step(grad_norm, count, loss_sum)
            return {"grad_norm": grad_norm, "update_skipped": 1.0}
        self._nonfinite_in_a_row = 0
        metrics = {"grad_norm": grad_norm, "update_skipped": 0.0}
        if self.critic is not None:
            metrics |= self.critic.update(scale, critic_square)
        if not gradients:
            return metrics
        clip = min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6))
        torch._foreach_mul_([local_shard(gradient) for gradient in gradients], scale * clip)
        if not self.config.update_stats:
            self.optimizer.step()
            self.scheduler.step()
            return metrics
        shards = [local_shard(parameter.detach()) for parameter in self._parameters]
        shards_before = [shard.clone() for shard in shards]
        self.optimizer.step()
        self.scheduler.step()
        return metrics | self._change_of_weights(shards_before, shards)

    def _note_skipped_step(self, grad_norm: float, count: float, loss_sum: float) -> None:
        """Count and log a step that is skipped, because its loss or gradient is not finite.

        Raises:
            NonFiniteGradient: More than `--nonfinite-steps` steps in a row were skipped.
        """
        self._nonfinite_in_a_row += 1
        error = NonFiniteGradient(
            f"over {count:.0f} {self.objective.unit or 'step'} the loss sums to {loss_sum} and the gradient norm is "
            f"{grad_norm}; the step was not taken. Look for NaN or inf in its log-probs and advantages"
        )
        if self._nonfinite_in_a_row > self.config.nonfinite_steps:
            self.discard_gradients()
            raise error
        log.error(
            "%s; the run goes on, %d of --nonfinite-steps %d",
            error,
            self._nonfinite_in_a_row,
            self.config.nonfinite_steps,
        )

    def _change_of_weights(self, before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
        """Return the norms of the old weights and of their change, and quantiles of the relative changes of the tensors.

        The difference is written into the tensors of `before`, so that no memory for a third copy is needed.
        """
        squares_before = squared_norms(before)
        torch._foreach_sub_(before, after)
        squares = torch.cat([squares_before, squared_norms(before)]) / self._num_copies
        no_maxima = squares[:0]
        summed_squares, _ = self.ranks.sum_and_max(squares, no_maxima)
        model_norms, delta_norms = summed_squares.sqrt().chunk(2)
        # A value head starts with weights of zero. Its first update has no relative size, because the ratio would
        # divide by 0
        has_size = model_norms > 0
        probabilities = torch.linspace(0, 1, 5, dtype=torch.float64)
        ratios = torch.quantile((delta_norms / model_norms)[has_size], probabilities).tolist()
        metrics = {
            "model_norm": model_norms.norm().item(),
            "model_delta_norm": delta_norms.norm().item(),
        }
        for name, ratio in zip(("min", "p25", "p50", "p75", "max"), ratios, strict=True):
            metrics[f"update_ratio_{name}"] = ratio
        return metrics

    def _memory_of_ranks(self) -> dict[str, dict[str, float]]:
        """Return the measured and planned memory of each rank, by name. A collective."""
        assert self.memory is not None
        peak_bytes = self.memory.take_peak_bytes()
        own_bytes = [peak_bytes, self.memory.baseline_bytes, self.memory.planned_bytes]
        entries = {}
        for rank, (peak, baseline, planned) in enumerate(
            self.ranks.gathered(torch.tensor(own_bytes, dtype=torch.float64)).tolist()
        ):
            entries[f"trainer rank {rank}"] = memory_entry(
                peak_bytes=peak, baseline_bytes=baseline, planned_bytes=planned
            )
        return entries
