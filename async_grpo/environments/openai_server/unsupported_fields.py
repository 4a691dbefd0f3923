"""Fields of OpenAI's and vLLM's APIs that the endpoint does not support, and that would change what an answer contains.

Requests with these fields are refused, because an agent that relies on such a field would misread the answer. Fields
that only set how turns are sampled, such as `temperature`, `seed` and `logit_bias`, are ignored and counted: the run's
settings apply to turns that are trained on.
"""

from collections.abc import Mapping
from typing import Any

_FREELY = (
    "turns are sampled freely, because they are trained on: leave it out, and check the text in the program"
)
_SCHEMAS_ONLY = "only JSON schemas can be required of answers: use `response_format`"
UNSUPPORTED = {
    "logprobs": "answers have no log probabilities: leave it out",
    "top_logprobs": "answers have no log probabilities: leave it out",
    "functions": "use `tools`",
    "best_of": "use `n`, and choose in the program",
    "audio": "answers are texts: leave it out",
    "web_search_options": "the endpoint has no tools of its own: leave it out",
    "stop_token_ids": "use `stop`",
    "suffix": "answers continue the prompt alone: leave it out",
    "chat_template_kwargs": "the chat template is used in the same way for all turns of the run: leave it out",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _SCHEMAS_ONLY),
    "structured_outputs": _SCHEMAS_ONLY,
    **dict.fromkeys(("bad_words", "min_tokens", "ignore_eos"), _FREELY),
}
# Fields that are ignored. The number of requests that have them is part of the metrics
IGNORED = (
    "frequency_penalty",
    "include_reasoning",
    "length_penalty",
    "logit_bias",
    "max_tool_calls",
    "min_p",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "reasoning",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "service_tier",
    "temperature",
    "top_k",
    "top_p",
    "truncation",
    "verbosity",
)
# Values with which an ignored field requests what the endpoint does anyway
_DEFAULTS = {"parallel_tool_calls": True, "truncation": "disabled", "include_reasoning": True}
# Further fields of the Responses API
RESPONSES_UNSUPPORTED = UNSUPPORTED | {
    "background": "a request is answered when the turn is complete: leave it out",
    "conversation": "use `previous_response_id`, or send the whole conversation as `input`",
    "prompt": "no prompts are stored here: write it into `instructions` and `input`",
}
# Values with which a field requests nothing. 0 is also such a value, because it equals False
_HARMLESS: tuple[Any, ...] = (None, False, "", [], {})
_HARMLESS_BEST_OF = 1

# The supported values of a field, for error messages
HINTS = {
    "content": "a text, or a list of parts {'type': 'text', 'text': ...} or {'type': 'image_url', 'image_url': {'url': "
    "'data:image/png;base64,...'}}; audio and files are not supported",
    "prompt": "one text, or one list of token ids, per request",
    "tool_choice": "'auto', 'none', 'required', or {'type': 'function', 'function': {'name': ...}}",
    "tools": "only functions of the agent, {'type': 'function', 'function': {'name': ...}}; tools of OpenAI's server are "
    "not supported",
    "response_format": "{'type': 'text'}, {'type': 'json_object'}, or {'type': 'json_schema', 'json_schema': "
    "{'name': ..., 'schema': {...}}}",
}
RESPONSES_HINTS = HINTS | {
    "input": "a text, or a list of items of the types message, function_call, function_call_output, reasoning and "
    "item_reference",
    "content": "a text, or a list of parts {'type': 'input_text', 'text': ...} or {'type': 'input_image', 'image_url': "
    "'data:image/png;base64,...'}; audio and files are not supported",
    "output": "a text, or a list of parts {'type': 'input_text', 'text': ...}",
    "tools": "only functions of the agent, {'type': 'function', 'name': ...}; tools of OpenAI's server are "
    "not supported",
    "tool_choice": "'auto', 'none', 'required', or {'type': 'function', 'name': ...}",
    "format": "{'type': 'text'}, {'type': 'json_object'}, or {'type': 'json_schema', 'name': ..., 'schema': {...}}",
    "include": "answers have no log probabilities, and no results of tools of OpenAI's server",
}


def unsupported_fields(request: Mapping[str, Any], unsupported: Mapping[str, str] = UNSUPPORTED) -> list[str]:
    """Return what is wrong with each unsupported field of a request.

    >>> unsupported_fields({"logprobs": True, "best_of": 2})
    ['logprobs: answers have no log probabilities: leave it out', 'best_of: use `n`, and choose in the program']
    """
    reasons = []
    for name, reason in unsupported.items():
        value = request.get(name)
        is_harmless = value in _HARMLESS or (name == "best_of" and value == _HARMLESS_BEST_OF)
        if not is_harmless:
            reasons.append(f"{name}: {reason}")
    return reasons


def ignored_fields(request: Mapping[str, Any]) -> list[str]:
    """Return the names of a request's fields that are ignored. `IGNORED` contains all of these names.

    >>> ignored_fields({"temperature": 0, "top_p": None, "parallel_tool_calls": True, "text": {"verbosity": "low"}})
    ['temperature', 'verbosity']
    """
    fields = dict(request)
    text_settings = request.get("text")
    # The Responses API has the verbosity among the settings of the text
    if isinstance(text_settings, Mapping):
        fields.setdefault("verbosity", text_settings.get("verbosity"))
    names = []
    for name in IGNORED:
        value = fields.get(name)
        is_default = name in _DEFAULTS and value == _DEFAULTS[name]
        # If a call is required, `parallel_tool_calls` is not ignored: it sets the number of calls (see `typed_output`)
        is_form = name == "parallel_tool_calls" and request.get("tool_choice") == "required"
        if value is not None and not is_default and not is_form:
            names.append(name)
    return names
