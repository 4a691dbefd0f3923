"""Compare the measured memory of each process with the memory that the plan of `--dry-run` estimates for it."""

from collections.abc import Mapping
from typing import Any

PEAK = "peak_GB"  # largest memory of the process: of its GPU or, on the CPU, its resident memory
# The part of PEAK that the process took since it began to load the model. The plan estimates this part
ADDED = "added_GB"
PLANNED = "planned_GB"  # estimate of the plan for ADDED
# Number of the step after which the memory is compared. The optimizer's moments exist from the end of the first step on, so
# the first step needs less memory than all others
COMPARED_AT_STEP = 3
MAX_FACTOR = 1.25  # a process that takes more than this multiple of its estimate raises an alarm
# Memory that a process on the CPU may take beyond its estimate, because its libraries load further parts while they work
CPU_SLACK_GB = 1.0
Memory = Mapping[str, float]


def memory_entry(*, peak_bytes: float, baseline_bytes: float, planned_bytes: float) -> dict[str, float]:
    """Return the entry of one process for the key `memory` of the metrics.

    Args:
        peak_bytes: Largest memory of the process.
        baseline_bytes: Memory before it loaded the model; 0 on a GPU.
        planned_bytes: Estimate of the plan; 0 if there is none.
    """
    return {
        PEAK: peak_bytes / 1e9,
        ADDED: max(0.0, peak_bytes - baseline_bytes) / 1e9,
        PLANNED: planned_bytes / 1e9,
    }


def memory_lines(memory: Mapping[str, Memory]) -> list[str]:
    """Return a line for each process, with measured and planned memory.

    Args:
        memory: The entries by name of the process.
    """
    lines = []
    for name, entry in memory.items():
        line = f"memory of {name}: at most {entry[PEAK]:.2f} GB"
        if entry[ADDED] != entry[PEAK]:
            line += f", of which {entry[ADDED]:.2f} GB since it began to load the model"
        if entry[PLANNED]:
            line += f"; planned: {entry[PLANNED]:.2f} GB"
        lines.append(line)
    return lines


def memory_alarms(memory: Mapping[str, Memory]) -> list[str]:
    """Return an alarm for each process that takes much more memory than planned.

    >>> usual = memory_entry(peak_bytes=5e9, baseline_bytes=0, planned_bytes=4.5e9)
    >>> large = memory_entry(peak_bytes=8e9, baseline_bytes=0, planned_bytes=4e9)
    >>> for alarm in memory_alarms({"engine a": usual, "trainer rank 0": large}): print(alarm)
    trainer rank 0 takes 8.00 GB, 2.0 times the 4.00 GB that the plan of --dry-run estimates: longer completions may \
exhaust the memory
    """
    alarms = []
    for name, entry in memory.items():
        # The two are equal on a GPU, where nothing is allocated before the model is loaded
        slack_gb = 0.0 if entry[ADDED] == entry[PEAK] else CPU_SLACK_GB
        if entry[PLANNED] and entry[ADDED] > MAX_FACTOR * entry[PLANNED] + slack_gb:
            factor = entry[ADDED] / entry[PLANNED]
            alarms.append(
                f"{name} takes {entry[ADDED]:.2f} GB, {factor:.1f} times the {entry[PLANNED]:.2f} GB that the plan of "
                "--dry-run estimates: longer completions may exhaust the memory"
            )
    return alarms


def checked_memory(value: Any) -> dict[str, dict[str, float]]:
    """Return the entries of a metrics line that have the expected form, because a run's folder may be a stranger's."""
    entries: dict[str, dict[str, float]] = {}
    if not isinstance(value, dict):
        return entries
    for name, entry in value.items():
        if isinstance(entry, dict) and all(
            isinstance(entry.get(key), float) for key in (PEAK, ADDED, PLANNED)
        ):
            entries[str(name)] = entry
    return entries
