"""Schedules against transformers' own, AdamW against its formula."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from async_grpo.training.config import OptimizerConfig
from async_grpo.training.optimizer import LR_SCHEDULES, build_policy_optimizer

WARMUP, TOTAL = 5, 20


def policy_of(weight):
    return SimpleNamespace(model=torch.nn.ParameterList([weight]), value_head=None)


def rates_of(optimizer, schedule, steps=TOTAL):
    """The learning rate that each of the first `steps` optimizer steps is taken with."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def learning_rates(steps=TOTAL, **options):
    config = OptimizerConfig(**({"learning_rate": 1.0, "num_warmup_steps": WARMUP} | options))
    weight = torch.nn.Parameter(torch.zeros(1))
    return rates_of(*build_policy_optimizer(policy_of(weight), config, TOTAL), steps)


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "inverse_sqrt"])
def test_the_warm_up_rises_evenly_from_its_first_step_and_then_the_schedule_is_that_of_transformers(name):
    rates, optimizer = learning_rates(lr_scheduler=name), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL)
    assert rates[:WARMUP] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[WARMUP:] == pytest.approx(rates_of(optimizer, schedule)[WARMUP:])


@pytest.mark.parametrize("name", list(LR_SCHEDULES))
def test_without_a_warm_up_every_schedule_starts_at_the_full_rate(name):
    assert learning_rates(lr_scheduler=name, num_warmup_steps=0)[0] == 1.0
    assert name != "constant" or set(learning_rates(lr_scheduler=name)) == {1.0}  # which knows no warm-up


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decay_ends_at_zero_and_stays_there(name):
    rates = learning_rates(TOTAL + 3, lr_scheduler=name)
    assert rates[TOTAL - 1] > 0 and rates[TOTAL:] == [0.0] * 3


@pytest.mark.parametrize(("beta1", "beta2", "epsilon"), [(0.9, 0.95, 1e-8), (0.8, 0.99, 0.5)])
def test_the_update_is_that_of_adamw(beta1, beta2, epsilon):
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    options = {"learning_rate": 0.1, "lr_scheduler": "constant", "weight_decay": 0.5}
    if (beta1, beta2) != (0.9, 0.95):  # which are the defaults
        options |= {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": epsilon}
    optimizer, _ = build_policy_optimizer(policy_of(weight), OptimizerConfig(**options))
    value, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate([1.0, -3.0, 0.5], start=1):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        first, second = (
            beta1 * first + (1 - beta1) * gradient,
            beta2 * second + (1 - beta2) * gradient**2,
        )
        mean, scale = first / (1 - beta1**step), math.sqrt(second / (1 - beta2**step))
        value = value * (1 - 0.1 * 0.5) - 0.1 * mean / (scale + epsilon)
        assert weight.item() == pytest.approx(value, rel=1e-5)


def test_the_value_head_has_a_peak_rate_of_its_own_and_the_same_schedule():
    policy = policy_of(torch.nn.Parameter(torch.tensor([2.0])))
    policy.value_head = SimpleNamespace(parameters=lambda: [torch.nn.Parameter(torch.tensor([3.0]))])
    config = OptimizerConfig(
        learning_rate=0.5, critic_learning_rate=0.125, lr_scheduler="constant_with_warmup", num_warmup_steps=4
    )
    optimizer, scheduler = build_policy_optimizer(policy, config)
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    shares = [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates == [[0.5 * share, 0.125 * share] for share in shares]
