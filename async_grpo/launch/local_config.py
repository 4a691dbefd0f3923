"""The options of a whole run on this machine."""

from dataclasses import dataclass

from async_grpo.config.compatibility import refuse_broken
from async_grpo.config.run import RunConfig
from async_grpo.inference.config import EngineOptions
from async_grpo.launch.judge_servers import LocalJudge, broken_judge
from async_grpo.launch.process_variables import gpus
from async_grpo.options.fields import POSITIVE, option, refuse


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
        # If the run joins a Ray cluster, its workers use the GPUs of that cluster, and none of this machine
        num_worker_gpus = 0
        if not self.ray_address:
            num_worker_gpus = self.generation_workers * self.tensor_parallel_size + len(self.logprob_roles)
        num_needed_gpus = self.nproc_per_node + num_worker_gpus + self.judge_gpus_alone
        num_gpus = len(visible_gpus)
        refuse(
            0 < num_gpus < num_needed_gpus,
            f"{num_needed_gpus} GPUs are needed (ranks {self.nproc_per_node}, engines and logprob workers "
            f"{num_worker_gpus}, judges {self.judge_gpus_alone}), {num_gpus} are here: use fewer, or "
            "CUDA_VISIBLE_DEVICES= for the CPU",
        )
        refuse(not self.reward_fns, "name the rewards of the run: --reward-fns countdown,format")
