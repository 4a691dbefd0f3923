"""Start one inference worker and keep it until the run is over: `async-grpo worker --mode generation ...`."""

from async_grpo.config.run import WorkerConfig
from async_grpo.options.command_line import run_command, set_up_logging
from async_grpo.programs.options_page import foreign_keys

RETIRED = {
    "temperature": "the trainer's --temperature holds for all workers",
    "global_num_verifiers": "the trainer's --verifiers-per-reward says how many",
    "write_failed_generation_samples": "the trainer's --dump-samples-filename writes every sample with its status",
}


def run(config: WorkerConfig) -> None:
    """Start the worker that the configuration describes, and stay until the run is over."""
    set_up_logging(config.logging_level, prefix=f"[{config.mode}] ")
    # Heavy imports only once the options are known to be good
    from async_grpo.cluster.worker_program import dispatch

    dispatch(config)


def main(argv: list[str] | None = None, program: str | None = None) -> None:
    """Run the command line `argv` (default: the program's own), and exit; `program`: what the help calls it."""
    run_command(
        WorkerConfig,
        run,
        help="Run one generation or logprob worker.",
        retired=RETIRED,
        argv=argv,
        program=program,
        foreign=foreign_keys,
    )


if __name__ == "__main__":
    main()
