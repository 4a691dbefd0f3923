"""The options that say which columns of a data file contain the prompt and the answer."""

from dataclasses import dataclass
from functools import partial

from async_grpo.experience.column_paths import parse_paths
from async_grpo.experience.row_columns import ColumnMap
from async_grpo.options.fields import LIST, Section, option

_data = partial(option, panel="Data", portable=True)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Options of all commands that read questions."""

    prompt_column: str | None = _data(
        None,
        "Column of the prompt, in training and held-out files: a name such as problem, or a dotted path such as "
        "conversations.0.value, where -1 is the last item of a list. Several are separated by commas, and the first one "
        "that a row has is used. By default the prompt is input_token_ids, messages, prompt or input.",
        form=LIST,
    )
    answer_column: str | None = _data(
        None,
        "Column of the answer that rewards get as `answer`: a name such as label, or a dotted path such as "
        "reward_model.ground_truth. Several are separated by commas, and the first one that a row has is used.",
        form=LIST,
    )
    prompt_as: str = _data(
        "message",
        "How a text in --prompt-column is used: message makes it the user's message in the model's chat template; text "
        "makes it the whole prompt, without a template.",
        choices=("message", "text"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.column_map  # noqa: B018  raises an error for an empty name

    @property
    def column_map(self) -> ColumnMap:
        """Return the columns of the prompt and the answer."""
        return ColumnMap(
            prompt=parse_paths(self.prompt_column, "--prompt-column"),
            answer=parse_paths(self.answer_column, "--answer-column"),
            text_is_message=self.prompt_as == "message",
        )
