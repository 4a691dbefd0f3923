"""Refuse a model that cannot be used, before anything is started and without loading its weights."""

from pathlib import Path

from transformers import PreTrainedConfig

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import load_config, model_folder, refuse_wrong_weights
from async_grpo.modeling.model_files import refuse_pickles, weight_shapes
from async_grpo.modeling.packable import check_packable_configuration

# Ends of the names of embeddings and heads, whose weights have one row per token of the vocabulary
WEIGHTS_BY_TOKEN = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "lm_head.weight",
    "embed_out.weight",
)
# Ends of the names of classes that generate text
CLASSES_OF_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def refuse_wrong_model(path: str | Path, *, trains: bool) -> None:
    """Refuse a model whose configuration or files of weights cannot be used.

    `config.preflight` checks the tokenizer and the end tokens.

    Args:
        path: The model's folder.
        trains: Whether the model is trained, and not only evaluated. Engines can serve more kinds of models than the
            packed forward of the trainer.

    Raises:
        ConfigurationError: The folder contains no complete model, or trainer and engines would compute different
            results.
    """
    config = load_config(path)
    folder = model_folder(path)
    _refuse_other_task(folder, config)
    if trains:
        check_packable_configuration(config)
    refuse_pickles(folder)
    _refuse_other_vocabulary(folder, config.get_text_config())
    if trains:
        refuse_wrong_weights(path)


def _refuse_other_vocabulary(folder: Path, config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if embedding or head have another number of tokens than the configuration says.

    transformers and vLLM detect this only when they load the weights.
    """
    vocab_size = getattr(config, "vocab_size", None)
    for name, shape in sorted(weight_shapes(folder).items()):
        if name.endswith(WEIGHTS_BY_TOKEN) and len(shape) == 2 and shape[0] != vocab_size:
            raise ConfigurationError(
                f"{folder}: config.json says vocab_size {vocab_size}, and {name} has rows for {shape[0]} tokens: correct "
                "vocab_size, or take config.json and weights of the same model"
            )
    pad_token_id = getattr(config, "pad_token_id", None)
    if type(vocab_size) is int and type(pad_token_id) is int and pad_token_id >= vocab_size:
        raise ConfigurationError(
            f"{folder}: config.json says pad_token_id {pad_token_id}, which is outside the vocabulary of {vocab_size} "
            "tokens: correct it, or set it to null"
        )


def _refuse_other_task(folder: Path, config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if the class named in the configuration is not one that generates text.

    Engines choose the model by this class. transformers ignores it, and uses the causal language model of the
    `model_type`.
    """
    names = getattr(config, "architectures", None) or []
    if not any(str(name).endswith(CLASSES_OF_GENERATORS) for name in names):
        raise ConfigurationError(
            f"{folder}: config.json says architectures {names!r:.100}, by which the engines choose, and none of them "
            "generates text: give a causal language model; if its weights are one, write its class, such as "
            '["Qwen2ForCausalLM"]'
        )
