"""`MuonWithAdamW`: Muon for the matrices of the hidden layers, and AdamW for everything else.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by an
approximately orthogonal matrix. `torch.optim.Muon` computes it with five Newton-Schulz iterations in bfloat16:

    B <- mu * B + (1 - mu) * G
    W <- (1 - lr * decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * NewtonSchulz((1 - mu) * G + mu * B)

With the factor 0.2 * sqrt(max(rows, columns)), updates are as large as those of AdamW, so that both use one learning rate
(Liu et al. 2025, "Muon is Scalable for LLM Training", equation 4).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Muon, Optimizer

from async_grpo.errors import ConfigurationError
from async_grpo.modeling import full_tensor, local_shard
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.config import OptimizerConfig

MOMENTUM_BUFFER = "momentum_buffer"  # key of B in the state of a matrix


class MuonWithAdamW(Optimizer):
    """Updates matrices by Muon and other parameters by AdamW.

    The Newton-Schulz iterations need whole matrices. If the parameters are sharded, every rank gathers one matrix after the
    other and computes the same iterations, so that the update does not depend on the number of ranks.

    Args:
        matrices: Parameters that Muon updates. They are parameter group 0.
        other_groups: Parameter groups that AdamW updates.
        config: The options of the optimizer.
    """

    def __init__(
        self, matrices: list[nn.Parameter], other_groups: list[dict[str, Any]], config: OptimizerConfig
    ) -> None:
        defaults = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        groups = [{"params": matrices, "momentum": config.muon_momentum}, *other_groups]
        super().__init__(groups, defaults)
        self._adamw = AdamW(
            self.param_groups[1:],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._share_groups_and_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the parameter groups and the state of both optimizers."""
        super().load_state_dict(state_dict)
        self._share_groups_and_state()

    def _share_groups_and_state(self) -> None:
        """Let AdamW use this optimizer's parameter groups and state, so that schedules and checkpoints see one optimizer.

        `load_state_dict` replaces both, so they must be shared again after it. Otherwise AdamW would keep its old
        learning rate.
        """
        self._adamw.param_groups = self.param_groups[1:]
        self._adamw.state = self.state

    def is_matrix(self, parameter: Tensor) -> bool:
        """Return whether Muon, and not AdamW, updates the parameter."""
        return any(parameter is matrix for matrix in self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the trainer never passes a closure
        """Update all parameters that have a gradient. A collective if they are sharded."""
        group = self.param_groups[0]
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=matrix.device)
                state[MOMENTUM_BUFFER] = torch.zeros_like(matrix)
            state["step"] += 1
            momentum = state[MOMENTUM_BUFFER]
            momentum.lerp_(matrix.grad, 1 - group["momentum"])
            direction = matrix.grad.lerp(momentum, group["momentum"])
            update = _newton_schulz_update(direction, group["lr"])
            shard = local_shard(matrix)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update.to(shard.device))
        self._adamw.step()


def _newton_schulz_update(direction: Tensor, learning_rate: float) -> Tensor:
    """Return this rank's shard of -lr * 0.2 * sqrt(max(rows, columns)) * NewtonSchulz(direction)."""
    whole_direction = full_tensor(direction)
    # One step of torch's Muon from zero, without momentum and decay, is the update itself
    update = nn.Parameter(torch.zeros_like(whole_direction))
    update.grad = whole_direction
    torch_muon = Muon(
        [update],
        lr=learning_rate,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    torch_muon.step()
    if not isinstance(direction, DTensor):
        return update.detach()
    mesh = direction.device_mesh
    on_all_ranks = DTensor.from_local(update.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return on_all_ranks.redistribute(mesh, direction.placements).to_local()


def split_parameters(policy: PolicyModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (matrices for Muon, other parameters) among the trained parameters of the policy's model.

    Muon does not train vectors and tensors with more than two dimensions. It does not train embeddings and the output
    head either, because each of their rows belongs to a single token.

    Raises:
        ConfigurationError: The model has no matrix for Muon.
    """
    excluded_ids = {id(parameter) for parameter in _token_tables(policy.model)}
    matrices: list[nn.Parameter] = []
    remaining: list[nn.Parameter] = []
    for parameter in policy.model.parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim == 2 and id(parameter) not in excluded_ids
        (matrices if is_matrix else remaining).append(parameter)
    if not matrices:
        raise ConfigurationError("--optimizer muon: the model has no matrix that Muon could train; use adamw")
    return matrices, remaining


def _token_tables(model: nn.Module) -> Iterable[nn.Parameter]:
    """Yield the parameters of all embeddings, and of the output head."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters(recurse=False)
    output_head = model.get_output_embeddings()  # type: ignore[operator]  # a method of transformers' models
    if output_head is not None:
        yield from output_head.parameters()
