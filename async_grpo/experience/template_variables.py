"""Find what is wrong with a chat template, or with the user's variables for it, before a prompt is rendered.

A template raises no error for a variable that it does not know, or for a value that it does not expect. So the prompts
would be wrong, and nobody would notice.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from async_grpo.options.fields import nearest, refuse

# The tags `generation` and `endgeneration`, which transformers adds to Jinja. They are removed, because Jinja's parser does
# not know them
EXTRA_TAG = re.compile(r"\{%-?\s{0,9}(?:end)?generation\s{0,9}-?%\}")
BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# Jinja's tests that tell true and false from the numbers 1 and 0
TESTS_OF_BOOLEANS = ("true", "false", "boolean", "sameas")
# Jinja's tests and filters for a variable that may be missing
DEFAULTS = ("defined", "undefined", "none", "default", "d")
GLOBALS = ("raise_exception", "strftime_now")  # functions that transformers adds


def syntax_problem(template: str) -> str:
    """Return line and reason if the text is no Jinja template, else ""."""
    try:
        meta.find_undeclared_variables(_parsed(template))  # looks at the names of filters, too
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "line 1: it is nested too deeply"
    return ""


def check_variables(variables: Mapping[str, Any], templates: list[str], template_name: str) -> None:
    """Check the variables of `--chat-template-kwargs`.

    Args:
        variables: Names and values.
        templates: The texts of the chat template, or of all of them if the tokenizer has several.
        template_name: Name of the template in messages.

    Raises:
        ConfigurationError: No template reads a variable, so it would change nothing. Or its value is a word or number by
            which the user probably means true or false, but which the template would take for something else.
    """
    if not variables:
        return
    names: set[str] = set()
    try:
        trees = [_parsed(template) for template in templates]
        for tree in trees:
            names |= _variables_of(tree)
    except (TemplateSyntaxError, RecursionError):
        return  # a template that is not valid Jinja is refused when a prompt is rendered
    for name, value in variables.items():
        option = f"--chat-template-kwargs {name}={value}"
        refuse(
            name not in names,
            f"{option}: {template_name} has no variable {name!r}, so it would change nothing"
            f"{nearest(name, sorted(names))}",
        )
        refuse(
            value == "null" and not any(value in _texts(tree) for tree in trees),
            f"{option}: {template_name} would take it for the text 'null': write {name}=none",
        )
        boolean = _intended_boolean(value, name, trees)
        refuse(
            boolean is not None,
            f"{option}: {template_name} takes {value!r} for neither true nor false, or for the wrong one: write "
            f"{name}={str(boolean).lower()}",
        )


def _parsed(template: str) -> nodes.Template:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= dict.fromkeys(GLOBALS)
    return environment.parse(EXTRA_TAG.sub("", template))


def _variables_of(tree: nodes.Template) -> set[str]:
    """Return the names of the variables that a template reads, and that its user may set.

    A name that the template sets itself counts only if the user's value has an effect, as in `{% set x = x or 3 %}` or
    with a test such as `x is defined`.
    """
    set_names = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    names_with_default: set[str] = set()
    for place in tree.find_all((nodes.Test, nodes.Filter)):
        if place.name in DEFAULTS and isinstance(place.node, nodes.Name):
            names_with_default.add(place.node.name)
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            read_names = {node.name for node in assignment.node.find_all(nodes.Name)}
            if isinstance(assignment.node, nodes.Name):
                read_names.add(assignment.node.name)
            names_with_default |= read_names & {assignment.target.name}
    return meta.find_undeclared_variables(tree) - (set_names - names_with_default)


def _intended_boolean(value: Any, name: str, trees: list[nodes.Template]) -> bool | None:
    """Return the boolean that the user probably means by a text or number, if a template would misread this value.

    For example, Jinja takes the text "no" for true. If a template compares the variable with such a text, it reads the
    value correctly, and the result is None.
    """
    word = str(value).strip("\"' ").lower()
    if isinstance(value, bool) or not isinstance(value, str | int) or word not in BOOLEANS:
        return None
    if isinstance(value, str):
        is_compared = any(value in _texts(tree) for tree in trees)
        is_misread = not is_compared
    else:
        is_misread = any(name in _names_tested_for_booleans(tree) for tree in trees)
    return BOOLEANS[word] if is_misread else None


def _texts(tree: nodes.Template) -> Iterator[str]:
    """Yield all texts that stand in quotes in a template."""
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _names_tested_for_booleans(tree: nodes.Template) -> Iterator[str]:
    """Yield the variables that a template compares with a boolean by a test such as `is false`."""
    for test in tree.find_all(nodes.Test):
        if test.name in TESTS_OF_BOOLEANS and isinstance(test.node, nodes.Name):
            yield test.node.name
