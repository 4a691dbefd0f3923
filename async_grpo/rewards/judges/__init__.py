"""Remote judges: rewards that a server gives. They stand in `REWARD_ADAPTERS` like any function.

    REWARD_ADAPTERS = {..., RewardType.JUDGE: LLMJudge(url="http://127.0.0.1:8000", model="judge")}

A judge consists of settings only: it holds no connection, and can be compared and pickled. Its client (`rewards.http`)
takes care of limits, retries and load balancing. A call either returns an answer or raises; a failure never becomes a
reward of 0.

Any object can be a judge that has `endpoint() -> Endpoint` and `async score(sample, client, *, phase, deadline)`. The
method `score` returns an answer (see `adapter.result`) and passes `phase` and `deadline` to the `EndpointClient`. It raises
JudgeError if there is no verdict, and ConfigurationError if the sample lacks what the judge needs.

`JudgeServer` (in `server`) starts vLLM for judges that ask a model.
"""

from async_grpo.rewards.judges.llm import GenerativeRM, LLMJudge
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.judges.scorers import HTTPScorer, RewardModelJudge

__all__ = ["GenerativeRM", "HTTPScorer", "JudgeAddresses", "LLMJudge", "RewardModelJudge"]
