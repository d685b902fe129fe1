"""What it takes to start: a verb in a process of its own, and the first run of a program that uses the SDK, each
against an interpreter that has nothing to do. No keeper runs, and nothing is kept ready from one to the next.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ringfence.cli.bench.measure import BenchCase, Row, Work, interleaved
from ringfence.core.errors import Unavailable

_COMMAND = "import sys; from ringfence.cli.main import main; sys.exit(main())"
_CASES = {
    "ringfence --version": (_COMMAND, "--version"),
    "ringfence --help": (_COMMAND, "--help"),
    "ringfence run -c pass": (_COMMAND, "run", "-c", "pass"),
    "import ringfence; run_code('pass')": ("import ringfence; ringfence.run_code('pass')",),
}


def run(runs: int, rounds: int = 5) -> list[Row]:
    """`runs` of each. Raises Unavailable where one fails, as without boxes."""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        environment = _environment(Path(folder))
        bare = BenchCase("bare python -c pass", _started(environment, "pass"), runs)
        cases = [BenchCase(name, _started(environment, *words), runs, bare.name) for name, words in _CASES.items()]
        return asyncio.run(interleaved([bare, *cases], rounds, "start"))


def _environment(folder: Path) -> Mapping[str, str]:
    """One without a configuration, and with a record of its own. What is compiled is kept, as after an installation."""
    ours = ("RINGFENCE_CONFIG", "RINGFENCE_KEYS", "PYTHONDONTWRITEBYTECODE")
    given = {name: value for name, value in os.environ.items() if name not in ours}
    return given | {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}


def _started(environment: Mapping[str, str], source: str, *words: str) -> Work:
    command = (sys.executable, "-c", source, *words)

    async def once() -> None:
        done = subprocess.run(  # noqa: ASYNC221 - nothing else is to happen meanwhile
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
        )
        if done.returncode != 0:
            raise Unavailable("bench", f"{' '.join(words) or source} ended with {done.returncode}")

    return once
