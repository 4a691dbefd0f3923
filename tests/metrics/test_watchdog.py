"""What a watchdog writes down, when it does, and that nothing of the process that it watches can keep it from that."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from async_grpo.__main__ import main
from async_grpo.errors import DeadlineExceeded
from async_grpo.metrics import watchdog as module
from async_grpo.metrics.watchdog import Watchdog, stalls_of
from async_grpo.processes.look import look, request_look
from async_grpo.processes.waits import situation, waiting

DEADLINE_S = 30.0


def until(condition, what):
    give_up = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < give_up, what
        time.sleep(0.05)
    return found


def first_line(folder) -> str:
    return next(iter(stalls_of(folder).values())).splitlines()[0]


@pytest.fixture
def program():
    """Starts Python programs, and ends them."""
    started = []

    def start(text, *arguments, **variables):
        command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
        started.append(subprocess.Popen(command, env=os.environ | variables))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


# Its main thread holds a mutex twice: no handler of Python ever runs again
RUN = """
    import ctypes, sys
    from pathlib import Path
    from async_grpo.metrics.watchdog import Watchdog
    from async_grpo.processes.end_on_signal import end_in_order
    from async_grpo.processes.waits import situation, waiting

    watchdog = Watchdog(Path(sys.argv[1]), lambda: 7, float(sys.argv[2]), situation)
    watchdog.start()
    lock = (Path(sys.argv[1]) / ".lock").open("a")  # open until the end, as a run has it
    end_in_order(lambda name: None, 60.0, is_failing=lambda: False, look=watchdog.ask)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    with waiting("rank", "rank 0", "computing"):
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
"""


def test_a_stall_is_written_down_once_by_itself(tmp_path, program):
    run = program(RUN, tmp_path, 0.5)
    ((folder, text),) = until(lambda: stalls_of(tmp_path), "a stall").items()
    assert folder.name.endswith("_step7") and text.startswith(f"Rank 0 (process {run.pid}, sleeping, ")
    assert f"process {run.pid}" in text and "Who waits for whom" in text and "MB of memory are free" in text
    assert "MainThread" in (folder / "stacks.txt").read_text()
    time.sleep(2.0)  # four limits more
    assert len(stalls_of(tmp_path)) == 1


def test_a_process_whose_main_thread_never_runs_again_still_answers_sigusr1(tmp_path, program):
    run = program(RUN, tmp_path, 3600.0)
    until(lambda: request_look(run.pid), "its handler")
    assert until(lambda: stalls_of(tmp_path), "an answer") and run.poll() is None


def test_who_has_no_handler_is_not_sent_the_signal_that_would_end_it(program):
    run = program("import time; time.sleep(60)")
    time.sleep(0.2)
    assert not request_look(run.pid) and run.poll() is None
    assert not request_look(2**22 - 1)  # nobody


class Asked:
    """The event of a watchdog, by script; it ends with the script."""

    def __init__(self, answers) -> None:
        self._answers = iter(answers)

    def wait(self, timeout_s) -> bool:
        return next(self._answers)

    def clear(self) -> None:
        pass


def test_the_default_limit_is_three_times_the_median_step_and_two_minutes_at_least(tmp_path, monkeypatch):
    """Steps end at the seconds 100, 200, 300, 400 and 500; later ones at 1600 and 1601, and then no more."""
    now, reports = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def answers():  # instead of a wait, a second passes
        while now[0] < 3000:
            now[0] += 1.0
            yield False

    ends = (100, 200, 300, 400, 500, 1600, 1601)
    watchdog = Watchdog(tmp_path, lambda: sum(now[0] >= end for end in ends), None, situation)
    watchdog._is_requested = Asked(answers())
    monkeypatch.setattr(watchdog, "report", lambda: reports.append(now[0]))
    with pytest.raises(StopIteration):
        watchdog._watch()
    assert reports == [801.0, 1902.0]  # once each, 300 s after the last step


def test_before_any_step_the_limit_is_two_minutes_or_what_one_says(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def first_report(limit_s) -> float:
        now[0] = 0.0
        watchdog, reports = Watchdog(tmp_path, lambda: 0, limit_s, situation), []
        monkeypatch.setattr(watchdog, "report", lambda: reports.append(now[0]))
        watchdog._is_requested = Asked(now.__setitem__(0, now[0] + 1.0) for _ in range(200))
        with pytest.raises(StopIteration):
            watchdog._watch()
        (moment,) = reports
        return moment

    assert first_report(None) == 121.0 and first_report(5.0) == 6.0


def test_what_a_controller_does_not_tell_is_the_diagnosis(tmp_path):
    def silent():
        raise DeadlineExceeded("the run's controller did not answer within 5 s")

    Watchdog(tmp_path, lambda: 0, None, silent).report()
    said = "The controller is silent: the run's controller did not answer within 5 s"
    assert first_line(tmp_path) == said


def test_a_stopped_engine_is_told_from_one_that_works(tmp_path):
    """A process that is called as Ray calls the actor of an engine."""
    command = ["bash", "-c", "exec -a ray::GenerationActor.exchange sleep 60"]
    with subprocess.Popen(command) as engine, waiting("worker", "prompt 1", "generation worker g0"):
        try:
            until(lambda: "ray::" in "".join(psutil.Process(engine.pid).cmdline()[:1]), "exec")
            watchdog = Watchdog(tmp_path, lambda: 0, None, situation)
            watchdog.report()
            assert first_line(tmp_path).startswith("Generation worker g0 keeps a group waiting (1 wait")
            engine.send_signal(signal.SIGSTOP)
            time.sleep(1.0)  # names of folders are of seconds
            watchdog.report()
            assert first_line(tmp_path).startswith(
                f"The engine (process {engine.pid}) is stopped, as by SIGSTOP"
            )
        finally:
            engine.kill()


def test_a_full_disk_is_named_though_nothing_can_be_written_to_it(tmp_path, caplog, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(logging.getLogger("async_grpo"), "propagate", True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        with pytest.raises(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        Watchdog(disk, lambda: 0, None, situation).report()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert f"The disk of {disk} is full: 0 MB are free" in caplog.text and "Who waits for whom" in caplog.text


def test_a_report_that_fails_costs_neither_the_thread_nor_the_next_one(tmp_path, monkeypatch):
    reports = []

    def broken():
        reports.append(1)
        raise ZeroDivisionError

    watchdog = Watchdog(tmp_path, lambda: 0, None, situation)
    monkeypatch.setattr(watchdog, "report", broken)
    watchdog._is_requested = Asked([True, False, True])
    with pytest.raises(StopIteration):
        watchdog._watch()
    assert len(reports) == 2


def test_the_processes_of_a_rank_and_of_a_reward_are_known_by_what_they_were_started_with(program):
    rank = program("import threading, time\ndef nap():\n    time.sleep(60)\nnap()", RANK="3")
    until(lambda: "-c" in psutil.Process(rank.pid).cmdline(), "exec")
    seen = until(lambda: [one for one in look([rank.pid]) if "nap (" in one.frames[0]], "its stack")
    assert [one.role for one in seen] == ["rank 3"]
    assert seen[0].status == "sleeping" and seen[0].cores < 0.5 and seen[0].memory_mb > 1
    assert seen[0].frames[0].startswith("nap (")


# async-grpo why


def folder_of_a_run(folder, lock: int):
    options = {"samples_per_question": 8, "batch_size": 4, "train_minibatch_size": None}
    options["num_training_batches"] = 100
    (folder / "training_params.json").write_text(json.dumps(options))
    line = {"step": 12, "timestamp": time.time()}
    (folder / "training_metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / ".lock").write_text(str(lock))
    return folder


def why(folder, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["why", str(folder)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_a_run_that_lives_is_asked(tmp_path, program, capsys):
    folder_of_a_run(tmp_path, os.getpid())
    run = program(RUN, tmp_path, 3600.0)
    until(lambda: request_look(run.pid), "its handler")
    until(lambda: stalls_of(tmp_path), "an answer")
    (earlier,) = stalls_of(tmp_path)
    earlier.rename(tmp_path / "moved")
    (tmp_path / ".lock").write_text(str(run.pid))
    assert "rank 0 has been computing for" in why(tmp_path, capsys).splitlines()[0]
    assert "rank 0 has been computing for" in (tmp_path / "moved" / "why.txt").read_text()


def test_of_several_stalls_the_newest_is_shown_and_the_others_are_listed(tmp_path, capsys):
    folder_of_a_run(tmp_path, os.getpid())
    for name in ("20260101-000000_step3", "20260102-000000_step9"):
        (tmp_path / "stalls" / name).mkdir(parents=True)
        (tmp_path / "stalls" / name / "why.txt").write_text(f"It was {name[-1]}\n\nand more of {name[-1]}\n")
    (tmp_path / "stalls" / "20260103-000000_step9").mkdir()  # that is being written
    shown = why(tmp_path, capsys)
    assert shown.startswith("It was 9\n\nand more of 9\n") and "20260101-000000_step3: It was 3" in shown
    assert "more of 3" not in shown


def test_of_a_run_that_ended_it_says_how_with_its_last_errors(tmp_path, capsys):
    folder_of_a_run(tmp_path, 2**22 - 1)
    (tmp_path / "logs").mkdir()
    said = "2026-11-23 01:02:03 ERROR something broke\nfine\nerror: the engine died: out of memory\n"
    (tmp_path / "logs" / "trainer.log").write_text("fine\n" + said)
    shown = why(tmp_path, capsys)
    assert "step 12 of 100, ended, without a checkpoint" in shown
    assert "\nerror: the engine died: out of memory" in shown and "something broke" in shown
    assert "fine" not in shown


def test_a_run_that_does_not_answer_is_looked_at_from_outside(tmp_path, capsys, program):
    run = program("import time; time.sleep(60)")
    time.sleep(0.2)
    folder_of_a_run(tmp_path, run.pid)
    run.send_signal(signal.SIGSTOP)
    shown = why(tmp_path, capsys)
    assert "does not answer" in shown and f"(process {run.pid}, stopped, 0% of a core)" in shown
