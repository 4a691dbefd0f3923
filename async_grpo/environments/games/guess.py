"""A game: guess a number in several turns. After each guess, the policy reads whether the number is higher or lower."""

import random
import re
from typing import Any

GUESS = re.compile(r"\d+")


class Guess:
    """Guess a number from `low` to `high`. The reward is 1 if the policy finds it within `guesses` turns, else 0."""

    def __init__(self, low: int = 1, high: int = 16, guesses: int = 4) -> None:
        self._low = low
        self._high = high
        self._guesses_left = guesses

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Draw the number, and return the range that the policy reads."""
        self._number = random.Random(seed).randint(self._low, self._high)
        self._range = (self._low, self._high)  # the lowest and highest number that the answers so far allow
        self.numbers = {"guesses": 0.0, "wasted": 0.0}
        return f"{self._low}-{self._high}"

    @property
    def state(self) -> str:
        """Return the name of the policy's situation: the number, and the range that the answers so far allow."""
        return f"{self._number} {self._range}"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a guess, and give the reward 1 if it is right."""
        self._guesses_left -= 1
        self.numbers["guesses"] += 1
        match = GUESS.fullmatch(text.strip())
        guess = int(match[0]) if match else None
        if guess == self._number:
            return "found", 1.0, True
        low, high = self._range
        if guess is None or not low <= guess <= high:
            self.numbers["wasted"] += 1
            hint = "?"
        elif guess < self._number:
            hint = "higher"
            self._range = (guess + 1, high)
        else:
            hint = "lower"
            self._range = (low, guess - 1)
        return hint, 0.0, self._guesses_left == 0
