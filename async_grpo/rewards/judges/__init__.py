"""Remote judges: rewards that a server gives. They stand in `REWARD_ADAPTERS` like any function.

    REWARD_ADAPTERS = {..., RewardType.JUDGE: LLMJudge(url="http://127.0.0.1:8000", model="judge")}

A judge is settings and no more: it holds no connection, and can be compared and pickled. Limits, retries and balancing
are its client's business (`rewards.http`). A call either gives an answer or raises; no trouble becomes a reward of 0.
`JudgeServer` (in `server`) starts vLLM for those that ask a model.
"""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from async_grpo.rewards.http.endpoint import Deadline, Endpoint
from async_grpo.rewards.judges.llm import GenerativeRM, LLMJudge
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.judges.scorers import HTTPScorer, RewardModelJudge

if TYPE_CHECKING:
    from async_grpo.rewards.http.http_client import EndpointClient


__all__ = [
    "GenerativeRM",
    "HTTPScorer",
    "Judge",
    "JudgeAddresses",
    "LLMJudge",
    "RewardModelJudge",
]


@runtime_checkable
class Judge(Protocol):
    """Scores samples over the network, many at once."""

    def endpoint(self) -> Endpoint:
        """Where the client sends the judge's requests, and within which limits."""

    async def score(
        self, sample: dict[str, Any], client: "EndpointClient", *, phase: str, deadline: Deadline | float
    ) -> dict[str, Any]:
        """The answer dict of `async_grpo.rewards.adapter.result`; `deadline` is to be handed to the client.

        `phase` is "train" or another one that must not queue behind it. Raises `JudgeError` when the judge gave no
        verdict, ConfigurationError when the sample lacks what the judge needs.
        """
