"""The cases of the comparison, with their settings, and the arms (settings of the library, or TRL) that run in each."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "sample-data"
REWARDS = Path(__file__).with_name("rewards.py")


@dataclass(frozen=True)
class Case:
    """Settings of a case, the same for both sides.

    `model` is "tiny" (the shipped model) or a name in `models.py`. `reward` is a function in `rewards.py`, or
    "countdown" for the shipped one. `calls` is the number of rewards that may run at once; 0 is no limit. `any_order`
    has further arms of this library, as pairs (--max-staleness, --groups-alive in steps). Their mean staleness is
    --groups-alive minus 1. `steps` is the number of measured steps. It must be a multiple of the number of steps alive,
    because asynchronous steps end in bursts of this size. `staleness` has one further arm of this library for each
    value. `minutes` is the duration of one repetition on 2 cores.

    `task` is a data set in sample-data, with prompts as texts with token ids, or as chats. A case with checkpoints
    measures the time until a fraction `accuracy` of the held-out tasks is solved, or `gain` more than before training,
    with `heldout_completions` for each task. Checkpoints after the first one that reaches this goal are not evaluated.
    A case with an adapter evaluates all, because it compares the last ones.

    `tokens_per_call` is this library's --max-tokens-per-gpu. `samples_per_call` is TRL's per_device_train_batch_size,
    the fastest of those that were tried.
    """

    what: str
    steps: int
    warm_up: int
    minutes: float
    model: str = "tiny"
    task: str = "countdown"
    reward: str = "shipped"
    prompts: int = 32
    group: int = 8
    max_tokens: int = 24
    learning_rate: float = 2e-4
    calls: int = 0
    tokens_per_call: int = 4096
    samples_per_call: int = 256
    staleness: tuple[int, ...] = (1,)
    any_order: tuple[tuple[int, int], ...] = ()
    mask_truncated: bool = (
        # The library's default is True; with it, a case whose completions are all truncated would train on nothing
        True
    )
    checkpoint_every: int = 0  # number of steps between two checkpoints, which are evaluated after the run
    accuracy: float | None = None
    gain: float | None = None
    heldout_completions: int = 2
    lora_rank: int = 0  # 0 trains all weights
    repetitions: int = 0  # 0 uses the number on the command line
    trl: dict[str, Any] = field(default_factory=dict)  # further settings of TRL's GRPOConfig

    @property
    def samples(self) -> int:
        """Return the number of samples of one optimizer step."""
        return self.prompts * self.group

    @property
    def train(self) -> Path:
        """Return the file of the tasks to train on."""
        return DATA / f"{self.task}_train.jsonl"

    @property
    def heldout(self) -> Path:
        """Return the file of the held-out tasks."""
        return DATA / f"{self.task}_heldout.jsonl"

    @property
    def arms(self) -> tuple[str, ...]:
        strict = (f"ours S={bound}" for bound in self.staleness)
        return (*strict, *(f"ours S={bound}, {alive} steps alive" for bound, alive in self.any_order), "TRL")


SMOLLM2 = Case(
    "capitals by SmolLM2-135M-Instruct, a real chat model, learning until 0.2 more of the held-out ones are named",
    model="smollm2",
    task="capitals",
    reward="named",
    prompts=8,
    max_tokens=12,
    learning_rate=2e-5,
    steps=3,
    warm_up=1,
    minutes=8.0,
    tokens_per_call=2048,
    samples_per_call=64,
    mask_truncated=False,  # a completion that names the capital may be truncated after it
    checkpoint_every=1,
    gain=0.2,
    # The first step gains a little more than 0.2. With 512 completions, the standard error is 0.02
    heldout_completions=32,
    repetitions=3,
)

CASES = {
    "short": Case("completions of about 12 tokens, free reward", steps=40, warm_up=5, minutes=2.2),
    "short-own": Case(
        "the same, the reward a function of a user's file",
        steps=40,
        warm_up=5,
        minutes=2.2,
        reward="countdown",
    ),
    "long-tail": Case(
        "log-normal lengths, sigma 1, up to 512 tokens",
        model="log-normal",
        reward="hashed",
        prompts=16,
        max_tokens=512,
        learning_rate=1e-6,
        steps=4,
        warm_up=2,
        minutes=4.5,
        tokens_per_call=8192,
        samples_per_call=128,
    ),
    "slow-64": Case(
        "a reward takes 0.1 to 4 s, 64 at once",
        reward="slow",
        calls=64,
        steps=6,
        # The first rollouts begin together; until they have ended, free places are not what steps wait for
        warm_up=3,
        minutes=5.5,
        staleness=(1, 2),
    ),
    "slow": Case(
        "a reward takes 0.1 to 4 s, no limit",
        reward="slow",
        steps=12,
        warm_up=3,
        minutes=5.0,
        staleness=(1, 2),
    ),
    "judge": Case(
        "a judge of 0.5 s (median), log-normal with sigma 1.2, at most 20 s",
        reward="judge",
        steps=6,
        warm_up=3,
        minutes=9.0,
        staleness=(1, 2),
        any_order=((4, 2), (4, 3)),
    ),
    "30m": Case(
        "30 M parameters, 256 tokens, free reward",
        model="30m",
        reward="hashed",
        prompts=4,
        max_tokens=256,
        learning_rate=1e-6,
        steps=4,
        warm_up=1,
        minutes=5.0,
        tokens_per_call=8192,
        samples_per_call=32,
        mask_truncated=False,
    ),
    "learning": Case(
        "as short, learning until 0.40 of the held-out tasks are solved (a seed a repetition)",
        steps=40,
        warm_up=5,
        minutes=5.0,
        checkpoint_every=5,
        accuracy=0.4,
        # A step improves the accuracy by 0.005 here. With 1,024 completions, 0.40 is known only to 0.015, which is
        # three steps
        heldout_completions=16,
        repetitions=3,
    ),
    "smollm2": SMOLLM2,
    "smollm2-lora": replace(
        SMOLLM2,
        what="capitals by SmolLM2-135M-Instruct, a LoRA adapter of rank 16 on all linear layers",
        learning_rate=2e-4,
        steps=8,
        warm_up=2,
        minutes=28.0,
        checkpoint_every=5,
        gain=None,
        accuracy=0.6,
        # With 1,024 completions, an accuracy of 0.8 is known to 0.0125
        heldout_completions=64,
        lora_rank=16,
        staleness=(0, 1),
    ),
}
