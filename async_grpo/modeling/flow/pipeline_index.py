"""Read model_index.json of a folder of diffusers: the classes of the parts, and the names of the labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.options.fields import refuse

INDEX_FILE = "model_index.json"
TRANSFORMER = "transformer"
SCHEDULER = "scheduler"
VAE = "vae"
SCHEDULER_CLASS = "FlowMatchEulerDiscreteScheduler"
LIBRARIES = ("diffusers", "transformers")  # packages whose classes a pipeline may contain
MAX_LABELS = 100_000
MAX_LABEL_DIGITS = 6  # maximum number of digits in the number of a label


def part_classes_of(index: Mapping[str, Any], family: FlowFamily, file: Path) -> dict[str, str]:
    """Return the class of each part beside transformer and scheduler, after checking that only known classes are loaded.

    Raises:
        ConfigurationError: A part is missing, or the pipeline has a part or a class that the family does not know.
    """
    known_classes = {
        TRANSFORMER: (family.model_class,),
        SCHEDULER: (SCHEDULER_CLASS,),
        **family.parts,
    }
    classes: dict[str, str] = {}
    for part, value in index.items():
        is_part = isinstance(value, list) or part in (TRANSFORMER, SCHEDULER, VAE)
        # Other entries are not parts but settings of the pipeline, such as the names of labels
        if not is_part or value in (None, [], [None, None]):
            continue
        names = known_classes.get(part, ())
        is_known = isinstance(value, list) and len(value) == 2 and value[0] in LIBRARIES and value[1] in names
        expected = " or ".join(names) if names else "no such part"
        refuse(
            not is_known,
            f"{file} says {part} {str(value)[:80]}, but a {family.pipeline_class} has {expected}",
        )
        classes[part] = value[1]
    for part in known_classes:
        refuse(
            part not in classes and part not in family.optional_parts,
            f"{file} has no {part}, which a {family.pipeline_class} needs",
        )
    del classes[TRANSFORMER], classes[SCHEDULER]
    return classes


def labels_of(index: Mapping[str, Any], file: Path) -> dict[str, int]:
    """Return the number of each label by its name. If the folder names no labels, they are "0", "1" and so on.

    Raises:
        ConfigurationError: The names are no mapping, or a name or number occurs twice, so that a prompt could draw
            another label than it names.
    """
    names = index.get("id2label")
    if names is None:
        return {}
    is_mapping = isinstance(names, dict) and 0 < len(names) <= MAX_LABELS
    refuse(
        not is_mapping or not all(_is_label(key, name) for key, name in names.items()),
        f"{file}: id2label must map numbers to texts, at most {MAX_LABELS}",
    )
    labels: dict[str, int] = {}
    for key, text in names.items():
        name = text.strip()
        refuse(name in labels, f"{file}: id2label has the name {name[:80]!r} twice")
        labels[name] = int(key)
    refuse(len(set(labels.values())) < len(labels), f"{file}: id2label has a number twice")
    return labels


def _is_label(key: str, name: Any) -> bool:
    return key.isdecimal() and len(key) <= MAX_LABEL_DIGITS and isinstance(name, str)
