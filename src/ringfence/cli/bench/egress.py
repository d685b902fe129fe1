"""What the way out of a box adds to a request: over a direct connection, through a tunnel, where TLS ends here, and
with a secret put in by policy and on record.

Client, proxy and server are processes of their own, as they are in use: the proxy lives here, in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ringfence import config
from ringfence.audit.keys import load_or_create
from ringfence.box import Way
from ringfence.cli.bench import far
from ringfence.cli.bench.measure import Row, row
from ringfence.cli.bench.staging import note
from ringfence.config.settings import Config
from ringfence.egress import names
from ringfence.egress.tls import Authority, outside
from ringfence.errors import Unavailable
from ringfence.outward import Serving, WayOut
from ringfence.policy import Policy
from ringfence.ports import Access
from ringfence.safe import Safe
from ringfence.store import Store

_HOST = "api.example"
_VARIABLE = "RINGFENCE_BENCH_TOKEN"
_ROUNDS = 6
_CONFIG = f"""version: 1
networks:
  tunnel:  {{{{allow: ["{_HOST}"], addresses: [127.0.0.1]}}}}
  inspect: {{{{allow: ["{_HOST}"], addresses: [127.0.0.1], inspect: true}}}}
secrets:
  token: {{{{from: env, name: {_VARIABLE}, hosts: ["{_HOST}"], header: Authorization}}}}
gateway: {{{{state: {{state}}}}}}
"""
DIRECT, TUNNELLED, INSPECTED, BROKERED = "direct", "tunnelled", "TLS ends here", "brokered, on record"


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    proxy: int | None
    trust: str
    token: str | None = None
    anew: bool = False


def run(requests: int) -> list[Row]:
    return asyncio.run(_measured(requests))


async def _measured(requests: int) -> list[Row]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-bench-")))
        real = Authority()
        port = await stack.enter_async_context(_server(real, folder))
        asker = await stack.enter_async_context(_started("ask"))
        cases = await _cases(stack, real, folder)
        times: dict[str, list[float]] = {case.name: [] for case in cases}
        for number in range(_ROUNDS + 1):
            note(f"egress: round {number} of {_ROUNDS}" if number else "egress: warming up")
            for case in cases:
                count = max(5, requests // _ROUNDS // (4 if case.anew else 1))
                spent = await _ask(asker, case, port, count if number else 5)
                times[case.name] += spent if number else []
    return _rows(times)


def _rows(times: dict[str, list[float]]) -> list[Row]:
    """Each kind against the direct one of its kind; what was added is the difference of their medians."""
    rows: dict[str, Row] = {}
    for name, seconds in times.items():
        base = rows.get(DIRECT if not name.startswith("new") else f"new connection, {DIRECT}")
        rows[name] = made = row(name, seconds, base)
        if base is not None:
            made.added_ms = round(made.p50_ms - base.p50_ms, 4)
    return list(rows.values())


# ── The stage ──


async def _cases(stack: AsyncExitStack, real: Authority, folder: Path) -> list[_Case]:
    """Each with a proxy of its own, as each box has."""
    os.environ[_VARIABLE] = secrets.token_hex(24)
    stack.callback(os.environ.pop, _VARIABLE, None)
    settings = config.loads(_CONFIG.format(state=folder / "state"), file="bench", base=folder)
    outward = await _way_out(stack, settings, real)
    trusted = real.pem.decode()
    cases = [_Case(DIRECT, None, trusted), _Case(f"new connection, {DIRECT}", None, trusted, anew=True)]
    for name, access in (
        (TUNNELLED, Access("tunnel")),
        (INSPECTED, Access("inspect")),
        (BROKERED, Access("tunnel", secrets=("token",), capability="bench")),
    ):
        passage = await outward.passage(access)
        assert passage.serve is not None
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = int(listener.getsockname()[1])
        way: Way = await passage.serve(listener)
        stack.push_async_callback(way.close)
        trust = trusted if way.authority is None else way.authority.decode()
        token = next(iter(passage.env.values()), None)
        cases.append(_Case(name, proxy, trust, token))
        cases.append(_Case(f"new connection, {name}", proxy, trust, token, anew=True))
    return cases


async def _way_out(stack: AsyncExitStack, settings: Config, real: Authority) -> WayOut:
    safe = Safe(settings)
    await safe.load()
    store = Store.open(settings.gateway.state, load_or_create(settings.gateway.state.with_name("keys")))
    stack.callback(store.close)
    policy = Policy((), preset=settings.policy.preset, environment=settings.environment)
    trust = outside()
    trust.load_verify_locations(cadata=real.pem.decode())
    return WayOut(settings.networks, Serving(_resolve, trust), safe.lending(lambda: policy, store))


async def _resolve(name: str) -> Sequence[str]:
    return ["127.0.0.1"]


@asynccontextmanager
async def _server(real: Authority, folder: Path) -> AsyncIterator[int]:
    file = folder / "certificate.pem"
    file.write_bytes(real.pair(names.host(_HOST)))
    async with _started("serve", str(file)) as process:
        assert process.stdout is not None
        yield int(await process.stdout.readline())


@asynccontextmanager
async def _started(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, far.__file__, *words, stdin=pipe, stdout=pipe, limit=1 << 24
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _ask(asker: asyncio.subprocess.Process, case: _Case, port: int, count: int) -> list[float]:
    assert asker.stdin is not None and asker.stdout is not None
    order = {"port": port, "host": _HOST, "proxy": case.proxy, "trust": case.trust, "token": case.token}
    asker.stdin.write(json.dumps({**order, "anew": case.anew, "count": count}).encode() + b"\n")
    answer = await asker.stdout.readline()
    if not answer:
        raise Unavailable("bench", f"{case.name}: the client ended")
    return [float(each) for each in json.loads(answer)]
