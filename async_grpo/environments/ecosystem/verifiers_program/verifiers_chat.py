"""verifiers' harness `null` in the process that asks; its own starts a program for each turn of a user."""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]  # where verifiers looks for a harness


class ChatHarness(NullHarness):
    """The model is told and asked, its tools are called, until it says something without a call."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Any) -> None: ...

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore
        system, told = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        told = [vf.UserMessage(content=told)] if isinstance(told, str) else told or []
        messages += map(message_to_wire, told)
        url, key = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack, httpx.AsyncClient(timeout=None, verify=False) as client:
            specs = {one: {"url": at, "timeout": self.config.tool_timeout} for one, at in mcp_urls.items()}
            tools, names, servers = await connect_mcp({"mcpServers": specs}, stack)
            asked = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                answer = await client.post(url, json=asked, headers=key)
                if answer.is_error:  # at a limit of the run: what there is is scored
                    return vf.ProgramResult(int("trajectory_over" not in answer.text), "", answer.text)
                messages.append(answer.json()["choices"][0]["message"])
                for call in messages[-1].get("tool_calls") or ():
                    said = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                    try:
                        arguments = dict(json.loads(call["function"]["arguments"] or "{}"))
                        said["content"] = await call_mcp(servers, names, said["name"], arguments)
                    except (KeyError, TypeError, ValueError) as error:  # no such tool, or no JSON object
                        said["content"] = f"error: {type(error).__name__}: {error}"
                    messages.append(bound_tool_message(said))
                if messages[-1]["role"] == "assistant":
                    return vf.ProgramResult(0, "", "")
