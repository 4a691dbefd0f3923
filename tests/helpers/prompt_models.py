"""Variants of the tiny model's tokenizer, and the prompts that rows become with them."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from async_grpo.experience.dataset import questions_of
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import PromptRenderer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "sample-data" / "tiny-model"
REPORTS = next(
    (folder / "shared" / "data" / "reports" for folder in ROOT.parents if (folder / "shared").is_dir()),
    ROOT / "shared" / "data" / "reports",
)
CHATML = (TINY / "chat_template.jinja").read_text(encoding="utf-8")
ASSISTANT = "<|im_start|>assistant\n"
BOS_TEXT, EOS_TEXT = "<|endoftext|>", "<|im_end|>"


def _adding(before: str | None, after: str | None) -> dict:
    """The post-processor of a tokenizer that adds a token before or after each text."""
    ids = {BOS_TEXT: 256, EOS_TEXT: 258}
    special = {
        token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (before, after) if token
    }
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    if before:
        single.insert(0, {"SpecialToken": {"id": before, "type_id": 0}})
    if after:
        single.append({"SpecialToken": {"id": after, "type_id": 0}})
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


NO_GENERATION_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHATML
)
MODELS = {  # name -> (post-processor, settings of the tokenizer, template)
    "tiny": (None, {}, CHATML),
    "bos": (
        _adding(BOS_TEXT, None),
        {"bos_token": BOS_TEXT, "pad_token": EOS_TEXT},
        "{{ bos_token }}" + CHATML,
    ),
    "addeos": (_adding(None, EOS_TEXT), {}, CHATML),
    "both": (_adding(BOS_TEXT, EOS_TEXT), {"bos_token": BOS_TEXT}, "{{ bos_token }}" + CHATML),
    "bosunnamed": (_adding(BOS_TEXT, None), {}, CHATML),
    "nogenprompt": (None, {}, NO_GENERATION_PROMPT),
    "nosystem": (None, {}, NO_SYSTEM),
    "broken": (None, {}, CHATML + "{% endfor %}"),
    "concat": (
        None,
        {},
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    "dicttemplate": (
        None,
        {
            "chat_template": [
                {"name": "default", "template": CHATML},
                {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML},
            ]
        },
        None,
    ),
    "dictnodefault": (
        None,
        {"chat_template": [{"name": "chat", "template": CHATML}, {"name": "tool_use", "template": CHATML}]},
        None,
    ),
    "notemplate": (None, {}, None),
    "forgets": (
        None,
        {},
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "usestools": (None, {}, "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML),
}


def make_tokenizer(folder: Path, name: str) -> Any:
    """Return a tokenizer of MODELS, whose files are written into a folder."""
    path = folder / name
    if not path.exists():
        post_processor, settings, template = MODELS[name]
        path.mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TINY / file, path / file)
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        if post_processor is not None:
            tokenizer["post_processor"] = post_processor
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = json.loads((path / "tokenizer_config.json").read_text()) | settings
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        if template is not None:
            (path / "chat_template.jinja").write_text(template)
    return AutoTokenizer.from_pretrained(path)


def prompt_text(tokenizer, row, **options) -> str:
    """Return the text of a row's prompt, as the engine would read it."""
    (question,) = questions_of(
        [("rows.jsonl, line 1", row)],
        tokenizer,
        900,
        266,
        PromptRenderer(tokenizer, PromptOptions(**options)),
    )
    return tokenizer.decode(question.token_ids.tolist())


def user(content) -> dict:
    return {"role": "user", "content": content}


def chat(*messages) -> str:
    """Return the prompt of messages (role, content) in the tiny model's template."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>" for role, content in messages) + ASSISTANT


ASKED = chat(("user", "3+4?"))
