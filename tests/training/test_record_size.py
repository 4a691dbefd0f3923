"""A record of a step that claims to be huge is refused before it is read."""

import pytest

from async_grpo.training.record import MAX_ARRAYS_BYTES, Recording, record_folder, recorded_completions


def test_a_huge_sparse_file_of_a_record_is_refused_by_size(tmp_path):
    folder = record_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    with open(folder / "rank_0.safetensors", "wb") as file:
        file.truncate(MAX_ARRAYS_BYTES + 1)
    (folder / "rank_0.json").write_text("{}")
    with pytest.raises(OSError, match="is larger than 4096 MB"):
        list(recorded_completions(folder))
    with pytest.raises(OSError, match="is larger than 4096 MB"):
        Recording._read(folder, 0)
