"""A calculator tool for countdown tasks. The policy can try expressions before its answer, which `countdown` scores."""

from async_grpo.rewards.builtin.countdown import NOT_ARITHMETIC, parse_arithmetic, value_of


def calc(e: str) -> str:
    """Compute the value of an arithmetic expression, such as 3*(4+5).

    >>> calc("3*(4+5)"), calc("1/3"), calc("1/0"), calc("import os")
    ('27', '1/3', '?', '?')
    """
    try:
        return str(value_of(parse_arithmetic(e)))
    except NOT_ARITHMETIC:
        return "?"


TOOLS = [calc]
