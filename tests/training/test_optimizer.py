"""Schedules against transformers' own, AdamW against its formula."""

import math

import pytest
import torch
from transformers import get_scheduler

from async_grpo.errors import ConfigurationError
from async_grpo.training.optimizer import LR_SCHEDULES, OptimizerConfig, build_optimizer

WARMUP, TOTAL = 5, 20


def learning_rates(steps=TOTAL, **options):
    """The learning rate that each of the first `steps` optimizer steps is taken with."""
    weight = torch.nn.Parameter(torch.zeros(1))
    settings = OptimizerConfig(
        **({"learning_rate": 1.0, "warmup_steps": WARMUP, "total_steps": TOTAL} | options)
    )
    optimizer, schedule = build_optimizer([weight], settings)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    return rates


def transformers_rates(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "inverse_sqrt"])
def test_after_the_warm_up_the_schedule_is_that_of_transformers(name):
    assert learning_rates(lr_scheduler=name)[WARMUP:] == pytest.approx(transformers_rates(name)[WARMUP:])


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "inverse_sqrt"])
def test_the_warm_up_rises_evenly_and_its_first_step_learns(name):
    assert learning_rates(lr_scheduler=name)[:WARMUP] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_does_not_warm_up():
    assert set(learning_rates(lr_scheduler="constant")) == {1.0}


@pytest.mark.parametrize("name", list(LR_SCHEDULES))
def test_without_a_warm_up_every_schedule_starts_at_the_full_rate(name):
    assert learning_rates(lr_scheduler=name, warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decay_ends_at_zero_and_stays_there(name):
    rates = learning_rates(TOTAL + 3, lr_scheduler=name)
    assert rates[TOTAL - 1] > 0 and rates[TOTAL:] == [0.0] * 3


def test_inverse_sqrt_quarters_the_steps_and_halves_the_rate():
    rates = learning_rates(4 * WARMUP + 1, lr_scheduler="inverse_sqrt")
    assert rates[4 * WARMUP] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"lr_scheduler": "polynomial"}, "inverse_sqrt"),
        ({"lr_scheduler": "cosine", "warmup_steps": 20}, "beyond warmup_steps"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"warmup_steps": -1}, "not negative"),
    ],
)
def test_impossible_settings_are_refused_with_their_values(options, names):
    with pytest.raises(ConfigurationError, match=names):
        learning_rates(**options)


def test_the_update_is_that_of_adamw_with_betas_09_and_095():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    settings = OptimizerConfig(learning_rate=0.1, lr_scheduler="constant", weight_decay=0.5)
    optimizer, _ = build_optimizer([weight], settings)
    value, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate([1.0, -3.0, 0.5], start=1):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        mean, scale = first / (1 - 0.9**step), math.sqrt(second / (1 - 0.95**step))
        value = value * (1 - 0.1 * 0.5) - 0.1 * mean / (scale + 1e-8)
        assert weight.item() == pytest.approx(value, rel=1e-5)
