"""`ReadBack`: checks by fingerprints whether an engine computes with the weights that it has received."""

import logging
from collections.abc import Collection, Mapping, Sequence

from async_grpo.weights.read_back import place_of

log = logging.getLogger(__name__)
# For each process of the engine, two tables place -> fingerprint: for the weights in use, and for the received weights. The
# second one lacks places that have received nothing
FingerprintsOfProcesses = Sequence[tuple[Mapping[str, int], Mapping[str, int]]]


class ReadBack:
    """Compares the weights that an engine received with those that it computes with, place by place.

    A place is the name of a module, whose weights share one fingerprint (see `weights.read_back.place_of`), or the name
    of a tied head's tensor. Some places cannot be read, such as quantized layers and packed experts. They are found at
    the first update that brings them weights: their fingerprints differ after it. They count as unreadable, and are
    ignored from then on. The first update may bring only some of the layers (see `weights.self_test.groups_within`), so
    each place has a first update of its own.

    If an engine applies a LoRA adapter, every tensor of the adapter is a separate place, and is never ignored. A place of
    the base model must keep the fingerprint that it had in `begin` until it receives weights.
    """

    def __init__(self) -> None:
        self._unreadable: set[str] = set()
        self._not_in_use: set[str] = set()  # readable places that differ after the last update
        # Places of the base model -> their fingerprints when the engine started. Empty if the engine applies no LoRA
        # adapter, because it then receives all weights
        self._at_start: dict[str, int] = {}
        self._received_once: set[str] = set()  # places of the model that have received weights
        self._adapter: set[str] = set()  # names of the adapter's tensors, which are also places
        # Names of the adapter's tensors that differ after the last update
        self._adapter_not_in_use: set[str] = set()

    def begin(self, processes: FingerprintsOfProcesses) -> None:
        """Record the weights with which an engine starts. Call this only if the engine applies a LoRA adapter to them."""
        places = processes[0][0].keys()
        self._at_start = {place: _sum_of_used(processes, place) for place in places}

    def compare(self, processes: FingerprintsOfProcesses) -> None:
        """Compare fingerprints after an update, and record for `is_in_use` the places at which they differ."""
        used, arrived = processes[0]
        differing = set()
        for place in used:
            # If a place has received nothing, it must have the value from the start. If that is unknown, `expected` is
            # None
            expected = arrived.get(place, self._at_start.get(place))
            if expected is not None and _sum_of_used(processes, place) != expected:
                differing.add(place)
        first_received = arrived.keys() - self._received_once
        self._unreadable |= differing & first_received
        self._received_once |= first_received
        if first_received:
            log.info(
                "%d of %d places that have received weights can be read back; %d places have received none",
                len(self._received_once - self._unreadable),
                len(self._received_once),
                len(used.keys() - self._received_once),
            )
        self._not_in_use = differing - self._unreadable

    def compare_adapter(self, processes: FingerprintsOfProcesses) -> None:
        """Compare fingerprints of the adapter's tensors after an update. Here the places are tensor names."""
        _, arrived = processes[0]
        self._adapter = set(arrived)
        self._adapter_not_in_use = {
            name for name, fingerprint in arrived.items() if _sum_of_used(processes, name) != fingerprint
        }

    def is_in_use(self, tensor_name: str) -> bool:
        """Return False if the engine is known to compute with other values than those that it received for the tensor."""
        places = {tensor_name, place_of(tensor_name)}
        return self._not_in_use.isdisjoint(places) and tensor_name not in self._adapter_not_in_use

    def is_readable(self, tensor_name: str) -> bool:
        """Return whether the values with which the engine computes can be read, to compare them with the tensor."""
        if tensor_name in self._adapter:
            return True
        places = {tensor_name, place_of(tensor_name)}
        compared_places = self._received_once | self._at_start.keys()
        return self._unreadable.isdisjoint(places) and not compared_places.isdisjoint(places)

    def not_in_use(self, apart_from: Collection[str]) -> set[str]:
        """Return the places that differ, except the places of the named tensors."""
        named_places = set(apart_from) | {place_of(name) for name in apart_from}
        return (self._not_in_use | self._adapter_not_in_use) - named_places


def _sum_of_used(processes: FingerprintsOfProcesses, place: str) -> int:
    """Return the fingerprint of a place over all processes, each of which holds a part of the weights."""
    return sum(used_by_place[place] for used_by_place, _ in processes) % 2**64
