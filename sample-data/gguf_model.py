"""Convert the GGUF file of a Llama-type model into a Hugging Face folder, and check the result.

Reading GGUF needs the package `gguf`: `pip install 'async-grpo[smollm2]'`.
"""

import hashlib
import importlib.util
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError

QUESTION, ANSWER_TOKENS = "What is the capital of France?", 12
# The tokenizer must give this text back: words, digits, spaces, an accent, a line break, a character of three bytes
ROUND_TRIP_TEXT = "The capital of France is  Paris. 12+34\nçà 東"
TENSORS = re.compile(
    r"(token_embd|output_norm|output|blk\.\d+\.(attn_(q|k|v|output|norm)|ffn_(gate|up|down|norm)))\.weight"
)
TENSORS_OF_LAYER = 9
# Kinds of tokenizers (BPE over bytes, and SentencePiece) -> field that the file must have in addition to the tokens
TOKENIZERS = {"gpt2": "tokenizer.ggml.merges", "llama": "tokenizer.ggml.scores"}
# Rules by which texts are split before BPE. Only for these does transformers make the same tokenizer as the original
SPLITS = ("default", "gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3")
# Types of weights that bfloat16 would round
FULL_TYPES = {"F16", "F32", "F64"}


class CannotMakeModel(ConfigurationError):
    """The model could not be made. The message says what is missing and what to do."""


@dataclass(frozen=True)
class GGUFFacts:
    """Facts about a model, read from its GGUF file."""

    name: str
    license: str  # "" if the file names none
    num_tensors: int
    weight_types: tuple[str, ...]  # types of the weights, such as Q4_1, the most frequent first
    tokens: list[str]
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def dtype(self) -> str:
        """Return the dtype of the Hugging Face folder: float32 if the file has weights that bfloat16 would round."""
        return "float32" if FULL_TYPES & set(self.weight_types) else "bfloat16"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or raise CannotMakeModel if there is none."""
    if not path.is_file():
        raise CannotMakeModel(f"{path} is no file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def new_folder(folder: Path, further_need: str = "") -> Iterator[Path]:
    """Let the block write the folder of a model. If the block fails, no folder is left.

    Args:
        folder: The folder to write, which must not exist.
        further_need: End of the error message if `gguf` is not installed: what else the user must do.

    Yields:
        The temporary folder to write, which becomes `folder` at the end. It does not exist yet. Its parent may be used
        for other temporary files.

    Raises:
        CannotMakeModel: The folder exists, or the package `gguf` is not installed.
    """
    if folder.exists():
        raise CannotMakeModel(f"{folder} exists already: give another folder, or remove it")
    if importlib.util.find_spec("gguf") is None:
        raise CannotMakeModel(
            f"the package `gguf` is not installed: pip install 'async-grpo[smollm2]'{further_need}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder has the same parent, because a rename works only within one file system
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        unfinished = Path(scratch, "model")
        yield unfinished
        unfinished.rename(folder)


def make_from_gguf(folder: Path, gguf: Path) -> str:
    """Write the Hugging Face folder of a GGUF file's model, and return the model's answer to QUESTION.

    If anything fails, no folder is left.

    Args:
        folder: The folder to write, which must not exist.
        gguf: A GGUF file with a model of the architecture `llama`.

    Raises:
        CannotMakeModel: The folder exists, `gguf` is not installed, or the file holds something that cannot be
            converted.
    """
    with new_folder(folder) as unfinished:
        file_digest = digest(gguf)
        facts = convert(gguf, unfinished)
        answer = answer_of(unfinished)
        about = (
            f"{facts.name or gguf.stem}, license {facts.license or 'unknown (the file names none)'}, made by async-grpo "
            f"from {gguf.name}, sha256 {file_digest}.\n\nThe weights were of the types {', '.join(facts.weight_types)} "
            f"before they were written here as {facts.dtype}. If they had been quantised, this model is worse than the "
            "original.\n"
        )
        (unfinished / "README.md").write_text(about, encoding="utf-8")
    return answer


def convert(gguf: Path, folder: Path) -> GGUFFacts:
    """Write the GGUF file's model and its tokenizer as a Hugging Face folder, and check the tokenizer.

    Raises:
        CannotMakeModel: The file holds something that cannot be converted, or the tokenizer differs from the file's.
    """
    facts = read_facts(gguf)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = dequantised.config.to_dict()
    for name in ("quantization_config", "dtype", "_name_or_path", "_model_name_or_path", "model_type"):
        values.pop(name, None)
    # GGUF holds the epsilon of the norms in 32 bits: 1e-05 is read as 9.999999747378752e-06
    values |= {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": float(f"{values['rms_norm_eps']:.6g}")}
    special = {
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": facts.eos_token_id,
        "pad_token_id": facts.eos_token_id if facts.pad_token_id is None else facts.pad_token_id,
    }
    model = LlamaForCausalLM(LlamaConfig(**(values | special)))
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.generation_config.update(**special)
    model.to(getattr(torch, facts.dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    _drop_further_tokens(facts, folder)
    check_tokens(facts, folder)
    return facts


def _drop_further_tokens(facts: GGUFFacts, folder: Path) -> None:
    """Remove the tokens that the GGUF file does not have from a tokenizer's files.

    transformers makes every BPE tokenizer like that of GPT-2, and adds GPT-2's token <|endoftext|> if the file does not
    have it. The model has no embedding for this token.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = [token for token in tokenizer["added_tokens"] if token["id"] < len(facts.tokens)]
    if added != tokenizer["added_tokens"]:
        path.write_text(json.dumps(tokenizer | {"added_tokens": added}, ensure_ascii=False), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("unk_token") not in (None, *facts.tokens):
        path.write_text(json.dumps(config | {"unk_token": None}, indent=2), encoding="utf-8")


def read_facts(gguf: Path) -> GGUFFacts:
    """Read the facts about a model from its GGUF file.

    Raises:
        CannotMakeModel: The file is not a GGUF file, or has something that `convert` cannot convert.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise CannotMakeModel(f"{gguf} cannot be read as GGUF: {error}") from error
    try:
        obstacle = _obstacle(fields, reader.tensors)
    except KeyError as error:
        obstacle = f"it lacks the field {error}"
    if obstacle is not None:
        raise CannotMakeModel(f"{gguf} cannot be converted: {obstacle}")
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    return GGUFFacts(
        name=fields.get("general.name", ""),
        license=fields.get("general.license", ""),
        num_tensors=len(reader.tensors),
        weight_types=tuple(name for name, _ in types.most_common()),
        tokens=fields["tokenizer.ggml.tokens"],
        chat_template=fields.get("tokenizer.chat_template"),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _obstacle(fields: dict[str, Any], tensors: list[Any]) -> str | None:
    """Return the reason why the file cannot be converted, or None if it can."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        return f"its model has the architecture {architecture!r}; only 'llama' is known"
    if fields.get("split.count", 1) > 1:
        return f"it is one of {fields['split.count']} parts; merge them first with `llama-gguf-split --merge`"
    if fields.get("llama.expert_count", 0):
        return f"its model is a mixture of {fields['llama.expert_count']} experts"
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        return f"its model scales rotary positions by the rule {scaling!r}"
    head_size = fields["llama.embedding_length"] // fields["llama.attention.head_count"]
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if fields.get(f"llama.{name}", head_size) != head_size:
            return f"its {name} is {fields[f'llama.{name}']}, and not the head size {head_size}"
    return _obstacle_in_tokenizer(fields) or _obstacle_in_tensors(fields["llama.block_count"], tensors)


def _obstacle_in_tokenizer(fields: dict[str, Any]) -> str | None:
    tokenizer = fields.get("tokenizer.ggml.model")
    if tokenizer not in TOKENIZERS:
        return f"its tokenizer is of the kind {tokenizer!r}; known: {', '.join(TOKENIZERS)}"
    if not fields.get(TOKENIZERS[tokenizer]):
        return f"it lacks the field {TOKENIZERS[tokenizer]!r}"
    split = fields.get("tokenizer.ggml.pre", "default")
    if split not in SPLITS:
        return f"its tokenizer splits texts by the rule {split!r}; known: {', '.join(SPLITS)}"
    # This rule makes each digit a word of its own. The tokenizer of transformers does so only if no token has two
    # digits
    if split == "smollm" and any(re.search(r"\d\d", token) for token in fields["tokenizer.ggml.tokens"]):
        return "its tokenizer splits texts by the rule 'smollm', but has tokens of two digits"
    return None


def _obstacle_in_tensors(num_layers: int, tensors: list[Any]) -> str | None:
    import gguf

    names = {tensor.name for tensor in tensors}
    unknown = sorted(name for name in names if not TENSORS.fullmatch(name))
    if unknown:
        return f"unknown tensors: {', '.join(unknown[:5])}"
    num_expected = num_layers * TENSORS_OF_LAYER + len({"token_embd", "output_norm"})
    if len(names - {"output.weight"}) != num_expected:
        return f"it holds {len(names)} tensors, where {num_layers} layers have {num_expected} and may have output.weight"
    for tensor in tensors:
        try:
            gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except (NotImplementedError, KeyError):
            return f"the package `gguf` cannot read the type {tensor.tensor_type.name} of {tensor.name}"
    return None


def check_tokens(facts: GGUFFacts, folder: Path) -> None:
    """Check the tokenizer in a folder against the vocabulary and the chat template of the GGUF file.

    Raises:
        CannotMakeModel: A token or the chat template differs, or a text does not survive encoding and decoding.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if tokens != facts.tokens:
        differing = [pair for pair in zip(tokens, facts.tokens, strict=False) if pair[0] != pair[1]]
        first = f"such as {differing[0][0]!r} for {differing[0][1]!r}" if differing else "some are missing"
        raise CannotMakeModel(
            f"the tokenizer in {folder} has {len(tokens)} tokens, the GGUF file {len(facts.tokens)}; "
            f"{len(differing)} differ, {first}"
        )
    if tokenizer.chat_template != facts.chat_template:
        raise CannotMakeModel(f"the chat template in {folder} is not the GGUF file's")
    token_ids = tokenizer.encode(ROUND_TRIP_TEXT, add_special_tokens=False)
    text = tokenizer.decode(token_ids)
    if text != ROUND_TRIP_TEXT:
        raise CannotMakeModel(
            f"the tokenizer in {folder} encodes {ROUND_TRIP_TEXT!r}, but decodes it to {text!r}"
        )


def answer_of(folder: Path) -> str:
    """Return the greedy answer of the model in a folder to QUESTION, or raise CannotMakeModel if it computes NaN."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    text = QUESTION
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # A chat template writes the special tokens itself
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=tokenizer.chat_template is None)
    with torch.no_grad():
        is_finite = bool(model(prompt["input_ids"]).logits.isfinite().all())
    if not is_finite:
        raise CannotMakeModel(f"the model in {folder} computes NaN or infinity")
    generated = model.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
    )
    return str(tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
