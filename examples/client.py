"""Call a tool through a running gateway and say why it ended as it did: python client.py URL TOOL [JSON]."""

import asyncio
import json
import sys

from mcp import Client


async def main(url: str, tool: str, arguments: str = "{}") -> None:
    async with Client(url) as client:
        result = await client.call_tool(tool, json.loads(arguments))
        meta = result.meta or {}
        print(meta["ringfence/outcome"]["status"], meta["ringfence/outcome"]["reason_code"])
        print(meta["ringfence/facts"]["explanation"])
        for block in result.content:
            print(getattr(block, "text", block))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
