"""Turn rewards, a mask and group ids into advantages: the estimators by name, and the rules that apply to all of them.

The rules ensure two things. A missing or non-finite reward never changes a baseline. An estimator that compares samples
within their group gives no advantage to a sample that is alone in its group.

- *Participants* are the valid rows with an unmasked token that share their group with at least one other such row. For
  an estimator that does not compare within groups (`Estimator.needs_group` is False), they are all valid rows with an
  unmasked token. All other rows get advantages of 0, and do not count in the statistics of group and batch.
- Values at masked positions and in invalid rows may be anything, including NaN, and do not affect the result. The same
  applies to rewards at tokens where a `step_mask` or one of the `masks` is False.
- The advantages at masked positions, and of rows that do not participate, are zero.
- Statistics are float64, and a standard deviation has ddof 1. Equal rewards give exactly zero, not rounding noise.
- Advantages are finite. An intermediate value that overflows raises a ValueError, as does an advantage that is too
  large for the dtype of the rewards.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor

from async_grpo.algorithm import outcome_advantages as outcomes
from async_grpo.algorithm import process_advantages as processes
from async_grpo.algorithm.decoupled_gae import decoupled_gae, decoupled_gae_returns
from async_grpo.algorithm.estimator_inputs import (
    SINGLE_REWARD,
    finite_values,
    refuse_rows,
    refuse_unknown,
    reward_masks,
)
from async_grpo.algorithm.running_mean import running_mean
from async_grpo.algorithm.statistics import Groups
from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import find_entry

# Forms in which an estimator gets the rewards of a sample
TOTAL = "total"  # one tensor: at each token, the sum of the rewards that belong to this token
COMPONENTS = "components"  # a dict by name: the reward of each adapter, at the last token
SOURCES = "sources"  # a dict by name: each process reward at its tokens, and the outcome at the last token

# The library passes these inputs to an estimator whose function has a keyword of that name
PROVIDED = (
    "values",  # the critic's values
    "baselines",  # the reward of each prompt's greedy completion
    "step_mask",  # True at the tokens that have a step reward
    "masks",  # for each source of rewards, True at the tokens that have a reward from this source
    "weights",  # `--reward-weights`
    "keys",  # for each sample, a number for the question or agent whose rewards share a running mean
    "means",  # for each sample, the running mean of its question or agent before the step
)


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator, and what the rest of the library must know about it.

    The defaults suit a function that a user passes without further settings.

    Args:
        function: (rewards, used, groups, *, options and inputs) -> advantages, see `outcome_advantages`. Keywords whose
            default is a number are options, all others are inputs.
        group_local: The advantages of a group depend on that group alone, so they are computed as soon as the group is
            complete. An estimator without this property is "batch-coupled": it needs all groups of the minibatch.
        outcome: The estimator accepts one score per sample, placed on the row's last unmasked token.
        process: The estimator accepts process rewards, which are placed on any unmasked tokens of the row.
        flat_between_rewards: All tokens after one reward, up to and including the token of the next reward, get the
            same advantage, unless the option `gamma` discounts. So the caller may pass a single column for all of these
            tokens (see `mask` of `__call__`). A sample with a single reward has the same advantage at all tokens.
        sums: Only the sum of a sample's rewards counts, not the tokens that they are placed on; implies
            `flat_between_rewards`.
        rewards: The form in which the function gets the rewards: TOTAL, COMPONENTS or SOURCES.
        needs_group: The estimator compares the samples of a group with each other, so a group of a single sample has no
            advantage. If False, `--samples-per-question` may be 1.
        compares_with_batch: Rewards are compared beyond their group. So groups whose rewards are all equal also get
            advantages, and must not be left out or replaced.
        needs_all_rewards: A sample counts only if every adapter gave it a reward. If `rewards` is TOTAL, this applies
            only to runs with process rewards. In other runs, the status of the combined verdict decides.
        divides_by_mean: The result is divided by the mean reward of the group, so rewards must not be negative.
        ignores_rewards: No reward changes the result. So samples without a reward also count, and groups of a single
            sample.
        inputs: Additional inputs, name -> function of a `Sample` that returns a number, or one number per completion
            token. For example, `lambda sample: sample.prompt.row["difficulty"]` reads a column of the data row.
        critic_returns: (rewards, values, mask, *, options) -> (advantages, returns). Set for an estimator that compares
            rewards with a critic's values. The trainer then computes the advantages with this function, and trains the
            critic to predict the returns.
    """

    function: Callable[..., Float[Tensor, "batch columns"]]
    group_local: bool = False
    outcome: bool = True
    process: bool = False
    flat_between_rewards: bool = False
    sums: bool = False
    rewards: str = TOTAL
    needs_group: bool = True
    compares_with_batch: bool = False
    needs_all_rewards: bool = False
    divides_by_mean: bool = False
    ignores_rewards: bool = False
    inputs: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    critic_returns: (
        Callable[..., tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]] | None
    ) = None

    @property
    def takes_named_rewards(self) -> bool:
        """Return whether the function takes several rewards, a dict by name."""
        return self.rewards != TOTAL

    @property
    def needs_critic(self) -> bool:
        """Return whether the advantages need the values of a critic."""
        return self.critic_returns is not None

    @property
    def compares_with_greedy(self) -> bool:
        """Return whether every prompt also needs a greedy completion with a reward."""
        return "baselines" in self.keywords

    @property
    def has_running_mean(self) -> bool:
        """Return whether the estimator compares with running means of rewards, which the library keeps over the steps."""
        return "means" in self.keywords

    @property
    def options(self) -> dict[str, float]:
        """Return the scalar options and their defaults."""
        return {name: value for name, value in self.keywords.items() if isinstance(value, (int, float))}

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that have no default; rewards and mask are not among them."""
        return tuple(name for name, value in self.keywords.items() if value is inspect.Parameter.empty)

    @cached_property  # read several times per group, and inspecting a signature is slow
    def keywords(self) -> dict[str, Any]:
        """Return options and inputs with their defaults."""
        return keywords(self.function)

    @torch.no_grad()
    def __call__(
        self,
        rewards: Float[Tensor, "batch tokens"] | Mapping[str, Float[Tensor, "batch tokens"]],
        mask: Shaped[Tensor, "batch tokens"],
        group_ids: Int[Tensor, " batch"],
        *,
        valid: Shaped[Tensor, " batch"] | None = None,
        **options: Any,
    ) -> Float[Tensor, "batch tokens"]:
        """Return the advantages in the dtype of the rewards.

        Args:
            rewards: A tensor, or a dict by name where the estimator takes several rewards.
            mask: True at the tokens that are trained on. If a column stands for several tokens, the mask contains their
                number. For example, rewards (B, 1) of whole samples come with a mask (B, 1) of their lengths.
            group_ids: Equal for the rows of one prompt.
            valid: False where the reward is missing; a row with False may contain NaN.
            options: Scalar options of the estimator, and inputs such as `baselines` (B,), `values` (B, T) and
                `step_mask` (B, T).

        Raises:
            ValueError: An option is unknown or missing, a shape or the number of rewards does not fit, an advantage is
                too large for the dtype, or a reward, baseline or value in a valid row is not finite or beyond 1e100.

        >>> rewards = torch.tensor([[0., 1.], [0., 0.], [0., 7.]])
        >>> ADVANTAGE_ESTIMATORS["dr_grpo"](rewards, torch.ones(3, 2), torch.tensor([4, 4, 9])).tolist()
        [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]
        """
        self._check_options(options)
        options = {name: value for name, value in options.items() if value is not None}
        rewards_by_name = self._rewards_by_name(rewards, mask, group_ids, valid)
        if self.takes_named_rewards:
            refuse_unknown("weights", options.get("weights", {}), rewards_by_name)

        num_tokens = mask  # tokens that each entry stands for: 1, unless a column stands for several tokens
        mask = mask.bool()
        candidates = mask.any(dim=1) if valid is None else mask.any(dim=1) & valid.bool()
        groups = Groups.of(group_ids, candidates, min_size=2 if self.needs_group else 1)
        readable = mask & candidates[:, None]  # tokens whose rewards and inputs must be finite
        used = mask & groups.participates  # tokens that count in the statistics and get advantages

        # The function gets masks of readable tokens only. The caller's masks may also select other tokens
        masks = reward_masks(options, rewards_by_name, readable)
        finite_rewards = {}
        for name, values in rewards_by_name.items():
            finite_rewards[name] = finite_values(name, values, masks[name])
        options |= self._finite_inputs(options, readable)
        if "step_mask" in options:
            options["step_mask"] = masks.get(SINGLE_REWARD)  # such an estimator has a single reward
        if "masks" in options:
            options["masks"] = masks
        dtype = reduce(torch.promote_types, (values.dtype for values in rewards_by_name.values()))
        if not used.any():
            return torch.zeros_like(mask, dtype=dtype)
        function_rewards = finite_rewards if self.takes_named_rewards else finite_rewards[SINGLE_REWARD]
        advantages = self.function(function_rewards, self._counts(used, num_tokens), groups, **options)
        advantages = torch.where(used, advantages, 0).to(dtype)
        reason = f"by {self.function.__name__} are not finite in {dtype}: rewards or options are too large"
        refuse_rows("advantages", ~torch.isfinite(advantages), reason)
        return advantages

    def _counts(
        self, used: Bool[Tensor, "batch tokens"], num_tokens: Shaped[Tensor, "batch tokens"]
    ) -> Shaped[Tensor, "batch tokens"]:
        """Return the `used` argument of the function: bool, or the number of tokens that each entry stands for."""
        accepts_counts = self.flat_between_rewards or self.sums
        if accepts_counts and (num_tokens > 1).any():
            return torch.where(used, num_tokens, 0)
        return used

    def _finite_inputs(
        self, options: Mapping[str, Any], readable: Bool[Tensor, "batch tokens"]
    ) -> dict[str, Float64[Tensor, "batch ..."]]:
        """Return the numeric inputs among the options, with zeros at masked tokens and in invalid rows.

        Args:
            options: Options and inputs by name.
            readable: True at the unmasked tokens of valid rows.

        Raises:
            ValueError: An input has the wrong shape, or is not finite at an unmasked token of a valid row.
        """
        readable_rows = readable.any(dim=1)
        finite_inputs = {}
        for name in {"values", "baselines", *self.inputs} & options.keys():
            if name == "values":
                masks = [readable]
            elif name == "baselines":
                masks = [readable_rows]
            else:
                # One number per row or one per token: `finite_values` chooses the mask with the shape of the input
                masks = [readable_rows, readable]
            finite_inputs[name] = finite_values(name, options[name], *masks)
        return finite_inputs

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is unknown, or a required input is missing."""
        name = self.function.__name__
        names = list(self.keywords)
        unknown = [option for option in options if option not in names]
        if unknown:
            raise ValueError(f"{name} has no option {unknown}; known: {', '.join(names) or 'none'}")
        missing = [option for option in self.required_inputs if options.get(option) is None]
        if missing:
            raise ValueError(f"{name} needs {missing} in addition to the rewards")

    def _rewards_by_name(
        self,
        rewards: Float[Tensor, "batch tokens"] | Mapping[str, Float[Tensor, "batch tokens"]],
        mask: Shaped[Tensor, "batch tokens"],
        group_ids: Int[Tensor, " batch"],
        valid: Shaped[Tensor, " batch"] | None,
    ) -> dict[str, Float[Tensor, "batch tokens"]]:
        """Return the rewards by name.

        Raises:
            ValueError: The rewards are not floats, their shapes do not fit the other arguments, or their number does not
                fit the estimator.
        """
        rewards_by_name = dict(rewards) if isinstance(rewards, Mapping) else {SINGLE_REWARD: rewards}
        if isinstance(rewards, Mapping) and not (self.takes_named_rewards and rewards):
            takes = "at least one" if self.takes_named_rewards else "a single (batch, tokens)"
            raise ValueError(f"{self.function.__name__} takes {takes} reward, not {list(rewards)}")
        rows_fit = all(ids is None or ids.shape == mask.shape[:1] for ids in (group_ids, valid))
        for name, values in rewards_by_name.items():
            if values.shape != mask.shape or mask.dim() != 2 or not rows_fit:
                raise ValueError(
                    f"{name} {tuple(values.shape)} and mask {tuple(mask.shape)} must both be (batch, tokens), "
                    f"and group_ids {tuple(group_ids.shape)} and `valid` must hold one per row"
                )
            if not values.is_floating_point():
                raise ValueError(f"{name} has dtype {values.dtype}, but rewards must be floats")
        return rewards_by_name


_batch_estimator = partial(
    Estimator, process=True, needs_group=False, compares_with_batch=True, needs_all_rewards=True
)
_step_estimator = partial(Estimator, outcome=False, process=True, flat_between_rewards=True)

ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(outcomes.grpo, group_local=True, sums=True),
    "dr_grpo": Estimator(outcomes.dr_grpo, group_local=True, sums=True),
    "rloo": Estimator(outcomes.rloo, group_local=True, sums=True),
    "opo": Estimator(outcomes.opo, group_local=True, sums=True),
    "grpo_passk": Estimator(outcomes.grpo_passk, group_local=True, sums=True),
    "max_rl": Estimator(outcomes.max_rl, group_local=True, sums=True, divides_by_mean=True),
    "remax": Estimator(processes.remax, group_local=True, needs_group=False, flat_between_rewards=True),
    "gpg": Estimator(outcomes.gpg, sums=True),
    "grpo_batch_std": Estimator(outcomes.grpo_batch_std, sums=True),
    "reinforce_plus_plus_baseline": Estimator(outcomes.reinforce_plus_plus_baseline, sums=True),
    "flash_reinforce": Estimator(
        outcomes.flash_reinforce, sums=True, needs_group=False, compares_with_batch=True
    ),
    "running_mean": Estimator(running_mean, sums=True, needs_group=False, compares_with_batch=True),
    "gdpo": Estimator(outcomes.gdpo, sums=True, rewards=COMPONENTS, needs_all_rewards=True),
    "reinforce_plus_plus": _batch_estimator(processes.reinforce_plus_plus, flat_between_rewards=True),
    "gae": _batch_estimator(processes.gae, critic_returns=processes.gae_returns),
    "decoupled_gae": _batch_estimator(decoupled_gae, critic_returns=decoupled_gae_returns),
    "grpo_process": _step_estimator(processes.grpo_process, group_local=True),
    "prime_rloo": _step_estimator(processes.prime_rloo, rewards=SOURCES),
    "gigpo": Estimator(
        processes.gigpo,
        group_local=True,
        process=True,
        inputs={"turns": processes.turn_numbers, "states": processes.turn_states},
    ),
    # The name is TEACHER_ALONE of `teacher_config`. It accepts rewards of every kind, and ignores them
    "teacher": Estimator(
        outcomes.no_advantage,
        group_local=True,
        process=True,
        sums=True,
        needs_group=False,
        ignores_rewards=True,
    ),
}


def get_estimator(name: str) -> Estimator:
    """Return the estimator with a name, or the user's own at `FILE.py:NAME`.

    Raises:
        ConfigurationError: There is no such estimator, or its function needs an input that nothing provides, or it lacks
            a keyword of estimators with running means.
    """
    estimator = find_entry(name, ADVANTAGE_ESTIMATORS, Estimator, "advantage-estimator")
    try:
        # Three placeholders: rewards, used, groups
        inspect.signature(estimator.function).bind(*range(3), **dict.fromkeys(estimator.keywords))
    except TypeError as error:
        raise ConfigurationError(
            f"--advantage-estimator {name} must be called as f(rewards, used, groups, *, options): {error}"
        ) from error
    accepted_keywords = {*PROVIDED, *estimator.inputs, *estimator.options}
    unknown = [keyword for keyword in estimator.keywords if keyword not in accepted_keywords]
    if unknown:
        raise ConfigurationError(
            f"--advantage-estimator {name} takes {', '.join(unknown)}, which is neither an option (a keyword with a number "
            f"as its default) nor provided ({', '.join(PROVIDED)}): give its Estimator entry inputs={{'{unknown[0]}': "
            "a function of the sample}"
        )
    if estimator.has_running_mean and not ("keys" in estimator.keywords and "decay" in estimator.options):
        raise ConfigurationError(
            f"--advantage-estimator {name} takes means: give its function also the keyword keys, and decay with a number "
            "as its default, by which the running means change"
        )
    return estimator
