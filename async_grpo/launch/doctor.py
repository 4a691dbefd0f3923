"""`async-grpo doctor [run.toml]`: check a run and its machine before the run starts."""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, build_opener

from packaging.requirements import Requirement
from packaging.version import Version

from async_grpo.config.resume import goes_on
from async_grpo.errors import EXIT_USAGE, ConfigurationError
from async_grpo.experience.dataset import Question
from async_grpo.inference.engine_python import VLLM_PACKAGES, read_environment
from async_grpo.inference.vllm_edges import KNOWN_VERSIONS, PINNED_VERSION
from async_grpo.launch import plan, process_variables
from async_grpo.launch.check import read_inputs
from async_grpo.launch.end_tokens import end_tokens
from async_grpo.launch.gpu_software import compare_versions
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.plan import ERROR, OK, WARNING, Finding
from async_grpo.launch.reward_trial import TriedReward, try_rewards
from async_grpo.launch.temporary_directory import temporary_directory
from async_grpo.metrics.writer import METRICS_FILE
from async_grpo.options.fields import option
from async_grpo.processes.deadline import interrupted_after
from async_grpo.processes.hub import local_model
from async_grpo.processes.private_folder import private_folder
from async_grpo.rewards.adapter.registry_source import display_name, parse_names

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared

LOOK_S = 300.0  # seconds that one check may take
PROGRAM_S = 90.0  # seconds that a program started by a check may take
REPLY_S = 3.0  # seconds that a server may take to reply
NUM_REWARD_ROWS = 4  # rows of the data with which rewards are tried
NUM_TOKENIZER_ROWS = 64  # rows of the data with which the tokenizer is tried
ALL_REDUCE = """
import sys
from async_grpo.training.distributed import distributed_run, leave
with distributed_run(sys.argv[1], timeout_s=60) as ranks:
    assert ranks.sum([1.0]) == [ranks.world_size]
leave()
"""
CLUSTER = """
from async_grpo.cluster.ray_session import connect, ray
connect("doctor")
print(*(int(ray.cluster_resources().get(resource, 0)) for resource in ("CPU", "GPU")))
"""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(LocalConfig):
    """Options of `async-grpo doctor`: those of `run`. Without a model and data, only the machine is checked."""

    model_name_or_path: str = option("", "Hugging Face folder of the policy to train.", everyday=True)
    data_path: str = option("", "File of questions, in any format that `run` takes.", everyday=True)
    json: bool = option(False, "Print the findings as JSON.", "Doctor")

    def __post_init__(self) -> None:
        if self.model_name_or_path or self.data_path:
            super().__post_init__()


def doctor(config: DoctorConfig) -> None:
    """Run all checks, and print their findings.

    Raises:
        SystemExit: A finding shows that the run could not work. The exit code is 2.
    """
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not config.json:
            plan.show([finding])
    if config.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    if any(finding.level == ERROR for finding in findings):
        raise SystemExit(EXIT_USAGE)


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Yield the findings of all checks. Slow checks come last, and are skipped if the run's settings cannot work."""
    prepared: list[Prepared] = []  # empty until `inputs` has found that the run's inputs work
    names_run = bool(config.model_name_or_path or config.data_path)
    yield from within(packages, config.engine_python)
    yield from within(vllm_version, config.engine_python)
    yield from within(compare_versions, config.engine_python)
    yield from within(machine)
    yield from within(temporary_directory)
    if names_run:
        yield from within(output_folder, config)
        yield from in_main_thread(inputs, config, prepared)
    else:
        yield from within(plan.limits)
    if prepared:
        # If the model is on the hub, it is now in this local folder
        config = replace(config, model_name_or_path=prepared[0].config.model_name_or_path)
        for look in (plan.resources, tokenizer, judges, rewards):
            yield from within(look, config, prepared[0])
    if prepared or not names_run:
        yield from within(all_reduce)
        yield from within(cluster, config)


def within(look: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """Run a check for at most `LOOK_S` seconds, and return its findings.

    If the check raises an exception or does not end in time, the findings contain an error. A check that does not end
    keeps its thread running.
    """
    findings: list[Finding] = []
    name = look.__name__.replace("_", " ")

    def run() -> None:
        try:
            findings.extend(look(*arguments))
        except (Exception, SystemExit) as error:  # drivers and the user's files may raise any exception
            findings.append(Finding(name, ERROR, str(error) or type(error).__name__))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LOOK_S)
    if thread.is_alive():
        findings.append(
            Finding(
                name,
                ERROR,
                f"it did not end within {LOOK_S:g} s",
                "find out what hangs, such as a disk or a driver",
            )
        )
    return findings


def in_main_thread(look: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """Run a check like `within`, but in the main thread.

    It tries the model's chat template, whose time is limited by a signal, and only the main thread gets signals.
    """
    findings: list[Finding] = []
    name = look.__name__.replace("_", " ")
    try:
        with interrupted_after(LOOK_S, f"the check of the {name}"):
            findings.extend(look(*arguments))
    except (Exception, SystemExit) as error:  # the user's files may raise any exception
        findings.append(Finding(name, ERROR, str(error) or type(error).__name__))
    return findings


def packages(engine_python: str = "") -> Iterator[Finding]:
    """Compare the installed packages with the library's requirements. With `engine_python`, vLLM is not required here."""
    problems = []
    if not engine_python and not find_spec("vllm"):
        problems.append("vllm is missing: async-grpo[gpu] or async-grpo[cpu]")
    for requirement in map(Requirement, requires("async-grpo") or []):
        try:
            installed_version = version(requirement.name)
        except PackageNotFoundError:
            if not requirement.marker:  # requirements with a marker belong to an optional extra, so skip them
                problems.append(f"{requirement.name}{requirement.specifier} is missing")
            continue
        if not requirement.specifier.contains(installed_version, prereleases=True):
            problems.append(f"{requirement.name} is {installed_version}, not {requirement.specifier}")
    result = ", ".join(problems) or "all are there, in versions that fit"
    yield Finding(
        "packages",
        ERROR if problems else OK,
        f"Python {sys.version.split()[0]}; {result}",
        "pip install them; see README.md on installing",
    )


def vllm_version(engine_python: str = "") -> Iterator[Finding]:
    """Compare the engines' version of vLLM, if any, with the versions that this library is known to work with."""
    known_versions = ", ".join(KNOWN_VERSIONS)
    versions_of_engines: Mapping[str, str] = {}
    if engine_python:
        with suppress(ConfigurationError):  # `compare_versions` reports this error
            versions_of_engines = read_environment(engine_python).versions
    for name in VLLM_PACKAGES:
        try:
            installed = versions_of_engines[name] if engine_python else version(name)
        except (KeyError, PackageNotFoundError):
            continue
        # `public` drops the label of a build: 0.32.0+cu130 becomes 0.32.0
        is_known = Version(installed).public in KNOWN_VERSIONS
        cure = (
            f"pip install {name}=={PINNED_VERSION}, and torch and transformers as it asks for them; or try this one: "
            "tests/inference/test_vllm_edges.py names what has changed in it"
        )
        yield Finding(
            "vLLM", OK if is_known else WARNING, f"{name} {installed}; known to work: {known_versions}", cure
        )


def machine() -> Iterator[Finding]:
    """Check GPUs, ports and clock."""
    level = OK
    text = "none: everything runs on the CPU"
    if process_variables.gpus():
        try:
            text = "; ".join("{}, {} MiB, {} free, driver {}".format(*card) for card in plan.cards())
        except plan.NO_CARDS as error:
            level = WARNING
            text = f"nvidia-smi fails: {error}"
    yield Finding("GPUs", level, text, "look at the driver")
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), REPLY_S).close()
    yield Finding("ports", OK, "the loopback interface has free ones")
    # A clock that shows a time before this file was installed is certainly wrong
    is_clock_wrong = time.time() < Path(__file__).stat().st_mtime
    yield Finding(
        "clock", WARNING if is_clock_wrong else OK, time.ctime(), "set it (timedatectl set-ntp true)"
    )


def all_reduce() -> Iterator[Finding]:
    """Sum a number over one process per GPU (NCCL), or over two processes on the CPU (gloo)."""
    num_gpus = len(process_variables.gpus())
    num_ranks = max(2, num_gpus)
    device = "cuda" if num_gpus > 1 else "cpu"
    begin = time.monotonic()
    with private_folder() as scratch:
        torchrun = process_variables.torchrun_arguments(num_ranks, scratch)
        _python(
            [*torchrun, "--no-python", sys.executable, "-c", ALL_REDUCE, device],
            num_ranks,
            variables=process_variables.torchrun_environment(scratch),
        )
    seconds = time.monotonic() - begin
    yield Finding("all reduce", OK, f"{num_ranks} processes, {device}: {seconds:.0f} s with their start")


def _python(
    arguments: list[str],
    ranks: int,
    ray_address: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run a Python program with the environment variables of a run's programs, and return its output.

    Args:
        arguments: The arguments of the interpreter.
        ranks: Number of trainer ranks. The first GPUs are reserved for them.
        ray_address: Address of the Ray cluster to join. "" means a private cluster.
        variables: Further environment variables.

    Raises:
        RuntimeError: The program failed. The message contains the last error that the program printed.
    """
    environment = process_variables.run_environment(ray_address, ranks, Path(), Path()) | dict(variables)
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env=environment,
    )
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if "rror: " in line] or ["it said nothing"]
        raise RuntimeError(f"exit code {process.returncode}: {errors[-1]}")
    return process.stdout


def output_folder(config: LocalConfig) -> Iterator[Finding]:
    """Check that the output folder can be written to, and that it contains no run, unless `--resume` continues it."""
    place = plan.nearest_folder(config.output_path)
    level = OK
    text = f"{place} can be written to"
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        level = ERROR
        text = f"{place} cannot be written to: {error.strerror}"
    if (config.output_path / METRICS_FILE).exists() and not goes_on(config):
        level = ERROR
        text = f"{config.output_path} already holds a run"
    yield Finding("output folder", level, text, "another --output-dir, or --resume auto")


def cluster(config: LocalConfig) -> Iterator[Finding]:
    """Check that the cluster at `--ray-address` answers, and has room for the workers."""
    if not config.ray_address:
        return
    process_variables.check_reachable(config.ray_address)
    output = _python(["-c", CLUSTER], config.nproc_per_node, config.ray_address)
    num_cpus, num_gpus = map(int, output.split()[-2:])
    num_workers = config.generation_workers * config.tensor_parallel_size + len(config.logprob_roles)
    has_room = (num_gpus or num_cpus) >= num_workers
    yield Finding(
        "Ray",
        OK if has_room else WARNING,
        f"{num_cpus} CPUs, {num_gpus} GPUs for {num_workers} workers",
        "add nodes",
    )


def inputs(config: LocalConfig, prepared: "list[Prepared]") -> Iterator[Finding]:
    """Check everything that `run` checks before it starts, and append the run's inputs to `prepared`.

    A model of the hub is fetched, as `run` does.
    """
    model = local_model(config.model_name_or_path)
    prepared.append(read_inputs(replace(config, model_name_or_path=model)))
    num_questions = len(prepared[0].questions)
    yield Finding("inputs", OK, f"model, {num_questions:,} questions, rewards and settings fit each other")


def tokenizer(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Check that decoding gives back the texts of the data, and that completions end.

    They end only if the token at the end of a chat turn is one of the tokens that end a completion.
    """
    from async_grpo.modeling.load import load_tokenizer

    model_tokenizer = load_tokenizer(config.model_name_or_path)
    changed_row = _first_changed_row(model_tokenizer, prepared.questions[:NUM_TOKENIZER_ROWS])
    yield Finding(
        "tokenizer",
        WARNING if changed_row else OK,
        f"{changed_row}: `input` decodes to another text" if changed_row else "it decodes texts unchanged",
        "tokenise the data by this model's tokenizer",
    )
    yield end_tokens(model_tokenizer, config, prepared.settings.stop_token_ids)


def _first_changed_row(model_tokenizer: Any, questions: Sequence[Question]) -> str:
    """Return file and line of the first row whose token ids do not decode to its text; "" if there is none."""
    for question in questions:
        has_tokens = question.row.get("input_token_ids") is not None
        if has_tokens and model_tokenizer.decode(question.token_ids.tolist()) != question.row["input"]:
            return question.where
    for question in questions:
        token_ids = model_tokenizer.encode(question.row["input"], add_special_tokens=False)
        if model_tokenizer.decode(token_ids) != question.row["input"]:
            return question.where
    return ""


def judges(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Check that a server answers at each address of a judge. Servers that the run itself will start are skipped."""
    assert prepared.rewards is not None
    for name in prepared.rewards.judges:
        judge = prepared.rewards.everyone[name]
        if config.judge_model and config.are_asked_by(judge):
            continue
        for url in judge.endpoint().urls:
            level = OK
            text = f"{url} answers"
            try:
                build_opener(ProxyHandler({})).open(url, timeout=REPLY_S).close()
            except (OSError, HTTPException) as error:
                # An HTTP error such as 404 also shows that a server answers
                is_reply = hasattr(error, "code")
                if not is_reply:
                    level = ERROR
                    text = f"{url} gives no answer within {REPLY_S:g} s ({error})"
            yield Finding(f"judge {name}", level, text, "start the server, or correct its address")


def rewards(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Try each reward on right and wrong answers made from the data. Skip judges, because their calls cost money."""
    assert prepared.rewards is not None
    names = [
        name for name in parse_names(config.reward_fns) if display_name(name) not in prepared.rewards.judges
    ]
    cards = {display_name(name): TriedReward() for name in names}
    if names:
        questions = prepared.questions[:NUM_REWARD_ROWS]
        asyncio.run(try_rewards(config, names, cards, questions, time_limit_s=LOOK_S / 2))
    for name, card in cards.items():
        level, text = card.result(
            may_be_for_other_rows=bool(config.reward_column),
            looks_at_groups=name in prepared.rewards.whole_groups,
        )
        milliseconds = 1000 * statistics.median([*card.right.seconds, *card.wrong.seconds])
        yield Finding(
            f"reward {name}",
            level,
            f"{text}; {milliseconds:.3g} ms a sample",
            f"try it on completions: async-grpo verify FILE --reward-fns {name}",
        )
