"""Remote judges: rewards that a server computes. Register them in `REWARD_ADAPTERS` like any reward function.

    REWARD_ADAPTERS = {..., RewardType.JUDGE: LLMJudge(url="http://127.0.0.1:8000", model="judge")}

A judge object has only settings and no connection, so it can be compared and pickled. Its client (`rewards.http`)
handles rate limits, retries and load balancing. A call either returns an answer or raises an error. A failure never
becomes a reward of 0.

Any object with `endpoint() -> Endpoint` and `async score(sample, client, *, phase, deadline)` can be a judge. The
method `score` returns an answer (see `adapter.result`) and passes `phase` and `deadline` to the `EndpointClient`. It
raises JudgeError if there is no verdict, and ConfigurationError if the sample lacks a column that the judge needs.

`JudgeServer` (in `server`) starts vLLM servers for judges that call a model.
"""

from async_grpo.rewards.judges.llm import GenerativeRM, LLMJudge
from async_grpo.rewards.judges.picture_judge import PictureJudge
from async_grpo.rewards.judges.picture_reader import PictureReader
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.judges.scorers import HTTPScorer, RewardModelJudge

__all__ = [
    "GenerativeRM",
    "HTTPScorer",
    "JudgeAddresses",
    "LLMJudge",
    "PictureJudge",
    "RewardModelJudge",
    "PictureReader",
]
