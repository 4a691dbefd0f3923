"""`ReadBack`: checks by fingerprints whether an engine computes with the weights that it has received."""

import logging
from collections.abc import Mapping, Sequence

from async_grpo.weights.read_back import place_of

log = logging.getLogger(__name__)


class ReadBack:
    """Compares the weights that an engine received with those that it computes with, place by place.

    A place is the name of a module, whose weights share one fingerprint (see `weights.read_back.place_of`), or the name
    of a tied head's tensor. Some places cannot be read, such as quantized layers and packed experts. The first update
    sends the weights that a new engine already holds, so all fingerprints should be equal afterwards. A place whose
    fingerprints differ cannot be read, and is ignored from then on.
    """

    def __init__(self) -> None:
        self._readable: set[str] | None = None  # None before the first update
        self._unreadable: set[str] = set()
        self._not_in_use: set[str] = set()  # readable places that differ after the last update

    def compare(self, processes: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> None:
        """Compare fingerprints after an update, and note for `is_in_use` the places at which they differ.

        Args:
            processes: For each process of the engine, the fingerprints of the weights in use and those of the received
                weights, both as a dictionary from places to fingerprints.
        """
        _, arrived = processes[0]
        differing = set()
        for place, fingerprint in arrived.items():
            used = sum(used_by_place[place] for used_by_place, _ in processes) % 2**64
            if used != fingerprint:
                differing.add(place)
        if self._readable is None:
            self._readable = arrived.keys() - differing
            self._unreadable = differing
            log.info("%d of %d places of the weights can be read back", len(self._readable), len(arrived))
        self._not_in_use = differing - self._unreadable

    def is_in_use(self, tensor_name: str) -> bool:
        """Return False if the engine is known to compute with other values of the tensor than it received."""
        return self._not_in_use.isdisjoint({tensor_name, place_of(tensor_name)})

    def is_readable(self, tensor_name: str) -> bool:
        """Return whether the values of the tensor that the engine computes with can be checked."""
        places = {tensor_name, place_of(tensor_name)}
        readable = self._readable or set()
        return self._unreadable.isdisjoint(places) and not readable.isdisjoint(places)
