"""The options of a policy that draws pictures. This module does not import torch, so that `--help` is fast."""

from dataclasses import dataclass
from functools import partial

from async_grpo.algorithm.flow.windows import RANDOM, WINDOW_ORDERS
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, SHARE, Section, option

TEXT = "text"  # a language model, which samples tokens
FLOW = "flow"  # a flow-matching model, which draws pictures
POLICIES = (TEXT, FLOW)
FLOW_GRPO = "flow_grpo"  # trains on denoising steps
DIFFUSION_NFT = "diffusion_nft"  # trains on finished pictures
FLOW_LOSSES = (FLOW_GRPO, DIFFUSION_NFT)
ADAPTIVE = "adaptive"  # squared error of the predicted picture, divided by its mean absolute error
VELOCITY = "velocity"  # squared error of the velocity
WEIGHTINGS = (ADAPTIVE, VELOCITY)

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

    flow_loss: str = _drawing(
        FLOW_GRPO,
        "Loss of a policy that draws: flow_grpo (policy gradients of stochastic denoising steps), or diffusion_nft (flow "
        "matching on finished pictures, weighted by their rewards).",
        choices=FLOW_LOSSES,
    )
    nft_beta: float = _drawing(
        1.0,
        "With --flow-loss diffusion_nft: share of the trained velocity in the positive and the negative policy. A smaller "
        "number lets the trained policy move further from the old one.",
        range=POSITIVE,
    )
    nft_times: int = _drawing(
        4,
        "With --flow-loss diffusion_nft: number of times and noises that are drawn for each picture.",
        range=POSITIVE,
    )
    nft_clip: float = _drawing(
        1.0,
        "With --flow-loss diffusion_nft: advantage from which on a picture counts as entirely good, and below whose "
        "negative as entirely bad.",
        range=POSITIVE,
    )
    nft_weighting: str = _drawing(
        ADAPTIVE,
        "With --flow-loss diffusion_nft: adaptive divides the squared error of the predicted picture by its mean absolute "
        "error, velocity takes the squared error of the velocity.",
        choices=WEIGHTINGS,
    )
    nft_old_decay: float = _drawing(
        0.5,
        "With --flow-loss diffusion_nft: largest weight of the old policy when it moves towards the trained one after an "
        "iteration. 0 draws with the trained policy.",
        range=SHARE,
    )
    nft_old_decay_growth: float = _drawing(
        0.001,
        "With --flow-loss diffusion_nft: the weight of the old policy begins with this number and grows by it in each "
        "iteration, until it is --nft-old-decay.",
        range=NOT_NEGATIVE,
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

    @property
    def trains_by_nft(self) -> bool:
        """Return whether the policy is trained by DiffusionNFT."""
        return self.draws and self.flow_loss == DIFFUSION_NFT
