"""A separate critic model: a language model whose value head estimates how much reward is still to come."""

from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from transformers import PreTrainedModel

from async_grpo.modeling.image_models import ImageInputs
from async_grpo.modeling.policy import PolicyModel


class CriticModel(PolicyModel):
    """A model that reads the same packed sequences as the policy, and returns values instead of log-probs.

    Its language-model head is not used, and keeps its weights. So a saved critic is the folder of a whole language
    model.

    Args:
        model: A causal LM. Its attention is replaced by packed attention.

    Raises:
        ConfigurationError: The model's attention or head does not work on packed sequences.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, value_head=True)
        head = model.get_output_embeddings()
        if head.weight is not model.get_input_embeddings().weight:
            for parameter in head.parameters():
                parameter.requires_grad_(False)

    def forward(  # type: ignore[override]  # it is called for values alone, never in place of a policy
        self,
        input_ids: Int64[Tensor, " packed"],
        cu_seqlens: Int[Tensor, " boundaries"],
        loss_mask: Bool[Tensor, " packed"],
        images: ImageInputs | None = None,
    ) -> Float[Tensor, " packed"]:
        """Return the value of the state before each token that `loss_mask` selects, and 0 at all other tokens.

        The arguments are the same as those of `PolicyModel.forward`.
        """
        positions, states = self.states_before(input_ids, cu_seqlens, loss_mask, images)
        assert self.value_head is not None, "`__init__` makes it"
        values = self.value_head(states)
        return values.new_zeros(len(input_ids)).index_copy(0, positions, values)
