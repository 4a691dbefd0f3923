"""Parse the texts of `--estimator-options` and `--loss-options`, which set further options of one estimator or loss."""

from collections.abc import Mapping
from typing import Any

from async_grpo.options.fields import BELOW_ONE, NOT_NEGATIVE, SHARE, is_number, parse_assignments, refuse

# Allowed ranges of options by name, for every estimator or loss that has them. clip_low is at most 1, because a ratio
# is never below 0
RANGES = {
    "estimator-options": {
        **dict.fromkeys(("gamma", "lam", "critic_lam"), SHARE),
        "decay": BELOW_ONE,  # with 1, a running mean would stay 0
        **dict.fromkeys(("eps", "alpha"), NOT_NEGATIVE),
    },
    "loss-options": {
        "clip_low": SHARE,
        **dict.fromkeys(("clip_high", "eps_low", "eps_high", "coef"), NOT_NEGATIVE),
    },
}


def parse_settings(flag: str, text: str, defaults: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the options in a text of assignments (NAME=VALUE,NAME=VALUE), by name.

    Args:
        flag: Name of the option that contains the text.
        text: The assignments.
        defaults: Options of the estimator or loss, and their defaults.
        owner: The estimator or loss, for the error messages.

    Raises:
        ConfigurationError: An option does not exist, or a value has another type than its default or is out of range.
    """
    settings = parse_assignments(text, flag)
    for name, value in settings.items():
        refuse(name not in defaults, f"{owner} has no option {name}; it has {', '.join(defaults) or 'none'}")
        match defaults[name]:
            case bool():
                is_right_kind = isinstance(value, bool)
                problem = "must be true or false"
            case str():
                is_right_kind = isinstance(value, str)
                problem = "must be a word"
            case default:
                is_right_kind = is_number(value) or value is default is None
                problem = "is no finite number"
        refuse(not is_right_kind, f"{owner}: {name}={value} {problem}")
        allowed = RANGES[flag].get(name)
        is_outside = allowed is not None and value is not None and not allowed.holds(value)
        refuse(is_outside, f"--{flag} {name}={value}: it {allowed and allowed.says}")
    return settings
