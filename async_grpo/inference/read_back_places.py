"""`ReadBack`: checks by fingerprints whether an engine computes with the weights that it has received."""

import logging
from collections.abc import Collection, Mapping, Sequence

from async_grpo.weights.read_back import place_of

log = logging.getLogger(__name__)
# For each process of the engine, the fingerprints of the weights in use and those of the received weights, both by place
FingerprintsOfProcesses = Sequence[tuple[Mapping[str, int], Mapping[str, int]]]


class ReadBack:
    """Compares the weights that an engine received with those that it computes with, place by place.

    A place is the name of a module, whose weights share one fingerprint (see `weights.read_back.place_of`), or the name
    of a tied head's tensor. Some places cannot be read, such as quantized layers and packed experts. The first update
    sends the weights that a new engine already holds, so all fingerprints should be equal afterwards. A place whose
    fingerprints differ cannot be read, and is ignored from then on.

    If an engine applies an adapter, every tensor of the adapter is a place of its own, which is never ignored. A place of
    the base must stay as it was in `begin` until it receives weights.
    """

    def __init__(self) -> None:
        self._readable: set[str] | None = None  # None before the first update
        self._unreadable: set[str] = set()
        self._not_in_use: set[str] = set()  # readable places that differ after the last update
        # Place -> fingerprint at the start of an engine with an adapter; empty for an engine that receives all weights
        self._at_start: dict[str, int] = {}
        self._received_once: set[str] = set()  # places of the base that have received weights
        self._adapter: set[str] = set()  # names of the adapter's tensors
        self._adapter_not_in_use: set[str] = set()  # those that differ after the last update

    def begin(self, processes: FingerprintsOfProcesses) -> None:
        """Note the weights with which an engine starts that will apply an adapter to them."""
        places = processes[0][0].keys()
        self._at_start = {place: _sum_of_used(processes, place) for place in places}
        self._readable = set(places)

    def compare(self, processes: FingerprintsOfProcesses) -> None:
        """Compare fingerprints after an update, and note for `is_in_use` the places at which they differ."""
        _, arrived = processes[0]
        differing = set()
        places_with_weights = {place for place, fingerprint in arrived.items() if fingerprint}
        for place, fingerprint in arrived.items():
            # The fingerprint is 0 if the place has received nothing
            expected = fingerprint or self._at_start.get(place, 0)
            if _sum_of_used(processes, place) != expected:
                differing.add(place)
        if self._readable is None:
            self._readable = arrived.keys() - differing
            self._unreadable = differing
            log.info("%d of %d places of the weights can be read back", len(self._readable), len(arrived))
        elif self._at_start:
            self._unreadable |= differing & (places_with_weights - self._received_once)
        self._received_once |= places_with_weights
        self._not_in_use = differing - self._unreadable

    def compare_adapter(self, processes: FingerprintsOfProcesses) -> None:
        """Compare fingerprints of the adapter's tensors after an update. Here the places are tensor names."""
        _, arrived = processes[0]
        self._adapter = set(arrived)
        self._adapter_not_in_use = {
            name for name, fingerprint in arrived.items() if _sum_of_used(processes, name) != fingerprint
        }

    def is_in_use(self, tensor_name: str) -> bool:
        """Return False if the engine is known to compute with other values of the tensor than it received."""
        places = {tensor_name, place_of(tensor_name)}
        return self._not_in_use.isdisjoint(places) and tensor_name not in self._adapter_not_in_use

    def is_readable(self, tensor_name: str) -> bool:
        """Return whether the values of the tensor that the engine computes with can be checked."""
        if tensor_name in self._adapter:
            return True
        places = {tensor_name, place_of(tensor_name)}
        readable = self._readable or set()
        return self._unreadable.isdisjoint(places) and not readable.isdisjoint(places)

    def not_in_use(self, apart_from: Collection[str]) -> set[str]:
        """Return the places that differ, without those of the named tensors."""
        named_places = set(apart_from) | {place_of(name) for name in apart_from}
        return (self._not_in_use | self._adapter_not_in_use) - named_places


def _sum_of_used(processes: FingerprintsOfProcesses, place: str) -> int:
    """Return the fingerprint of a place over all processes, each of which holds a part of the weights."""
    return sum(used_by_place[place] for used_by_place, _ in processes) % 2**64
