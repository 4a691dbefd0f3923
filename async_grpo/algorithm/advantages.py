"""(rewards, mask, groups) -> advantages: the estimators by name, or by `FILE.py:NAME`, and the rules for every one.

A reward that is missing or not a number must never move a baseline, and a sample without a rival teaches nothing:

- *Participants* are the valid rows with an unmasked token that have at least one other such row in their group. The
  rest enters no statistic, of the group or of the batch, and gets zeros. This holds for `reinforce_plus_plus` and `gae`
  too: rows that are not to be compared by prompt share one group id.
- What stands at masked positions and in invalid rows may be anything, NaN included, and changes nothing; so do rewards
  outside a `step_mask` or `masks`. There, and where a row does not participate, the advantages are zero.
- Statistics are float64, a deviation has ddof 1. Equal rewards give exactly zero, not rounding noise.
- Advantages are finite. What would overflow on the way, or in the dtype of the rewards, is a ValueError.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithm import outcome_advantages as outcomes
from async_grpo.algorithm import process_advantages as processes
from async_grpo.algorithm.statistics import Groups
from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import find_entry

LARGEST = 1e100  # of rewards, baselines and values: their squares and sums stay far within float64
SOLE = "reward"  # the name of a reward that came as a bare tensor

# How the rewards of a sample reach an estimator
TOTAL = "total"  # one tensor: all that the sample earned, each part on the token that it was earned on
COMPONENTS = "components"  # a dict by name: the reward of each adapter on the last token, apart
SOURCES = "sources"  # a dict by name: each process reward on its tokens, and the outcome on the last one

# Inputs that the library provides to an estimator whose function has a keyword of that name: the critic's values, the
# reward of the greedy completion, where step rewards stand (of a total; of each source), the user's --reward-weights
PROVIDED = ("values", "baselines", "step_mask", "masks", "weights")


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator and all that the rest of the library must know of it; defaults: those of a bare function.

    Args:
        function: (rewards, used, groups, *, options and inputs) -> advantages, see `outcome_advantages`. Keywords with
            a number as default are its options, the others its inputs.
        group_local: the result for a group depends on that group alone, so groups may be handed on as they complete; a
            batch-coupled estimator has to wait for its whole minibatch.
        outcome: it does with one score per sample, placed on the row's last unmasked token.
        process: it knows which token a reward stands on.
        per_sample: given one score per sample, it gives all tokens of the sample the same advantage, and given several
            those up to each (unless its option `gamma` discounts): one column for all of them does.
        sums: only the sum of a sample's rewards counts, whichever tokens they stand on; implies `per_sample`.
        rewards: TOTAL, COMPONENTS or SOURCES.
        compares_with_batch: groups of equal rewards teach it too, so they must not be left out or replaced.
        needs_all_rewards: a sample counts only if every adapter gave it a reward. With TOTAL that is asked where some
            rewards come step by step; elsewhere their combination says what a sample is worth.
        inputs: inputs of its own, name -> function of a `Sample`: a number, or one number per completion token. A column
            of the data row is `lambda sample: sample.prompt.row["difficulty"]`.
        critic_returns: (rewards, values, mask, *, options) -> (advantages, returns), (B, T) each: it compares with the
            values of a critic, so the trainer computes it, and trains the critic towards the returns.
    """

    function: Callable[..., Tensor]
    group_local: bool = False
    outcome: bool = True
    process: bool = False
    per_sample: bool = False
    sums: bool = False
    rewards: str = TOTAL
    compares_with_batch: bool = False
    needs_all_rewards: bool = False
    inputs: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    critic_returns: Callable[..., tuple[Tensor, Tensor]] | None = None

    @property
    def named(self) -> bool:
        """It takes several rewards apart, a dict of (B, T) by name."""
        return self.rewards != TOTAL

    @property
    def needs_critic(self) -> bool:
        return self.critic_returns is not None

    @property
    def compares_with_greedy(self) -> bool:
        """Every prompt also needs a greedy completion with a reward."""
        return "baselines" in self.keywords

    @property
    def options(self) -> dict[str, float]:
        """Its scalar options and their defaults."""
        return {name: value for name, value in self.keywords.items() if isinstance(value, (int, float))}

    @property
    def needs(self) -> tuple[str, ...]:
        """The tensors that it cannot do without, beside rewards and mask."""
        return tuple(name for name, value in self.keywords.items() if value is inspect.Parameter.empty)

    @cached_property  # asked for several times per group, and a signature is slow
    def keywords(self) -> dict[str, Any]:
        """Options and inputs, and their defaults."""
        return keywords(self.function)

    @torch.no_grad()
    def __call__(
        self,
        rewards: Tensor | Mapping[str, Tensor],
        mask: Tensor,
        group_ids: Tensor,
        *,
        valid: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Advantages (B, T) of `rewards` (B, T), in their dtype.

        mask (B, T): True on the tokens that are trained on. A column may stand for several tokens of its row, and then
        says how many: rewards (B, 1) of whole samples come with a mask (B, 1) of their lengths. group_ids (B,): rows of
        one prompt share an id. valid (B,): False where the reward is missing; such a row may hold NaN. `options` go to
        the estimator: scalars, and inputs such as `baselines` (B,), `values` (B, T), `step_mask` (B, T).
        ValueError: an option that is unknown or missing, a shape that does not fit, several rewards where one is taken,
        a valid row whose reward, baseline or value is not finite or beyond 1e100, or an advantage beyond the dtype.

        >>> rewards = torch.tensor([[0., 1.], [0., 0.], [0., 7.]])
        >>> ADVANTAGE_ESTIMATORS["dr_grpo"](rewards, torch.ones(3, 2), torch.tensor([4, 4, 9])).tolist()
        [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]
        """
        self._check_options(options)
        options = {name: value for name, value in options.items() if value is not None}
        sources = self._by_name(rewards, mask, group_ids, valid)
        if self.named:
            _refuse_unknown("weights", options.get("weights", {}), sources)
        tokens, mask = mask, mask.bool()
        candidates = mask.any(dim=1) if valid is None else mask.any(dim=1) & valid.bool()
        groups, read = Groups.of(group_ids, candidates), mask & candidates[:, None]
        used = mask & groups.participates

        paid = {name: read & chosen for name, chosen in _reward_masks(options, sources, mask).items()}
        cleaned = {name: _finite(name, values, paid[name]) for name, values in sources.items()}
        rows = read.any(dim=1)
        for name in {"values", "baselines", *self.inputs} & options.keys():
            places = {"values": (read,), "baselines": (rows,)}.get(name, (rows, read))
            options[name] = _finite(name, options[name], *places)
        masks = {"step_mask": paid.get(SOLE), "masks": paid}
        options |= {name: masks[name] for name in masks.keys() & options.keys()}

        dtype = reduce(torch.promote_types, (values.dtype for values in sources.values()))
        if not used.any():
            return torch.zeros_like(mask, dtype=dtype)
        counted = self.per_sample or self.sums
        counts = torch.where(used, tokens, 0) if counted and (tokens > 1).any() else used
        advantages = self.function(cleaned if self.named else cleaned[SOLE], counts, groups, **options)
        advantages = torch.where(used, advantages, 0).to(dtype)
        too_large = f"are no finite {dtype} by {self.function.__name__}: rewards or options are too large"
        _refuse_rows("advantages", ~torch.isfinite(advantages), too_large)
        return advantages

    def _check_options(self, options: Mapping[str, Any]) -> None:
        name, known = self.function.__name__, list(self.keywords)
        if unknown := [option for option in options if option not in known]:
            raise ValueError(f"{name} has no option {unknown}; known: {', '.join(known) or 'none'}")
        if missing := [option for option in self.needs if options.get(option) is None]:
            raise ValueError(f"{name} needs {missing} beside the rewards")

    def _by_name(
        self, rewards: Tensor | Mapping[str, Tensor], mask: Tensor, group_ids: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        """The rewards by name, all of one shape with the rest."""
        sources = dict(rewards) if isinstance(rewards, Mapping) else {SOLE: rewards}
        if isinstance(rewards, Mapping) and not (self.named and rewards):
            takes = "at least one" if self.named else "a single (batch, tokens)"
            raise ValueError(f"{self.function.__name__} takes {takes} reward, not {list(rewards)}")
        rows_fit = all(ids is None or ids.shape == mask.shape[:1] for ids in (group_ids, valid))
        for name, values in sources.items():
            if values.shape != mask.shape or mask.dim() != 2 or not rows_fit:
                raise ValueError(
                    f"{name} {tuple(values.shape)} and mask {tuple(mask.shape)} must be (batch, tokens) alike, "
                    f"group_ids {tuple(group_ids.shape)} and valid one per row"
                )
            if not values.is_floating_point():
                raise ValueError(f"{name} has dtype {values.dtype}; advantages have fractions: give floats")
        return sources


def _reward_masks(
    options: Mapping[str, Any], sources: Mapping[str, Tensor], mask: Tensor
) -> dict[str, Tensor]:
    """Where each reward counts: the caller's `step_mask` or `masks`, or wherever the mask is True."""
    given = options.get("step_mask", options.get("masks", {}))
    given = given if isinstance(given, Mapping) else {SOLE: given}
    _refuse_unknown("masks", given, sources)
    for name, chosen in given.items():
        if chosen.shape != mask.shape:
            raise ValueError(f"the mask of {name} {tuple(chosen.shape)} must be {tuple(mask.shape)}")
    return {name: given[name].bool() if name in given else mask for name in sources}


def _refuse_unknown(what: str, names: Iterable[str], sources: Mapping[str, Tensor]) -> None:
    if unknown := [name for name in names if name not in sources]:
        raise ValueError(f"{what} for {unknown}, but there are rewards only for {list(sources)}")


def _finite(name: str, values: Tensor, *places: Tensor) -> Tensor:
    """Values in float64, zero where they do not count, as the one of `places` says that has their shape.

    ValueError: none has it, or they are not finite where they count; names the rows.
    """
    counted = next((place for place in places if place.shape == values.shape), None)
    if counted is None:
        shapes = " or ".join(str(tuple(place.shape)) for place in places)
        raise ValueError(f"{name} {tuple(values.shape)} must be {shapes}")
    cleaned = torch.where(counted, values, 0).double()
    kind = "rewards" if name == SOLE else name
    _refuse_rows(kind, ~torch.isfinite(cleaned), "are not finite; a missing one must be marked invalid")
    beyond = f"are beyond {LARGEST:g}, where their statistics overflow: give plausible numbers"
    _refuse_rows(kind, cleaned.abs() > LARGEST, beyond)
    return cleaned


def _refuse_rows(what: str, is_wrong: Tensor, why: str) -> None:
    """Raise ValueError if any entry (B, ...) is wrong; the message names the rows."""
    if is_wrong.any():
        rows = is_wrong.nonzero()[:, 0].unique().tolist()
        raise ValueError(f"the {what} of rows {rows} {why}")


_of_batch = partial(Estimator, process=True, compares_with_batch=True, needs_all_rewards=True)
_of_steps = partial(Estimator, outcome=False, process=True, per_sample=True)

ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(outcomes.grpo, group_local=True, sums=True),
    "dr_grpo": Estimator(outcomes.dr_grpo, group_local=True, sums=True),
    "rloo": Estimator(outcomes.rloo, group_local=True, sums=True),
    "opo": Estimator(outcomes.opo, group_local=True, sums=True),
    "grpo_passk": Estimator(outcomes.grpo_passk, group_local=True, sums=True),
    "remax": Estimator(processes.remax, group_local=True, per_sample=True),
    "gpg": Estimator(outcomes.gpg, sums=True),
    "grpo_batch_std": Estimator(outcomes.grpo_batch_std, sums=True),
    "reinforce_plus_plus_baseline": Estimator(outcomes.reinforce_plus_plus_baseline, sums=True),
    "gdpo": Estimator(outcomes.gdpo, sums=True, rewards=COMPONENTS, needs_all_rewards=True),
    "reinforce_plus_plus": _of_batch(processes.reinforce_plus_plus, per_sample=True),
    "gae": _of_batch(processes.gae, critic_returns=processes.gae_returns),
    "grpo_process": _of_steps(processes.grpo_process, group_local=True),
    "prime_rloo": _of_steps(processes.prime_rloo, rewards=SOURCES),
    "gigpo": Estimator(
        processes.gigpo,
        group_local=True,
        process=True,
        inputs={"turns": processes.turn_numbers, "states": processes.turn_states},
    ),
}


def get_estimator(name: str) -> Estimator:
    """The estimator of that name; ConfigurationError: there is none, or it takes what nothing provides."""
    estimator = find_entry(name, ADVANTAGE_ESTIMATORS, Estimator, "advantage-estimator")
    try:
        inspect.signature(estimator.function).bind(*range(3), **dict.fromkeys(estimator.keywords))
    except TypeError as error:
        takes = f"must be called as f(rewards, used, groups, *, options): {error}"
        raise ConfigurationError(f"--advantage-estimator {name} {takes}") from error
    known = {*PROVIDED, *estimator.inputs, *estimator.options}
    if unknown := [keyword for keyword in estimator.keywords if keyword not in known]:
        raise ConfigurationError(
            f"--advantage-estimator {name} takes {', '.join(unknown)}, which is neither an option (a keyword with a number "
            f"as its default) nor provided ({', '.join(PROVIDED)}): give its Estimator entry inputs={{'{unknown[0]}': "
            "a function of the sample}"
        )
    return estimator
