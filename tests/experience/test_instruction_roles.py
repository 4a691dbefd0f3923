"""Messages of the role developer are in the prompt, whatever roles a chat template writes."""

import pytest
from chat_templates import MODEL, chat_of
from model_families import TEMPLATES, TOOLS, family_chat, needs_templates
from transformers import AutoTokenizer

from async_grpo.errors import ConfigurationError
from async_grpo.experience.instruction_roles import InstructionRoles
from async_grpo.experience.prompts import PromptRenderer

REFUSED = "writes neither a developer nor a system message"
# Templates that refuse system messages, and one that cannot be used without tools
WITHOUT_SYSTEM = ("gemma2",)
ONLY_WITH_TOOLS = ("hermes3",)


def conversation(*roles: str) -> list[dict]:
    """Return messages of these roles with a text each, and a question."""
    messages = [{"role": role, "content": f"text{number}."} for number, role in enumerate(roles)]
    return [*messages, {"role": "user", "content": "A question?"}]


@needs_templates
@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
@pytest.mark.parametrize(
    "roles",
    [
        ["developer", "user", "assistant", "developer"],
        *(
            pytest.param(roles, marks=pytest.mark.exhaustive)
            for roles in (
                ["developer"],
                ["system", "developer"],
                ["developer", "system"],
                ["developer", "developer"],
                ["user", "assistant", "developer"],
            )
        ),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "with tools"])
def test_each_text_is_in_the_prompt_of_each_public_template_or_is_refused_by_name(
    name, roles, tools, tmp_path
):
    chat = family_chat(name, tmp_path)
    messages = conversation(*roles)
    try:
        text = chat.prompts.render(messages, tools)
    except ConfigurationError as error:
        is_leading = "user" not in roles
        is_without = name in WITHOUT_SYSTEM or (name in ONLY_WITH_TOOLS and tools is None)
        assert REFUSED in str(error) and (not is_leading or is_without)
    else:
        assert [message["content"] for message in messages if message["content"] not in text] == []


def render(messages: list[dict]) -> str:
    return " ".join(f"[{message['role']}: {message['content']}]" for message in messages)


def roles_of_template(*accepted: str, first_only: bool = False) -> InstructionRoles:
    """Return the roles of a template that leaves out all other roles, and perhaps all system messages but the first."""

    def apply(messages, tools, *, begins_turn=True):
        written = [message for message in messages if message["role"] in (*accepted, "user", "assistant")]
        if first_only:
            written = [
                message
                for message in written
                if message["role"] in ("user", "assistant") or message is messages[0]
            ]
        return render(written)

    return InstructionRoles("the template", apply)


@pytest.mark.parametrize(
    ("roles", "messages", "expected"),
    [
        (roles_of_template("developer"), ["developer"], "[developer: text0.]"),
        (roles_of_template("system"), ["developer"], "[system: text0.]"),
        (roles_of_template("system"), ["system", "developer"], "[system: text0.] [system: text1.]"),
        (roles_of_template("system", first_only=True), ["system", "developer"], "[system: text0.\n\ntext1.]"),
        (roles_of_template("system", first_only=True), ["system", "system"], "[system: text0.\n\ntext1.]"),
        (roles_of_template("developer", first_only=True), ["system", "developer"], "[developer: text0.\n\ntext1.]"),
        # Nothing changes for system messages that a template leaves out, which the log names
        (roles_of_template(), ["system", "system"], "[system: text0.] [system: text1.]"),
        (roles_of_template(), ["system"], "[system: text0.]"),
    ],
)  # fmt: skip
def test_instructions_get_the_roles_that_the_template_writes(roles, messages, expected):
    assert render(roles.mapped(conversation(*messages), None)) == f"{expected} [user: A question?]"


def test_a_template_is_probed_once_for_each_combination_of_roles():
    count = 0

    def apply(messages, tools, *, begins_turn=True):
        nonlocal count
        count += 1
        return render([message for message in messages if message["role"] != "developer"])

    roles = InstructionRoles("the template", apply)
    for _ in range(3):
        roles.mapped(conversation("developer"), None)
    assert count == 3  # developer, which it does not write, with two contents, and system


def test_a_template_that_changes_a_content_writes_it_nevertheless():
    def apply(messages, tools, *, begins_turn=True):
        return render([message | {"content": message["content"].upper()} for message in messages])

    messages = conversation("developer", "user", "assistant", "developer")
    assert InstructionRoles("the template", apply).mapped(messages, None) == messages


def test_the_marks_of_foreign_text_survive_the_change_of_a_role():
    """A control token in a developer's message stays plain text."""
    chat = chat_of("merges_system")
    rendered = chat.render_foreign(
        [{"role": "developer", "content": "a<|im_end|>b"}, {"role": "user", "content": "go"}]
    )
    assert "a<|im_end|>b" in rendered.text and rendered.breaks


def test_a_row_with_a_developer_message_is_mapped_as_a_request_is():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] in ('system', 'user') %}[{{ m['role'] }}: {{ m['content'] }}]{% endif %}"
        "{% endfor %}"
    )
    prompts = PromptRenderer(tokenizer)
    ids = prompts.prompt_tokens({"messages": conversation("developer")}, 1000)
    assert tokenizer.decode(ids) == "[system: text0.][user: A question?]"
