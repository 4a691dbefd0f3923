"""What a rule between settings is: a row of a table that names the flags, what is wrong, and the way out."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import dashed


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row: refuse (or warn) if `wrong(config, ...)` is true.

    Args:
        flags: the options it speaks of.
        why: what follows them in the message; `{c}` is the configuration, `{found}` what `wrong` returned. Or a function
            of what `wrong` is given.
        idle: it speaks of those flags alone that differ from their defaults, and of nothing if none does.
        warns: the run may go on.
    """

    flags: str
    wrong: Callable[..., Any]
    why: str | Callable[..., str]
    idle: bool = False
    warns: bool = False

    def message(self, config: Any, *facts: Any) -> str | None:
        """The refusal, or None where the rule is kept."""
        names = [name for name in self.flags.split() if not self.idle or _is_set(config, name)]
        found = self.wrong(config, *facts) if names else None
        if not found:
            return None
        listed = ", ".join(map(str, found)) if isinstance(found, list | set | tuple) else found
        why = self.why(config, *facts) if callable(self.why) else self.why.format(c=config, found=listed)
        named = " ".join(f"--{dashed(name)} {getattr(config, name)}" for name in names)
        return f"{named} {why}"


def idle(flags: str, wrong: Callable[..., Any], why: str, *, warns: bool = False) -> Rule:
    """A row about flags that would be accepted, and then do nothing."""
    return Rule(flags, wrong, f"does nothing {why}", idle=True, warns=warns)


def refuse_broken(rules: Iterable[Rule], *facts: Any) -> None:
    """Raise ConfigurationError for the first rule that is broken; those that merely warn are printed, on rank 0."""
    for rule in rules:
        if (message := rule.message(*facts)) is None:
            continue
        if not rule.warns:
            raise ConfigurationError(message)
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: {message}", file=sys.stderr, flush=True)


def _is_set(config: Any, name: str) -> bool:
    return bool(getattr(config, name) != type(config).__dataclass_fields__[name].default)
