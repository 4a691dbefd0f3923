"""`Teachers`: has the teacher of each row compute the log-probs of the sampled tokens.

`GroupAdvantages` turns these log-probs into advantages: A_t = coef * (log pi_T - log mu). pi_T is the teacher, and mu is
the policy that sampled the token. The trainer's policy pi may already differ from mu. If the loss has the importance ratio
pi / mu, the expected gradient is that of KL(pi || pi_T) - KL(pi || mu).

If the teacher gave no log-prob for a token, the token is left out of the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_grpo.algorithm.teacher_config import SELF, TeacherConfig
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.experience.logprob_requests import logprobs_of_samples
from async_grpo.experience.step_metrics import lacks_teacher
from async_grpo.protocols import Logprobs
from async_grpo.types import Group, Sample

MAX_LOG_RATIO = 80.0  # larger log ratios are cut to this, because a single exp(ratio) would dominate the mean
MAX_SHOWN_CHARACTERS = 200  # maximum number of characters of a row's value in an error message


def teacher_name(config: TeacherConfig, row: Mapping[str, Any]) -> str:
    """Return the name of the teacher of a row.

    Raises:
        ConfigurationError: The row names no teacher of the run.
    """
    if config.teacher_column is None:
        return next(iter(config.teachers))
    name = row.get(config.teacher_column)
    if not isinstance(name, str) or name not in config.teachers:
        raise ConfigurationError(
            f"the column {config.teacher_column!r} (--teacher-column) says {name!r:.{MAX_SHOWN_CHARACTERS}}; it must "
            f"name one of the teachers {', '.join(config.teachers)}"
        )
    return str(name)


class Teachers:
    """Adds the teachers' log-probs to groups.

    Args:
        config: The options of the teachers.
        sources: Source of the log-probs of each teacher, by name. A source returns NaN for tokens without a log-prob.
    """

    def __init__(self, config: TeacherConfig, sources: Mapping[str, Logprobs]) -> None:
        self._config = config
        self._sources = sources

    async def add_logprobs(self, group: Group) -> Group:
        """Return the group with the log-probs of its row's teacher."""
        name = teacher_name(self._config, group.prompt.row)
        teacher_token_ids = group.prompt.teacher_token_ids
        k = self._config.teacher_top_k
        if self._config.teachers[name] == SELF and teacher_token_ids is None:
            return replace(group, samples=tuple(_taught_by_itself(sample, k) for sample in group.samples))
        source = self._sources[name]
        samples = []
        if not k:
            logprobs_by_sample = await logprobs_of_samples(source, group.samples, teacher_token_ids)
            for sample, logprobs in zip(group.samples, logprobs_by_sample, strict=True):
                samples.append(replace(sample, teacher_logprobs=logprobs.astype(np.float32)))
            return replace(group, samples=tuple(samples))
        rows_by_sample = await logprobs_of_samples(source, group.samples, teacher_token_ids, k)
        for sample, rows in zip(group.samples, rows_by_sample, strict=True):
            samples.append(replace(sample, teacher_logprobs=rows[:, 1, 0], teacher_top=rows[:, :, 1:]))
        return replace(group, samples=tuple(samples))

    def refuse_untaught(self, step: int, groups: Sequence[Group]) -> None:
        """Check that a teacher gave a log-prob for at least one token of a step.

        Raises:
            RunFailed: There is no such token. The message contains the first reason.
        """
        samples = [sample for group in groups for sample in group.samples if len(sample.completion)]
        if not samples or not all(lacks_teacher(sample) for sample in samples):
            return
        reasons = [
            source.first_failure for source in self._sources.values() if hasattr(source, "first_failure")
        ]
        raise RunFailed(
            f"no teacher gave log-probs for any of the {len(samples)} samples of step {step}; the first reason: "
            f"{next(filter(None, reasons), 'none was given')}"
        )

    def stats(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the metrics of the teachers of a step.

        - `teacher_kl`: mean of log pi - log pi_T over the covered tokens, in nats. It estimates KL(pi || pi_T) per token.
        - `teacher_kl_k3`: the same KL divergence by the estimator k3 (`algorithm.kl`), which varies less and is never
          negative.
        - `teacher_kl/NAME`: `teacher_kl` over the rows of one teacher, if there are several teachers.
        - `teacher_covered`: share of the sampled tokens for which a teacher gave a log-prob.
        - `teacher_failures`: number of samples for which a teacher gave no log-prob at all.
        """
        gaps_by_name: dict[str, list[np.ndarray]] = {}
        num_failures = 0
        for group in groups:
            name = teacher_name(self._config, group.prompt.row)
            for sample in group.samples:
                num_failures += lacks_teacher(sample)
                gaps_by_name.setdefault(name, []).append(_gaps(sample))
        gaps = np.concatenate([np.concatenate(parts) for parts in gaps_by_name.values()])
        stats: dict[str, Any] = {
            "teacher_kl": _finite_mean(gaps),
            "teacher_kl_k3": _finite_mean(np.expm1(np.minimum(-gaps, MAX_LOG_RATIO)) + gaps),
            "teacher_covered": float(np.isfinite(gaps).mean()) if len(gaps) else None,
            "teacher_failures": num_failures,
        }
        if len(self._config.teachers) > 1:
            for name, parts in sorted(gaps_by_name.items()):
                stats[f"teacher_kl/{name}"] = _finite_mean(np.concatenate(parts))
        return stats


def _taught_by_itself(sample: Sample, k: int) -> Sample:
    """Return the sample of a row without a demonstration, whose teacher is the policy itself.

    The teacher's distribution is the policy's, so the log-probs are the engine's own, and the advantages are exactly 0. No
    token has a forward KL.
    """
    top = np.full((len(sample.completion), 2, k), np.nan, np.float32) if k else None
    return replace(sample, teacher_logprobs=sample.completion.logprobs, teacher_top=top)


def _gaps(sample: Sample) -> np.ndarray:
    """Return log pi - log pi_T at each token, (T,) float64. It is not finite where the teacher gave no log-prob."""
    assert sample.teacher_logprobs is not None
    return sample.completion.logprobs.astype(np.float64) - sample.teacher_logprobs


def _finite_mean(values: np.ndarray) -> float | None:
    """Return the mean of the finite values, or None if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
