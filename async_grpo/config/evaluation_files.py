"""Refuse files of held-out questions with an equals sign in their names, which `--eval-data-path` reads as `NAME=FILE`."""

from pathlib import Path

from async_grpo.config.run import RunConfig
from async_grpo.options.fields import COMMAS, refuse


def refuse_ambiguous_files(config: RunConfig) -> None:
    """Refuse an existing file with an equals sign in its name, because the part before the sign is read as NAME.

    Raises:
        ConfigurationError: `--eval-data-path lr=1.jsonl` names the file `1.jsonl`, and only `lr=1.jsonl` exists.
    """
    text = config.eval_data_path
    if text is None or list(config.eval_files) == [""]:
        return
    has_named_files = all(Path(path).exists() for path in config.eval_files.values())
    if has_named_files or not Path(text).is_file():
        return
    name, _, path = text.partition("=")
    refuse(
        True,
        f"--eval-data-path {text}: this means the file {path}, with the name {name}; for the file {text}, write "
        f"--eval-data-path held_out={text}; {COMMAS}",
    )
