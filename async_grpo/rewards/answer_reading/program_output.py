"""Compares the output of a program with the expected output, as text or with a tolerance for numbers."""

import math
import re
from dataclasses import dataclass

# A number that is not part of a word. Each character can be matched in one way only, so that matching takes linear time
_NUMBER = re.compile(r"((?<![\w.])[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w|\.\w))", re.ASCII)


@dataclass(frozen=True)
class Tolerance:
    """How far numbers in the output may be from the expected ones. A number is close if either limit allows it.

    Integers must be equal: a tolerance only applies if at least one of two numbers has a decimal point or an exponent.

    Args:
        relative: Largest difference, as a share of the larger of the two numbers.
        absolute: Largest difference.

    Raises:
        ValueError: A tolerance is negative, or not a number.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def __post_init__(self) -> None:
        if not (self.relative >= 0 and self.absolute >= 0):
            raise ValueError(
                f"relative_tolerance={self.relative} and absolute_tolerance={self.absolute} must be numbers of at least 0"
            )

    def is_close(self, number: str, expected: str) -> bool:
        """Return whether a number in an output is close enough to the expected one."""
        if number == expected:
            return True
        values = (float(number), float(expected))
        is_float = any(mark in number + expected for mark in ".eE")
        if not is_float or not all(map(math.isfinite, values)):
            return False
        return math.isclose(*values, rel_tol=self.relative, abs_tol=self.absolute)


EXACT = Tolerance()


def same_output(output: str, expected: str, tolerance: Tolerance = EXACT) -> bool:
    """Return whether two outputs are equal, except for blanks at the ends of lines and empty lines at the end.

    With a tolerance, numbers need only be close. The text around them must be equal.

    >>> same_output("x = 0.3333, 2", "x = 0.3333333, 2"), same_output("0.3333", "0.3333333", Tolerance(1e-3))
    (False, True)
    """
    output_lines = _stripped_lines(output)
    expected_lines = _stripped_lines(expected)
    if tolerance == EXACT or len(output_lines) != len(expected_lines):
        return output_lines == expected_lines
    line_pairs = zip(output_lines, expected_lines, strict=True)
    return all(_are_close(line, expected_line, tolerance) for line, expected_line in line_pairs)


def _are_close(line: str, expected_line: str, tolerance: Tolerance) -> bool:
    # The parts are text and numbers alternately, beginning with text
    parts = _NUMBER.split(line)
    expected_parts = _NUMBER.split(expected_line)
    if parts[::2] != expected_parts[::2]:
        return False
    number_pairs = zip(parts[1::2], expected_parts[1::2], strict=True)
    return all(tolerance.is_close(number, expected) for number, expected in number_pairs)


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
