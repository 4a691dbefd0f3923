"""The samples page: model text in it stays text, whatever it is, and it says what the run wrote."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from sample_run import RATIO, write_run
from vision_model import encoded, picture

from async_grpo.__main__ import main
from async_grpo.errors import ConfigurationError
from async_grpo.observe import samples
from async_grpo.observe.samples import SamplesConfig, page, write_samples_page

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> \u2028 ]]> @DATA@"


def row(step=1, group=0, **changes):
    plain = {"input": "1 + 1?", "completion": "2", "reward": 1.0, "status": "ok", "finish_reason": "stop"}
    return {"step": step, "group": group, "components": {}, "advantage": 0.5, "answer": "2"} | plain | changes


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.texts = [("", {})], {}

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.seen.append((f"/{tag}", {}))

    def handle_data(self, data):
        self.texts[len(self.seen) - 1] = self.texts.get(len(self.seen) - 1, "") + data


def parsed(text):
    elements = Elements()
    elements.feed(text)
    return elements


def test_a_completion_with_script_in_it_is_data_and_no_element():
    text = page([row(completion=HOSTILE, input=HOSTILE, answer=HOSTILE)], "t")
    elements = parsed(text)
    scripts = [n for n, (tag, _) in enumerate(elements.seen) if tag == "script"]
    assert len(scripts) == 2 and not [tag for tag, _ in elements.seen if tag == "img"]
    data = json.loads(elements.texts[scripts[0]])
    assert data["samples"][0]["completion"] == HOSTILE == data["samples"][0]["input"]


def test_only_the_page_s_own_script_may_run_and_nothing_may_be_fetched():
    elements = parsed(page([row()], "t"))
    (rules,) = [a["content"] for tag, a in elements.seen if tag == "meta" and "http-equiv" in a]
    (own,) = [text for n, text in elements.texts.items() if elements.seen[n] == ("script", {})]
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rules and "default-src 'none'" in rules
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page([row()], "t"))
    assert "innerHTML" not in own and "eval(" not in own


@pytest.mark.parametrize(
    ("options", "file"), [({}, "samples.jsonl"), ({"dump_samples_filename": "all.jsonl"}, "all.jsonl")]
)
def test_the_newest_samples_of_the_run_are_in_it(tmp_path, options, file):
    (tmp_path / "training_params.json").write_text(json.dumps(options))
    lines = [json.dumps(row(step, group)) for step in (1, 2, 3) for group in range(4)]
    (tmp_path / file).write_text("\n".join(lines) + "\n")
    (tmp_path / "eval_samples_20.jsonl").write_text(json.dumps(row(9)) + "\n")
    write_samples_page(SamplesConfig(path=str(tmp_path), output=str(tmp_path / "s.html"), limit=6))
    elements = parsed((tmp_path / "s.html").read_text())
    data = json.loads(next(t for n, t in elements.texts.items() if elements.seen[n][1].get("id") == "data"))
    assert [(s["step"], s["group"]) for s in data["samples"]] == [
        (2, 2),
        (2, 3),
        (3, 0),
        (3, 1),
        (3, 2),
        (3, 3),
    ]


def test_without_samples_the_way_to_have_some_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no run"):
        write_samples_page(SamplesConfig(path=str(tmp_path)))
    (tmp_path / "training_params.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="--keep-sample-groups"):
        write_samples_page(SamplesConfig(path=str(tmp_path)))
    (tmp_path / "eval_samples_20.jsonl").write_text(json.dumps(row()) + "\n")
    write_samples_page(SamplesConfig(path=str(tmp_path), output=str(tmp_path / "s.html")))
    assert '"step": 1' in (tmp_path / "s.html").read_text()


def samples_of(path):
    elements = parsed(path.read_text(encoding="utf-8"))
    return json.loads(next(t for n, t in elements.texts.items() if elements.seen[n][1].get("id") == "data"))


def written(folder, **options):
    write_samples_page(SamplesConfig(path=str(folder), output=str(folder / "s.html"), **options))
    return samples_of(folder / "s.html")


TEXTS = ["<think>a \u20ac</think> 7", "same", "same", "\U0001f642" + HOSTILE]


def test_every_token_has_what_it_was_trained_with(tmp_path):
    found = written(write_run(tmp_path, [[TEXTS], [TEXTS[:2], TEXTS[2:]]]))["samples"]
    assert [len(found), {one["step"] for one in found}] == [8, {1, 2}]
    for one in found:
        assert "".join(one["tokens"][:-1]) == one["completion"] and one["tokens"][-1] == "<|im_end|>"
        count = len(one["tokens"])
        assert one["mask"] == [0] + [1] * (count - 1)
        assert one["ratios"] == [None] + [RATIO] * (count - 1)
        assert one["versions"] == [one["step"] + 1] * (count // 2) + [one["step"] + 2] * (count - count // 2)
        assert one["advantages"] == [one["member"] % 3 / 2 - 0.5] * count
        expected = [round(-4 * place / (count - 1), 4) for place in range(count)]
        assert one["logprobs"] == pytest.approx(expected, abs=2e-4)


def test_a_character_of_several_tokens_stands_at_its_last_one(tmp_path):
    (found,) = written(write_run(tmp_path, [[["a\u20acb"]]]))["samples"]
    assert found["tokens"] == ["a", "", "", "\u20ac", "b", "<|im_end|>"]


def test_only_the_newest_samples_have_tokens_and_without_a_record_none_has(tmp_path, monkeypatch):
    folder = write_run(tmp_path, [[["old"]], [["new"]]])
    monkeypatch.setattr(samples, "MAX_TOKENS", 4)  # "new" and its end
    old, new = written(folder)["samples"]
    assert "tokens" not in old and len(new["tokens"]) == 4
    shutil.rmtree(folder / "record")
    assert not any("tokens" in one for one in written(folder)["samples"])


def test_a_sample_that_was_not_trained_has_no_tokens_but_a_place(tmp_path):
    folder = write_run(tmp_path, [[["yes"]]])
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(row(completion="no")) + "\n")
    assert ["tokens" in one for one in written(folder)["samples"]] == [True, False]


def test_what_a_browser_could_not_hold_is_left_out_the_oldest_first(tmp_path, monkeypatch):
    folder = write_run(tmp_path, [[["a" * 100]], [["b" * 100]], [["c" * 100]]])
    monkeypatch.setattr(samples, "MAX_CHARACTERS", 250)
    page = written(folder)
    assert [one["completion"][0] for one in page["samples"]] == ["b", "c"] and "2 samples" in page["title"]
    monkeypatch.setattr(samples, "MAX_CHARACTERS", 10)
    assert len(written(folder)["samples"]) == 1


@pytest.mark.parametrize(
    "text", ["\u202edetrever\u202c", "a\0b\x1b[31m", "\ud83d alone", "x" * 1_000_000, "\u2028", "NaN"]
)
def test_whatever_a_model_writes_is_read_back_as_it_was(tmp_path, text):
    folder = write_run(tmp_path, [])
    (folder / "samples.jsonl").write_text(json.dumps(row(completion=text)) + "\n")
    (found,) = written(folder)["samples"]
    assert found["completion"] == text


def test_the_alarms_of_the_run_are_on_the_page_once_each_with_their_steps(tmp_path):
    folder = write_run(tmp_path, [[["a"]], [["b"]]], alarms=["45% of the completions end alike"])
    assert written(folder)["alarms"] == [{"first": 1, "last": 2, "says": "45% of the completions end alike"}]


def test_evaluations_of_several_files_are_groups_of_their_own_the_newest_kept(tmp_path):
    folder = write_run(tmp_path, [[["a"]]])
    for step in (10, 20):
        for name in ("", "_gsm8k"):
            told = {key: value for key, value in row().items() if key != "step"}
            (folder / f"eval_samples_{step}{name}.jsonl").write_text(json.dumps(told) + "\n")
    found = written(folder, evaluation=True, limit=3)["samples"]
    assert [one["step"] for one in found] == [10, 20, 20]
    assert {one["file"] for one in found[1:]} == {"eval_samples_20", "eval_samples_20_gsm8k"}


def test_the_command_takes_the_page_s_place_in_either_spelling(tmp_path):
    folder = write_run(tmp_path, [[["a"]]])
    for number, flag in enumerate(("-o", "--output")):
        with pytest.raises(SystemExit) as ended:
            main(["samples", str(folder), flag, str(tmp_path / f"{number}.html")])
        assert ended.value.code == 0 and len(samples_of(tmp_path / f"{number}.html")["samples"]) == 1


def test_images_of_samples_are_on_the_page_and_nothing_from_outside_the_run_is(tmp_path):
    content = encoded(picture())
    names = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("shown", "link", "text", "lost")}
    (tmp_path / "run" / "images").mkdir(parents=True)
    run = tmp_path / "run"
    (run / "images" / names["shown"]).write_bytes(content)
    (tmp_path / "secret.png").write_bytes(content)
    (run / "images" / names["link"]).symlink_to(tmp_path / "secret.png")
    (run / "images" / names["text"]).write_text("<svg onload=alert(1)>")
    (run / "training_params.json").write_text("{}")
    rows = [
        row(images=[*names.values(), "../../secret.png", 7, None]),
        row(images="not a list"),
        row(),
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    data = written(run)
    assert list(data["images"]) == [names["shown"]]
    assert base64.b64decode(data["images"][names["shown"]].removeprefix("data:image/png;base64,")) == content
    assert [line.get("images") for line in data["samples"]] == [[names["shown"]], None, None]
    elements = parsed((run / "s.html").read_text())
    (rules,) = [a["content"] for tag, a in elements.seen if tag == "meta" and "http-equiv" in a]
    assert "img-src data:" in rules
