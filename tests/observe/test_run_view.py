"""One reader for the files of a run, and what it says of an empty or a wrong folder."""

import ast
import json
from pathlib import Path

import pytest

import async_grpo.observe
from async_grpo.errors import ConfigurationError
from async_grpo.observe.run_view import RunView

FOLDER = Path(async_grpo.observe.__file__).parent
READERS = {"last_records", "last_lines", "spread_records", "metrics_lines", "spread_metrics", "span_lines"}
READERS |= {"sample_lines", "options_of", "holder", "stalls_of", "files_inside", "checkpoints_of"}


@pytest.mark.parametrize("name", ["status", "why", "watch", "samples", "plot", "figures"])
def test_what_shows_a_run_reads_its_files_through_the_view(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    imported = {alias.name for node in imports for alias in node.names}
    assert not imported & READERS


def test_a_run_that_has_written_only_its_options_has_nothing_else(tmp_path):
    options = {
        "samples_per_question": 8,
        "batch_size": 4,
        "num_training_batches": 10,
        "train_minibatch_size": 16,
    }
    (tmp_path / "training_params.json").write_text(json.dumps(options))
    run = RunView(tmp_path)
    assert run.total_steps == 20  # 32 samples of a batch, 16 of a step
    assert run.metrics(5) == run.evaluations(5) == run.spans(5) == run.samples(5) == []
    assert run.evaluation_samples(5) == [] and run.stalls() == {} and run.log_lines(5) == {}
    assert run.metrics_from(100, 5) == (0, [], 0)
    assert run.newest_manifest() is None and run.writer_process() is None


def test_a_folder_without_a_run_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} holds no run"):
        _ = RunView(tmp_path).options
