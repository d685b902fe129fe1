"""The way out of a box: one listener in its own network namespace, before anything runs there, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from socket import socket
from types import MappingProxyType
from typing import Any

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Limits, NetworkRule, Program, Serve, ServedRoute
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Cell, Command, StaySpec
from ringfence.egress.tls import Authority
from ringfence.governance.route import ProxyRoute, ProxyServer
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.process import outlet
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.interpreter import Interpreter
from ringfence.sandbox.process.live import LiveBox
from tests import tooling
from tests.egress.outside import LOOPBACK, NOBODY, Names, Server, answering, host_context, trusting
from tests.sandbox import comparing

pytestmark = pytest.mark.anyio

ASK = """
import http.client, sys
def ask(host, port, path="/"):
    way = http.client.HTTPConnection("127.0.0.1", 3128, timeout=25)
    way.request("GET", f"http://{host}:{port}{path}")
    answer = way.getresponse()
    return answer.status, answer.read()
"""
OPEN = NetworkRule("open", ("api.example",), addresses=LOOPBACK)


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


def serve(*rules: NetworkRule, trust: ssl.SSLContext = NOBODY, **known: Sequence[str]) -> Serve:
    return ProxyServer(Names(**{"api_example": ["127.0.0.1"], **known}), trust).by(rules)


async def run(backend: ProcessBackend, source: str, way: Serve | None, **more: Any) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source.encode()), network=way, **more))


# ── What there is ──


async def test_a_box_reaches_whom_a_rule_names_and_its_facts_tell(backend: ProcessBackend) -> None:
    async with answering(Server()) as outside:
        port = outside.port
        report = await run(backend, ASK + f"print(ask('api.example', {port}), ask('no.example', 80)[0])", serve(OPEN))
    assert report.stdout.text == "(200, b'ok') 403\n"
    assert report.network is not None
    (allowed,), (denied,) = report.network["allowed"], report.network["denied"]
    assert (allowed["host"], allowed["port"], allowed["rule"], allowed["count"]) == ("api.example", port, "open", 1)
    assert denied == {"host": "no.example", "port": 80, "count": 1, "rule": "denied", "reason": "host"}
    assert report.network["bytes_out"] == len(outside.requests[0]) and report.network["failed"] == []


async def test_programs_find_the_proxy_in_their_environment(backend: ProcessBackend) -> None:
    async with answering(Server()) as outside:
        url = f"http://api.example:{outside.port}/"
        source = f"import urllib.request\nprint(urllib.request.urlopen({url!r}).read())"
        assert (await run(backend, source, serve(OPEN))).stdout.text == "b'ok'\n"
        mine = await run(backend, "import os\nprint(os.environ['http_proxy'])", serve(OPEN), env={"http_proxy": "mine"})
    assert mine.stdout.text == "mine\n"
    assert len(outside.requests) == 1


async def test_a_box_without_a_network_has_nothing_of_it(backend: ProcessBackend) -> None:
    report = await run(backend, "import os\nprint([n for n in os.environ if 'prox' in n.lower()])\n" + _CONNECT, None)
    assert report.stdout.text == "[]\nECONNREFUSED\n"
    assert report.network is None


_CONNECT = """
import errno, socket
try:
    socket.create_connection(("127.0.0.1", 3128), 2)
    print("open")
except OSError as exc:
    print(errno.errorcode[exc.errno])
"""


async def test_loopback_is_the_boxs_own_unless_a_rule_names_it(backend: ProcessBackend) -> None:
    source = "import os\nprint(os.environ['no_proxy'])"
    assert (await run(backend, source, serve(OPEN))).stdout.text == "localhost,127.0.0.1,::1\n"
    named = NetworkRule("named", ("127.0.0.1:8080",))
    assert (await run(backend, source, serve(named))).stdout.text == "localhost,::1\n"


# ── Trust ──


async def test_a_box_trusts_the_authority_of_its_run_where_tls_ends_here(backend: ProcessBackend) -> None:
    real = Authority()
    rule = NetworkRule("api", ("api.example",), methods=("GET",), addresses=LOOPBACK)
    source = """
import os, ssl, sys, urllib.request
url = sys.argv[1]
print(urllib.request.urlopen(url).read())
bundle = os.environ["SSL_CERT_FILE"]
names = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT")
print(bundle, {os.environ[name] for name in names} == {bundle})
for do in (lambda: open(bundle, "a"), lambda: os.unlink(bundle), lambda: os.mkdir(bundle + ".d")):
    try:
        do()
        print("written")
    except OSError as exc:
        print("refused")
"""
    async with answering(Server(), host_context(real, "api.example")) as outside:
        program = Program("python", source.encode(), (f"https://api.example:{outside.port}/x",))
        report = await backend.run(BoxSpec(program, network=serve(rule, trust=trusting(real))))
    assert report.stdout.text.splitlines() == ["b'ok'", "/run/ringfence/ca.pem True", *["refused"] * 3], report
    assert report.network is not None and report.network["allowed"][0]["inspected"] is True


async def test_a_plain_tunnel_needs_no_authority_and_says_that_it_was_not_inspected(backend: ProcessBackend) -> None:
    real = Authority()
    source = f"""
import os, ssl, urllib.request
context = ssl.create_default_context(cadata={real.pem.decode()!r})
print(urllib.request.urlopen("https://api.example:%d/", context=context).read(), "SSL_CERT_FILE" in os.environ)
"""
    async with answering(Server(), host_context(real, "api.example")) as outside:
        report = await run(backend, source.replace("%d", str(outside.port)), serve(OPEN))
    assert report.stdout.text == "b'ok' False\n", report.stderr.text
    assert report.network is not None and report.network["allowed"][0]["inspected"] is False


# ── What a guest cannot do with it ──


async def test_nobody_can_have_the_port_of_the_listener_beside_it(backend: ProcessBackend) -> None:
    source = """
import errno, socket
for address in ("127.0.0.1", "0.0.0.0", "::"):
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as mine:
            for option in options:
                mine.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                mine.bind((address, 3128))
                mine.listen()
                print(address, options, "bound")
            except OSError as exc:
                assert exc.errno == errno.EADDRINUSE, exc
"""
    report = await run(backend, source + ASK + "print(ask('no.example', 80)[0])", serve(OPEN))
    assert report.stdout.text == "403\n", report.stderr.text


async def test_there_is_no_other_way_out(backend: ProcessBackend) -> None:
    source = """
import errno, socket
def tried(kind, address, port=53, protocol=0):
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind, protocol) as way:
            way.settimeout(25)
            way.connect((address, port))
            way.send(b"x")
        return "sent"
    except OSError as exc:
        return errno.errorcode.get(exc.errno, str(exc))
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    print({tried(kind, address) for address in ("198.51.100.7", "169.254.169.254", "10.0.0.1", "2001:db8::1")})
print(tried(socket.SOCK_RAW, "127.0.0.1", 0, 1))
try:
    socket.getaddrinfo("api.example", 80)
except socket.gaierror:
    print("no names")
"""
    report = await run(backend, source, serve(OPEN))
    assert report.stdout.text.splitlines() == ["{'ENETUNREACH'}", "{'ENETUNREACH'}", "EPERM", "no names"]


async def test_a_box_sees_no_process_of_whoever_serves_it(backend: ProcessBackend) -> None:
    source = "import os\nprint([name for name in os.listdir('/proc') if name.isdigit()])"
    assert (await run(backend, source, serve(OPEN))).stdout.text == "['2']\n"


# ── Its life ──


class Closing:
    """A way that is counted."""

    authority = None
    unproxied: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})

    def __init__(self, listener: socket) -> None:
        self.listener = listener
        self.closed = 0

    def facts(self) -> dict[str, Any]:
        return {}

    def hold(self) -> None: ...

    def go_on(self) -> None: ...

    async def close(self) -> dict[str, Any]:
        self.closed += 1
        self.listener.close()
        return {"allowed": [], "denied": []}


def counted() -> tuple[list[Closing], Serve]:
    ways: list[Closing] = []

    async def serve(listener: socket) -> ServedRoute:
        ways.append(Closing(listener))
        return ways[-1]

    return ways, serve


async def test_the_listener_is_there_before_the_program_and_gone_after_it(backend: ProcessBackend) -> None:
    ways, way = counted()
    report = await run(backend, _CONNECT, way)
    assert report.stdout.text == "open\n"
    assert report.network == {"allowed": [], "denied": []}
    assert [each.closed for each in ways] == [1]


async def test_a_cancelled_run_leaves_nothing(backend: ProcessBackend) -> None:
    ways, way = counted()
    running = asyncio.create_task(run(backend, "import time\ntime.sleep(60)", way))
    await tooling.until(lambda: ways)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ways[0].closed == 1


async def test_where_it_cannot_be_served_nothing_runs(backend: ProcessBackend) -> None:
    async def refuse(listener: socket) -> ServedRoute:
        raise Unavailable("authority_expired", "no")

    with pytest.raises(Unavailable, match="no"):
        await run(backend, "print('ran')", refuse)  # the first one of a backend also makes what all boxes share
    before = descriptors()
    for _ in range(40):
        with pytest.raises(Unavailable, match="no"):
            await run(backend, "print('ran')", refuse)
    # Boxes that nobody wants any more end by themselves; one or two may have been made ready meanwhile.
    await tooling.until(lambda: descriptors() <= before + 30)


def descriptors() -> int:
    """That are open here, without those of control groups: some of these are kept for the next boxes."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the one that listed them
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("/sys/fs/cgroup")
    return count


async def test_a_box_without_a_namespace_of_its_own_gets_no_network() -> None:
    made = ProcessBackend(without=("net_namespace",), depth=0)
    try:
        with pytest.raises(Unavailable, match="not confined"):
            await run(made, "print('ran')", serve(OPEN))
        with pytest.raises(Unavailable, match="not confined"):
            await made.open(StaySpec(), serve(OPEN))
    finally:
        await made.close()


async def test_many_boxes_at_once_each_have_their_own(backend: ProcessBackend) -> None:
    async with answering(Server()) as outside:
        rules = [NetworkRule("open", ("api.example",), paths=(f"/{n}",), addresses=LOOPBACK) for n in range(4)]
        source = ASK + f"print([ask('api.example', {outside.port}, f'/{{n}}')[0] for n in range(4)])"
        reports = await asyncio.gather(*(run(backend, source, serve(rule)) for rule in rules))
    for number, report in enumerate(reports):
        assert report.stdout.text == f"{[200 if n == number else 403 for n in range(4)]}\n"


async def test_a_box_that_stays_has_it_for_all_that_runs_in_it(backend: ProcessBackend) -> None:
    async with answering(Server()) as outside:
        box = await backend.open(StaySpec(), serve(OPEN))
        try:
            interpreter = await box.interpreter()
            cell = Cell((ASK + f"print(ask('api.example', {outside.port}))").encode(), Limits())
            first = await interpreter.run(cell, lambda *_: None, lambda _: None)
            quiet = await interpreter.run(Cell(b"1"), lambda *_: None, lambda _: None)
            leaving = Cell(b"import subprocess; left = subprocess.Popen(['sleep', '600'])")
            leaves = await interpreter.run(leaving, lambda *_: None, lambda _: None)
            clearing = Cell(b"left.kill(); left.wait()")
            cleared = await interpreter.run(clearing, lambda *_: None, lambda _: None)
            command = Command(("/bin/sh", "-c", "echo $http_proxy"))
            second = await (await box.command(command, lambda *_: None)).over()
        finally:
            await box.end()
    assert first.report.stdout.text == "(200, b'ok')\n"
    assert first.report.network is not None and first.report.network["allowed"][0]["count"] == 1
    assert quiet.report.network is not None and quiet.report.network["allowed"] == []
    assert [each.report.left for each in (first, quiet, leaves, cleared)] == [False, False, True, False]
    assert second.stdout.text == f"http://127.0.0.1:{outlet.PORT}\n"
    assert box.outlet is not None and box.outlet.facts()["allowed"][0]["count"] == 1


# ── After a step ──

POST = """
import socket
def post(port, path, corked=False):
    way = socket.create_connection(("127.0.0.1", 3128))
    if corked:
        way.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    place = f"api.example:{port}"
    head = f"POST http://{place}/{path} HTTP/1.1\\r\\nHost: {place}\\r\\nContent-Length: 6\\r\\n\\r\\n"
    way.sendall(head.encode() + b"secret")
    return way
"""


def requests(report: BoxReport) -> int:
    assert report.network is not None
    return sum(entry["count"] for entry in report.network["allowed"])


class Staying:
    """A box that stays, with an interpreter and a route to a server."""

    def __init__(self, box: LiveBox, interpreter: Interpreter, outside: Server) -> None:
        self.box = box
        self.interpreter = interpreter
        self.outside = outside

    async def cell(self, source: str, **how: Any) -> BoxReport:
        cell = Cell(source.replace("PORT", str(self.outside.port)).encode(), **how)
        report = await self.interpreter.run(cell, lambda *_: None, lambda _: None)
        assert report.error is None, report.error
        return report.report

    async def something_waits(self) -> None:
        """Until a request of the box is held."""
        assert self.box.outlet is not None
        route = self.box.outlet._way
        assert isinstance(route, ProxyRoute)
        await tooling.until(lambda: route.waiting == 1)


@pytest.fixture
async def staying(backend: ProcessBackend) -> AsyncIterator[Staying]:
    async with answering(Server()) as outside:
        box = await backend.open(StaySpec(), serve(OPEN))
        try:
            made = Staying(box, await box.interpreter(), outside)
            await made.cell(POST)
            yield made
        finally:
            await box.end()


CORKED = "way = post(PORT, 'corked', corked=True)"
TIMER = """
import signal
signal.signal(signal.SIGALRM, lambda *_: post(PORT, "timer"))
signal.setitimer(signal.ITIMER_REAL, 0.01)
"""


@pytest.mark.parametrize("source", [CORKED, TIMER], ids=["bytes that the kernel holds back", "a timer"])
async def test_what_a_harmless_step_sends_afterwards_waits_for_a_step_that_reports_it(
    staying: Staying, source: str
) -> None:
    harmless = await staying.cell(source)
    if not requests(harmless):  # a timer may end before its cell does
        assert not harmless.left
        await staying.something_waits()
        assert staying.outside.requests == []
        own = await staying.cell("1", reported=False)
        assert (requests(own), staying.outside.requests) == (0, [])
    reports = [harmless]
    while not staying.outside.requests:
        reports.append(await staying.cell("1"))
    assert sum(map(requests, reports)) == 1


async def test_what_waits_when_a_session_is_closed_is_never_sent(staying: Staying) -> None:
    harmless = await staying.cell(CORKED)
    assert (requests(harmless), harmless.left) == (0, False)
    await staying.something_waits()
    await staying.box.end()
    assert staying.outside.requests == []


async def test_beside_a_background_command_a_step_leaves_something_and_the_next_one_tells_what_it_sent(
    staying: Staying,
) -> None:
    command = await staying.box.command(Command(("/bin/sleep", "600")), lambda *_: None)
    thread = "import threading, os, time\ndef later():\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    leaves = await staying.cell(f"{thread}    post(PORT, 'late')\nthreading.Thread(target=later, daemon=True).start()")
    assert (requests(leaves), leaves.left) == (0, True)
    Workspace(staying.box.workspace, staying.box.box.host_id).write("go", b"")
    await tooling.until(lambda: staying.outside.requests)
    after = await staying.cell("1")
    assert after.left and after.late is not None and after.late["network"]["allowed"][0]["count"] == 1
    command.signal(9)
    assert requests(await command.over()) == 1


async def test_what_goes_on_in_a_pause_sends_nothing_before_it_is_resumed(staying: Staying) -> None:
    thread = "import threading, os, time\ndef later():\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    await staying.cell(f"{thread}    post(PORT, 'late')\nthreading.Thread(target=later, daemon=True).start()")
    await staying.box.pause()
    group = staying.box.box.group
    if group is not None and group.frozen() is not None:
        group.thaw()  # as a program that has itself continued where there is no freezer
    else:
        staying.box._signal_all(signal.SIGCONT)
    Workspace(staying.box.workspace, staying.box.box.host_id).write("go", b"")
    await staying.something_waits()
    assert staying.outside.requests == []
    await staying.box.resume()
    await tooling.until(lambda: staying.outside.requests)


async def test_what_set_up_code_of_another_interpreter_lets_out_is_told_by_the_next_step(staying: Staying) -> None:
    await staying.cell(CORKED)
    await staying.something_waits()
    while not staying.outside.requests:
        await staying.interpreter.set_up("1", Limits())
    after = await staying.cell("1")
    assert after.late is not None and after.late["network"]["allowed"][0]["count"] == 1


async def test_what_set_up_code_does_is_in_the_facts_of_the_next_step(backend: ProcessBackend) -> None:
    async with answering(Server()) as outside:
        setup = f"{ASK}import os\nos.makedirs('/workspace/output', exist_ok=True)\n"
        setup += f"ask('api.example', {outside.port})\nname = str(len(os.listdir('/workspace/output')))\n"
        setup += "open('/workspace/output/' + name, 'w')\n"
        refused = "try: os.chroot('/')\nexcept OSError: pass"
        box = await backend.open(StaySpec(setup=setup + refused), serve(OPEN))
        try:
            reports = []
            for _ in range(2):
                interpreter = await box.interpreter()
                for _ in range(2):
                    reports.append((await interpreter.run(Cell(b"1"), lambda *_: None, lambda _: None)).report)
        finally:
            await box.end()
    for number, report in enumerate(reports):
        assert not report.denials and not report.files and not requests(report)
        if number % 2:
            assert report.late is None
            continue
        assert report.late is not None and report.late["denials"] == {"chroot": 1}
        assert [each["path"] for each in report.late["files"]] == [f"/workspace/output/{number // 2}"]
        assert sum(entry["count"] for entry in report.late["network"]["allowed"]) == 1


@pytest.mark.parametrize("first", ["setup", "command"])
async def test_what_is_sent_before_the_first_step_is_told_by_that_step(backend: ProcessBackend, first: str) -> None:
    async with answering(Server()) as outside:
        asks = f"{ASK}ask('api.example', {outside.port})\n"
        box = await backend.open(StaySpec(setup=asks if first == "setup" else ""), serve(OPEN))
        try:
            if first == "command":
                # As commands of the background have it: what they did is told when somebody waits for them.
                command = Command(("python3", "-c", asks), reported=False)
                await (await box.command(command, lambda *_: None)).over()
            interpreter = await box.interpreter()
            told = [(await interpreter.run(Cell(b"1"), lambda *_: None, lambda _: None)).report for _ in range(2)]
        finally:
            await box.end()
    assert told[0].late is not None and told[0].late["network"]["allowed"][0]["count"] == 1
    assert told[1].late is None or "network" not in told[1].late
