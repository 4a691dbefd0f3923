"""Check that the chat template ends answers with one of the tokens at which the engines end completions."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import TEMPLATE_S, PromptRenderer
from async_grpo.launch.plan import OK, WARNING, Finding
from async_grpo.processes.deadline import interrupted_after

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared

MESSAGE_COLUMNS = ("messages", "prompt")  # columns of a row that may contain a chat as messages


def end_tokens(tokenizer: Any, options: PromptOptions, stop_ids: Sequence[int]) -> Finding:
    """Return a finding with the tokens that end completions: a warning if no answer of the template ends with one."""
    text = ", ".join(f"{stop} is {tokenizer.convert_ids_to_tokens(stop)}" for stop in stop_ids)
    renderer = PromptRenderer(tokenizer, options)
    cure = "add the template's end token to eos_token_id in generation_config.json"
    if not renderer.has_template:
        return Finding("stop ids", OK, f"{text}; no chat template", cure)
    try:
        answer_ids = renderer.answered_tokens()
    except ConfigurationError as error:
        return Finding(
            "stop ids", OK, f"{text}; whether one ends an answer is unknown, because {error}", cure
        )
    if {*answer_ids}.isdisjoint(stop_ids):
        problem = "none ends an answer of the chat template, so no completion would end"
        return Finding("stop ids", WARNING, f"{text}: {problem}", cure)
    return Finding("stop ids", OK, text, cure)


def answers_without_end(prepared: "Prepared") -> Iterator[Finding]:
    """Yield the finding of `end_tokens` if it is a warning. Yield nothing if the data contains no chats."""
    from async_grpo.modeling.load import load_tokenizer

    rows = (question.row for question in prepared.questions)
    if not any(isinstance(row.get(column), list) for row in rows for column in MESSAGE_COLUMNS):
        return
    tokenizer = load_tokenizer(prepared.config.model_name_or_path)
    with interrupted_after(TEMPLATE_S, "the model's chat template"):
        finding = end_tokens(tokenizer, prepared.config, prepared.settings.stop_token_ids)
    if finding.level == WARNING:
        yield finding
