"""The program of `async-grpo eval`: opens a run without a trainer, scores its engines' completions, and prints results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from async_grpo.config.run import RunConfig
from async_grpo.metrics.console import means_of, show_waiting
from async_grpo.metrics.writer import ConsoleHandler
from async_grpo.options.fields import TABLE, option
from async_grpo.options.log_setup import set_up_logging

if TYPE_CHECKING:
    from async_grpo.config.compared_adapters import ComparedAdapters
    from async_grpo.experience.dataset import Question
    from async_grpo.messages import SharedRunSettings

RESULTS_FILE = "eval_results.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(RunConfig):
    """Options of the evaluation program: those of a run. Options that concern training are ignored."""

    evaluated: str = option("", "Name of the evaluated model in the results.")
    step: int = option(0, "Policy version of the evaluated weights.")
    lora_adapters: str = option("", "The compared adapters, as a table of names and folders.", form=TABLE)


def ask_and_score(config: EvaluatorConfig) -> None:
    """Evaluate the model on every file, print a table of the results, and append them to `RESULTS_FILE`.

    Raises:
        AsyncGrpoError: An input cannot work, or a call of the controller failed.
    """
    set_up_logging(config.logging_level, "[evaluator] ", ConsoleHandler())
    # Import these here, because they take seconds: wrong options should be refused before
    from async_grpo.cluster.ray_session import answer, connect
    from async_grpo.cluster.remote_experience import start_batcher
    from async_grpo.cluster.trainer_rank import await_workers, close_run, open_run
    from async_grpo.config.preflight import prepare

    prepared = prepare(config).store_images()
    settings = replace(prepared.settings, trains=False)
    adapters = None
    if config.lora_adapters:
        from async_grpo.config.compared_adapters import ComparedAdapters, adapter_folders

        adapters = ComparedAdapters.read(adapter_folders(config.lora_adapters), config.model_name_or_path)
        # With `lora`, the engines expect to receive the weights of adapters
        settings = replace(prepared.settings, lora=adapters.settings)
    questions = prepared.eval_questions
    connect(config.run_name, config.logging_level)
    controller = open_run(config, settings)
    answer(start_batcher(controller, prepared), config.start_timeout_s)
    await_workers(controller, config)
    results_by_adapter = _evaluations(controller, config, settings, questions, adapters)
    rows: dict[tuple[str, str], Mapping[str, str]] = {}
    for adapter, evaluated, results in results_by_adapter:
        for name, result in results.items():
            rows[adapter, name] = _written(config, adapter, evaluated, name, result)
    close_run(controller, "the evaluation is done")
    if adapters is None:
        _print_table({name or "held-out": row for (_, name), row in rows.items()}, config.evaluated)
    else:
        _print_adapters(rows, config.evaluated)
    Console().print(f"results: {config.output_path / RESULTS_FILE}", soft_wrap=True, highlight=False)


def _evaluations(
    controller: Any,
    config: EvaluatorConfig,
    settings: "SharedRunSettings",
    questions: Mapping[str, "Sequence[Question]"],
    adapters: "ComparedAdapters | None",
) -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Evaluate the model once, or each of the compared adapters.

    Yields:
        The adapter's name, "" if none are compared; the evaluated model's or adapter's path; the results by file name.
    """
    from async_grpo.cluster.ray_session import answer

    count = config.eval_samples * sum(map(len, questions.values()))
    if adapters is None:
        with show_waiting(f"{config.eval_samples} x {count // config.eval_samples} completions"):
            results = answer(controller.evaluate.remote(questions, config), config.experience_timeout_s)
        yield "", config.evaluated, results
        return
    from async_grpo.cluster.compared_adapters import AdapterEvaluation

    evaluation = AdapterEvaluation(controller, config, settings, adapters)
    for version, name in enumerate(adapters.names):
        with show_waiting(f"{name}: {count} completions"):
            results = evaluation.evaluate(version, name, questions)
        yield name, adapters.folder_of(name) or config.evaluated, results


def _written(
    config: EvaluatorConfig, adapter: str, evaluated: str, name: str, result: dict[str, Any]
) -> dict[str, str]:
    """Write the result of one file, and return the cells of the table.

    Args:
        config: The options of the evaluation.
        adapter: Name of the evaluated adapter; "" if the model itself was evaluated.
        evaluated: Path of the adapter or the model.
        name: Name of the file of questions; "" if the user gave it no name.
        result: The result of the evaluation.
    """
    from async_grpo.cluster.remote_experience import write_evaluation

    # The engines number their weights from 0. Replace these numbers in the results by the training step of the weights
    result |= {"version_min": config.step, "version_max": config.step}
    for sample in result["samples"]:
        sample["oldest_version"] = config.step
    path = config.output_path / RESULTS_FILE
    line = write_evaluation(path, config.step, name, result, adapter=adapter, evaluated=evaluated)
    return {
        **means_of(line),
        "scored": f"{result['num_reward_ok']} of {result['num_samples']}",
        "seconds": f"{result['seconds']:.1f}",
    }


def _print_table(columns: Mapping[str, Mapping[str, str]], title: str) -> None:
    """Print a table with a column for each file."""
    table = Table("", *columns, title=title, title_justify="left")
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    for label in labels:
        table.add_row(label, *(column.get(label, "-") for column in columns.values()))
    Console().print(table)


def _print_adapters(rows: Mapping[tuple[str, str], Mapping[str, str]], title: str) -> None:
    """Print a table with a row for each adapter and file. `rows` has the cells by (adapter, file)."""
    labels = dict.fromkeys(label for row in rows.values() for label in row)
    table = Table("adapter", "file", *labels, title=title, title_justify="left")
    for (adapter, name), row in rows.items():
        table.add_row(adapter, name or "held-out", *(row.get(label, "-") for label in labels))
    Console().print(table)


if __name__ == "__main__":
    from async_grpo.launch.commands import foreign_keys
    from async_grpo.options.command_line import run_command

    run_command(EvaluatorConfig, ask_and_score, help="See `async-grpo eval`.", foreign=foreign_keys)
