"""A gateway as a real process, its clients, and the evidence that it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client

from ringfence.audit.export import verify_live
from ringfence.audit.keys import Keys, load_or_create
from ringfence.core import canonical
from ringfence.store import Reader, Record, Store
from tests import tooling

Json = dict[str, Any]
SERVER = tooling.fixture_command("hostile_server.py")
_SERVES = re.compile(r"at (http://127\.0\.0\.1:\d+/mcp)")


class Zygote:
    """The process that forks gateways; see zygote.py."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("zygote.py")
        path = os.pathsep.join(filter(None, (str(tooling.ROOT / "src"), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._say() == "ready"

    def fork(self, order: Json) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._say())

    def _say(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=120)


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that serves."""

    pid: int
    log: Path
    url: str

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Without a word of warning, as a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        tooling.wait_until_gone(self.pid)

    def stop(self) -> None:
        if tooling.alive(self.pid):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        tooling.wait_until_gone(self.pid)


@dataclass(slots=True)
class Stage:
    """One installation: its files, its gateways, and what its tools did."""

    folder: Path
    zygote: Zygote
    running: list[Running] = field(default_factory=list)
    disk: Path | None = None
    """Where the state is seen from here, if not where the gateway sees it."""
    _starts: int = 0

    @property
    def state(self) -> Path:
        return self.disk or self.folder / "state"

    @property
    def keys(self) -> Keys:
        return load_or_create(self.folder / "keys")

    @property
    def env(self) -> dict[str, str]:
        return {"RINGFENCE_KEYS": str(self.folder / "keys")}

    @property
    def effects(self) -> Path:
        """Where the tool `append` leaves its lines."""
        return self.folder / "effects.txt"

    def done(self) -> Counter[str]:
        """What really happened out there."""
        return Counter(self.effects.read_text().splitlines()) if self.effects.exists() else Counter()

    def line(self, text: str) -> Json:
        """The arguments that have `append` leave this line."""
        return {"path": str(self.effects), "text": text}

    # ── configuration ──

    def configure(self, name: str = "ringfence.yaml", **sections: Any) -> Path:
        """A configuration file; JSON is YAML. What is not said is the least that works."""
        # In no box: what is on trial is the log, over hundreds of starts, and the server writes down what it did.
        server: Json = {"command": SERVER, "pins": "first_use", "placement": "unsafe_host"}
        server["env"] = {"STAGE": str(self.folder)}
        whole: Json = {
            "version": 1,
            "gateway": {"listen": "127.0.0.1:0", "state": str(self.state), "approval_wait_seconds": 0},
            "servers": {"tools": server},
            "capabilities": {
                "echo": {"server": "tools", "mode": "read"},
                "append": {"server": "tools", "mode": "write", "log": {"arguments": "redacted"}},
                "slow": {"server": "tools", "mode": "write"},
            },
            "policy": {"preset": "permissive"},
        }
        for section, value in sections.items():
            whole[section] = {**whole.get(section, {}), **value} if isinstance(value, dict) else value
        path = self.folder / name
        path.write_text(json.dumps(whole))
        return path

    # ── gateways ──

    def start(self, config: Path, **order: Any) -> Running:
        """A gateway on this configuration, once it serves."""
        self._starts += 1
        log = self.folder / f"gateway-{self._starts}.log"
        argv = ["serve", "--config", str(config)]
        pid = self.zygote.fork({"argv": argv, "env": self.env, "log": str(log), **order})
        deadline = time.monotonic() + tooling.PATIENCE
        while True:
            text = log.read_text(errors="replace") if log.exists() else ""
            if found := _SERVES.search(text):
                break
            if not tooling.alive(pid) or time.monotonic() > deadline:
                raise AssertionError(f"the gateway does not serve:\n{text}")
            time.sleep(0.005)
        gateway = Running(pid, log, found[1])
        self.running.append(gateway)
        return gateway

    @contextmanager
    def serving(self, config: Path, **order: Any) -> Iterator[Running]:
        gateway = self.start(config, **order)
        try:
            yield gateway
        finally:
            gateway.stop()

    def run(self, *argv: str | Path) -> tuple[int, str]:
        """One verb of the command line on this installation: its exit code and what it said."""
        self._starts += 1
        log = self.folder / f"run-{self._starts}.log"
        pid = self.zygote.fork({"argv": [str(word) for word in argv], "env": self.env, "log": str(log)})
        tooling.wait_until_gone(pid)
        return int(Path(f"{log}.code").read_text()), log.read_text()

    def servers(self) -> list[int]:
        """The processes of its servers that run just now, whoever started them."""
        mark, found = f"STAGE={self.folder}\0".encode(), []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and mark in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return [pid for pid in found if tooling.alive(pid)]

    # ── evidence ──

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        reader = Reader.open(self.state)
        try:
            yield reader
        finally:
            reader.close()

    @contextmanager
    def opened(self) -> Iterator[Store]:
        with Store.open(self.state, self.keys) as store:
            yield store

    def records(self, **wanted: Any) -> list[Record]:
        with self.reading() as reader:
            return list(reader.records(**wanted))

    def assert_verifies(self) -> None:
        """The whole log against itself and what was signed about it."""
        with self.reading() as reader:
            report = verify_live(*reader.evidence(), self.keys.public, reader.record)
        assert report.ok, str(report)

    def assert_kept(self, receipts: Iterable[Json]) -> None:
        """Every receipt that a client holds is in the database, at its place and with its hash."""
        there = {(r.chain, r.seq): r.hash for r in self.records()}
        lost = [r for r in receipts if there.get((r["chain"], r["seq"])) != r["head"]]
        assert lost == []

    def assert_each_call_closed_once(self) -> None:
        records = self.records()
        started = Counter(r.call_id for r in records if r.kind == "started")
        finished = Counter(r.call_id for r in records if r.kind == "finished")
        assert set(finished.values()) <= {1}
        assert set(started.values()) <= {1}
        assert started.keys() <= finished.keys()

    def assert_each_effect_was_started(self) -> None:
        """Each line out there belongs to a *started* record of its own; the arguments kept beside it say to which."""
        begun: Counter[str] = Counter()
        with self.reading() as reader:
            for record in reader.records(kind="started"):
                if record.body["call"]["tool"] != "append":
                    continue
                payload = reader.payload(str(record.call_id), "arguments")
                assert payload is not None
                assert canonical.salted_bytes(payload.body, payload.salt) == record.body["arguments"]["digest"]
                begun[json.loads(payload.body)["text"]] += 1
        assert self.done() - begun == Counter()


@dataclass(frozen=True, slots=True)
class Said:
    """What the gateway answered to one call."""

    status: str
    reason_code: str
    call_id: str
    approval_id: str | None
    receipt: Json | None
    text: str
    facts: Json


class Caller:
    """An MCP client of the official SDK."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(
        self, tool: str, arguments: Mapping[str, Any], *, key: str | None = None, wait: float | None = None
    ) -> Said:
        given = {"ringfence/idempotency_key": key, "ringfence/wait_seconds": wait}
        meta: Any = {name: value for name, value in given.items() if value is not None}
        result = await self._client.call_tool(tool, dict(arguments), meta=meta)
        about: Json = dict(result.meta or {})
        told = about["ringfence/outcome"]
        text = "\n".join(getattr(block, "text", "") for block in result.content)
        return Said(
            told["status"],
            told["reason_code"],
            told["call_id"],
            told.get("approval_id"),
            about.get("ringfence/receipt"),
            text,
            about["ringfence/facts"],
        )


@asynccontextmanager
async def client(gateway: Running, mode: str = "2026-07-28") -> AsyncIterator[Caller]:
    async with Client(gateway.url, mode=mode, cache=None) as made:
        yield Caller(made)
