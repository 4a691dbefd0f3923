"""`async-grpo worker --mode generation ...`: run one inference worker until the run is over."""

from functools import partial

from async_grpo.config.run import WorkerConfig
from async_grpo.launch.commands import run_program
from async_grpo.options.log_setup import set_up_logging

RETIRED = {
    "temperature": "the trainer's --temperature holds for all workers",
    "global_num_verifiers": "the trainer's --verifiers-per-reward says how many",
    "write_failed_generation_samples": "the trainer's --dump-samples-filename writes every sample with its status",
}


def run(config: WorkerConfig) -> None:
    """Run the worker that the configuration describes until the run is over."""
    set_up_logging(config.logging_level, prefix=f"[{config.mode}] ")
    from async_grpo.cluster.worker_program import dispatch

    dispatch(config)


main = partial(run_program, "worker")

if __name__ == "__main__":
    main()
