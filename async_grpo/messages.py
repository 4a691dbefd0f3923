"""Messages between the processes of a run: packed micro-batches, the end of each step, and the shared settings.

In the comments, a packed micro-batch has S sequences and N tokens (N = sum of the sequence lengths, without padding).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.types import PROMPT_TOKEN, ImageReference

# Entry of `MicroBatch.times` for a token that was not sampled, or whose sample has a single sequence
NO_TIME = np.int32(-1)


@dataclass(frozen=True)
class FirstPass:
    """What the first pass over a batch computed for a micro-batch, which later passes use (`--passes-per-batch`)."""

    # (N,) float32, the trainer's log-probs in the first pass, so before the update to which the micro-batch contributed
    logprobs: np.ndarray
    # With a critic, (N,) float32 each: the estimated advantages, the targets of the critic, and its values
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    values: np.ndarray | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences packed end to end for one rank, without padding and with at most `max_tokens_per_gpu` tokens.

    Entry i of an array (N,) describes token i: `behaviour_logprobs[i]` is the log-prob of `input_ids[i]` given the
    tokens before it in its own sequence. Where `loss_mask` is False, the log-probs and advantages have no meaning.
    """

    input_ids: np.ndarray  # (N,) int32, token ids
    cu_seqlens: np.ndarray  # (S + 1,) int32, boundaries of the sequences: 0 ... N
    loss_mask: np.ndarray  # (N,) bool, True at tokens that are trained on
    behaviour_logprobs: np.ndarray  # (N,) float32, log-probs computed by the engine
    advantages: np.ndarray  # (N,) float32
    # (N,) int32, policy version that generated each token; PROMPT_TOKEN for a token that no policy generated
    versions: np.ndarray
    group_ids: np.ndarray  # (S,) int64, `Prompt.ordinal` of the sequence's prompt, which identifies its group
    # (S,) int64, number of trained tokens of the sequence's group in the whole minibatch
    group_tokens: np.ndarray
    ref_logprobs: np.ndarray | None = None  # (N,) float32, log-probs of the reference policy
    proximal_logprobs: np.ndarray | None = None  # (N,) float32, log-probs of the proximal policy
    # (N, 2, k) float32, ids and log-probs of the teacher's k most probable tokens at each position
    teacher_top: np.ndarray | None = None
    # `members` and `times` are set if there is a critic and the micro-batch contains trajectories with several
    # sequences
    members: np.ndarray | None = None  # (S,) int64, index of the sequence's sample in its group
    # (N,) int32, position of the token among the sampled tokens of its trajectory, in the order of time; or NO_TIME
    times: np.ndarray | None = None
    # Set if a grammar restricted the sampled tokens: (N,), with ALL_TOKENS at tokens that were not sampled
    allowed: AllowedTokens | None = None
    # (S,), the images of each sequence, in the order of their tokens; () if no sequence has an image
    images: tuple[tuple[ImageReference, ...], ...] = ()
    # (N, 2, channels, height, width) float32, if the policy draws. Each token is one denoising step of a picture. The array
    # has the states of the picture before and after the step. With DiffusionNFT, it is (N, 1, ...): each token is a
    # finished picture
    latents: np.ndarray | None = None
    first_pass: FirstPass | None = None  # set from the second pass over a batch on
    # (S,), the condition of each sequence, if the policy draws from texts (`Completion.condition`); else ()
    conditions: tuple[tuple[np.ndarray, ...], ...] = ()
    # True for a micro-batch without trained tokens, which an idle rank runs so that all ranks run the same collectives
    is_dummy: bool = False

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences S."""
        return len(self.cu_seqlens) - 1

    def sequence_ids(self) -> np.ndarray:
        """Return the index of each token's sequence, (N,) int64."""
        return np.repeat(np.arange(self.num_sequences), np.diff(self.cu_seqlens))


def dummy_micro_batch(token_id: int) -> MicroBatch:
    """Return a micro-batch without trained tokens, for a rank that has nothing to train while other ranks do."""
    zeros = np.zeros(2, np.float32)
    return MicroBatch(
        input_ids=np.full(2, token_id, np.int32),
        cu_seqlens=np.array([0, 2], np.int32),
        loss_mask=np.zeros(2, bool),
        behaviour_logprobs=zeros,
        advantages=zeros,
        versions=np.full(2, PROMPT_TOKEN, np.int32),
        group_ids=np.array([-1], np.int64),
        group_tokens=np.array([0], np.int64),
        is_dummy=True,
    )


@dataclass(frozen=True)
class StepEnd:
    """The end of one optimizer step. Every rank gets it after the last micro-batch of the step.

    In later passes over a batch, the numbers of groups and samples are 0, because the first pass has counted them.
    """

    step: int  # number of the minibatch, from 0. With one pass over each batch, it is the number of the step
    num_groups: int  # number of groups trained in the step
    num_samples: int  # number of samples trained in the step
    stats: dict[str, Any]  # metrics of generation and rewards, for the metrics line of the step


@dataclass(frozen=True)
class WorkersJoined:
    """A request to every rank to publish the current weights, after a self-test, to workers that have just joined."""


@dataclass(frozen=True)
class SaveRequested:
    """A request to every rank to save its part of a checkpoint of the current policy."""

    end_reason: str = ""  # why the run ends after this checkpoint; "" if the run continues


# Every rank receives messages of the same types, in the same order
Message = MicroBatch | StepEnd | WorkersJoined | SaveRequested


@dataclass(frozen=True)
class LoraSettings:
    """The LoRA adapter of a run: which layers compute with W + scaling * B A, and how A and B reach the engines."""

    rank: int
    scaling: float
    # Names of the layers with an adapter, such as "model.layers.0.self_attn.q_proj", sorted
    layers: tuple[str, ...]
    # "merged": engines get W + scaling * B A as the weights of the model; "adapter": they get A and B alone
    sync: str = "merged"
    initial_folder: str = ""  # folder of the adapter with which the training begins; "" for a new one
    # Names of the layers whose frozen weights the trainer stores in 4 bits, and the number of these weights
    four_bit_layers: tuple[str, ...] = ()
    num_four_bit_weights: int = 0


@dataclass(frozen=True)
class Truncation:
    """The rules by which tokens are sampled among the most probable tokens only.

    They apply in the engine's order, to the distribution at the sampling temperature: first `min_p`, then `top_k`,
    then `top_p` over what is left. The remaining tokens, the support, share the whole probability.
    """

    # Sum of probabilities that the kept tokens must reach. As few tokens as possible are kept, the most probable ones; 1
    # keeps all tokens
    top_p: float = 1.0
    top_k: int = 0  # number of most probable tokens to keep; 0 keeps all tokens
    # Lowest probability of a kept token, as a share of the highest one; 0 keeps all tokens
    min_p: float = 0.0


@dataclass(frozen=True)
class FlowSettings:
    """How a policy draws: the denoising steps of a training sample, and which of them are stochastic."""

    num_steps: int  # number of denoising steps of a picture
    # The window: the denoising steps that are stochastic and trained (`algorithm.flow.windows.stochastic_steps`)
    window: int = 0  # number of its steps; 0 means all steps
    window_order: str = "random"  # "random": a random place for each picture; "sliding": moves during the run
    window_every: int = 1  # number of policy versions that a sliding window stays at one place
    picture_size: int = 0  # height and width of a picture in pixels; 0 means the model's own
    guidance: float = 1.0  # weight of the prompt against the negative prompt; 1 means no guidance
    # Whether the trainer needs finished pictures (DiffusionNFT) instead of denoising steps. They are drawn without noise
    trains_finished: bool = False


@dataclass(frozen=True)
class ImageCanary:
    """A text of the canary that has an image, so that the canary shows the weights of a vision tower, too."""

    token_ids: tuple[int, ...]
    image: ImageReference

    def images_of(self, token_ids: np.ndarray) -> tuple[ImageReference, ...]:
        """Return the images of a canary text with the token ids (N,): the image if it is this text, otherwise none."""
        return (self.image,) if token_ids.tolist() == list(self.token_ids) else ()


@dataclass(frozen=True)
class SharedRunSettings:
    """Settings that every worker must share. The trainer publishes them, so that a user sets them only once."""

    run_name: str
    model_fingerprint: str  # sha256 of the architecture part of config.json and of the vocabulary
    vocab_size: int
    dtype: str
    temperature: float  # sampling temperature
    stop_token_ids: tuple[int, ...]
    max_total_tokens: int  # maximum length of prompt and completion together
    max_completion_tokens: int
    transport: str  # how weights are transferred to engines, see `weights.config`
    logprob_roles: tuple[str, ...]  # kinds of logprob worker that the run needs, such as "reference"
    seed: int
    char_ends: bool = False  # whether workers set `Completion.char_ends`, which process rewards need
    float32_head: bool = False  # whether engines compute logits in float32
    # Number of completion tokens that fit into the context even after the longest prompt; 0 if unknown
    guaranteed_completion_tokens: int = 0
    group_size: int = 1  # number of samples of one prompt, which an engine must be able to accept at once
    # Maximum number of samples whose generation has begun and that have not been trained on yet; 0 if unknown
    samples_in_flight: int = 0
    checkpoint: str = ""  # path of the checkpoint that the ranks resume from; "" if they start from the model
    lora: LoraSettings | None = None  # None if all weights are trained
    trains: bool = True  # False if no training takes place, so that engines keep their initial weights
    # Level at which engines sleep while the trainer computes (`--engine-sleep`); 0 if they stay awake
    sleep_level: int = 0
    moves_reference: bool = False  # whether reference workers get new weights (`--ref-update-steps`)
    # Whether log-probs must not depend on which requests arrive at the same time (`--deterministic`)
    deterministic: bool = False
    has_grammars: bool = False  # whether requests may have a grammar (`Sampling.grammar`)
    library: str = ""  # version of this library that the trainer runs
    image_token_id: int = -1  # the placeholder of images in prompts; -1 if the model reads no images
    # Tokens that stand for images and videos in prompts, and that the policy never samples; () for a model of texts
    unsampled_token_ids: tuple[int, ...] = ()
    most_images: int = 0  # highest number of images in one prompt
    image_processor: str = ""  # class of the trainer's image processor; "" if the model reads no images
    # Fingerprint of each teacher that a logprob worker loads, by kind of worker
    teacher_fingerprints: Mapping[str, str] = field(default_factory=dict)
    truncation: Truncation | None = None  # None if tokens are sampled among all tokens
    # Text of the canary that has an image; None if the model reads no images, or if the text does not fit its context
    image_canary: ImageCanary | None = None
    flow: FlowSettings | None = None  # set if the policy draws; `temperature` is then its noise level


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker, sent when it registers."""

    worker_id: str
    kind: str  # "generation", or a kind of logprob worker: "reference", "proximal", "self_teacher", "teacher:NAME"
    # Number of sequences that the worker accepts at once: `EngineOptions.max_sequences` for a generation worker, and
    # `inference.config.UNLIMITED` for a logprob worker
    max_sequences: int
    # Number of tokens that the worker can keep at once: in the KV cache of a generation worker, or in one forward pass
    # of a logprob worker
    max_tokens: int
    world_size: int = 1  # number of the worker's processes (GPUs), each of which has a shard of the weights
    # `--reward-fns` of the worker; "" if it has none. The rewards of a run may be named there instead of at the trainer
    rewards: str = ""
