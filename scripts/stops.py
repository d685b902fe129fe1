"""Prints the stops of real calls: which files of the source each enters, in order, and by which functions.

    python scripts/stops.py

It starts the demo gateway, makes each call once so that everything is loaded, and then once more, traced: a tool of an
upstream server, `execute_python` in a fresh box, and `execute_python` in a session. Traced are the gateway and the
keeper. What runs in a zygote or in a box is not: its files are `sandbox/process/zygote/` and `guest/`.

A file that docs/architecture.md names as a stop has the number that it has there; a test compares the two.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = f"{ROOT / 'src' / 'ringfence'}/"
PAGE = ROOT / "docs" / "architecture.md"
UNTRACED = ("sandbox/process/zygote/", "sandbox/process/guest/")
PATHS = {"call": "The path of a call", "run": "The path of a run", "step": "The path of a step"}
"""The calls that are traced, and the headings of the page that describe them."""
_SHOWN = 4
_PATIENCE = 300.0
_SERVED = re.compile(r"serves \d+ tools at (http://127\.0\.0\.1:\d+/mcp)")
"""What the gateway prints once it listens, at a port that the kernel chose."""
_PROGRAM = """
import os
os.makedirs("/workspace/output", exist_ok=True)
open("/workspace/output/answer", "w").write("42")
print(6 * 7)
"""


# ── Tracing, in the gateway and in the keeper ─────────────────────────────────────────────────────


class Tracer:
    """Notes when a file of ours is entered from another one, and by which function."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[int, str] = {}
        self._entered: list[tuple[int, str, str]] = []
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        thread = threading.get_ident()
        if self._last.get(thread) != code.co_filename:
            self._last[thread] = code.co_filename
            self._entered.append((time.monotonic_ns(), code.co_filename[len(SOURCE) :], code.co_name))

    def write(self) -> None:
        sys.setprofile(None)
        (whole := self._folder / f"{os.getpid()}.now").write_text(json.dumps(self._entered))
        whole.rename(whole.with_suffix(".json"))


def traced(folder: Path, words: list[str]) -> None:
    """The command line in this process, and the keeper that it starts, traced."""
    keeper = importlib.import_module("ringfence.compose.keeper")
    begin = "from ringfence.compose.keeper import main\n"
    end = "main()\n"
    program = vars(keeper)["_PROGRAM"]
    assert begin in program
    assert program.endswith(end)
    here = f"sys.path.insert(0, {str(ROOT)!r})\nfrom scripts.stops import Tracer\nfrom pathlib import Path\n"
    start = f"{here}tracer = Tracer(Path({str(folder)!r}))\n"
    vars(keeper)["_PROGRAM"] = program.removesuffix(end) + f"{start}try:\n    main()\nfinally:\n    tracer.write()\n"
    main = importlib.import_module("ringfence.cli.main")
    tracer = Tracer(folder)
    sys.argv = ["ringfence", *words]
    try:
        main.main()
    finally:
        tracer.write()


# ── Making the calls ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Client:
    """As little of an MCP client as makes calls."""

    url: str
    headers: dict[str, str] = field(
        default_factory=lambda: {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    )
    number: int = 0

    def open(self) -> None:
        about = {"name": "stops", "version": "1"}
        self.request("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": about})
        self.headers["mcp-protocol-version"] = "2025-11-25"
        self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        answer = self.request("tools/call", {"name": tool, "arguments": dict(arguments)})
        if answer.get("isError"):
            raise SystemExit(f"{tool} did not succeed: {answer['content']}")
        return answer

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        self.number += 1
        text = self._post({"jsonrpc": "2.0", "id": self.number, "method": method, "params": dict(params)})
        lines = [line.removeprefix("data:") for line in text.splitlines() if line.startswith(("data:", "{"))]
        messages = [json.loads(line) for line in lines if line.strip()]
        return next(message["result"] for message in messages if message.get("id") == self.number)

    def _post(self, message: Mapping[str, Any]) -> str:
        request = urllib.request.Request(self.url, json.dumps(message).encode(), self.headers)  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=_PATIENCE) as response:  # noqa: S310 - as above
            if session := response.headers.get("mcp-session-id"):
                self.headers["mcp-session-id"] = session
            return str(response.read().decode())


@contextmanager
def demo(folder: Path) -> Iterator[str]:
    """The demo gateway in a process of its own, traced, while the block lasts; at its end the traces are written."""
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONUNBUFFERED": "1"}
    for name in [name for name in environment if name.startswith(("XDG_", "RINGFENCE_"))]:
        del environment[name]
    (folder / "home").mkdir()
    command = [sys.executable, __file__, str(folder), "serve", "--demo", "--port", "0"]
    with (folder / "log").open("wb") as log:
        gateway = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        _wait(lambda: _SERVED.search((folder / "log").read_text()), gateway, folder / "log")
        found = _SERVED.search((folder / "log").read_text())
        assert found is not None
        yield found[1]
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(_PATIENCE)


def _wait(reached: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while not reached():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the gateway did not start:\n{log.read_text()}")
        time.sleep(0.05)


Stops = dict[str, list[str]]
"""The files that a call enters, in order, each with the functions that it is entered by."""


def stops_of_calls() -> dict[str, Stops]:
    """Real calls, traced: the stops of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times: dict[str, tuple[int, int]] = {}
        with demo(folder) as url:
            client = Client(url)
            client.open()
            code = {"code": _PROGRAM}
            calls: dict[str, tuple[str, Mapping[str, Any]]] = {
                "call": ("search_docs", {"query": "refunds"}),
                "run": ("execute_python", code),
                "step": ("execute_python", code),
            }
            for which, (tool, arguments) in calls.items():
                if which == "step":
                    session = client.call("open_session", {})["structuredContent"]["session"]
                    arguments = {**arguments, "session": session}
                client.call(tool, arguments)  # loads what is loaded once
                began = time.monotonic_ns()
                client.call(tool, arguments)
                times[which] = (began, time.monotonic_ns())
            client.call("close_session", {"session": session})
        # The keeper lingers for some seconds after its last session, and writes its trace when it ends.
        gateway_and_keeper = 2
        until = time.monotonic() + _PATIENCE
        while len(found := list(folder.glob("*.json"))) < gateway_and_keeper and time.monotonic() < until:
            time.sleep(0.1)
        entered = sorted(tuple(each) for file in found for each in json.loads(file.read_text()))
    return {which: _between(entered, *span) for which, span in times.items()}


def _between(entered: list[tuple[Any, ...]], began: int, ended: int) -> Stops:
    stops: Stops = {}
    for at, file, function in entered:
        if began <= at <= ended:
            functions = stops.setdefault(file, [])
            if function not in functions and not function.startswith("<"):
                functions.append(function)
    return stops


# ── Comparing with the page ───────────────────────────────────────────────────────────────────────


def on_page(which: str) -> dict[str, int]:
    """The files that docs/architecture.md names on a path, by the number of their stop."""
    section = PAGE.read_text().split(f"## {PATHS[which]}\n")[1].split("\n## ")[0]
    named: dict[str, int] = {}
    for number, text in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section, re.MULTILINE | re.DOTALL):
        folder = ""
        for word in re.findall(r"`([\w/]+\.py)`", text):
            folder = f"{Path(word).parent}/" if "/" in word else folder
            named.setdefault(word if "/" in word else folder + word, int(number))
    return named


def main() -> None:
    for which, stops in stops_of_calls().items():
        known = on_page(which)
        print(f"{PATHS[which]}: {len(stops)} files, {len(known)} of them stops of the page")
        for file, functions in stops.items():
            more = f", and {len(functions) - _SHOWN} more" if len(functions) > _SHOWN else ""
            print(f"  {known.get(file, ''):>3} {file:44} {', '.join(functions[:_SHOWN])}{more}")
        print()


if __name__ == "__main__":
    if sys.argv[1:]:
        traced(Path(sys.argv[1]), sys.argv[2:])
    else:
        main()
