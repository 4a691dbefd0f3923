"""`PromptOptions`: how messages become text. The same options apply to training, evaluation and environments."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import TABLE, Section, option, parse_assignments, refuse
from async_grpo.processes.untrusted_files import RepeatedKey, all_is_text, is_text, parse_json, read_text

MAX_TEMPLATE_BYTES = 1 << 20
# Arguments of `apply_chat_template` that this library sets itself, or that are not variables of a template
RESERVED_NAMES = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)

_prompts = partial(option, panel="Prompts")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Section):
    """Options of the chat template, which turns messages into the text of a prompt."""

    chat_template: str | None = _prompts(
        None,
        "Jinja file of the chat template that turns messages into a prompt. The default is the model's own.",
    )
    chat_template_kwargs: str = _prompts(
        "",
        "Further variables of the chat template, such as enable_thinking=false, or a JSON object of them.",
        portable=True,
        form=TABLE,
    )
    system_prompt: str | None = _prompts(
        None,
        "Text of a system message for conversations without one. A prompt that is a plain text becomes the user's "
        "message. By default nothing is added.",
        portable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chat_template is not None:
            # Make the path absolute, because other programs of the run have other working directories
            object.__setattr__(self, "chat_template", os.path.abspath(self.chat_template))
        for name in self.template_variables:
            refuse(
                name in RESERVED_NAMES,
                f"--chat-template-kwargs {name}: the library itself sets it; leave it out",
            )
        refuse(
            not all_is_text(self.template_variables),
            f"--chat-template-kwargs {self.chat_template_kwargs!r:.80} is not valid text: give it as UTF-8",
        )
        refuse(
            self.system_prompt is not None and not is_text(self.system_prompt),
            f"--system-prompt {self.system_prompt!r:.80} is not valid text: give it as UTF-8",
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables of `--chat-template-kwargs`.

        >>> PromptOptions(chat_template_kwargs="enable_thinking=false,effort=low").template_variables
        {'enable_thinking': False, 'effort': 'low'}
        >>> PromptOptions(chat_template_kwargs='{"documents": [{"title": "a, b"}]}').template_variables
        {'documents': [{'title': 'a, b'}]}
        """
        text = self.chat_template_kwargs.strip()
        if not text.startswith("{"):
            return parse_assignments(text, "chat-template-kwargs")
        try:
            variables = parse_json(text, unique_keys=True)
        except RepeatedKey as error:
            raise ConfigurationError(f"--chat-template-kwargs: {error}") from error
        except ValueError as error:
            raise ConfigurationError(
                f"--chat-template-kwargs {text!r:.80} begins like a JSON object, but is not valid JSON: {error}"
            ) from error
        assert isinstance(variables, dict), "a JSON text that begins with a brace is an object"
        return variables

    def read_template(self) -> str | None:
        """Return the text of the file that `--chat-template` names, or None without that option.

        Raises:
            ConfigurationError: The file cannot be read, or is empty.
        """
        if self.chat_template is None:
            return None
        try:
            text = read_text(Path(self.chat_template), MAX_TEMPLATE_BYTES, follow_links=True)
        except (OSError, ValueError) as error:
            is_text_of_template = "{%" in self.chat_template or "{{" in self.chat_template
            hint = (
                "; it must be the name of a file: write the template into one" if is_text_of_template else ""
            )
            raise ConfigurationError(
                f"--chat-template {self.chat_template} cannot be read: {error}{hint}"
            ) from error
        # Some editors write a byte order mark at the beginning of a file, which would become part of each prompt
        text = text.removeprefix("\ufeff")
        refuse(not text.strip(), f"--chat-template {self.chat_template} is empty")
        refuse(
            _is_json_object(text),
            f"--chat-template {self.chat_template} is a JSON object: write the text of its chat_template alone into a "
            "file, such as by jq -r .chat_template FILE",
        )
        return text


def _is_json_object(text: str) -> bool:
    """Return whether a text is a JSON object, such as tokenizer_config.json, and therefore not a template."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


MODEL_DEFAULTS = PromptOptions()
