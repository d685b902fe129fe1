"""Programs on record, run again: one that always does the same, one that reads the clock, one that draws lots."""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ringfence import Gateway

CONFIG = """
gateway: {state: ./state}
capabilities: {execute_python: {transport: sandboxed_exec, mode: high_risk, approval: none, record: full}}
"""
PROGRAMS = {
    "a sum": "print(sum(range(100)))",
    "the time": "import time\nprint(time.time())",
    "a draw": "import random\nprint(random.choice(range(10**9)))",
}


async def record(path: Path) -> dict[str, str]:
    """Let an agent run them; what they are is kept, sealed."""
    async with Gateway.from_config(path) as gateway:
        ended = {name: await gateway.call_tool("execute_python", {"code": code}) for name, code in PROGRAMS.items()}
    return {name: outcome.facts["call_id"] for name, outcome in ended.items()}


def replay(path: Path, call_id: str) -> str:
    """What `ringfence audit replay` says of one."""
    words = ["audit", "replay", call_id, "--config", str(path), "--json"]
    done = subprocess.run([sys.executable, "-m", "ringfence.cli.main", *words], capture_output=True, text=True)
    told = json.loads(done.stdout)
    if told["same"]:
        return "the same"
    return ", ".join(f"{each['what']} differs by {' and '.join(each['kinds'])}" for each in told["differences"])


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "ringfence.yaml"
    path.write_text(CONFIG)
    for name, call_id in asyncio.run(record(path)).items():
        print(f"{name}: {replay(path, call_id)}")
