"""A gateway inside your own program. Policy `strict` lets reads pass and asks a person before writes."""

import asyncio
import sys
from pathlib import Path

from ringfence import Gateway

SERVER = [sys.executable, str(Path(__file__).with_name("weather_server.py"))]


async def main() -> None:
    async with Gateway(upstream=[SERVER], policy="strict", approval_wait_seconds=0) as gateway:
        print("offered:", ", ".join(tool["name"] for tool in await gateway.list_tools()))

        read = await gateway.call_tool("forecast", {"city": "Oslo"})
        print(read.status, "-", read.text)
        print("because:", read.facts["explanation"])

        write = await gateway.call_tool("subscribe", {"city": "Oslo", "mail": "kari@example.org"})
        print(write.status, "-", write.message)

        wrong = await gateway.call_tool("forecats", {"city": "Oslo"})
        print(wrong.status, "-", wrong.message)


if __name__ == "__main__":
    asyncio.run(main())
