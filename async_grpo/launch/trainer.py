"""Train: `torchrun --nproc_per_node=N -m async_grpo.launch.trainer --model-name-or-path M --data-path D.jsonl`."""

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
    """Be one rank of the trainer, of which torchrun's environment says which."""
    rank = int(os.environ.get("RANK", 0))
    shown = [] if rank or os.path.sameopenfile(1, 2) else [ConsoleHandler()]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a watchdog: it would end the run
    set_up_logging(config.logging_level, f"[trainer {rank}] ", *shown)
    try:
        _train(config, rank)
    except AsyncGrpoError as error:
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's report ends with it
            report = {"message": redacted(f"error: {error}"), "timestamp": int(time.time())}
            Path(file).write_text(json.dumps(report), encoding="utf-8")
        if isinstance(error, DeadlineExceeded):  # a thread that hangs would be waited for at exit
            print(redacted(f"error: {error}"), file=sys.stderr)
            os._exit(EXIT_FAILED)
        raise
    if "RANK" in os.environ:
        from async_grpo.training.distributed import leave

        leave()


def _train(config: RunConfig, rank: int) -> None:
    # Heavy imports only once the options are known to be good
    from async_grpo.config.preflight import prepare
    from async_grpo.config.resume import goes_on

    prepared = None
    if rank == 0:  # data and registry file are read on one node alone
        prepared = prepare(config)
        claim(config.output_path, again=goes_on(config))
    from async_grpo.cluster.trainer_rank import train_as_rank

    if rank:  # importing Ray has set a handler that writes a page when torchrun ends this rank for another one's fault
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train_as_rank(config, prepared)


main = partial(run_program, "train")

if __name__ == "__main__":
    main()
