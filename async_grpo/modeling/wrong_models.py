"""Refuse a wrong model before anything is started, without loading its weights."""

from pathlib import Path

from async_grpo.modeling.load import load_config, model_folder
from async_grpo.modeling.model_files import refuse_pickles
from async_grpo.modeling.packable import check_packable_configuration


def refuse_wrong_model(path: str | Path, *, trains: bool) -> None:
    """Refuse a model whose configuration or files of weights cannot be used.

    `config.preflight` checks the tokenizer and the end tokens.

    Args:
        path: The model's folder.
        trains: Whether the model is trained, and not only evaluated. Engines can serve more kinds of models than the
            packed forward of the trainer.

    Raises:
        ConfigurationError: The folder holds no complete model, or the trainer would not compute it as the engines do.
    """
    config = load_config(path)
    if trains:
        check_packable_configuration(config)
    refuse_pickles(model_folder(path))
