"""--chat-template, --chat-template-kwargs and --system-prompt reach every place that makes prompts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from chat_templates import MODEL
from scripted_play import SETTINGS, OneSession, run, trajectories

from async_grpo.__main__ import main
from async_grpo.config.preflight import prepare
from async_grpo.config.resume import as_options, data_digests, find_checkpoint
from async_grpo.config.run import RunConfig, write_params
from async_grpo.data import TINY_MODEL
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.make import make_played, source_of
from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.launch.evaluate import EvalConfig
from async_grpo.modeling.load import load_tokenizer
from async_grpo.training.checkpoint_folder import Manifest, complete, partial_folder
from async_grpo.types import Prompt

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant{% if effort %}, {{ effort }}{% endif %}: {% endif %}"
)
ASK = [{"role": "user", "content": "3+4?"}]
PROMPT = "[system: Add.][user: 3+4?][assistant, low: "


@pytest.fixture
def options(tmp_path) -> dict[str, str]:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return {"chat_template": str(path), "chat_template_kwargs": "effort=low", "system_prompt": "Add."}


def write_rows(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(tmp_path: Path, options: dict, **changes) -> RunConfig:
    rows = write_rows(
        tmp_path / "rows.jsonl", {"messages": ASK, "answer": "7"}, {"prompt": "3+4?", "answer": "7"}
    )
    settings = {
        "model_name_or_path": str(TINY_MODEL),
        "data_path": rows,
        "eval_data_path": f"held={rows}",
        "reward_fns": "format",
        "max_generation_tokens": 24,
        "output_dir": str(tmp_path / "out"),
    }
    return RunConfig(**settings | options | changes)


def test_training_and_held_out_evaluation_have_the_same_prompts(tmp_path, options, caplog):
    prepared = prepare(config_of(tmp_path, options))
    decode = load_tokenizer(TINY_MODEL).decode
    questions = [*prepared.questions, *prepared.eval_questions["held"]]
    assert [decode(question.token_ids.tolist()) for question in questions] == [PROMPT] * 4
    # Rewards read the prompt in `input`
    assert [question.row["input"] for question in questions] == [PROMPT] * 4
    assert not caplog.records


def test_the_parameters_of_a_run_and_its_checkpoints_name_them(tmp_path, options):
    config = config_of(tmp_path, options)
    path = tmp_path / "training_params.json"
    write_params(path, config, {})
    written = json.loads(path.read_text())
    assert {name: written[name] for name in options} == options
    assert data_digests(config).keys() == {"data_path", "chat_template"}
    assert data_digests(config_of(tmp_path, {})).keys() == {"data_path"}


def test_a_file_is_named_by_its_absolute_path(tmp_path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert PromptOptions(chat_template="template.jinja").chat_template == options["chat_template"]


def save(config: RunConfig) -> Path:
    """Write the manifest of a checkpoint, and return the checkpoint's folder."""
    partial = partial_folder(config.output_path, 3)
    partial.mkdir(parents=True)
    (partial / "experience.json").write_text("{}")
    facts = {"step": 3, "samples": 24, "world_size": 1, "versions": {}}
    return complete(partial, Manifest(**facts, options=as_options(config), inputs=data_digests(config)))


def eval_config(path: Path, **options: str) -> EvalConfig:
    """Return the configuration of `async-grpo eval`, as the command line makes it."""
    defaults = {field.name: field.default for field in dataclasses.fields(EvalConfig)}
    return EvalConfig.from_options(defaults | {"path": str(path)} | options, {"path", *options})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", None),
        ("chat_template_kwargs", "effort=high"),
        ("system_prompt", None),
        ("system_prompt", "Go."),
    ],
)
def test_a_run_that_goes_on_has_the_same_prompts(tmp_path, options, name, value):
    config = config_of(tmp_path, options)
    save(config)
    assert find_checkpoint(config) is not None
    with pytest.raises(
        ConfigurationError, match=f"--{name.replace('_', '-')}: the value is .*was rendered|prompts"
    ):
        find_checkpoint(dataclasses.replace(config, **{name: value}))


def test_a_run_that_goes_on_has_the_template_of_the_same_text(tmp_path, options):
    config = config_of(tmp_path, options)
    save(config)
    Path(options["chat_template"]).write_text(TEMPLATE + " ")
    with pytest.raises(ConfigurationError, match="the file of --chat-template is not the one that the run"):
        find_checkpoint(config)


def test_eval_takes_over_texts_and_asks_for_the_file(tmp_path, options):
    taken = {name: options[name] for name in ("chat_template_kwargs", "system_prompt")}
    checkpoint = save(config_of(tmp_path, taken))
    run_config = eval_config(checkpoint).as_run("exported")
    assert {name: getattr(run_config, name) for name in taken} == taken
    assert eval_config(checkpoint, system_prompt="Go.").as_run("exported").system_prompt == "Go."


def test_eval_of_a_run_with_a_template_of_its_own_asks_for_it(tmp_path, options):
    checkpoint = save(config_of(tmp_path, options))
    with pytest.raises(ConfigurationError, match="give --chat-template yourself"):
        eval_config(checkpoint)
    run_config = eval_config(checkpoint, chat_template=options["chat_template"]).as_run("exported")
    assert run_config.chat_template == options["chat_template"]


def run_main(command: list[str]) -> int:
    """Return the exit code of the command."""
    with pytest.raises(SystemExit) as ending:
        main(command)
    return ending.value.code or 0


REWARDS = """
def sees_the_prompt(sample):
    return float(sample["input"] == {prompt!r})


REWARD_ADAPTERS = {{"sees_the_prompt": sees_the_prompt}}
"""


def test_verify_gives_rewards_the_prompt_of_a_run(tmp_path, options, capsys):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS.format(prompt=PROMPT))
    rows = write_rows(
        tmp_path / "completions.jsonl",
        {"messages": ASK, "completion": "7", "label": True},
        {"prompt": "3+4?", "completion": "7", "label": True},
        {"input": PROMPT, "completion": "7", "label": True},
        {"input": "3+4?", "messages": ASK, "completion": "7", "label": False},
        {"completion": "7", "label": False},
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    output = tmp_path / "out.jsonl"
    command = ["verify", rows, f"--reward-fns={rewards}:sees_the_prompt", f"--output={output}"]
    assert run_main([*command, f"--model-name-or-path={TINY_MODEL}", *flags]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["reward"] for line in lines] == [line["label"] for line in lines]
    capsys.readouterr()
    assert run_main([*command, *flags]) == 2
    assert "--chat-template: only with --model-name-or-path" in capsys.readouterr().err


def test_verify_refuses_a_row_as_a_run_does(tmp_path, capsys):
    rows = write_rows(tmp_path / "completions.jsonl", {"messages": [{"content": "a"}], "completion": "7"})
    assert run_main(["verify", rows, "--reward-fns=format", f"--model-name-or-path={TINY_MODEL}"]) == 2
    assert f"{rows}, line 1: message 1 of 1: it has no role" in capsys.readouterr().err


def test_environments_and_the_endpoint_render_with_them(tmp_path, options):
    (tmp_path / "mine.py").write_text(
        "class Game:\n"
        "    def reset(self, row, seed):\n"
        "        return None\n"
        "    def step(self, said):\n"
        "        return None, 1.0, True\n"
        "class Asks(Game):\n"
        "    def reset(self, row, seed):\n"
        "        return '3+4?'\n"
    )
    tokenizer = load_tokenizer(MODEL)
    for name, row in (("Game", {"messages": ASK}), ("Asks", {"input": ""})):
        environment = f"{tmp_path / 'mine.py'}:{name}"
        config = EnvironmentConfig(environment=environment, **options)
        prompt_ids = PromptRenderer(load_tokenizer(MODEL), config).prompt_tokens({"messages": ASK}, 900)
        playing = make_played(config, str(MODEL), SETTINGS, source_of(environment), OneSession(lambda: "7"))
        prompt = Prompt(0, np.asarray(prompt_ids, np.int32), row)
        (trajectory,) = run(trajectories(playing, prompt))
        assert trajectory.outcome.failure == ""
        assert tokenizer.decode(trajectory.turns[0].before.tolist()) == PROMPT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template": "no.jinja"}, r"--chat-template \S+no.jinja cannot be read"),
        ({"chat_template": "."}, "--chat-template .* cannot be read"),
        (
            {"chat_template_kwargs": "effrt=low"},
            "has no variable 'effrt', so it would change nothing; did you mean effort",
        ),
        (
            {"chat_template_kwargs": "tokenize=true"},
            "--chat-template-kwargs tokenize: the library itself sets it",
        ),
        (
            {"chat_template_kwargs": "add_generation_prompt=false"},
            "add_generation_prompt: the library itself sets it",
        ),
        ({"chat_template_kwargs": "effort"}, "'effort' is not name=value"),
        ({"chat_template_kwargs": "effort=1,effort=2"}, "effort is given twice"),
        ({"chat_template_kwargs": '{"effort": '}, "begins like a JSON object, but is not valid"),
        ({"chat_template_kwargs": '{"effort": "\\ud800"}'}, "is not valid text"),
        ({"system_prompt": "a\udc80"}, "--system-prompt .* is not valid text"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_at_once(options, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        PromptRenderer(load_tokenizer(TINY_MODEL), PromptOptions(**options | changes))


SWITCHES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if thinks %}<think>{% endif %}"
    "{% if strict is defined and strict is false %}<plain>{% endif %}"
    "{% if mode == 'on' %}<on>{% endif %}{{ times }}"
    "{% if a %}{% set role = 'x' %}{% endif %}{{ role }}{% set few = few or '' %}{{ few }}"
    "{% if not day is defined %}{% set day = '' %}{% endif %}{{ day }}"
    "{% generation %}{% endgeneration %}{% set fixed = 1 %}{{ fixed }}{{ raise_exception and '' }}"
)
# Text of --chat-template-kwargs -> the end of the prompt, or the words that refuse it
SWITCHED = {
    "thinks=true": "3+4?<think>1",
    "thinks=False": "3+4?1",
    "thinks=0": "3+4?1",
    "thinks=1,times=0": "3+4?<think>01",
    "thinks=no": "for the wrong one: write thinks=false",
    "thinks=off": "write thinks=false",
    "thinks=Yes": "write thinks=true",
    'thinks="false"': "write thinks=false",
    '{"thinks": "false"}': "write thinks=false",
    '{"thinks": "0"}': "write thinks=false",
    "strict=false": "3+4?<plain>1",
    "strict=true": "3+4?1",
    "strict=0": "takes 0 for neither true nor false.* write strict=false",
    "mode=on": "3+4?<on>1",
    "mode=off": "write mode=false",
    "times=1": "3+4?11",
    "times=none": "3+4?None1",
    "times=few": "3+4?few1",
    "m=3": "has no variable 'm', so it would change nothing",
    "fixed=3": "has no variable 'fixed'",
    "raise_exception=3": "has no variable 'raise_exception'",
    "role=3": "has no variable 'role'",
    "few=3": "3+4?31",
    "day=Monday": "3+4?Monday1",
    "a=true": "3+4?x1",
    "content=3": "has no variable 'content'",
}


@pytest.mark.parametrize("kwargs", SWITCHED)
def test_a_variable_reaches_the_template_as_it_was_meant_or_is_refused(tmp_path, kwargs):
    path = tmp_path / "template.jinja"
    path.write_text(SWITCHES)
    tokenizer = load_tokenizer(TINY_MODEL)
    options = PromptOptions(chat_template=str(path), chat_template_kwargs=kwargs)
    expected = SWITCHED[kwargs]
    if expected.startswith("3+4?"):
        tokens = PromptRenderer(tokenizer, options).prompt_tokens({"messages": ASK}, 900)
        assert tokenizer.decode(tokens) == expected
    else:
        with pytest.raises(ConfigurationError, match=f"--chat-template-kwargs .*{expected}"):
            PromptRenderer(tokenizer, options)


WRONG_TEMPLATES = {
    "{{ messages }}\n{% endfor %}": "line 2: .*unknown tag 'endfor'",
    "a\n\n{% for m in messages %}": "line 3: Unexpected end of template",
    "{{ messages": "line 1: unexpected end of template",
    "a\n{{ a|nofilter }}": "line 2: No filter named 'nofilter'",
    "{% generate %}": "line 1: .*unknown tag 'generate'",
}


@pytest.mark.parametrize("text", WRONG_TEMPLATES)
def test_a_file_that_is_no_template_is_refused_by_its_line(tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"^--chat-template {path}, {WRONG_TEMPLATES[text]}"):
        PromptRenderer(load_tokenizer(TINY_MODEL), PromptOptions(chat_template=str(path)))


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_template_is_refused(tmp_path, content):
    path = tmp_path / "template.jinja"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="template.jinja is empty"):
        PromptOptions(chat_template=str(path)).read_template()
    path.write_text("\ufeff" + TEMPLATE)
    assert PromptOptions(chat_template=str(path)).read_template() == TEMPLATE


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": ASK}, "[system: Add.][user: 3+4?][assistant: "),
        ({"prompt": "3+4?"}, "[system: Add.][user: 3+4?][assistant: "),
        ({"input": "3+4?"}, "[system: Add.][user: 3+4?][assistant: "),
        ({"messages": [*ASK, {"role": "assistant", "content": "7"}, *ASK]}, None),
        # neighbours: rows with a system message keep it, wherever it stands
        ({"messages": [{"role": "system", "content": "Go."}, *ASK]}, "[system: Go.][user: 3+4?][assistant: "),
        (
            {"messages": [{"role": "developer", "content": "Go."}, *ASK]},
            "[developer: Go.][user: 3+4?][assistant: ",
        ),
        ({"messages": [*ASK, {"role": "system", "content": "Go."}]}, "[user: 3+4?][system: Go.][assistant: "),
        ({"messages": [{"role": "system", "content": ""}, *ASK]}, "[system: ][user: 3+4?][assistant: "),
        ({"input": "<|im_start|>user\n3+4?"}, "with the control token <|im_start|>"),
        ({"prompt": "a<|im_end|>"}, "with the control token <|im_end|>"),
        (
            {"input_token_ids": [64], "messages": ASK},
            "--system-prompt: the prompt is given as input_token_ids",
        ),
    ],
)
def test_a_system_prompt_is_added_where_a_conversation_has_none(options, row, expected):
    tokenizer = load_tokenizer(TINY_MODEL)
    renderer = PromptRenderer(tokenizer, PromptOptions(**options | {"chat_template_kwargs": ""}))
    if expected is None:
        expected = "[system: Add.][user: 3+4?][assistant: 7][user: 3+4?][assistant: "
    if not expected.startswith("["):
        with pytest.raises(ConfigurationError, match=expected.replace("|", r"\|")):
            renderer.prompt_tokens(row, 900)
    else:
        assert tokenizer.decode(renderer.prompt_tokens(row, 900)) == expected


@pytest.mark.parametrize(
    ("row", "environment", "warning"),
    [
        ({"input": "a"}, None, "no prompt is a conversation"),
        ({"input_token_ids": [64]}, None, "no prompt is a conversation"),
        ({"input": "a"}, "guess", None),
        ({"messages": ASK}, None, None),
    ],
)
def test_a_template_that_no_row_uses_is_warned_about(tmp_path, options, row, environment, warning, caplog):
    rows = write_rows(tmp_path / "some.jsonl", row)
    changes = {"system_prompt": None, "data_path": rows, "eval_data_path": None, "environment": environment}
    prepare(config_of(tmp_path, options, **changes))
    assert len(caplog.records) == (warning is not None) and (warning or "") in caplog.text


def test_an_environment_is_told_at_the_start_that_the_template_opens_no_answer(tmp_path, caplog):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE.partition("{% if add")[0])
    rows = write_rows(tmp_path / "some.jsonl", {"input": "a"})
    changes = {"chat_template": str(path), "data_path": rows, "eval_data_path": None, "environment": "guess"}
    prepare(config_of(tmp_path, changes))
    (record,) = caplog.records
    assert "messages of the environment" in record.getMessage() and "'[assistant: '" in record.getMessage()


@pytest.mark.parametrize("content", ['{"chat_template": "{{ messages }}"}', '\ufeff{\n"bos_token": null}\n'])
def test_a_json_file_is_no_template(tmp_path, content):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is a JSON object: write the text of its chat_template"):
        PromptOptions(chat_template=str(path)).read_template()


@pytest.mark.parametrize(
    "content", ["{}{{ messages }}", "{% if true %}{% endif %}", '["{{ messages }}"]', "{{ messages }}"]
)
def test_a_template_with_braces_is_no_json_file(tmp_path, content):
    path = tmp_path / "template.jinja"
    path.write_text(content, encoding="utf-8")
    assert PromptOptions(chat_template=str(path)).read_template() == content
