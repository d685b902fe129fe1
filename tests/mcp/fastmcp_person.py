# mypy: ignore-errors
# (what it imports is installed in an environment of its own)
"""A person at a client of fastmcp, who is asked about a call and answers as they were told to.

It prints as JSON what they saw, and what came of the call.

    python fastmcp_person.py URL MODE ANSWER TEXT

MODE is what fastmcp calls a revision: `legacy`, `auto` or its date. ANSWER is `approve`, `deny` or `decline`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from fastmcp import Client
from fastmcp.client.elicitation import ElicitResult

PATIENCE = 120.0
"""Seconds that the client waits: those of its own may be too few on a busy machine."""


async def main(url: str, mode: str, answer: str, text: str) -> None:
    shown = []

    async def asked(message: str, response_type: Any, params: Any, context: Any) -> Any:
        shown.append(message)
        # The type is fastmcp's own, made of the question's schema: it takes no other answer.
        return ElicitResult(action="decline") if answer == "decline" else response_type(answer=answer)

    async with Client(url, mode=mode, elicitation_handler=asked, timeout=PATIENCE, init_timeout=PATIENCE) as client:
        revision = client.protocol_version
        result = await client.call_tool("echo", {"text": text}, raise_on_error=False)
    told = "".join(getattr(block, "text", "") for block in result.content)
    outcome = result.meta["ringfence/outcome"]
    print(json.dumps({"revision": revision, "shown": shown, "read": told, "outcome": outcome}))


asyncio.run(main(*sys.argv[1:]))
