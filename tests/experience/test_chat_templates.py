"""Chat templates in the style of public models are rendered as transformers renders them, token for token."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from async_grpo.environments.chat import Chat
from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import PromptRenderer

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "tests" / "data" / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "default": None}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
ASK = {"role": "user", "content": "What is 3+4? "}
CONVERSATIONS = {
    "one question": [ASK],
    "with a system message": [{"role": "system", "content": "Be brief."}, ASK],
    "several turns": [
        ASK,
        {"role": "assistant", "content": "<think>Hm.</think>\n\n7"},
        {"role": "user", "content": "And 4+5 = ½?"},
    ],
    "a tool's answer": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '7\n"quoted"'},
    ],
}
REFUSALS = {  # what templates say to a system message
    "gemma": "System role not supported",
    "mistral": "Conversation roles must alternate",
}


def tokenizer_of(name: str):
    """Return the tiny model's tokenizer with a first token, and the template where `name` is one."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "sample-data" / "tiny-model")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    if name:
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def renderer_of(name: str, **options) -> PromptRenderer:
    """Return a renderer that gets the template by `--chat-template`."""
    path = str(TEMPLATES / f"{name}.jinja")
    return PromptRenderer(tokenizer_of(""), PromptOptions(chat_template=path, **options))


def tokens_of(renderer: PromptRenderer, **row) -> list[int]:
    return renderer.prompt_tokens(row, 10_000, "rows.jsonl, line 1")


def test_the_templates_of_twelve_public_models_are_here_with_their_source():
    assert len(NAMES) >= 12
    for name in NAMES:
        first_line = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").splitlines()[0]
        assert first_line.startswith("{#- In the style of ")


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_tokens_of_transformers(name, conversation, tools):
    messages = CONVERSATIONS[conversation]
    reference = tokenizer_of(name)
    try:
        expected = reference.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:
        with pytest.raises(ConfigurationError, match="refuses these messages") as refusal:
            tokens_of(renderer_of(name), messages=messages, tools=tools)
        assert str(error) in str(refusal.value)
        return
    assert tokens_of(renderer_of(name), messages=messages, tools=tools) == expected
    # The endpoint and the environments render the same text, and encode it alike
    chat = Chat(reference)
    assert chat.encode(chat.render(messages, tools)).tolist() == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<s><|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen2_5",
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3",
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\nAdd.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n3+4?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("llama2", "<s>[INST] <<SYS>>\nAdd.\n<</SYS>>\n\n3+4? [/INST]"),
        ("phi3", "<|system|>\nAdd.<|end|>\n<|user|>\n3+4?<|end|>\n<|assistant|>\n"),
        ("zephyr", "<|system|>\nAdd.</s>\n<|user|>\n3+4?</s>\n<|assistant|>\n"),
        ("deepseek", "<s>Add.<｜User｜>3+4?<｜Assistant｜><think>\n"),
        (
            "command_r",
            "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Add.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>3+4?"
            "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        (
            "granite",
            "<|start_of_role|>system<|end_of_role|>Add.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>3+4?"
            "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        ),
        ("olmo", "<s><|system|>\nAdd.\n<|user|>\n3+4?\n<|assistant|>\n"),
        (
            "smollm2",
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_prompt_is_the_text_that_the_model_was_trained_on(name, expected, caplog):
    tokenizer = tokenizer_of("")
    row = {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4?"}]}
    assert tokenizer.decode(tokens_of(renderer_of(name), **row)) == expected
    # `--system-prompt` gives the same prompt
    row = {"messages": [{"role": "user", "content": "3+4?"}]}
    assert tokenizer.decode(tokens_of(renderer_of(name, system_prompt="Add."), **row)) == expected
    assert not caplog.records, "a public template deserves no warning for a plain conversation"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistral", "<s>[INST] 3+4? [/INST]"),
        ("gemma", "<s><start_of_turn>user\n3+4?<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
def test_a_template_without_system_messages_refuses_them_in_its_own_words(name, expected, caplog):
    ask = {"role": "user", "content": "3+4?"}
    assert tokenizer_of("").decode(tokens_of(renderer_of(name), messages=[ask])) == expected
    assert not caplog.records
    for options, messages in (
        ({}, [{"role": "system", "content": "Add."}, ask]),
        ({"system_prompt": "Add."}, [ask]),
    ):
        words = REFUSALS[name]
        with pytest.raises(ConfigurationError, match=f"{name}.jinja refuses these messages: {words}"):
            tokens_of(renderer_of(name, **options), messages=messages)


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [
        ("", "<|im_start|>assistant\n"),
        ("enable_thinking=true", "<|im_start|>assistant\n"),
        ("enable_thinking=false", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ('{"enable_thinking": false}', "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_variables_reach_rows_and_the_endpoint(kwargs, end):
    messages = [{"role": "user", "content": "3+4?"}]
    options = PromptOptions(chat_template_kwargs=kwargs)
    tokenizer = tokenizer_of("qwen3")
    expected = f"<|im_start|>user\n3+4?<|im_end|>\n{end}"
    tokens = PromptRenderer(tokenizer, options).prompt_tokens({"messages": messages}, 1000)
    assert tokenizer.decode(tokens) == expected
    assert Chat(tokenizer, options=options).render(messages) == expected


def test_calls_beside_a_null_content_are_written_where_the_template_asks_for_none_and_where_it_does_not():
    row = {
        "messages": [
            {"role": "user", "content": "3+4?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "7", "tool_call_id": None},
        ]
    }
    asks = tokenizer_of("").decode(tokens_of(renderer_of("deepseek"), **row))
    assert '<｜tool▁sep｜>add\n{"a": 3}<｜tool▁call▁end｜>' in asks and "None" not in asks
    asks_not = tokenizer_of("").decode(tokens_of(renderer_of("qwen2_5"), **row))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>' in asks_not
    assert "None" not in asks_not


@pytest.mark.parametrize("arguments", [{"a": "½"}, '{"a": "½"}'])
def test_a_template_that_expects_arguments_as_texts_gets_texts(arguments):
    tokenizer = tokenizer_of("")
    tokenizer.chat_template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}"
        "{% endfor %}{{ m.content }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    expected = 'What is 3+4? add{"a": "½"}7'
    assert Chat(tokenizer).render(messages) == expected
    tokens = PromptRenderer(tokenizer).prompt_tokens({"messages": messages}, 1000)
    assert tokenizer.decode(tokens) == expected


@pytest.mark.parametrize(
    ("role", "known_to"), [("ipython", "llama3"), ("tool_response", "granite"), ("model", None)]
)
def test_a_role_that_the_template_compares_with_is_known(role, known_to):
    row = {"messages": [{"role": "user", "content": "3+4?"}, {"role": role, "content": "7"}]}
    for name in ("chatml", "llama3", "granite", "gemma"):
        if name == known_to:
            assert tokens_of(renderer_of(name), **row)
        else:
            with pytest.raises(ConfigurationError, match=f"message 2 of 2: the role '{role}' is unknown"):
                tokens_of(renderer_of(name), **row)
