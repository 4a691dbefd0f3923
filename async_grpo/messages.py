"""What the processes of a run tell each other: packed micro-batches, the end of each step, the settings that they share.

Axes in names:  S sequences and N tokens of one packed micro-batch (N = sum of the sequence lengths, no padding).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.types import PROMPT_TOKEN

NO_TIME = np.int32(-1)  # `times` of a token that is not part of a trajectory of several sequences


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences packed end to end for one rank: no padding, at most `max_tokens_per_gpu` tokens.

    Everything of axis N is aligned with the *token it speaks of*: `behaviour_logprobs[i]` is the log-prob of
    `input_ids[i]` given the tokens before it in its own sequence. Where `loss_mask` is False the values mean nothing.
    """

    input_ids: np.ndarray  # (N,) int32
    cu_seqlens: np.ndarray  # (S + 1,) int32, boundaries of the sequences: 0 ... N
    loss_mask: np.ndarray  # (N,) bool, tokens that are trained on
    behaviour_logprobs: np.ndarray  # (N,) float32, the engine's
    advantages: np.ndarray  # (N,) float32
    versions: np.ndarray  # (N,) int32, PROMPT_TOKEN where not generated
    group_ids: np.ndarray  # (S,) int64, the prompt's ordinal
    group_tokens: np.ndarray  # (S,) int64, trained tokens of the sequence's group in the whole minibatch
    ref_logprobs: np.ndarray | None = None  # (N,) float32
    proximal_logprobs: np.ndarray | None = None  # (N,) float32
    # Of trajectories with several sequences, for a critic; None where there is none in the micro-batch
    members: np.ndarray | None = None  # (S,) int64, place of the sequence's sample in its group
    times: np.ndarray | None = None  # (N,) int32, place in time among the trajectory's tokens; below 0: none
    is_dummy: bool = False  # nothing to learn: keeps the collectives of an idle rank aligned

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def sequence_ids(self) -> np.ndarray:
        """(N,) int64: the index of the sequence each token belongs to."""
        return np.repeat(np.arange(self.num_sequences), np.diff(self.cu_seqlens))


def dummy_micro_batch(token_id: int) -> MicroBatch:
    """The smallest micro-batch with an empty loss mask, for a rank that has nothing while others do."""
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
    """Closes one optimizer step on every rank, after its last micro-batch; `stats` go into the metrics line."""

    step: int
    num_groups: int
    num_samples: int
    stats: dict[str, Any]


@dataclass(frozen=True)
class WorkersJoined:
    """Workers wait for the current weights: all ranks publish them once more, with the self-test."""


@dataclass(frozen=True)
class SaveRequested:
    """Every rank saves its part of a checkpoint, of the policy that it holds now; with a reason, the run ends there."""

    end_reason: str = ""


# What a rank is told; every rank, as many of each, in one order
Message = MicroBatch | StepEnd | WorkersJoined | SaveRequested


@dataclass(frozen=True)
class SharedRunSettings:
    """The settings that every worker must share, published by the trainer: typed once, never twice."""

    run_name: str
    model_fingerprint: str  # sha256 over the architecture part of config.json and the vocabulary
    vocab_size: int
    dtype: str
    temperature: float
    stop_token_ids: tuple[int, ...]
    max_total_tokens: int  # prompt and completion together
    max_completion_tokens: int
    transport: str  # how weights travel: see `weights.config`
    logprob_roles: tuple[str, ...]  # kinds of logprob worker that the loss needs: "reference", "proximal"
    seed: int
    char_ends: bool = False  # completions carry `char_ends`: for process rewards
    float32_head: bool = False  # engines compute logits in float32
    guaranteed_completion_tokens: int = 0  # for which even the longest prompt leaves room; 0: not known
    group_size: int = 1  # samples that one engine must take at once
    samples_in_flight: int = 0  # admitted and not yet part of the live weights, at most; 0: not known
    checkpoint: str = ""  # that the ranks resume from
    trains: bool = True  # else engines work with the weights that they start with
    library: str = ""  # version of the trainer's


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself when it registers."""

    worker_id: str
    kind: str  # "generation", "reference" or "proximal"
    max_sequences: int  # admitted at once: max_num_seqs + overhead_seqs
    max_tokens: int  # tokens it can hold at once (its KV cache, or its packing budget)
    world_size: int = 1  # GPUs or processes that hold a share of the weights
    rewards: str = ""  # that it was started with
