"""`ChatHarness`: does the same as the harness `null` of verifiers, but within this process.

The original harness starts a program for each user turn.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]  # verifiers finds the harness through this list


class ChatHarness(NullHarness):
    """Ask the model, and call the tools that it requests, until it answers without a tool call."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Any) -> None:
        """Do nothing, because there is no program to install."""

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore
        """Play one trajectory."""
        url = f"{endpoint}/chat/completions"
        headers = {"Authorization": f"Bearer {secret}"}
        messages = self._first_messages(data)
        servers_config = {}
        for name, server_url in mcp_urls.items():
            servers_config[name] = {"url": server_url, "timeout": self.config.tool_timeout}
        async with AsyncExitStack() as stack, httpx.AsyncClient(timeout=None, verify=False) as client:
            tools, names, servers = await connect_mcp({"mcpServers": servers_config}, stack)
            request = {"model": ctx.model, "messages": messages}
            if tools:
                request["tools"] = tools
            while True:
                answer = await client.post(url, json=request, headers=headers)
                if answer.is_error:
                    # A trajectory that has reached one of the run's limits is no failure, and is scored
                    is_failure = "trajectory_over" not in answer.text
                    return vf.ProgramResult(int(is_failure), "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                for call in calls:
                    messages.append(bound_tool_message(await _tool_message(servers, names, call)))
                if not calls:
                    return vf.ProgramResult(0, "", "")

    def _first_messages(self, data: Any) -> list[dict[str, Any]]:
        """Return the prompt of a task as messages."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        prompt_messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message_to_wire(message) for message in prompt_messages]
        return messages


async def _tool_message(servers: Any, names: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Call a tool, and return its answer as a message."""
    function = call["function"]
    message = {"role": "tool", "tool_call_id": call["id"], "name": function["name"]}
    try:
        arguments = dict(json.loads(function["arguments"] or "{}"))
        message["content"] = await call_mcp(servers, names, function["name"], arguments)
    except (KeyError, TypeError, ValueError) as error:
        # The tool does not exist, or the arguments are not a JSON object
        message["content"] = f"error: {type(error).__name__}: {error}"
    return message
