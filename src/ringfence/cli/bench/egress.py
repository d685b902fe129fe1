"""What leaves a box: the cost of a request through its proxy, and of searching its output for secrets.

Requests go over a direct connection, through a tunnel, with TLS ended at the proxy, and with a secret put in, by policy
and on record. Client, proxy and server are processes of their own, as in use: the proxy runs here.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import ringfence
from ringfence import config
from ringfence.audit.keys import load_or_create
from ringfence.cli.bench import far
from ringfence.cli.bench.measure import Row, note, row
from ringfence.compose.secrets import ConfiguredSecrets
from ringfence.config.settings import Config
from ringfence.core.box import ServedRoute
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Access
from ringfence.core.record import dataclass
from ringfence.core.secret import Secret
from ringfence.egress import names
from ringfence.egress.tls import Authority, outside
from ringfence.governance.policy import Policy
from ringfence.governance.route import ConfiguredRouter, ProxyServer
from ringfence.secrets.redaction import RedactingStream, SecretMatcher
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
_PIECE = 64 * 1024
_BYTES = 16 << 20
_FEW = 10
_MANY = 100
DIRECT = "direct"
TUNNELLED = "tunnelled"
INSPECTED = "TLS ends here"
BROKERED = "brokered, on record"


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
    """The cases, each with a proxy of its own, as each box has."""
    os.environ[_VARIABLE] = secrets.token_hex(24)
    stack.callback(os.environ.pop, _VARIABLE, None)
    settings = config.loads(_CONFIG.format(state=folder / "state"), file="bench", base=folder)
    router = await _way_out(stack, settings, real)
    trusted = real.pem.decode()
    cases = [_Case(DIRECT, None, trusted), _Case(f"new connection, {DIRECT}", None, trusted, anew=True)]
    for name, access in (
        (TUNNELLED, Access("tunnel")),
        (INSPECTED, Access("inspect")),
        (BROKERED, Access("tunnel", secrets=("token",), capability="bench")),
    ):
        route = await router.route(access)
        assert route.serve is not None
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = int(listener.getsockname()[1])
        way: ServedRoute = await route.serve(listener)
        stack.push_async_callback(way.close)
        trust = trusted if way.authority is None else way.authority.decode()
        token = next(iter(route.env.values()), None)
        cases.append(_Case(name, proxy, trust, token))
        cases.append(_Case(f"new connection, {name}", proxy, trust, token, anew=True))
    return cases


async def _way_out(stack: AsyncExitStack, settings: Config, real: Authority) -> ConfiguredRouter:
    safe = ConfiguredSecrets(settings)
    await safe.load()
    store = Store.open(settings.gateway.state, load_or_create(settings.gateway.state.with_name("keys")))
    stack.callback(store.close)
    policy = Policy((), preset=settings.policy.preset, environment=settings.environment)
    trust = outside()
    trust.load_verify_locations(cadata=real.pem.decode())
    return ConfiguredRouter(settings.networks, ProxyServer(_resolve, trust), safe.broker(lambda: policy, store))


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


# ── Output, searched for secrets ──────────────────────────────────────────────────────────────────


def run_redaction(rounds: int = 3) -> list[Row]:
    """The text is this program's own source, which is what programs print most like."""
    text = _text()
    few = _values(_FEW)
    many = _values(_MANY)
    leaking = few.leaking(text)
    cases = (
        ("redaction, shapes alone, streamed", SecretMatcher(), text),
        (f"redaction, {_FEW} secrets, streamed", few.values, text),
        (f"redaction, {_MANY} secrets, streamed", many.values, text),
        (f"redaction, {_FEW} secrets, one in every 64 KiB, streamed", few.values, leaking),
    )
    rows = []
    for name, values, data in cases:
        _streamed(values, data[: 4 * _PIECE])
        began = time.process_time()
        times = [seconds for _ in range(rounds) for seconds in _streamed(values, data)]
        made = row(name, times)
        # Of processor time: what else the machine does is not to be measured.
        made.mb_per_second = round(rounds * len(data) / (time.process_time() - began) / 1e6, 1)
        rows.append(made)
    return rows


class _Known:
    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self.values = SecretMatcher([Secret(f"s{index}", text) for index, text in enumerate(texts)])

    def leaking(self, data: bytes) -> bytes:
        """The data, a value in each piece of it."""
        pieces = [data[at : at + _PIECE - 64] for at in range(0, len(data), _PIECE - 64)]
        return b"".join(piece + self._texts[n % len(self._texts)].encode() for n, piece in enumerate(pieces))


def _values(count: int) -> _Known:
    return _Known([secrets.token_urlsafe(32) for _ in range(count)])


def _text() -> bytes:
    sources = sorted(Path(ringfence.__file__).parent.rglob("*.py"))
    once = b"".join(path.read_bytes() for path in sources)
    return (once * (_BYTES // len(once) + 1))[:_BYTES]


def _streamed(values: SecretMatcher, data: bytes) -> list[float]:
    stream = RedactingStream(values)
    times = []
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        began = time.perf_counter()
        stream.feed(piece)
        times.append(time.perf_counter() - began)
    stream.finish()
    return times
