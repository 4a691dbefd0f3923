"""Whether an engine computes with the weights that arrived, as its processes' fingerprints tell."""

import logging
from collections.abc import Mapping, Sequence

from async_grpo.weights.read_back import place_of

log = logging.getLogger(__name__)


class ReadBack:
    """Compares the weights that arrived with those that the engine computes with, place by place (`weights.read_back`).

    Some places cannot be read, such as quantised layers and packed experts. They are the places that differ after the first
    update, which brings what a new engine holds already.
    """

    def __init__(self) -> None:
        self._readable: set[str] | None = None  # None before the first update
        self._unreadable: set[str] = set()
        self._not_in_use: set[str] = set()

    def compare(self, processes: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> None:
        """Take the fingerprints (used, arrived) of the engine's processes, each by place."""
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
        """Return whether nothing shows that the engine computes with another value of the tensor than arrived."""
        return self._not_in_use.isdisjoint({tensor_name, place_of(tensor_name)})

    def is_readable(self, tensor_name: str) -> bool:
        """Return whether the tensor can be read back."""
        places = {tensor_name, place_of(tensor_name)}
        readable = self._readable or set()
        return self._unreadable.isdisjoint(places) and not readable.isdisjoint(places)
