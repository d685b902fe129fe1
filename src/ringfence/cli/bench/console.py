"""From a call that a person must approve to the event at a page of the console that is open: what they wait to see it.

Through a whole gateway: the call over Streamable HTTP, the event by the stream that a browser has. The stream looks for
changes now and then, so calls come at times that are spread over that.
"""

from __future__ import annotations

import http.client
import json
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import anyio
from mcp import Client

from ringfence.cli.bench import echo
from ringfence.cli.bench.gateway import MODES, free_port, wait_for
from ringfence.cli.bench.measure import Row, row
from ringfence.console.live import LOOK_SECONDS
from ringfence.core.errors import Unavailable

_CONFIG = """version: 1
gateway: {{listen: "127.0.0.1:{port}", state: {state}, approval_wait_seconds: 0}}
servers: {{echo: {{url: "http://127.0.0.1:{echo}/mcp", pins: first_use}}}}
capabilities: {{echo: {{server: echo, mode: write, approval: always}}}}
"""
_LINK = re.compile(r"/console/login#(\S+)")
_PATIENCE = 60.0
Events = queue.SimpleQueue[tuple[float, int]]


def run(calls: int) -> list[Row]:
    """Raises Unavailable where no gateway comes up, or an event does not come."""
    with _gateway() as (port, code), _page(port, code) as events:
        seconds = anyio.run(_measure, f"http://127.0.0.1:{port}/mcp", events, calls)
    return [row("a question at an open page, after its call", seconds)]


async def _measure(url: str, events: Events, calls: int) -> list[float]:
    out: list[float] = []
    async with Client(url, mode=MODES["2025-11-25"], cache=None) as client:
        for number in range(calls):
            await anyio.sleep(random.uniform(0, 2 * LOOK_SECONDS))  # noqa: S311 - no secret
            began = time.perf_counter()
            await client.call_tool("echo", {"text": f"hello {number}"})
            out.append(await anyio.to_thread.run_sync(_seen, events, number + 1) - began)
    return out


def _seen(events: Events, waiting: int) -> float:
    """When the page was told that so many questions wait."""
    while True:
        try:
            at, count = events.get(timeout=_PATIENCE)
        except queue.Empty:
            raise Unavailable("bench", f"no event came for question {waiting}") from None
        if count >= waiting:
            return at


@contextmanager
def _page(port: int, code: str) -> Iterator[Events]:
    """The stream of an open page, for whoever logs in with this code."""
    place, events = f"127.0.0.1:{port}", Events()
    login = http.client.HTTPConnection(place, timeout=_PATIENCE)
    headers = {"origin": f"http://{place}", "content-type": "application/x-www-form-urlencoded"}
    login.request("POST", "/console/login", urlencode({"credential": code}), headers)
    answer = login.getresponse()
    cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
    login.close()
    if answer.status != 303:
        raise Unavailable("bench", f"the console let nobody in ({answer.status})")
    stream = http.client.HTTPConnection(place, timeout=_PATIENCE)
    stream.request("GET", "/console/events", headers={"cookie": cookie})
    lines = stream.getresponse()

    def read() -> None:
        try:
            for line in lines:
                if line.startswith(b"data: {") and b"waiting" in line:
                    events.put((time.perf_counter(), json.loads(line.removeprefix(b"data: "))["waiting"]))
        except (OSError, ValueError, http.client.HTTPException):
            return  # it is over

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield events
    finally:
        if stream.sock is not None:
            stream.sock.close()


@contextmanager
def _gateway() -> Iterator[tuple[int, str]]:
    """Its port, and the code that logs its person in."""
    ports = [free_port(), free_port()]
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        path = Path(folder) / "ringfence.yaml"
        path.write_text(_CONFIG.format(port=ports[1], echo=ports[0], state=Path(folder) / "state"), encoding="utf-8")
        server = subprocess.Popen([sys.executable, echo.__file__, str(ports[0])])
        try:
            wait_for(ports[0])
            command = [sys.executable, "-m", "ringfence.cli.main", "serve", "--config", str(path)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
                try:
                    assert gateway.stdout is not None
                    found = next((match for line in gateway.stdout if (match := _LINK.search(line))), None)
                    if found is None:
                        raise Unavailable("bench", "the gateway gave no link to its console")
                    threading.Thread(target=gateway.stdout.read, daemon=True).start()
                    wait_for(ports[1])
                    yield ports[1], found[1]
                finally:
                    gateway.terminate()
        finally:
            server.terminate()
            server.wait(10)
