"""Train: `torchrun --nproc_per_node=N -m async_grpo.programs.trainer --model-name-or-path M --data-path D.jsonl`."""

import os

from async_grpo.config.run import RunConfig
from async_grpo.options.command_line import run_command, set_up_logging

RETIRED = {
    "experience_batcher_name": "--run-name keeps runs on one cluster apart",
    "constant_length_samples": "use --loss-aggregation constant_length",
    "clip_ratio_c": "it had no effect in the prior library either",
    "insert_reasoning_phrases": "completions are trained on as the policy wrote them",
    "global_rank": "torchrun's RANK says it",
    "use_torch_compile": "the packed forward runs uncompiled",
}


def run(config: RunConfig) -> None:
    """Be one rank of the trainer, of which torchrun's environment says which."""
    rank = int(os.environ.get("RANK", 0))
    set_up_logging(config.logging_level, prefix=f"[trainer {rank}] ")
    # Heavy imports only once the options are known to be good
    from async_grpo.config.preflight import prepare

    prepared = prepare(config) if rank == 0 else None  # data and reward page are read on one node alone
    from async_grpo.cluster.trainer_rank import train
    from async_grpo.training.distributed import leave

    train(config, prepared)
    if "RANK" in os.environ:
        leave()


def main(argv: list[str] | None = None) -> None:
    run_command(RunConfig, run, help="Train a policy by asynchronous GRPO.", retired=RETIRED, argv=argv)


if __name__ == "__main__":
    main()
