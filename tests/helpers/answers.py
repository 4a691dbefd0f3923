"""What a reward's process says of one sample, without a process."""

from collections.abc import Mapping
from typing import Any

from async_grpo.rewards.isolation.child import Reward, run_plain


def answer_of(adapter: Any, sample: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    ((answer,),) = run_plain(Reward(adapter, options).replies([{"sample": sample}]))
    return answer
