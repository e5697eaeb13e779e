"""The library's `null` harness without a process: the chat loop of an agent that has a model and tools, and no shell.

The library starts a Python program for each agent's run, and installs its packages from the network at first. That costs about
two seconds of a core for each rollout. This loop does the same in the library's thread: it asks the model through the library's
interception server, calls the tools of MCP servers, and ends with the first answer that calls none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from counterpoint.environments.verifiers_library.policy_client import MALFORMED_CALL

__all__ = ["ChatHarness"]

_CONNECT_SECONDS = 60.0


class ChatHarnessConfig(NullHarnessConfig):
    """The keys of `null`."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """See the module."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """See `vf.Harness`."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
            )
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with asyncio.timeout(_CONNECT_SECONDS):
                tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            chat = _Chat(session, endpoint, ctx.model, tools, tool_interception_url)
            failure = await chat.play(messages, dispatch, connections)
        return ProgramResult(exit_code=1 if failure else 0, stdout="", stderr=failure)


class _Chat:
    """One run of the loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: str,
        model: str,
        tools: list[dict[str, Any]],
        gate: str | None,
    ) -> None:
        self._session = session
        self._url = f"{endpoint.rstrip('/')}/chat/completions"
        self._body: dict[str, Any] = {"model": model} | ({"tools": tools} if tools else {})
        self._gate = gate

    async def play(self, messages: list[dict[str, Any]], dispatch: Any, connections: Any) -> str:
        """Plays until an answer calls no tool. Returns what went wrong; nothing where the model's context is full."""
        while True:
            status, answered = await self._post(self._url, self._body | {"messages": messages})
            if status != 200:
                said = str((answered.get("error") or {}).get("message") or answered)
                full = any(marker in said.casefold() for marker in CONTEXT_OVERFLOW_MARKERS)
                return "" if full else f"the model's answer had status {status}: {said}"
            message = answered["choices"][0]["message"]
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                return ""
            messages += [await self._tool_message(call, dispatch, connections) for call in calls]

    async def _tool_message(self, call: dict[str, Any], dispatch: Any, connections: Any) -> Any:
        name, text = call["function"]["name"], call["function"]["arguments"] or "{}"
        message = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": ""}
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            arguments = text
            wrong = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        else:
            wrong = (
                ""
                if isinstance(arguments, dict)
                else "error: tool arguments must be a JSON object; resend as an object"
            )
        if name == MALFORMED_CALL and isinstance(arguments, dict) and name not in dispatch:
            return bound_tool_message(message | {"content": f"error: {arguments.get('error')}"})
        if self._gate is not None:
            decision = await self._decision(call["id"], name, arguments)
            if decision["action"] == "deny":
                return bound_tool_message(decision["message"])
        if wrong:
            content: Any = wrong
        elif name not in dispatch:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
        return bound_tool_message(message | {"content": content})

    async def _decision(self, identity: str, name: str, arguments: Any) -> Mapping[str, Any]:
        asked = {"tool_call_id": identity, "name": name, "arguments": arguments}
        status, decision = await self._post(str(self._gate), asked)
        if status != 200 or decision.get("action") == "stop":
            raise RuntimeError(str(decision.get("reason") or decision.get("error") or decision))
        return decision

    async def _post(self, url: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self._session.post(url, json=body) as response:
            return response.status, await response.json()
