"""The program of one trainer rank.

Usage: `torchrun --nproc_per_node=N -m async_grpo.launch.trainer --model-name-or-path M --data-path D.jsonl`.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from async_grpo.config.run import RunConfig
from async_grpo.errors import EXIT_FAILED, AsyncGrpoError, DeadlineExceeded
from async_grpo.launch.commands import run_program
from async_grpo.metrics.writer import ConsoleHandler, claim
from async_grpo.options.log_setup import set_up_logging
from async_grpo.options.redaction import redacted

RETIRED = {
    "experience_batcher_name": "--run-name keeps runs on one cluster apart",
    "constant_length_samples": "use --loss-aggregation constant_length",
    "clip_ratio_c": "it had no effect in the prior library either",
    "insert_reasoning_phrases": "completions are trained on as the policy wrote them",
    "global_rank": "torchrun's RANK says it",
    "use_torch_compile": "use --torch-compile",
}


def run(config: RunConfig) -> None:
    """Train as one rank. The rank's number is in torchrun's environment variable RANK; without torchrun it is 0.

    Raises:
        AsyncGrpoError: The run failed.
    """
    rank = int(os.environ.get("RANK", 0))
    handlers = []
    is_terminal_output_separate = not os.path.sameopenfile(1, 2)
    if rank == 0 and is_terminal_output_separate:
        handlers.append(ConsoleHandler())
    # By default SIGUSR1 would end the process. Ignore it until the watchdog, which handles it, runs
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    set_up_logging(config.logging_level, f"[trainer {rank}] ", *handlers)
    try:
        _train(config, rank)
    except AsyncGrpoError as error:
        # Torchrun prints this file at the end of its report
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            report = {"message": redacted(f"error: {error}"), "timestamp": int(time.time())}
            Path(file).write_text(json.dumps(report), encoding="utf-8")
        if isinstance(error, DeadlineExceeded):
            # End the process at once. A normal exit would wait for the thread that missed the deadline
            print(redacted(f"error: {error}"), file=sys.stderr)
            os._exit(EXIT_FAILED)
        raise
    if "RANK" in os.environ:
        from async_grpo.training.distributed import leave

        leave()


def _train(config: RunConfig, rank: int) -> None:
    # Import these here, because they take seconds: wrong options should be refused before
    from async_grpo.config.preflight import prepare
    from async_grpo.config.resume import goes_on

    prepared = None
    if rank == 0:  # only the node of rank 0 needs the data and the registry file
        config.refuse_missing_teacher()
        prepared = prepare(config)
        claim(config.output_path, may_hold_run=goes_on(config))
        prepared = prepared.store_images()
    from async_grpo.cluster.trainer_rank import train_as_rank

    if rank:
        # torchrun ends this rank by SIGTERM if another rank fails. Ray has set a handler that would then print a stack
        # trace, so restore the default
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train_as_rank(config, prepared)


main = partial(run_program, "train")

if __name__ == "__main__":
    main()
