"""`run` warns if no end token of the model ends an answer of its chat template, as `doctor` does."""

import json
import shutil
from pathlib import Path

import pytest

from async_grpo.config.preflight import prepare
from async_grpo.data import TINY_MODEL
from async_grpo.launch.end_tokens import answers_without_end
from async_grpo.launch.local_config import LocalConfig

CHAT = {"messages": [{"role": "user", "content": "3+4?"}], "answer": 7}
TEXT = {"input": "3+4?", "answer": 7}
TEMPLATE = (Path(TINY_MODEL) / "chat_template.jinja").read_text()
END = "<|im_end|>"  # token 258
OTHER_END = "<|endoftext|>"  # token 256
REFUSES_ANSWERS = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE

CASES = [  # end tokens of all files, chat template, row, whether the run warns
    (256, OTHER_END, TEMPLATE, CHAT, True),
    ([256, 5], OTHER_END, TEMPLATE, CHAT, True),
    (None, OTHER_END, TEMPLATE, CHAT, True),
    (258, END, TEMPLATE.replace(END, ""), CHAT, True),
    (258, END, TEMPLATE.replace(END, OTHER_END), CHAT, True),
    (258, END, TEMPLATE, CHAT, False),
    ([258, 256], END, TEMPLATE, CHAT, False),
    (256, END, TEMPLATE, CHAT, False),
    (256, OTHER_END, TEMPLATE, TEXT, False),
    (258, END, TEMPLATE.replace(END, ""), TEXT, False),
    (256, OTHER_END, REFUSES_ANSWERS, CHAT, False),
    (256, OTHER_END, None, TEXT, False),
]


@pytest.mark.parametrize(("ids", "token", "template", "row", "warns"), CASES)
def test_a_run_warns_where_no_answer_would_end(tmp_path, ids, token, template, row, warns):
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    for name, changes in (
        ("config.json", {"eos_token_id": ids}),
        ("generation_config.json", {"eos_token_id": ids}),
        ("tokenizer_config.json", {"eos_token": token}),
    ):
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(content))
    if template is None:
        (folder / "chat_template.jinja").unlink()
    else:
        (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    config = LocalConfig(
        model_name_or_path=str(folder),
        data_path=str(tmp_path / "data.jsonl"),
        reward_fns="exact",
        max_generation_tokens=24,
        output_dir=str(tmp_path / "run"),
    )
    findings = [*answers_without_end(prepare(config))]
    assert len(findings) == warns
    for finding in findings:
        assert finding.level == "warning" and "none ends an answer of the chat template" in finding.found
        assert "eos_token_id in generation_config.json" in finding.cure
