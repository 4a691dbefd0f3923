"""Find out how vLLM names the weights of a model that reads images, whose parts have other names than in transformers.

Written for vLLM 0.31 and 0.32. `fingerprints_in_use` reports places by vLLM's names (`language_model.model.layers.0`), and
the trainer asks for them by those of transformers (`model.language_model.layers.0`). vLLM translates names by the attribute
`hf_to_vllm_mapper` of the model's class, which is private.

Not needed any more when vLLM reports weights by the names under which it receives them.
"""

from collections.abc import Iterable, Mapping

import torch

from async_grpo.weights.read_back import place_of


def by_received_names(
    model: torch.nn.Module, used: Mapping[str, int], names: Iterable[str]
) -> dict[str, int]:
    """Return fingerprints with their places named as in transformers, as the received tensors are.

    Args:
        model: vLLM's model. If it reads only texts, its names are those of transformers, and the result is `used`.
        used: Fingerprints with their places named as in vLLM (`weights_in_use.fingerprints_in_use`).
        names: Names of the tensors that the engine has received.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None or not getattr(model, "supports_multimodal", False):
        return dict(used)
    received_places = {}
    for name in names:
        engine_name = mapper._map_name(name)
        if engine_name is not None:
            received_places[place_of(engine_name)] = place_of(name)
            # A tied head is fingerprinted under the full name of the embedding
            received_places[engine_name] = name
    return {received_places.get(place, place): fingerprint for place, fingerprint in used.items()}
