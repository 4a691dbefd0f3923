"""Messages between the processes of a run: packed micro-batches, the end of each step, and the shared settings.

Axes in the comments: S sequences and N tokens of one packed micro-batch (N = sum of the sequence lengths, no padding).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.types import PROMPT_TOKEN

NO_TIME = np.int32(-1)  # `times` of a token outside of trajectories with several sequences


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences packed end to end for one rank, without padding and with at most `max_tokens_per_gpu` tokens.

    Every array of axis N is aligned with the token that it describes: `behaviour_logprobs[i]` is the log-prob of
    `input_ids[i]` given the tokens before it in its own sequence. Where `loss_mask` is False, the values have no meaning.
    """

    input_ids: np.ndarray  # (N,) int32
    cu_seqlens: np.ndarray  # (S + 1,) int32, boundaries of the sequences: 0 ... N
    loss_mask: np.ndarray  # (N,) bool, tokens that are trained on
    behaviour_logprobs: np.ndarray  # (N,) float32, computed by the engine
    advantages: np.ndarray  # (N,) float32
    versions: (
        np.ndarray
    )  # (N,) int32, policy version of each token; PROMPT_TOKEN where no policy generated it
    group_ids: np.ndarray  # (S,) int64, ordinal of the prompt
    group_tokens: np.ndarray  # (S,) int64, number of trained tokens of the group in the whole minibatch
    ref_logprobs: np.ndarray | None = None  # (N,) float32
    proximal_logprobs: np.ndarray | None = None  # (N,) float32
    # Set for a critic if the micro-batch contains trajectories with several sequences
    members: np.ndarray | None = None  # (S,) int64, index of the sequence's sample in its group
    times: np.ndarray | None = None  # (N,) int32, rank in time among the trajectory's tokens, or NO_TIME
    is_dummy: bool = False  # has no loss tokens; keeps the collectives of an idle rank aligned

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences S."""
        return len(self.cu_seqlens) - 1

    def sequence_ids(self) -> np.ndarray:
        """Return (N,) int64, the index of the sequence that each token belongs to."""
        return np.repeat(np.arange(self.num_sequences), np.diff(self.cu_seqlens))


def dummy_micro_batch(token_id: int) -> MicroBatch:
    """Return a micro-batch without loss tokens, for a rank that is idle while other ranks train."""
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
    """The end of one optimizer step, sent to every rank after its last micro-batch."""

    step: int
    num_groups: int
    num_samples: int
    stats: dict[str, Any]  # for the metrics line


@dataclass(frozen=True)
class WorkersJoined:
    """New workers wait for the current weights; all ranks publish them once more, with the self-test."""


@dataclass(frozen=True)
class SaveRequested:
    """A request to every rank to save its part of a checkpoint of the current policy."""

    end_reason: str = ""  # why the run ends after the checkpoint; "" if it continues


# Every rank receives equally many messages of each kind, in the same order
Message = MicroBatch | StepEnd | WorkersJoined | SaveRequested


@dataclass(frozen=True)
class SharedRunSettings:
    """Settings that every worker must share. The trainer publishes them, so that a user sets them only once."""

    run_name: str
    model_fingerprint: str  # sha256 of the architecture part of config.json and of the vocabulary
    vocab_size: int
    dtype: str
    temperature: float  # of the sampling
    stop_token_ids: tuple[int, ...]
    max_total_tokens: int  # prompt and completion together
    max_completion_tokens: int
    transport: str  # transport of the weights, see `weights.config`
    logprob_roles: tuple[str, ...]  # kinds of logprob worker that the loss needs: "reference", "proximal"
    seed: int
    char_ends: bool = False  # completions have `char_ends`, which process rewards need
    float32_head: bool = False  # engines compute logits in float32
    guaranteed_completion_tokens: int = 0  # completion tokens that fit after the longest prompt; 0 if unknown
    group_size: int = 1  # samples that one engine must accept at once
    samples_in_flight: int = (
        0  # highest number of samples that are admitted and not yet trained; 0 if unknown
    )
    checkpoint: str = ""  # checkpoint that the ranks resume from
    trains: bool = True  # False: the engines keep the weights that they start with
    library: str = ""  # version of the trainer's library


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker, sent when it registers."""

    worker_id: str
    kind: str  # "generation", "reference" or "proximal"
    max_sequences: int  # sequences that it accepts at once: max_num_seqs + overhead_seqs
    max_tokens: int  # tokens that it can hold at once (its KV cache, or its packing budget)
    world_size: int = 1  # GPUs or processes that hold a share of the weights
    rewards: str = ""  # rewards that it was started with
