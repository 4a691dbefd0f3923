"""Ready runs: every file is a configuration that a run accepts, every command in a script one that exists."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from tiny_flow import NEEDS_DIFFUSERS
from tiny_pipelines import PICTURE_SIZE, save_tiny_pipeline

from async_grpo.__main__ import main
from async_grpo.data import FOLDER, TINY_MODEL
from async_grpo.errors import EXIT_INTERRUPTED, EXIT_USAGE
from async_grpo.launch.check import read_inputs
from async_grpo.launch.commands import config_class, foreign_keys
from async_grpo.launch.local_config import LocalConfig
from async_grpo.options.command_line import run_command
from async_grpo.rewards.builtin.code import score
from async_grpo.rewards.judges import JudgeAddresses

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SLURM, MANIFESTS = EXAMPLES / "slurm", EXAMPLES / "kubernetes" / "kuberay.yaml"
SCRIPTS = [*sorted(SLURM.iterdir()), MANIFESTS]
EIGHT = "0,1,2,3,4,5,6,7"
RUNS = {  # and the GPUs that each needs, by CUDA_VISIBLE_DEVICES
    "countdown_laptop": "",
    "gsm8k_1gpu": "0",
    "lora_24gb": "0",
    "lora_80gb": "0",
    "gsm8k_8gpu": EIGHT,
    "maths_2x8": f"{EIGHT},8,9,10,11,12,13,14,15",
    "essay": "0,1,2,3",
    "code": "0,1",
    "draw_sd35_4gpu": "0,1,2,3",
    "draw_flux_8gpu": EIGHT,
    "draw_qwen_image_8gpu": EIGHT,
}
DRAWING = {  # examples of policies that draw, and the tiny pipeline that stands in for their model
    "draw_sd35_4gpu": "stable_diffusion_3",
    "draw_flux_8gpu": "flux",
    "draw_qwen_image_8gpu": "qwen_image",
}
NAMES = [pytest.param(name, marks=NEEDS_DIFFUSERS) if name in DRAWING else name for name in RUNS]


@cache
def tiny_pipeline(name: str) -> Path:
    return save_tiny_pipeline(name, Path(tempfile.mkdtemp()) / name)


def arguments(name: str, output: Path) -> list[str]:
    """The example as a command line; what is not in the checkout (models, downloaded data) has a stand-in."""
    toml = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    sample, given = FOLDER / "gsm8k_sample.jsonl", {"output-dir": output}
    for key, stand_in in (
        ("model_name_or_path", TINY_MODEL),
        ("judge_model", TINY_MODEL),
        ("data_path", sample),
    ):
        if key in toml and not (ROOT / toml[key]).exists():
            given[key] = stand_in
    held_out = toml.get("eval_data_path")
    if isinstance(held_out, dict):
        given["eval_data_path"] = ",".join(f"{each}={sample}" for each in held_out)
    elif held_out and not (ROOT / held_out).exists():
        given["eval_data_path"] = sample
    if name in DRAWING:
        given["model_name_or_path"] = tiny_pipeline(DRAWING[name])
        given["picture-size"] = PICTURE_SIZE
    return [f"examples/{name}.toml", *(f"--{key}={value}" for key, value in given.items())]


def configured(argv: list[str]) -> LocalConfig | None:
    """What `async-grpo run` makes of a command line; None if it is refused."""
    seen: list[LocalConfig] = []
    with pytest.raises(SystemExit):
        run_command(LocalConfig, seen.append, help="", argv=argv, foreign=foreign_keys)
    return seen[0] if seen else None


@pytest.fixture
def pretend(monkeypatch):
    """Work in the checkout, with GPUs of these names."""

    def set_devices(devices: str) -> None:
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)

    return set_devices


def test_every_ready_run_is_tried_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == set(RUNS)
    for name in RUNS:
        assert len((EXAMPLES / f"{name}.toml").read_text().splitlines()) <= 30, name


@pytest.mark.parametrize("name", NAMES)
def test_a_ready_run_is_one_that_could_start(name, pretend, tmp_path, capsys):
    pretend(RUNS[name])
    config = configured(arguments(name, tmp_path / "run"))
    said = capsys.readouterr().err
    assert config is not None, said
    assert "warning" not in said
    assert read_inputs(config).resumed is None and not (tmp_path / "run").exists()
    # The stand-in model is short of context: what a real one would be refused for
    longest_prompt = 1 if name in DRAWING else 1024
    num_sampled = config.flow_window or config.max_generation_tokens
    assert num_sampled + longest_prompt <= config.max_tokens_per_gpu


@pytest.mark.parametrize(
    "name", [name for name, devices in RUNS.items() if "," in devices and name not in DRAWING]
)
def test_it_needs_the_gpus_that_it_says_and_no_fewer(name, pretend, tmp_path, capsys):
    one_less = RUNS[name].rpartition(",")[0]
    pretend(one_less)
    assert configured(arguments(name, tmp_path)) is None
    assert f"{one_less.count(',') + 2} GPUs are needed" in capsys.readouterr().err


def test_engines_of_a_cluster_that_is_joined_take_none_of_the_gpus_here(pretend, tmp_path, capsys):
    pretend(EIGHT)
    command = arguments("maths_2x8", tmp_path)
    assert configured([*command, "--ray-address=10.0.0.1:6379"]) is not None
    assert configured(command) is None
    nine_ranks = [*command, "--ray-address=10.0.0.1:6379", "--nproc-per-node=9"]
    assert configured(nine_ranks) is None and "9 GPUs are needed" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_of_it_ends_well_and_writes_nothing(name, pretend, tmp_path):
    pretend(RUNS[name])
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments(name, tmp_path / "run"), "--dry-run"])
    assert ended.value.code == 0 and not (tmp_path / "run").exists()


def test_the_code_rows_are_solved_by_their_solutions_and_not_by_nothing():
    rows = [json.loads(line) for line in (EXAMPLES / "code.jsonl").read_text().splitlines()]
    assert len(rows) == tomllib.loads((EXAMPLES / "code.toml").read_text())["batch_size"]
    for row in rows:
        fenced = {**row, "completion": f"```python\n{row['solution']}\n```"}
        assert score(fenced)["reward"] == 1.0, row["messages"]
        assert score({**row, "completion": "```python\npass\n```"})["reward"] == 0.0, row["messages"]


def test_the_essay_judge_reads_a_row_and_has_no_address_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from essay_judge import essay

    row = json.loads((EXAMPLES / "essay.jsonl").read_text().splitlines()[0])
    prompt, reply = essay.token_estimate({**row, "completion": "Maps lie. " * 100})
    assert 250 < prompt < 1000 and reply == 256  # a column that the template names and no row has would raise
    assert JudgeAddresses(judge_urls="http://10.0.0.5:8000").with_address(essay).urls == (
        "http://10.0.0.5:8000",
    )


def commands_of(text: str) -> list[tuple[str, set[str]]]:
    """Every command of ours and of Ray's in a script, with its options."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"\b((?:async-grpo|ray) [a-z]+|torchrun)\b( [^\n;|`']*)?", joined)
    return [(command, set(re.findall(r" --([a-z][a-z-]*)", rest))) for command, rest in found]


@pytest.mark.filterwarnings("ignore")  # of Ray's own modules
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_name_options_that_there_are(script):
    from ray.scripts import scripts as ray_commands
    from torch.distributed.run import get_args_parser

    lines = [line for line in script.read_text().splitlines() if not line.lstrip().startswith("#")]
    for command, given in commands_of("\n".join(lines)):
        program, _, name = command.partition(" ")
        if program == "ray":
            known = {o.removeprefix("--") for p in getattr(ray_commands, name).params for o in p.opts}
        elif program == "torchrun":
            known = {o.removeprefix("--") for o in get_args_parser()._option_string_actions} | {"config"}
        else:
            fields = dataclasses.fields(config_class(name))
            known = {"config", *(field.name.replace("_", "-") for field in fields)}
        assert given and given <= known, (command, given - known)


@pytest.mark.parametrize("script", sorted(SLURM.iterdir()), ids=lambda path: path.name)
def test_a_script_of_slurm_is_bash(script):
    assert subprocess.run(["bash", "-n", str(script)], timeout=10).returncode == 0
    assert os.access(script, os.X_OK)


STUBS = {
    "hostname": 'echo "10.0.0.1 192.168.0.1"',
    "srun": 'echo "srun $*" >>"$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": 'echo "ray $*" >>"$LOG"',
    "scontrol": '[ "$1" != show ] || printf "n%d\\n" 1 2 3 4; echo "scontrol $*" >>"$LOG"',
    "python": f'exec "{sys.executable}" "$@"',
    "torchrun": 'echo "torchrun $*" >>"$LOG"; trap \'exit "$END"\' TERM; echo up >>"$LOG"; while :; do sleep 0.05; done',
    "async-grpo": 'echo "async-grpo $* ${#RAY_AUTH_TOKEN}" >>"$LOG"; [ "$CODE" != waits ] || '
    """{ trap 'exit "$END"' TERM; echo up >>"$LOG"; while :; do sleep 0.05; done; }; exit "$CODE\"""",
}


@pytest.fixture
def job(tmp_path):
    """Start the script of SLURM among programs that only write down how they were called; (process, their log)."""
    for name, text in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{text}\n")
        stub.chmod(0o755)
    log, started = tmp_path / "log", []

    def start(code: str, script: str = "run.sh", **more: str) -> tuple[subprocess.Popen[bytes], Path]:
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "LOG": str(log),
            "CODE": code,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-4]",
        }
        environment |= {"SLURMD_NODENAME": "n1", **more}
        command = ["bash", str(SLURM / script), "examples/own.toml", "--batch-size=8"]
        started.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return started[-1], log

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # also what a script that has ended left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def rays(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("ray start")]


@pytest.mark.parametrize(("code", "ended"), [("0", 0), ("1", 1), ("2", 2), (str(EXIT_INTERRUPTED), 0)])
def test_the_slurm_job_is_queued_again_after_code_75_and_after_no_other(job, code, ended):
    process, log = job(code)
    assert process.wait(60) == ended
    until(lambda: len(rays(log)) == 2)  # the second node's is not waited for by the script
    lines = log.read_text().splitlines()
    both = rays(log)
    assert any("--head" in one and "--num-gpus=0" in one for one in both)
    assert any("--address=10.0.0.1:6379" in one and "--block" in one for one in both)
    assert "async-grpo run examples/own.toml --ray-address=10.0.0.1:6379 --batch-size=8 64" in lines
    assert ("scontrol requeue 7" in lines) == (code == "75")


@pytest.mark.parametrize(("end", "requeued"), [(EXIT_INTERRUPTED, True), (1, False)])
def test_the_signal_before_the_time_is_up_reaches_the_run_which_may_save(job, end, requeued):
    process, log = job("waits", END=str(end))
    until(lambda: log.exists() and "up\n" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == (0 if requeued else end)
    assert ("scontrol requeue 7" in log.read_text()) == requeued


def test_trainers_on_two_nodes_are_one_torchrun_and_every_gpu_of_the_others_has_an_engine(job):
    """Of four nodes with two GPUs each; told to end, all of torchrun is, and the job is queued again."""
    process, log = job("waits", "many_trainers.sh", END="1", SLURM_GPUS_ON_NODE="2")
    until(lambda: log.exists() and len(rays(log)) == 3)
    until(lambda: log.read_text().count("--mode=generation") == 4)
    until(lambda: log.read_text().count("up\n") == 5)  # torchrun, and the workers
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    lines = log.read_text().splitlines()
    (torchrun,) = [line for line in lines if line.startswith("torchrun")]
    assert "--nnodes=2 --nproc-per-node=2" in torchrun and "--rdzv-endpoint=10.0.0.1:29500" in torchrun
    assert [line for line in lines if "srun" in line and "torchrun" in line and "--nodelist=n1,n2 " in line]
    assert [
        line for line in lines if "srun" in line and "--num-gpus=2" in line and "--nodelist=n3,n4 " in line
    ]
    assert "scontrol requeue 7" in lines


def test_the_manifests_are_a_cluster_and_a_job_that_fit_each_other_and_the_run():
    text = MANIFESTS.read_text()
    cluster, job = yaml.safe_load_all(text)
    run = tomllib.loads((EXAMPLES / "maths_2x8.toml").read_text())
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    lock = (ROOT / "requirements_gpu.lock").read_text()
    assert f"\nray=={spec['rayVersion']}\n" in lock and spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-gpus": "0"}
    (workers,) = spec["workerGroupSpecs"]
    (engines,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(engines["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == run["generation_workers"]
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    assert int(trainer["resources"]["limits"]["nvidia.com/gpu"]) == run["nproc_per_node"]
    assert pod["terminationGracePeriodSeconds"] > LocalConfig.__dataclass_fields__["grace_s"].default
    (script,) = trainer["args"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=10).returncode == 0
    assert script.count(f"{name}-head-svc:6379") == 2
    token = next(one for one in trainer["env"] if one["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [EXIT_USAGE], "Ignore": [EXIT_INTERRUPTED]}
    assert (EXAMPLES / Path(re.search(r"run (examples/\S+)", script)[1]).name).exists()
