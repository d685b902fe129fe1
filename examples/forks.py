"""One starting point, several attempts at once, each in a box of its own that the others cannot reach."""

import asyncio

from ringfence import AsyncSandbox, RingfenceError

ATTEMPTS = ("sum(numbers)", "max(numbers)", "while True: pass", "numbers / 2")


async def attempt(sandbox: AsyncSandbox, expression: str) -> str:
    async with sandbox:
        await sandbox.run_code("numbers = [int(line) for line in open('numbers')]")
        execution = await sandbox.run_code(expression, timeout=1)
        return f"{expression}: {execution.text if execution.error is None else execution.error.name}"


async def main() -> None:
    async with await AsyncSandbox.create() as start:
        await start.files.write("numbers", "1\n2\n39\n")
        children = await start.fork(len(ATTEMPTS))
        tries = [
            attempt(child, expression)
            for child, expression in zip(children, ATTEMPTS, strict=True)
            if not isinstance(child, RingfenceError)
        ]
        print("\n".join(await asyncio.gather(*tries)))


asyncio.run(main())
