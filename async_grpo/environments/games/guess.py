"""Guess a number in several turns: after each guess the policy is told whether the number is higher or lower."""

import random
import re
from typing import Any

GUESS = re.compile(r"\d+")


class Guess:
    """Numbers from `low` to `high`; the reward is 1 when it is found within `guesses`, else 0."""

    def __init__(self, low: int = 1, high: int = 16, guesses: int = 4) -> None:
        self._low, self._high, self._left = low, high, guesses

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self._number = random.Random(seed).randint(self._low, self._high)
        self._known = self._low, self._high
        self.numbers = {"guesses": 0.0, "wasted": 0.0}
        return f"{self._low}-{self._high}"

    @property
    def state(self) -> str:
        """What is known of the number, to compare turns that found the same."""
        return f"{self._number} {self._known}"

    def step(self, said: str) -> tuple[str, float, bool]:
        self._left -= 1
        self.numbers["guesses"] += 1
        found = GUESS.fullmatch(said.strip())
        guess = int(found[0]) if found else None
        if guess == self._number:
            return "found", 1.0, True
        low, high = self._known
        if guess is None or not low <= guess <= high:
            self.numbers["wasted"] += 1
            hint = "?"
        elif guess < self._number:
            hint, self._known = "higher", (guess + 1, high)
        else:
            hint, self._known = "lower", (low, guess - 1)
        return hint, 0.0, self._left == 0
