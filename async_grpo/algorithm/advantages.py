"""The advantage estimators by name, or by `FILE.py:NAME` where they are the user's own.

An entry says everything that the rest of the library must know of its estimator; no other module knows one by its name.
"""

from async_grpo.algorithm import outcome_advantages as outcomes
from async_grpo.algorithm import process_advantages as processes
from async_grpo.algorithm.estimator import COMPONENTS, PROVIDED, SOURCES, Estimator
from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import find_entry

ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(outcomes.grpo, group_local=True, per_sample=True),
    "dr_grpo": Estimator(outcomes.dr_grpo, group_local=True, per_sample=True),
    "rloo": Estimator(outcomes.rloo, group_local=True, per_sample=True),
    "opo": Estimator(outcomes.opo, group_local=True, per_sample=True),
    "grpo_passk": Estimator(outcomes.grpo_passk, group_local=True, per_sample=True),
    "remax": Estimator(processes.remax, group_local=True, per_sample=True),
    "gpg": Estimator(outcomes.gpg, per_sample=True),
    "grpo_batch_std": Estimator(outcomes.grpo_batch_std, per_sample=True),
    "reinforce_plus_plus_baseline": Estimator(outcomes.reinforce_plus_plus_baseline, per_sample=True),
    "gdpo": Estimator(outcomes.gdpo, per_sample=True, rewards=COMPONENTS, needs_all_rewards=True),
    "reinforce_plus_plus": Estimator(
        processes.reinforce_plus_plus,
        process=True,
        per_sample=True,
        compares_with_batch=True,
        needs_all_rewards=True,
    ),
    "gae": Estimator(
        processes.gae,
        process=True,
        compares_with_batch=True,
        needs_all_rewards=True,
        critic_returns=processes.gae_returns,
    ),
    "grpo_process": Estimator(processes.grpo_process, group_local=True, outcome=False, process=True),
    "prime_rloo": Estimator(processes.prime_rloo, outcome=False, process=True, rewards=SOURCES),
}


def get_estimator(name: str) -> Estimator:
    """The estimator of that name, or the user's own that `FILE.py:NAME` names.

    Raises:
        ConfigurationError: there is none, or it needs an input that nothing provides.
    """
    estimator = find_entry(name, ADVANTAGE_ESTIMATORS, Estimator, "advantage-estimator")
    known = {*PROVIDED, *estimator.inputs, *estimator.options}
    if unknown := [keyword for keyword in estimator.keywords if keyword not in known]:
        raise ConfigurationError(
            f"--advantage-estimator {name} takes {', '.join(unknown)}, which is neither an option (a keyword with a number "
            f"as its default) nor provided ({', '.join(PROVIDED)}): give its Estimator entry inputs={{'{unknown[0]}': "
            "a function of the sample}"
        )
    return estimator
