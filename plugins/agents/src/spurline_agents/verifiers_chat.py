"""A harness for verifiers: a chat with the tools of the taskset, in this process instead of a program for each turn.

It does what the library's harness `null` does. The library imports it by its id, from the entry in `__all__`.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakKeyDictionary

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1 import ModelContext, ProgramResult, Runtime, TaskData, Trace  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.null import NullHarness  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

from spurline.errors import listing

__all__ = ["ChatHarness"]

# OpenAI's library takes about 80 ms to make a client.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


class ChatHarness(NullHarness):
    """Chats until the model answers without a call of a tool, or its context is full."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Runtime) -> None:
        """Prepare nothing: no program is started."""

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        loop = asyncio.get_running_loop()
        if loop not in _clients:
            _clients[loop] = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
        api = _clients[loop].with_options(base_url=endpoint, api_key=secret)
        async with AsyncExitStack() as stack:
            urls = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            found: Any = await connect_mcp({"mcpServers": urls}, stack, set()) if urls else ([], {}, {})
            tools, places, servers = found
            request: dict[str, Any] = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                try:
                    message = (await api.chat.completions.create(**request)).choices[0].message
                except APIStatusError as error:
                    if "context_length_exceeded" not in str(error) or not trace.num_turns:
                        raise
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    content = await _result_of(call.function.name, call.function.arguments, places, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if not message.tool_calls:
                    break
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _result_of(name: str, arguments: str, places: dict[str, Any], servers: dict[str, Any]) -> Any:
    """Call a tool, and return what the model gets."""
    if name not in places:
        return f"error: there is no tool '{name[:80]}'. Tools: {listing(places)}."
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments of {name} are not valid JSON ({error})."
    return await call_mcp(servers, places, name, given)
