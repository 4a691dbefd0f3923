"""The loss of a step by one padded forward in float64, as the reference for packed, sharded and split steps.

It shares neither packing, nor sharding, nor micro-batches, nor precision with the trainer: transformers' own forward of a
padded batch, and the functions of `algorithm` called once, on all of it. In float64 the reference has no rounding errors of
its own, so that a tolerance bounds those of the trainer.
"""

from dataclasses import asdict
from types import MethodType

import numpy as np
import torch
from supports import in_support
from tiny_policy import critic_policy, tiny_model

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.aggregation import aggregate_loss
from async_grpo.algorithm.kl import kl_penalty
from async_grpo.algorithm.off_policy import importance_weights, rejection_mask
from async_grpo.algorithm.policy_masks import high_entropy_mask, off_policy_sequence_mask
from async_grpo.algorithm.process_advantages import value_loss
from async_grpo.modeling.critic import CriticModel
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.sharding import shard_policy
from async_grpo.types import PROMPT_TOKEN

FAR_BELOW = -1e4  # logit of a token outside of the support


def policy_of(objective):
    """The policy of all ranks, with a critic on it if the objective has one there."""
    if objective.has_value_head:
        return critic_policy(13, value_trunk_gradient=objective.config.critic_trunk_gradient)
    return PolicyModel(tiny_model(), chunk_tokens=13)


def own_critic():
    """A critic of other weights than the policy, whose head is not at its initial zero, and whose LM head is untied."""
    critic = CriticModel(tiny_model(seed=1, tie_word_embeddings=False))
    torch.nn.init.normal_(critic.value_head.weight, std=0.5)
    torch.nn.init.normal_(critic.value_head.bias, std=0.5)
    return critic


def _with_exact_norms(model):
    """The model with norms that do not round to float32, as those of transformers do."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_norm, module)
    return model


def _norm(module, hidden):
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * hidden * torch.rsqrt(variance + module.variance_epsilon)


def sharded_in_float64(model, ranks):
    """A model of the trainer, sharded. Its weights and the sums of its gradients stay in float32."""
    return shard_policy(_with_exact_norms(model), ranks, dtype=torch.float64)


def plain_in_float64(model):
    """A model of the reference, with transformers' own attention."""
    model.double()
    model.model.set_attn_implementation("sdpa")  # "eager" computes its softmax in float32
    return _with_exact_norms(model)


def padded(sequences, column):
    """(B, T) or (B, T, ...): one row per sequence; masked positions and padding hold 0."""
    longest = max(len(sequence["ids"]) for sequence in sequences)
    shape = sequences[0][column].shape[1:]
    rows = torch.zeros(len(sequences), longest, *shape, dtype=torch.float64)
    for row, sequence in enumerate(sequences):
        # The trainer gets these numbers in float32
        values = np.nan_to_num(sequence[column].astype(np.float32))
        rows[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return rows


def padded_step_gradients(objective, policy, sequences, critic=None, first=None):
    """The gradient of every parameter by name, zero where it has none. Those of a critic of its own begin with `critic.`.

    Args:
        objective: The trainer's objective.
        policy: The policy (`plain_in_float64`).
        sequences: All sequences of the step.
        critic: The critic of its own (`plain_in_float64`).
        first: Results of the first pass over the batch, by name. Empty in the first pass, which fills it.
    """
    parameters = dict(policy.named_parameters())
    if critic is not None:
        trained = [(name, p) for name, p in critic.named_parameters() if p.requires_grad]
        parameters |= {f"critic.{name}": parameter for name, parameter in trained}
    for parameter in parameters.values():
        parameter.grad = None
    step_loss(objective, policy, sequences, critic, {} if first is None else first).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def step_loss(objective, policy, sequences, critic, first):
    config = objective.config
    ids, mask = padded(sequences, "ids").long(), padded(sequences, "mask").bool()
    mask[:, 0] = False
    output = policy.model(ids, output_hidden_states=True)  # causal: what fills up a row is never looked at
    logits = output.logits[:, :-1]
    if objective.truncation is not None:
        is_kept = in_support(logits.flatten(0, 1), ids[:, 1:].flatten(), **asdict(objective.truncation))
        logits = logits.masked_fill(~is_kept.view_as(logits), FAR_BELOW)
    log_softmax = logits.log_softmax(-1)
    logprobs = _shifted(log_softmax.gather(2, ids[:, 1:, None])[..., 0])
    entropy = _shifted(-(log_softmax.exp() * log_softmax).sum(-1))
    behaviour, advantages = padded(sequences, "behaviour"), padded(sequences, "advantages")
    start_logprobs = first.get("logprobs", logprobs.detach())
    first.setdefault("logprobs", _kept(start_logprobs))
    proximal = padded(sequences, "proximal") if "proximal" in sequences[0] else None

    kept = mask
    if config.rejection_statistic:
        bounds = {"low": config.rejection_low, "high": config.rejection_high}
        compared = start_logprobs if proximal is None else proximal
        kept = rejection_mask(compared, behaviour, mask, statistic=config.rejection_statistic, **bounds)
    weights = None
    if config.importance_level != "none":
        names = ("level", "mode", "low", "high", "normalize")
        options = {name: getattr(config, f"importance_{name}") for name in names}
        compared = proximal
        if compared is None:
            compared = start_logprobs if objective.loss.uses_ratio else logprobs.detach()
        weights = importance_weights(compared, behaviour, kept, **options)
    values = old_values = returns = None
    if objective.has_critic:
        values = _values(config, policy, critic, ids, output.hidden_states[-1])
        if "values" in first:
            old_values, advantages, returns = (first[name] for name in ("values", "advantages", "returns"))
        else:
            old_values = values.detach()
            advantages, returns = _advantages(config, sequences, advantages, old_values, mask)
            first |= {
                "values": _kept(old_values),
                "advantages": _kept(advantages),
                "returns": _kept(returns),
            }

    options, old = dict(objective.loss_settings), behaviour
    if objective.loss.needs_proximal:
        options["proximal_logprobs"] = proximal
    elif config.old_policy == "proximal":
        old = proximal
    elif config.old_policy == "current":
        old = start_logprobs
    loss, _ = objective.loss(logprobs, old, advantages, kept, importance_weights=weights, **options)
    if config.off_policy_mask_threshold is not None:
        threshold = config.off_policy_mask_threshold
        loss = loss * off_policy_sequence_mask(logprobs, behaviour, advantages, kept, threshold=threshold)
    loss = loss * high_entropy_mask(entropy, kept, quantile=config.top_entropy_quantile)
    if config.kl_coef:
        log_ratio = logprobs - old if config.unbiased_kl else None
        reference = padded(sequences, "ref")
        kl = kl_penalty(logprobs, reference, config.kl_kind, clamp=config.kl_clamp, log_ratio=log_ratio)
        loss = loss + config.kl_coef * torch.where(kept, kl, 0)
    loss = loss + config.log_ratio_coef * torch.where(kept, (logprobs - old) ** 2, 0)
    loss = loss - config.entropy_coef * torch.where(kept, entropy, 0)
    if config.teacher_top_k:
        loss = loss + config.teacher_coef * torch.where(kept, _teacher_kl(log_softmax, sequences), 0)
    if objective.has_critic:
        value_losses, _ = value_loss(values, returns, old_values, kept, clip=config.critic_clip)
        loss = loss + (config.critic_coef if critic is None else 1.0) * value_losses
    groups = torch.tensor([sequence["group"] for sequence in sequences])
    scale = config.max_generation_tokens
    total = aggregate_loss(loss, kept, config.loss_aggregation, group_ids=groups, scale=scale)
    if config.observation_coef:
        total = total + config.observation_coef * _mean_of_observations(logprobs, sequences)
    return total


def _kept(values):
    """Numbers as the trainer keeps them for later passes."""
    return values.float().double()


def _shifted(values):
    """The numbers of all tokens but the first, of which there is none."""
    return torch.nn.functional.pad(values, (1, 0))


def _values(config, policy, critic, ids, states):
    """What the critic says of each token before it was chosen."""
    head = policy.value_head
    if critic is not None:
        states, head = critic.model(ids, output_hidden_states=True).hidden_states[-1], critic.value_head
    if not config.critic_trunk_gradient:
        states = states.detach()
    return _shifted(head(states[:, :-1].flatten(0, 1)).view(len(ids), -1))


def _teacher_kl(log_softmax, sequences):
    """The sum over the teacher's tokens v of p_T(v) (log p_T(v) - log pi(v)), without the missing ones."""
    top = padded(sequences, "teacher_top")[:, 1:]
    token_ids, teacher = top[:, :, 0].long(), top[:, :, 1]
    # A missing log-prob is NaN, which `padded` made 0: no token has the probability 1
    gaps = teacher - log_softmax.gather(2, token_ids)
    return _shifted(torch.where(teacher == 0, 0, teacher.exp() * gaps).sum(-1))


def _advantages(config, sequences, rewards, values, mask):
    """Advantages and returns of a critic's estimator, computed once for the whole padded batch."""
    settings = {**config.estimator.options, **config.estimator_settings}
    if "times" in sequences[0]:
        raw, returns = _gae_in_time(sequences, rewards, values, mask, settings)
        pool = raw[mask]
        return torch.where(mask, (raw - pool.mean()) / (pool.var() + 1e-8).sqrt(), 0), returns
    discounts = {name: value for name, value in settings.items() if name != "whiten"}
    _, returns = config.estimator.critic_returns(rewards, values, mask, **discounts)
    estimator = ADVANTAGE_ESTIMATORS[config.advantage_estimator]
    one_group = torch.zeros(len(sequences), dtype=torch.int64)
    return estimator(rewards, mask, one_group, values=values, **settings), returns


def _lam_of(settings, num_tokens):
    """The policy's lambda for a trajectory of so many tokens."""
    if settings.get("alpha"):
        return max(0.0, 1 - 1 / (settings["alpha"] * max(num_tokens, 1)))
    return settings["lam"]


def _gae_in_time(sequences, rewards, values, mask, settings):
    """Advantages and returns (B, T) of trajectories, token by token back from the last one in time."""
    gamma = settings["gamma"]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for group in {sequence["group"] for sequence in sequences}:
        tokens = [
            (sequence["times"][place], row, place)
            for row, sequence in enumerate(sequences)
            for place in range(len(sequence["ids"]))
            if sequence["group"] == group and mask[row, place]
        ]
        lam = _lam_of(settings, len(tokens))
        critic_lam = settings.get("critic_lam", lam)
        ahead, ahead_of_critic, value_ahead = 0.0, 0.0, 0.0
        for _, row, place in sorted(tokens, reverse=True):
            value = values[row, place].item()
            delta = rewards[row, place].item() + gamma * value_ahead - value
            ahead = delta + gamma * lam * ahead
            ahead_of_critic = delta + gamma * critic_lam * ahead_of_critic
            advantages[row, place], returns[row, place] = ahead, ahead_of_critic + value
            value_ahead = value
    return advantages, returns


def _mean_of_observations(logprobs, sequences):
    """The mean cross-entropy of the environment's tokens after the first sampled one, where something is trained on."""
    losses = []
    for row, sequence in enumerate(sequences):
        if not sequence["mask"][1:].any():
            continue
        is_after_a_turn = False
        for place, version in enumerate(sequence["versions"]):
            if version != PROMPT_TOKEN:
                is_after_a_turn = True
            elif is_after_a_turn:
                losses.append(-logprobs[row, place])
    assert len(losses) > 5
    return torch.stack(losses).mean()


def add_teacher(sequences, rng, num_top):
    """Give every token ids and log-probs of a teacher's most probable tokens, some of them missing; NaN where masked."""
    for sequence in sequences:
        length = len(sequence["ids"])
        token_ids = rng.permuted(np.tile(np.arange(100), (length, 1)), axis=1)[:, :num_top]
        logprobs = np.log(rng.dirichlet(np.ones(num_top + 2), length)[:, :num_top])
        logprobs[rng.random((length, num_top)) < 0.1] = np.nan
        top = np.stack([token_ids, logprobs], axis=1)
        sequence["teacher_top"] = np.where(sequence["mask"][:, None, None], top, np.nan)
