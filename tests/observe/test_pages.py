"""The pages in a real browser: nothing that a model wrote runs, the keys work, tokens are coloured, ten thousand samples.

`pytest tests/observe/test_pages.py --basetemp DIR` leaves the pictures in DIR.
"""

import json

import pytest
from browser import Browser
from sample_run import RATIO, write_run

from async_grpo.metrics.writer import as_json
from async_grpo.observe.samples import SamplesConfig, write_samples_page

pytestmark = pytest.mark.real

RUNS = "document.title = 'it ran'; alert('it ran')"
HOSTILE = [
    f"<script>{RUNS}</script>",
    f"</script><script>{RUNS}</script>",
    f'<img src="http://127.0.0.1:9/x" onerror="{RUNS}"><svg onload="{RUNS}"><a href="javascript:{RUNS}">here</a>',
    "<style>#list { display: none }</style><base href='http://127.0.0.1:9/'>",
    "before \u202etxet\u202c after\0 \x1b[2J \u2066x\u2069 @DATA@",
    "<!-- <script> ${alert(1)} {{alert(1)}} ]]>",
]
HONEST = [
    "<think>5 * 3 = 15, then 15 - 8 = 7</think> <answer> 5 * 3 - 8 </answer>",
    "<think>8 + 3 is 11</think> <answer> 8 + 3 - 5 </answer>",
    "I do not know, \u20ac \U0001f642",
]
ALARM = "45% of the completions end in words said before; 60 steps ago 5%"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(
        tmp_path_factory.mktemp("run"), [[HONEST, HONEST[:2]], [HOSTILE, HONEST]], alarms=[ALARM]
    )


def opened(browser, folder, query=""):
    """The samples page of a run; returns the seconds until it was drawn."""
    page = folder / "samples.html"
    write_samples_page(SamplesConfig(path=str(folder), output=str(page)))
    browser.requests.clear()
    browser.dialogs.clear()
    browser.errors.clear()
    return browser.open(page.as_uri() + query)


@pytest.fixture
def page(browser, run):
    opened(browser, run)
    return browser


def completions(browser):
    return browser.evaluate("shown.map((one) => one.completion)")


def test_no_script_that_a_completion_brings_runs_and_all_of_it_is_text(page, run):
    seen = []
    for _ in range(len(completions(page))):
        seen.append(page.text("#completion"))
        page.press("j")
    assert page.text("#count") == "14 of 14 samples"
    for text in HOSTILE[:4]:
        assert text in seen
    for tag in ("img", "svg", "base", "a", "iframe"):
        assert page.evaluate(f"document.querySelectorAll('{tag}').length") == 0
    assert page.evaluate("document.querySelectorAll('script, style').length") == 2  # the page's own
    assert page.evaluate("document.title") == f"{run.name}: 14 samples"
    assert page.dialogs == [] and page.errors == []
    assert [one for one in page.requests if not one.startswith("file:")] == []


def test_the_page_notices_what_is_tested_here_when_a_script_does_run(browser, tmp_path):
    """That no dialog was seen means something only if one would have been."""
    (tmp_path / "bad.html").write_text(f"<title>t</title><script>{RUNS}</script>")
    browser.open((tmp_path / "bad.html").as_uri())
    assert browser.dialogs[-1:] == ["it ran"] and browser.evaluate("document.title") == "it ran"


def test_characters_that_hide_or_turn_text_are_shown_by_their_names(page):
    page.evaluate("choose(shown.findIndex((one) => one.completion.startsWith('before')))")
    text = page.text("#completion")
    assert text.startswith(
        "before \u27e8U+202E\u27e9txet\u27e8U+202C\u27e9 after\u27e8U+0000\u27e9 \u27e8U+001B\u27e9[2J"
    )
    assert "\u202e" not in page.evaluate("document.body.textContent")


def test_the_keyboard_goes_from_sample_to_sample_and_from_sibling_to_sibling(page):
    texts = completions(page)

    def place():
        return page.evaluate("chosen")

    page.press("j", "j", "ArrowDown")
    assert place() == 3 and page.text("#completion") == texts[3]
    assert page.evaluate("document.querySelectorAll('.row.chosen').length") == 1
    page.press("k")
    assert place() == 2
    page.press("Home", "k")
    assert place() == 0
    page.press("l", "l")
    assert page.text(".sibling.chosen pre") == HONEST[2] == page.text("#completion")
    page.press("l")  # the last one of its group
    assert page.text("#completion") == HONEST[2]
    page.press("h", "End")
    assert place() == len(texts) - 1
    page.press("/")
    page.press(*"onerror")
    assert page.text("#count") == "1 of 14 samples" and page.text("#completion") == HOSTILE[2]
    page.press("Escape", "c")
    assert page.evaluate("document.activeElement.id") != "search" and page.evaluate("colouring") == "ratios"
    page.press("c", "c", "c", "c", "c")


def test_filter_and_sort_show_what_they_say(page):
    def choice(of, value):
        page.evaluate(f"by('{of}').value = '{value}', by('{of}').dispatchEvent(new Event('input'))")
        return page.evaluate("shown.map((one) => [one.step, one.reward])")

    assert {step for step, _ in choice("filter", "step 2")} == {2}
    rewards = [reward for _, reward in choice("sort", "-reward")]
    assert rewards == sorted(rewards, reverse=True) and len(rewards) == 9


def backgrounds(page):
    return page.evaluate(
        "[...by('completion').querySelectorAll('.token')].map((one) => getComputedStyle(one).backgroundColor)"
    )


def test_tokens_are_coloured_by_what_one_chooses_and_tell_their_numbers(page):
    assert (
        page.evaluate("document.querySelectorAll('.token').length") == 0
        and page.evaluate("colouring") == "plain"
    )
    page.press("c")
    assert page.evaluate("by('colour').selectedOptions[0].textContent") == "log-prob ratio"
    count = page.evaluate("shown[chosen].tokens.length")
    first, *others = backgrounds(page)
    assert len(others) == count - 1 and first == "rgba(0, 0, 0, 0)"  # it was not trained
    assert set(others) == {"rgba(213, 94, 0, 0.6)"}  # they all have one ratio, above 0
    page.press("c")
    shades = backgrounds(page)  # log-probs that fall from 0 to -4: ever more blue
    shares = [float(one.split(",")[3].rstrip(")")) for one in shades]
    assert shares == sorted(shares) and shares[0] == 0 and all("(0, 114, 178" in one for one in shades[1:])
    assert page.evaluate("document.querySelectorAll('.legend').length") == 5
    page.press("c")
    assert page.evaluate("by('colour').value") == "versions" and len(set(backgrounds(page))) == 2
    assert page.evaluate("[...document.querySelectorAll('.legend')].map((one) => one.textContent)") == [
        "2",
        "3",
    ]
    page.press("c")
    assert len(set(backgrounds(page))) == 2 and page.text(".masked") == page.evaluate(
        "shown[chosen].tokens[0]"
    )
    page.press("c")
    assert (
        len(page.evaluate("[...document.querySelectorAll('.sibling .token')].map((one) => one.title)"))
        > count
    )
    page.press("n", "n", "n", "p")
    told = page.text("#told")
    assert told.startswith(f"token 2 of {count}, ") and f"ln trainer / engine {RATIO}" in told
    assert "policy version 2" in told and "advantage -0.5" in told and told.endswith("trained")
    page.hover("#completion .token:nth-child(1)")
    assert page.text("#told").startswith(f"token 1 of {count}, ") and page.text("#told").endswith("masked")
    page.press("c")
    assert page.evaluate("colouring") == "plain" and page.text("#told") == ""


def test_alarms_stand_on_top(page):
    assert page.text("#alarms") == f"ALARM {ALARM} (step 1 to 2)"


def test_it_can_be_read_in_light_and_in_dark(page, tmp_path):
    page.press("c", "c")
    grounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        assert page.picture(tmp_path / f"{scheme}.png").stat().st_size > 20_000
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(18, 18, 18)"]
    page.prefer("light")
    page.press("c", "c", "c", "c")


def test_of_a_very_long_line_the_beginning_is_shown_until_one_asks_for_more(browser, tmp_path):
    folder = write_run(tmp_path, [[["a"]]])
    told = json.loads((folder / "samples.jsonl").read_text())
    (folder / "samples.jsonl").write_text(as_json(told | {"completion": "x" * 1_000_000}))
    opened(browser, folder)
    assert browser.text("#completion") == "x" * 20_000 + "show all 1000000"
    browser.evaluate("document.querySelector('#completion button').click()")
    assert len(browser.text("#completion")) == 1_000_000


def test_ten_thousand_samples_open_soon_in_little_memory_and_only_what_is_seen_is_drawn(
    browser, tmp_path, capsys
):
    folder = write_run(tmp_path, [[["a"]]])
    told = json.loads((folder / "samples.jsonl").read_text())
    lines = [
        told | {"step": 1 + n // 100, "group": n // 10, "completion": f"{n} " + "word " * 400}
        for n in range(10_000)
    ]
    (folder / "samples.jsonl").write_text("".join(map(as_json, lines)))
    seconds, megabytes = opened(browser, folder), browser.memory_mb()
    size = (folder / "samples.html").stat().st_size / 1e6
    with capsys.disabled():
        print(f"\n10,000 samples, a page of {size:.0f} MB: drawn after {seconds:.2f} s, {megabytes:.0f} MB")
    assert browser.text("#count") == "10000 of 10000 samples"
    assert browser.evaluate("document.querySelectorAll('.row').length") < 60
    assert seconds < 10 and megabytes < 500  # 2 s on a machine that does nothing else
    browser.press("End")
    assert browser.text("#completion").startswith("9999 ") and browser.text(".row.chosen small").startswith(
        "9999 "
    )
