"""Facts about a model that a run needs before anything is started, for each kind of policy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_grpo.algorithm.flow.config import FLOW, TEXT
from async_grpo.config.flow_prompts import MAX_TEXT_BYTES, flow_prompts
from async_grpo.config.images import image_prompts
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.experience.dataset import Question, questions_of
from async_grpo.experience.image_prompts import ImagePrompts
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.messages import FlowSettings, LoraSettings
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.load import (
    context_length,
    load_config,
    load_tokenizer,
    model_fingerprint,
    stop_token_ids,
)
from async_grpo.modeling.wrong_models import refuse_wrong_model
from async_grpo.options.fields import refuse


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a run's model."""

    tokenizer: Any  # has `decode` and a length
    renderer: Any  # turns rows into prompts, like a `PromptRenderer`
    vocab_size: int
    context_tokens: int  # maximum number of tokens of prompt and completion together
    stop_token_ids: tuple[int, ...]
    fingerprint: str  # sha256 (hex) with which workers check that their model is the same
    hidden_size: int
    dtype: str  # dtype of the computation
    lora: LoraSettings | None = None  # None if all weights are trained
    flow: FlowSettings | None = None  # set if the policy draws
    images: ImagePrompts | None = None  # renders prompts with images; None if the model reads none

    def questions_of(
        self, rows: Iterable[tuple[str, Any]], max_prompt_tokens: int, folder: Path
    ) -> list[Question]:
        """Return the questions of a file's rows; see `dataset.questions_of`.

        Args:
            rows: (file and line number as text, row) for each row.
            max_prompt_tokens: Maximum length of a prompt.
            folder: Folder of the file, in which images are looked for.
        """
        return questions_of(
            rows,
            self.tokenizer,
            max_prompt_tokens,
            self.vocab_size,
            self.renderer,
            self.images,
            folder,
        )


def read_language_model(config: RunConfig) -> ModelFacts:
    """Return the facts about a language model in a folder of transformers.

    Raises:
        ConfigurationError: A file of the folder is missing or cannot be used, or an adapter does not fit.
    """
    path = config.model_name_or_path
    text_config = load_config(path).get_text_config()
    lora = lora_settings(config, path)
    context_tokens = context_length(path)
    tokenizer = load_tokenizer(path)
    renderer = PromptRenderer(tokenizer, config)
    return ModelFacts(
        tokenizer=tokenizer,
        renderer=renderer,
        vocab_size=text_config.vocab_size,
        context_tokens=context_tokens,
        stop_token_ids=stop_token_ids(path),
        fingerprint=model_fingerprint(path),
        hidden_size=text_config.hidden_size,
        dtype=_dtype(config),
        lora=lora,
        images=image_prompts(config, tokenizer, renderer),
    )


def read_flow_model(config: RunConfig) -> ModelFacts:
    """Return the facts about a flow-matching model in a folder of diffusers. Its tokens are denoising steps.

    Raises:
        ConfigurationError: The folder cannot be used, or the denoising steps do not fit.
    """
    folder = read_flow_folder(config.model_name_or_path).with_options(config.picture_size, config.guidance)
    refuse(
        config.trains_by_nft and folder.family.needs_negative(config.guidance),
        f"--flow-loss diffusion_nft --guidance {config.guidance} do not go together: DiffusionNFT draws and trains without "
        "a negative prompt. Leave --guidance out",
    )
    num_steps = config.max_generation_tokens
    folder.schedule(num_steps)
    if config.eval_max_tokens is not None:
        folder.schedule(config.eval_max_tokens)
    prompts = flow_prompts(folder)
    max_prompt_tokens = MAX_TEXT_BYTES if folder.family.reads_text else 1
    model_config = folder.model_config
    return ModelFacts(
        tokenizer=prompts,
        renderer=prompts,
        vocab_size=folder.num_labels,
        context_tokens=max_prompt_tokens + max(num_steps, config.eval_max_tokens or 0),
        stop_token_ids=(),
        fingerprint=folder.fingerprint,
        hidden_size=int(model_config["num_attention_heads"]) * int(model_config["attention_head_dim"]),
        dtype="float32" if config.dtype == "auto" else config.dtype,
        lora=lora_settings(config, config.model_name_or_path),
        flow=FlowSettings(
            num_steps=num_steps,
            window=config.flow_window,
            window_order=config.flow_window_order,
            window_every=config.flow_window_every,
            picture_size=config.picture_size,
            guidance=config.guidance,
            trains_finished=config.trains_by_nft,
        ),
    )


def refuse_wrong_flow_model(path: str, *, trains: bool) -> None:
    """Refuse a folder of diffusers whose configuration or weights cannot be used. Only sizes are compared.

    Raises:
        ConfigurationError: The folder contains no complete model.
    """
    read_flow_folder(path).check_weights()


@dataclass(frozen=True)
class ModelKind:
    """Functions that read and check the models of one kind of policy."""

    read: Callable[[RunConfig], ModelFacts]
    refuse_wrong: Callable[..., None]  # (path, trains=...) -> None; raises ConfigurationError


MODEL_KINDS = {
    TEXT: ModelKind(read_language_model, refuse_wrong_model),
    FLOW: ModelKind(read_flow_model, refuse_wrong_flow_model),
}


def _dtype(config: RunConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"
