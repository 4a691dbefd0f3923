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
    """A `RunConfig` and what the workers beside it need."""

    nproc_per_node: int = option(1, "Number of trainer ranks.", "Local", range=POSITIVE, everyday=True)
    generation_workers: int = option(
        1, "Number of generation workers.", "Local", range=POSITIVE, everyday=True
    )
    ray_address: str = option(
        "", "Address of a Ray cluster to join. By default the run starts a cluster of its own.", "Local"
    )
    dry_run: bool = option(False, "Only print what would be done; write and start nothing.", "Local")

    def __post_init__(self) -> None:
        super().__post_init__()
        group, room = self.samples_per_question, self.max_sequences
        engine = f"an engine of {room} sequences (--max-num-seqs + --overhead-seqs)"
        refuse(group > room, f"a group of {group} (--samples-per-question) does not fit {engine}")
        refuse_broken(self, broken_judge(self, gpus()))
        of_ray = self.generation_workers * self.tensor_parallel_size + len(self.logprob_roles)
        of_ray *= not self.ray_address  # a cluster that is joined has GPUs of its own
        needed, here = self.nproc_per_node + of_ray + self.judge_gpus_alone, len(gpus())
        refuse(
            0 < here < needed,
            f"{needed} GPUs are needed (ranks {self.nproc_per_node}, engines and logprob workers {of_ray}, "
            f"judges {self.judge_gpus_alone}), {here} are here: use fewer, or CUDA_VISIBLE_DEVICES= for the CPU",
        )
        refuse(not self.reward_fns, "name the rewards of the run: --reward-fns countdown,format")
