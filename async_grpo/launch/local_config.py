"""The options of a whole run on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.config.rules import BrokenRules, changed_options, refuse_broken
from async_grpo.config.run import RunConfig
from async_grpo.inference.config import NO_SLEEP_ON_CPU, EngineOptions
from async_grpo.launch.judge_servers import LocalJudge, broken_judge
from async_grpo.launch.process_variables import gpus
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, dashed, option, refuse
from async_grpo.options.source_file import is_file

# Options that are read only by the engine vLLM
OPTIONS_OF_VLLM = """
    tensor_parallel_size engine_options engine_python enable_prefix_caching engine_stall_s
""".split()
# Fraction of a GPU's memory that two programs on it need for their CUDA contexts and for libraries
CONTEXTS_SHARE = 0.03
# Fraction of a GPU's memory that an engine may keep while it sleeps, for example for its CUDA graphs
SLEEPING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class LocalConfig(LocalJudge, EngineOptions, RunConfig):
    """Options of `async-grpo run`: those of a run, of its workers, and of the judge's servers."""

    nproc_per_node: int = option(1, "Number of trainer ranks.", "Local", range=POSITIVE, everyday=True)
    generation_workers: int = option(
        1, "Number of generation workers.", "Local", range=POSITIVE, everyday=True
    )
    ray_address: str = option(
        "", "Address of a Ray cluster to join. By default the run starts a cluster of its own.", "Local"
    )
    warm_start: str = option(
        "auto",
        "Whether to fork the run's processes from a process that has already imported the libraries, which saves many "
        "seconds of the start: yes, no, or auto (yes without GPUs).",
        "Local",
        choices=("auto", "yes", "no"),
    )
    dry_run: bool = option(
        False, "Print what the run would do, without writing or starting anything.", "Local"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            self.samples_per_question > self.max_sequences,
            f"a group of {self.samples_per_question} (--samples-per-question) does not fit an engine of "
            f"{self.max_sequences} sequences (--max-num-seqs + --overhead-seqs)",
        )
        visible_gpus = gpus()
        refuse_broken(self, broken_judge(self, visible_gpus))
        refuse_broken(self, self._broken_colocation())
        refuse_broken(self, self._broken_sleep(visible_gpus))
        refuse_broken(self, self._broken_engine())
        num_needed_gpus = self.num_gpus
        num_gpus = len(visible_gpus)
        share_them = "" if self.colocate else "--colocate to let trainer and engines share them, "
        refuse(
            0 < num_gpus < num_needed_gpus,
            f"{num_needed_gpus} GPUs are needed (ranks {self.nproc_per_node}, engines and logprob workers "
            f"{self.num_worker_gpus}, judges {self.judge_gpus_alone}), {num_gpus} are here: use fewer, {share_them}or "
            "CUDA_VISIBLE_DEVICES= for the CPU",
        )
        refuse(not self.reward_fns, "name the rewards of the run: --reward-fns countdown,format")
        if self.nproc_per_node:
            self.refuse_missing_teacher()

    @property
    def num_worker_gpus(self) -> int:
        """The number of this machine's GPUs that engines and logprob workers use."""
        if self.ray_address:
            return 0  # the workers use the GPUs of the Ray cluster, not of this machine
        return self.generation_workers * self.tensor_parallel_size + len(self.logprob_roles)

    @property
    def trainer_gpus_alone(self) -> int:
        """The number of GPUs that only the trainer uses."""
        return 0 if self.colocate else self.nproc_per_node

    @property
    def num_gpus(self) -> int:
        """The number of this machine's GPUs that the run needs."""
        shared = max(self.nproc_per_node, self.num_worker_gpus) if self.colocate else self.num_worker_gpus
        return self.trainer_gpus_alone + shared + self.judge_gpus_alone

    @property
    def trainer_gpu_share(self) -> float:
        """The share of each GPU's memory that the trainer may take."""
        if not self.colocate:
            return 1.0
        return max(0.0, 1.0 - self.gpu_memory_utilization - CONTEXTS_SHARE)

    @property
    def trainer_peak_share(self) -> float:
        """The share of each GPU's memory that the trainer may take while it computes.

        If engines sleep meanwhile, the trainer may also take their share. Between two steps it takes at most
        `trainer_gpu_share`.
        """
        if not self.colocate or not self.sleep_level:
            return self.trainer_gpu_share
        return 1.0 - SLEEPING_SHARE - CONTEXTS_SHARE

    def _broken_sleep(self, visible_gpus: Sequence[str]) -> BrokenRules:
        """If engines are to sleep, yield the reasons why they cannot on this machine."""
        if not self.sleep_level:
            return
        if not visible_gpus:
            yield "engine_sleep", f"needs a GPU: {NO_SLEEP_ON_CPU}"
        if not self.colocate:
            yield (
                "engine_sleep colocate",
                "do not fit together: an engine that has a GPU of its own would sleep for nobody; use --colocate",
            )

    def _broken_engine(self) -> BrokenRules:
        """Yield the engine options that do not fit the kind of policy, each with the reason."""
        if self.draws != (self.engine == "drawing") and not is_file(self.engine):
            yield "policy engine", "do not fit together: --policy flow and --engine drawing need each other"
        if not self.draws:
            return
        for name in changed_options(self, OPTIONS_OF_VLLM):
            yield f"policy {name}", f"do not go together: leave --{dashed(name)} out"

    def _broken_colocation(self) -> BrokenRules:
        """Yield the options that cannot be combined with `--colocate`, each with the reason."""
        if not self.colocate:
            return
        if self.weight_transport == "nccl":
            yield (
                "colocate weight_transport",
                "do not fit together: NCCL needs a GPU for each process; use object_store",
            )
        if self.ray_address:
            yield (
                "colocate ray_address",
                "do not fit together: the engines of a cluster use its GPUs; leave out one of the two options",
            )
        if not self.trainer_gpu_share:
            yield (
                "colocate gpu_memory_utilization",
                "leave the trainer nothing of its GPU: give the engine a smaller share, such as 0.4",
            )


@dataclass(frozen=True, kw_only=True)
class MayHaveNoTrainer(LocalConfig):
    """Options of a run that may have no trainer ranks, because it only evaluates."""

    nproc_per_node: int = option(1, "Number of trainer ranks.", "Local", range=NOT_NEGATIVE)
