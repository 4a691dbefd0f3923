"""Grammars of typed answers that are made in this process, and whether a text keeps to one."""

import json
from typing import Any

import xgrammar

from async_grpo.environments.processes import EnvironmentFailed
from async_grpo.inference.output_grammars import GrammarHost


class GrammarsHere:
    """A `GrammarProcess` without a process."""

    def __init__(self, source: Any, name: str, options: dict[str, Any], **_: Any) -> None:
        self._host = GrammarHost(**options)
        self.num_asked = 0

    async def start(self) -> None:
        pass

    async def ask(self, call: str, _: int, *arguments: Any, timeout_s: float) -> dict[str, Any]:
        self.num_asked += 1
        # As the process's messages do it
        request = json.loads(json.dumps({"call": call, "arguments": arguments}))
        ((answer,),) = await self._host.replies([{"sample": request}])
        if answer["status"] != "ok":
            raise EnvironmentFailed(answer["reason"])
        return answer

    async def close(self) -> None:
        pass


def accepts(tokenizer, grammar: str, text: str) -> bool:
    """Return whether a text, which ends there, keeps to a grammar."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), info.stop_token_ids[0]]
    return all(matcher.accept_token(token_id) for token_id in token_ids)
