"""Read rows from Parquet files, and from folders and data sets of the hub by way of the library `datasets`.

CSV, TSV and JSON are read without `datasets`: it chooses one type for each column, so an answer 007 would become 7, NA
would become a null, and a column with numbers and texts would be refused. Parquet files have types of their own.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.errors import ConfigurationError
from async_grpo.experience.plain_values import plain_row

ROWS_AT_ONCE = 256  # number of rows that are decoded at the same time


def parquet_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield (file and row number as text, row) for each row of a Parquet file.

    Raises:
        ConfigurationError: The packages of the extra `data` are missing, the file is not Parquet, or a row holds values
            that are no JSON.
    """
    parquet = imported("pyarrow.parquet", f"{path} is a Parquet file")
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                place = f"{path}, row {number}"
                yield place, plain_row(row, place)
    except ConfigurationError:
        raise
    except Exception as error:  # pyarrow raises exceptions of several kinds for broken files
        raise ConfigurationError(
            f"{path}: cannot be read as Parquet behind row {number} ({error}): copy the file again"
        ) from error


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
