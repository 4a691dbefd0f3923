"""Read rows from Parquet files, and from folders and data sets of the hub by the library `datasets`.

CSV, TSV and JSON files are never read by `datasets`, not even in folders, because it chooses one type for each column: an
answer 007 would become 7, NA would become null, and texts in a column with numbers would become JSON. Parquet files store
the types of their columns.
"""

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.experience.plain_values import plain_row
from async_grpo.processes.hub import offline_variable, reach_hub, way_out
from async_grpo.processes.untrusted_files import parse_json

ReadFile = Callable[[Path], Iterator[tuple[str, Any]]]
ROWS_AT_ONCE = 256  # number of rows that are decoded at the same time
# Files in a folder that `save_to_disk` of `datasets` wrote
SAVED_FILES = ("dataset_dict.json", "state.json")
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
# Files that describe a data set and contain none of its rows. They are skipped, although their names end in .json
INFORMATION_FILES = (*SAVED_FILES, "dataset_info.json", "dataset_infos.json")
log = logging.getLogger(__name__)


def parquet_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield (file and row number as text, row) for each row of a Parquet file.

    Raises:
        ConfigurationError: The packages of the extra `data` are missing, the file is not Parquet, or a row contains values
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


def dataset_rows(path: str, read_file: ReadFile) -> Iterator[tuple[str, Any]]:
    """Yield (name and row number as text, row) for each row of a folder, or of a data set of the hub.

    Args:
        path: FOLDER or OWNER/NAME, followed by `:SPLIT` or `:CONFIGURATION:SPLIT` if there are several.
        read_file: Yields (file and line number as text, row) for each row of a file of text in the folder.

    Raises:
        ConfigurationError: The package is missing, there is no such data set, it has several splits, or a row contains
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
        if any((Path(name) / file).is_file() for file in SAVED_FILES):
            yield from _rows_of_dataset(path, _saved(datasets, name, selection))
            return
        configuration, split = _chosen_parts(datasets, name, selection)
        text_files = _text_files(datasets, name, configuration, split) if is_folder else []
        for file in text_files:
            yield from read_file(file)
        if not text_files:
            yield from _rows_of_dataset(path, datasets.load_dataset(name, configuration, split=split))
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


def _rows_of_dataset(path: str, dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path and row number as text, row) for each row of a data set of `datasets`."""
    batches = dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
    for place, row in _placed_rows(path, batches):
        yield place, {name: _with_json(value, dataset.features.get(name)) for name, value in row.items()}


def _with_json(value: Any, feature: Any) -> Any:
    """Return the value, with each JSON text of a feature `Json` parsed.

    `datasets` stores a column with values of several types as such a feature.
    """
    if type(feature).__name__ == "Json":
        return parse_json(value) if isinstance(value, str) else value
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _with_json(item, feature.get(name)) for name, item in value.items()}
    if isinstance(value, list):
        item_feature = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_with_json(item, item_feature) for item in value]
    return value


def _placed_rows(path: str, batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path and row number as text, row) for each row of Arrow's batches."""
    number = 0
    for batch in batches:
        short_numbers = _numbers_of_single_precision(batch)
        for index, row in enumerate(batch.to_pylist()):
            number += 1
            place = f"{path}, row {number}"
            for name, numbers in short_numbers.items():
                row[name] = numbers[index]
            yield place, plain_row(row, place)


def _numbers_of_single_precision(batch: Any) -> dict[str, list[float | None]]:
    """Return the numbers of each float32 column, by name, rounded to the digits that identify them.

    The float32 that is nearest to 0.1 becomes 0.1. Arrow itself returns 0.10000000149011612, which no completion states.
    """
    numbers = {}
    for field in batch.schema:
        if str(field.type) == "float":
            texts = batch.column(field.name).cast("string").to_pylist()
            numbers[field.name] = [None if text is None else float(text) for text in texts]
    return numbers


def _saved(datasets: Any, name: str, selection: list[str]) -> Any:
    """Return the data set of one split in a folder that `save_to_disk` wrote.

    Raises:
        ConfigurationError: The selection names a split that does not exist, or names none although there are several.
    """
    dataset = datasets.load_from_disk(name)
    if not isinstance(dataset, datasets.DatasetDict):
        _refuse_unless_empty(name, selection)
        return dataset
    return dataset[_chosen("split", name, selection, list(dataset))]


def _chosen_parts(datasets: Any, name: str, selection: list[str]) -> tuple[str, str]:
    """Return the names of configuration and split.

    Raises:
        ConfigurationError: The selection names one that does not exist, or names none although there are several.
    """
    configurations = datasets.get_dataset_config_names(name)
    if len(selection) == 2 or (selection and len(configurations) > 1 and selection[0] in configurations):
        configuration, *selection = selection
        _chosen("configuration", name, [configuration], configurations)
    else:
        configuration = _chosen("configuration", name, [], configurations)
    splits = datasets.get_dataset_split_names(name, configuration)
    return configuration, _chosen("split", name, selection, splits)


def _text_files(datasets: Any, name: str, configuration: str, split: str) -> list[Path]:
    """Return the files of a folder's split if this library reads all of them as texts, else [].

    `datasets` reads files of only one format in a folder. A warning names each file of rows that is left out.
    """
    files_by_split = datasets.load_dataset_builder(name, configuration).config.data_files or {}
    split_by_file = {Path(str(file)): str(key) for key, files in files_by_split.items() for file in files}
    is_only_configuration = len(datasets.get_dataset_config_names(name)) == 1
    for file in sorted(Path(name).resolve().rglob("*")):
        is_of_rows = (
            file.suffix.lower() in (*TEXT_SUFFIXES, ".parquet") and file.name not in INFORMATION_FILES
        )
        if is_only_configuration and is_of_rows and file not in split_by_file:
            log.warning(
                "%s is not read, because other files of the folder have another format: give it alone, as a file",
                file,
            )
    files = [file for file, key in split_by_file.items() if key == split]
    are_texts = all(file.suffix.lower() in TEXT_SUFFIXES and file.is_file() for file in files)
    return files if are_texts else []


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
        ConfigurationError: The module is not installed. The message begins with the reason why it is needed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{reason}, which needs further packages ({error}): pip install 'async-grpo[data]', or write the rows as JSONL"
        ) from error
