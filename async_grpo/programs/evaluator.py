"""What `async-grpo eval` starts beside engines: they answer with the weights that they have, and rewards score."""

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from async_grpo.__main__ import foreign_keys
from async_grpo.config.run import RunConfig
from async_grpo.metrics.console import means_of, waiting
from async_grpo.metrics.writer import ConsoleHandler
from async_grpo.options.command_line import run_command, set_up_logging
from async_grpo.options.fields import option

RESULTS_FILE = "eval_results.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(RunConfig):
    """A run's options, of which those of the training are idle."""

    evaluated: str = option("", "What the results say is evaluated.")
    step: int = option(0, "The policy version of its weights.")


def run(config: EvaluatorConfig) -> None:
    """Evaluate on every file; show what was found, and write it down."""
    set_up_logging(config.logging_level, "[evaluator] ", ConsoleHandler())
    # Heavy imports only once the options are known to be good
    from async_grpo.cluster.ray_session import answer, connect
    from async_grpo.cluster.remote_experience import start_batcher, write_evaluation
    from async_grpo.cluster.trainer_rank import await_workers, close_run, open_run
    from async_grpo.config.preflight import prepare

    prepared = prepare(config)
    questions, path = prepared.eval_questions, config.output_path / RESULTS_FILE
    connect(config.run_name, config.logging_level)
    controller = open_run(config, replace(prepared.settings, trains=False))
    answer(start_batcher(controller, prepared), config.start_timeout_s)
    await_workers(controller, config)
    with waiting(f"{config.eval_samples} x {sum(map(len, questions.values()))} completions"):
        found = answer(controller.evaluate.remote(questions, config), config.experience_timeout_s)
    columns = []
    for name, result in found.items():
        result |= {"version_min": config.step, "version_max": config.step}
        for sample in result["samples"]:
            sample["oldest_version"] = config.step
        means = means_of(write_evaluation(path, config.step, name, result, evaluated=config.evaluated))
        scored = f"{result['num_reward_ok']} of {result['num_samples']}"
        columns.append({**means, "scored": scored, "seconds": f"{result['seconds']:.1f}"})
    close_run(controller, "the evaluation is done")
    table = Table("", *(name or "held-out" for name in found), title=config.evaluated, title_justify="left")
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "-") for column in columns))
    console = Console()
    console.print(table)
    console.print(f"results: {path}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    run_command(EvaluatorConfig, run, help="See `async-grpo eval`.", foreign=foreign_keys)
