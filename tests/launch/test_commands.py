"""The console script and its programs: what each says, and what it says when something is wrong."""

import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import async_grpo
from async_grpo.__main__ import main
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.launch import early_start, local_run, process_variables, trainer
from async_grpo.launch.commands import COMMANDS
from async_grpo.metrics.writer import ConsoleHandler
from async_grpo.options.log_setup import set_up_logging

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *arguments: object) -> tuple[int, str]:
    """Exit code and output of `async-grpo`."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out + captured.err


def test_the_version_is_that_of_the_package(capsys):
    assert run(capsys, "--version") == (0, f"async-grpo {async_grpo.__version__}\n")


@pytest.mark.parametrize(
    "command", [*([name] for name in COMMANDS), ["data", "countdown"], ["data", "gsm8k"]]
)
def test_every_command_has_a_help(capsys, command):
    code, text = run(capsys, *command, "--help")
    assert code == 0 and f"async-grpo {command[0]}" in text


def test_a_broken_torchvision_is_named_with_the_way_out(monkeypatch):
    """What pip takes from PyPI beside a CPU build of torch breaks the import of transformers."""

    def fail(name):
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from RuntimeError(
            "operator torchvision::nms does not exist"
        )

    monkeypatch.setattr("async_grpo.launch.commands.import_module", fail)
    with pytest.raises(SystemExit, match="torchvision::nms does not exist: pip uninstall torchvision"):
        main(["demo"])


def test_a_name_of_a_file_alone_asks_plot_for_a_picture(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"total_samples_accumulated": 1, "avg_reward": 0.5}\n' * 2)
    code, text = run(capsys, "plot", tmp_path / "metrics.jsonl", "-o", tmp_path / "curve.svg")
    assert code == 0 and (tmp_path / "curve.svg").stat().st_size > 0, text
    assert "avg_reward" in run(capsys, "plot", "info", tmp_path / "metrics.jsonl")[1]


def test_data_that_cannot_be_written_are_an_error_of_one_line(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"question": "2 + 3?", "answer": "#### 5"}\n')
    given = [f"--tokenizer={ROOT / 'sample-data' / 'tiny-model'}", "--output=/proc/x"]
    for command in (
        ["gsm8k", f"--input={tmp_path / 'in.jsonl'}"],
        ["countdown", "--source=generate", "--num-train=2"],
    ):
        code, text = run(capsys, "data", *command, *given)
        assert code == 2 and "/proc/x cannot be written" in " ".join(text.replace("│", " ").split())


def test_torchruns_report_ends_with_the_reason_of_a_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        trainer.main(["--model-name-or-path=/no/model", "--data-path=/no/data"])
    assert ended.value.code == 2
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"].startswith("error: ") and "/no/model" in report["message"]


def test_a_log_in_a_file_has_whole_lines_with_a_date():
    code = "from async_grpo.options.log_setup import set_up_logging; import logging; set_up_logging('INFO', '[x] '); "
    code += "logging.getLogger('async_grpo.y').info('word ' * 50)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d .* INFO \[x\] (word ){50}\n", done.stderr)


def test_what_is_logged_is_shown_beside_the_steps(capsys, monkeypatch):
    logger = logging.getLogger("async_grpo")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    set_up_logging("INFO", "[trainer 0] ", ConsoleHandler())
    logging.getLogger("async_grpo.cluster").info("evaluating %d held-out questions", 512)
    assert "[trainer 0] evaluating 512 held-out questions" in capsys.readouterr().out


def test_ray_gets_an_interpreter_whose_name_no_shell_splits(tmp_path, monkeypatch):
    """Ray writes the interpreter's path into a command line as it is; the environment stays the same."""
    prefix = tmp_path / "a folder" / "venv"
    prefix.parent.mkdir()
    prefix.symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
    python, *_ = process_variables.ray_command("127.0.0.1:6379", tmp_path)
    assert " " not in python
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert os.path.samefile(done.stdout.strip(), sysconfig.get_path("purelib"))


def test_the_trainer_has_its_share_of_the_cores_if_its_model_can_use_them(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def threads(size: int, ranks: int) -> str:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(size)
        return process_variables.trainer_threads(str(tmp_path), ranks)["OMP_NUM_THREADS"]

    assert threads(3 << 20, 1) == "1"
    assert [threads(120 << 20, ranks) for ranks in (1, 3, 9)] == ["8", "2", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert threads(120 << 20, 1) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(120 << 20, 1) == "5"


def test_the_lock_for_gpus_holds_every_pin():
    locked = set((ROOT / "requirements_gpu.lock").read_text().splitlines())
    for name in ("requirements_base.txt", "requirements_fsdp.txt"):
        pins = {line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"}
        assert pins <= locked


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_for_gpus_holds_all_that_its_packages_want_of_this_python(python):
    """As far as these packages are installed here, in the locked versions; vLLM's other build stands for it nowhere."""
    lock = (ROOT / "requirements_gpu.lock").read_text()
    assert "Python 3.11 or 3.12" in lock.split("accelerate")[0]
    pins = dict(line.split("==") for line in lock.splitlines() if line[0] != "#")
    environment = {"python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    num_packages = 0
    for name, pin in pins.items():
        try:
            is_same = metadata.version(name) == pin
        except metadata.PackageNotFoundError:
            continue
        if not is_same:
            continue
        num_packages += 1
        for requirement in map(Requirement, metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                wanted = canonicalize_name(requirement.name)
                assert wanted in pins, (name, requirement)
                assert requirement.specifier.contains(pins[wanted], prereleases=True), (name, requirement)
    assert num_packages > 80
    # vLLM asks for these from Python 3.12 on
    assert "six" in pins and int(pins["setuptools"].split(".")[0]) < 81


def test_an_interrupted_run_says_what_it_does_and_where_its_results_are(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt("SIGTERM")

    said = []
    monkeypatch.setattr(local_run, "check", interrupted)
    monkeypatch.setattr(early_start, "_start_ray", lambda *_: None)
    monkeypatch.setattr(early_start.log, "warning", lambda text, *values: said.append(text % values))
    settings = {"model_name_or_path": "m", "data_path": "d", "reward_fns": "exact"}
    config = local_run.LocalConfig(**settings, output_dir=str(tmp_path), warm_start="no")
    with pytest.raises(KeyboardInterrupt):
        local_run.run_locally(config)
    assert "SIGTERM: ending trainer, workers and Ray" in said[0] and str(tmp_path) in said[0]


def test_a_run_starts_its_programs_before_anything_imports_torch(tmp_path):
    """Importing torch takes seconds, for which everything else would wait."""
    code = f"""
import sys
from async_grpo.__main__ import main
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.launch import local_run
def early_start(config):
    sys.exit(3 if "torch" in sys.modules else 4)
local_run.early_start = early_start
main([
    "run", "--model-name-or-path={TINY_MODEL}", "--data-path={COUNTDOWN_TRAIN}", "--output-dir={tmp_path}",
    "--reward-fns=countdown,format", "--kl-coef=0.001",
])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4, done.stderr
