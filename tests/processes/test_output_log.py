"""What processes of environments and agents print goes to a file of limited size, without secrets."""

import subprocess
import sys

from scripted_play import prompt_of, run, trajectories

from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.make import OUTPUT_FILE, make_played, source_of
from async_grpo.processes import output_log
from async_grpo.processes.output_log import OutputLog

PAGE = """
import os, sys
class Noisy:
    def reset(self, row, seed):
        return "begin"
    def step(self, said):
        os.write(1, b"x" * 100 + b"\\n")  # also what programs print that it starts
        for _ in range(200):
            print("y" * 50_000)
        print("to stderr", file=sys.stderr)
        return "", 1.0, True
"""


def log_of(tmp_path) -> OutputLog:
    return OutputLog(tmp_path / "output.log", lambda text: text.replace("secret", "***"))


def test_output_of_several_processes_stands_in_the_file_with_their_names(tmp_path):
    log = log_of(tmp_path)
    first, second = log.output_of("agent 1"), log.output_of("agent 2")
    first.add(b"one\ntw")
    second.add(b"other\n")
    first.add(b"o\nlast")
    first.end()
    text = (tmp_path / "output.log").read_text()
    assert text == "--- agent 1\none\n--- agent 2\nother\n--- agent 1\ntwo\nlast\n"


def test_a_secret_that_arrives_in_two_pieces_is_hidden(tmp_path):
    output = log_of(tmp_path).output_of("agent")
    output.add(b"my sec")
    output.add(b"ret\n")
    assert (tmp_path / "output.log").read_text() == "--- agent\nmy ***\n"


def test_the_output_of_one_process_and_the_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(output_log, "MAX_SOURCE_BYTES", 1000)
    monkeypatch.setattr(output_log, "MAX_FILE_BYTES", 3000)
    log = log_of(tmp_path)
    for number in range(20):
        output = log.output_of(f"agent {number}")
        for _ in range(100):
            output.add(b"z" * 99 + b"\n")
        output.end()
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(files) <= {"output.log", "output.log.1"} and max(files.values()) < 3000 + 1300
    newest = (tmp_path / "output.log.1").read_text() + (
        (tmp_path / "output.log").read_text() if "output.log" in files else ""
    )
    assert "agent 19" in newest and "further output of this process is dropped" in newest


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path):
    output = log_of(tmp_path).output_of("agent")
    for _ in range(40):
        output.add(b"z" * 10_000)
    assert len(output._unfinished_line) <= output_log.MAX_PIECE_BYTES + 10_000


def test_a_full_disk_stops_no_process_and_is_named_once(tmp_path, caplog):
    log = OutputLog(tmp_path / "missing" / "output.log", str)
    descriptor = log.pipe("program")
    program = "import sys; [print('x' * 1000) for _ in range(2000)]"
    subprocess.run([sys.executable, "-c", program], stdout=descriptor, check=True, timeout=60)
    log.write("agent", b"lost, too")
    (warning,) = caplog.messages
    assert "is lost" in warning and "output.log" in warning


def test_what_an_environment_prints_goes_to_the_run_s_folder_and_not_to_the_console(tmp_path, capfd):
    from chat_templates import MODEL
    from scripted_play import SETTINGS, OneSession

    page = tmp_path / "page.py"
    page.write_text(PAGE)
    config = EnvironmentConfig(environment=f"{page}:Noisy")
    playing = make_played(
        config, str(MODEL), SETTINGS, source_of(config.environment), OneSession(lambda: "hm"), tmp_path
    )
    (trajectory,) = run(trajectories(playing, prompt_of()))
    assert trajectory.outcome.reward == 1.0 and not capfd.readouterr().err
    log = tmp_path / OUTPUT_FILE
    text = log.read_text()
    assert text.startswith("--- environment Noisy\n" + "x" * 100 + "\n") and "yyyy" in text
    assert log.stat().st_size < output_log.MAX_SOURCE_BYTES + 2 * output_log.MAX_PIECE_BYTES
