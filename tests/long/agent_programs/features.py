"""The main function of the programs beside this file: each uses features of one framework, in its environment."""

import json
import sys
from collections.abc import Callable
from typing import Any


def main(**features: Callable[[str], Any]) -> None:
    """Use the feature that the command names, and end with an error if its result is not the row's `expected`.

    The row comes on the standard input. Without an argument, print the names of the features, one on each line.
    """
    if len(sys.argv) == 1:
        print("\n".join(features))
        return
    row = json.load(sys.stdin)
    result = features[sys.argv[1]](row["input"])
    if result != row["expected"]:
        sys.exit(f"the result is {result!r}, not {row['expected']!r}")
