"""The options of a logprob worker."""

from dataclasses import dataclass

from async_grpo.algorithm.teacher_config import SELF_TEACHER_ROLE, TEACHER_ROLE, teacher_kind
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option, refuse

# Roles of workers whose weights stay as they were loaded
FROZEN_ROLES = ("reference", TEACHER_ROLE)


@dataclass(frozen=True, kw_only=True)
class LogprobConfig(Section):
    """The options of one logprob worker."""

    max_tokens_per_gpu: int = option(
        46_000, "Maximum number of tokens in one packed forward pass.", "Logprob mode", range=POSITIVE
    )
    max_wait_s: float = option(
        0.02,
        "Maximum seconds that a sequence waits for others to fill a forward pass.",
        "Logprob mode",
        range=NOT_NEGATIVE,
    )
    role: str = option(
        "reference",
        "Policy that computes the log-probs: reference (that of the KL penalty), proximal (follows the trained policy), "
        "teacher (the model in --model-path, frozen) or self_teacher (follows the trained policy).",
        "Logprob mode",
        choices=("reference", "proximal", TEACHER_ROLE, SELF_TEACHER_ROLE),
    )
    teacher_name: str = option(
        "",
        "Name of the teacher in the run's --teacher that this worker holds, if the run has several.",
        "Logprob mode",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            bool(self.teacher_name) and self.role != TEACHER_ROLE,
            f"--teacher-name {self.teacher_name} --role {self.role} do not fit: only a worker of the role "
            f"{TEACHER_ROLE} holds a teacher",
        )

    @property
    def logprob_kind(self) -> str:
        """Return the kind under which the worker registers with the run, such as "reference" or "teacher:NAME"."""
        return teacher_kind(self.teacher_name) if self.role == TEACHER_ROLE else self.role
