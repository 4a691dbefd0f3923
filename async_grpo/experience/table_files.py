"""Read rows from Parquet files, and from folders and data sets of the hub by the library `datasets`.

CSV, TSV and JSON are read without `datasets`: it chooses one type for each column, so an answer 007 would become 7, NA
would become a null, and a column with numbers and texts would be refused. Parquet files have types of their own.
"""

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.experience.plain_values import plain_row
from async_grpo.processes.hub import offline_variable, reach_hub, way_out

ROWS_AT_ONCE = 256  # number of rows that are decoded at the same time
# Files in a folder that `save_to_disk` of `datasets` wrote
SAVED_FILES = ("dataset_dict.json", "state.json")
log = logging.getLogger(__name__)


def parquet_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield (file and row number as text, row) for each row of a Parquet file.

    Raises:
        ConfigurationError: The packages of the extra `data` are missing, the file is not Parquet, or a row holds values
            that cannot be written as JSON.
    """
    parquet = imported("pyarrow.parquet", f"{path} is a Parquet file")
    number = 0
    try:
        table = parquet.ParquetFile(file)
        _refuse_names_given_twice(path, table.schema_arrow.names)
        batches = table.iter_batches(batch_size=ROWS_AT_ONCE)
        for place, row in _placed_rows(str(path), batches):
            number += 1
            yield place, row
    except ConfigurationError:
        raise
    except Exception as error:  # pyarrow raises exceptions of several kinds for broken files
        raise ConfigurationError(
            f"{path}: cannot be read as Parquet after row {number} ({error}): copy the file again"
        ) from error


def dataset_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (name and row number as text, row) for each row of a folder, or of a data set of the hub.

    Args:
        path: FOLDER or OWNER/NAME, followed by `:SPLIT` or `:CONFIGURATION:SPLIT` if there are several.

    Raises:
        ConfigurationError: The package is missing, there is no such data set, it has several splits, or a row holds
            values that cannot be written as JSON.
    """
    name, *selection = path.split(":")
    is_folder = Path(name).is_dir()
    reason = (
        f"{name} is a folder"
        if is_folder
        else f"{name} is no file or folder here, but may be a data set of the hub"
    )
    datasets = imported("datasets", reason)
    datasets.disable_progress_bars()  # the bars would appear between the run's own lines
    if not is_folder:
        log.info("%s: there is no such file or folder here, so the hub is asked", name)
        reach_hub(name, "dataset")
    try:
        dataset = _loaded(datasets, name, selection)
        yield from _placed_rows(path, dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE))
    except ConfigurationError:
        raise
    except Exception as error:  # `datasets` raises exceptions of many kinds
        if not is_folder and offline_variable():
            raise ConfigurationError(
                f"{name}: there is no such file or folder, and {offline_variable()} is set, so the hub is not asked: "
                f"{way_out(name, 'dataset')}"
            ) from error
        raise ConfigurationError(f"{path}: `datasets` cannot read it: {error}") from error


def _refuse_names_given_twice(path: Path, names: Sequence[str]) -> None:
    """Raise ConfigurationError if two columns have the same name, because a row would have only the last of them."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{path}: two columns have the name {name!r}: rename or remove one")


def _placed_rows(path: str, batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path and row number as text, row) for each row of Arrow's batches."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            place = f"{path}, row {number}"
            yield place, plain_row(row, place)


def _loaded(datasets: Any, name: str, selection: list[str]) -> Any:
    """Return the data set of one split.

    Raises:
        ConfigurationError: The selection names a split that does not exist, or does not say which of several is meant.
    """
    if any((Path(name) / file).is_file() for file in SAVED_FILES):
        dataset = datasets.load_from_disk(name)
        if not isinstance(dataset, datasets.DatasetDict):
            _refuse_unless_empty(name, selection)
            return dataset
        return dataset[_chosen("split", name, selection, list(dataset))]
    configurations = datasets.get_dataset_config_names(name)
    if len(selection) == 2 or (selection and len(configurations) > 1 and selection[0] in configurations):
        configuration, *selection = selection
        _chosen("configuration", name, [configuration], configurations)
    else:
        configuration = _chosen("configuration", name, [], configurations)
    splits = datasets.get_dataset_split_names(name, configuration)
    split = _chosen("split", name, selection, splits)
    return datasets.load_dataset(name, configuration, split=split)


def _chosen(kind: str, name: str, selection: list[str], choices: list[str]) -> str:
    """Return the selected choice. Without a selection, return the only choice.

    Raises:
        ConfigurationError: The selection is none of the choices, or is missing.
    """
    form = f"{name}:{kind.upper()}" if kind == "split" else f"{name}:{kind.upper()}:SPLIT"
    names = ", ".join(choices)
    if not selection and len(choices) == 1:
        return choices[0]
    if not selection:
        raise ConfigurationError(f"{name} has several {kind}s: name one of {names}, as {form}")
    if len(selection) > 1 or selection[0] not in choices:
        raise ConfigurationError(f"{name}:{':'.join(selection)}: its {kind}s are {names}: name one as {form}")
    return selection[0]


def _refuse_unless_empty(name: str, selection: list[str]) -> None:
    if selection:
        raise ConfigurationError(f"{name}:{':'.join(selection)}: the folder has no splits: give {name} alone")


def imported(module: str, reason: str) -> Any:
    """Return a module of the extra `data`.

    Raises:
        ConfigurationError: It is not installed. The message begins with the reason why it is needed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{reason}, which needs further packages ({error}): pip install 'async-grpo[data]', or write the rows as JSONL"
        ) from error
