"""A server in a box, for a client that does not know Ringfence: put `ringfence wrap` before the server's command.

    python examples/boxed_server.py

The server sees the folder that it was given, and neither the rest of the disk nor the network.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from mcp import Client, StdioServerParameters

SERVER = """
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")


@server.tool()
def read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else "there is no such file"


server.run("stdio")
"""


async def ask(server: Path, notes: Path, diary: Path) -> None:
    words = ["-m", "ringfence.cli.main", "wrap", "--mount", f"{notes}:/notes", "--", sys.executable, str(server)]
    async with Client(StdioServerParameters(command=sys.executable, args=words), mode="legacy") as client:
        for path in ("/notes/today.txt", str(diary)):
            result = await client.call_tool("read", {"path": path})
            print(f"{path.rpartition('/')[2]}: {result.content[0].text}")  # type: ignore[union-attr]


with tempfile.TemporaryDirectory() as folder:
    code, shared, private = Path(folder, "code"), Path(folder, "notes"), Path(folder, "diary.txt")
    code.mkdir()
    shared.mkdir()
    (code / "server.py").write_text(SERVER)
    (shared / "today.txt").write_text("Water the plants.")
    private.write_text("Nobody's business.")
    asyncio.run(ask(code / "server.py", shared, private))
