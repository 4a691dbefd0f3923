"""The options of a policy that draws pictures. This module does not import torch, so that `--help` is fast."""

from dataclasses import dataclass
from functools import partial

from async_grpo.algorithm.flow.windows import RANDOM, WINDOW_ORDERS
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option

TEXT = "text"  # a language model, which samples tokens
FLOW = "flow"  # a flow-matching model, which draws pictures
POLICIES = (TEXT, FLOW)

_drawing = partial(option, panel="Drawing", portable=True)


@dataclass(frozen=True, kw_only=True)
class FlowConfig(Section):
    """Options of the kind of policy, and of flow-matching policies."""

    policy: str = option(
        TEXT,
        "Kind of the policy: text (a language model), or flow (a flow-matching model in a folder of diffusers, which draws "
        "pictures; it needs --engine drawing).",
        "Drawing",
        choices=POLICIES,
        portable=True,
    )
    flow_window: int = _drawing(
        0,
        "Number of denoising steps of each picture that are stochastic and trained; all others are deterministic. 0 means "
        "all.",
        range=NOT_NEGATIVE,
    )
    flow_window_order: str = _drawing(
        RANDOM,
        "Where the window of --flow-window lies: random draws a place for each picture, sliding moves it from the noisiest "
        "steps to the last ones.",
        choices=WINDOW_ORDERS,
    )
    flow_window_every: int = _drawing(
        25,
        "Number of optimizer steps after which a sliding window moves by one denoising step.",
        range=POSITIVE,
    )

    picture_size: int = _drawing(
        0,
        "Height and width of the pictures in pixels. 0 means the size for which the model was made.",
        range=NOT_NEGATIVE,
    )
    guidance: float = _drawing(
        1.0,
        "Strength of classifier-free guidance in training and evaluation: by how much the prompt counts more than the "
        "negative prompt or no label. FLUX reads this number as an input. 1 means no guidance.",
        range=POSITIVE,
    )

    @property
    def draws(self) -> bool:
        """Return whether the policy draws pictures."""
        return self.policy == FLOW
