"""Remote judges: rewards that a server gives. They stand in `REWARD_ADAPTERS` like any function.

    REWARD_ADAPTERS = {..., RewardType.JUDGE: LLMJudge(url="http://127.0.0.1:8000", model="judge")}

A judge is settings and no more: it holds no connection, and can be compared and pickled. Limits, retries and balancing
are its client's business (`rewards.http`). A call either gives an answer or raises; no trouble becomes a reward of 0.

One of your own is any object with `endpoint() -> Endpoint` and `async score(sample, client, *, phase, deadline)`, which
returns an answer (see `adapter.result`), hands `phase` and `deadline` to the `EndpointClient`, and raises JudgeError where
there is no verdict, ConfigurationError where the sample lacks what it needs.
`JudgeServer` (in `server`) starts vLLM for those that ask a model.
"""

from async_grpo.rewards.judges.llm import GenerativeRM, LLMJudge
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.judges.scorers import HTTPScorer, RewardModelJudge

__all__ = ["GenerativeRM", "HTTPScorer", "JudgeAddresses", "LLMJudge", "RewardModelJudge"]
