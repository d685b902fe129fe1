"""Whatever a box sends: a server outside, by a parser that is not ours, reads only requests that the rules allow."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.core.box import NetworkRule
from tests.egress.outside import LOCAL, LOOPBACK, OK, box, serving

READ = NetworkRule("read", ("api.example",), addresses=LOOPBACK, methods=("GET", "PUT"), paths=("/v1",))

LINES = [
    *("GET http://api.example:{p}/v1 HTTP/1.1", "PUT http://api.example:{p}/v1/x HTTP/1.1"),
    *("DELETE http://api.example:{p}/v1 HTTP/1.1", "GET http://api.example:{p}/evil HTTP/1.1", "DELETE /evil HTTP/1.1"),
    *("GET http://other.example:{p}/v1 HTTP/1.1", "GET http://api.example:{p}/v1/../evil HTTP/1.1"),
]
HEADERS = [
    *("Host: api.example:{p}", "Host: evil.example", "Content-Length: 0", "Content-Length: 5", "Content-Length: 40"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding : chunked", "Transfer-Encoding: identity", "X: y", " folded"),
    *("Connection: close", "Connection: Host", "Expect: 100-continue", "X: a\nTransfer-Encoding: chunked", "X: a\rb"),
    *(
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: +5",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
    ),
]
ENDS = ["\r\n", "\r\n", "\n", "\r", "\r\n\r\n"]
BODIES = [
    "",
    "",
    "hello",
    "5\r\nhello\r\n0\r\n\r\n",
    "0\r\n\r\n",
    "5;a=b\r\nhello\r\n0\r\n\r\n",
    "ffffffff\r\nx",
    "5\nhello\r\n",
]
ALLOWED = st.sampled_from(
    [
        f"{LINES[0]}\r\nHost: api.example:{{p}}\r\n\r\n",
        f"{LINES[1]}\r\nHost: api.example:{{p}}\r\nContent-Length: 23\r\n\r\nDELETE /evil HTTP/1.1\r\n",
        f"{LINES[1]}\r\nHost: api.example:{{p}}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ]
)
NEARLY = st.builds(
    lambda line, more, body: f"{line}\r\nHost: api.example:{{p}}\r\n{more}\r\n{body}",
    st.sampled_from(LINES),
    st.lists(st.sampled_from(HEADERS).map(lambda header: f"{header}\r\n"), max_size=2).map("".join),
    st.sampled_from(BODIES),
)
ODD = st.builds(
    lambda line, end, headers, body: end.join([line, *headers, "", ""]) + body,
    *(st.sampled_from(LINES), st.sampled_from(ENDS), st.lists(st.sampled_from(HEADERS), max_size=4)),
    st.sampled_from(BODIES),
)


def understood(data: bytes) -> list[h11.Request]:
    """What an independent server makes of the bytes of one connection. Raises RemoteProtocolError."""
    connection, found = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            found.append(event)
        elif event is h11.NEED_DATA or event is h11.PAUSED:
            if connection.their_state is not h11.DONE:
                return found
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return found
            connection.start_next_cycle()


async def outside_hears(said: str) -> tuple[list[bytes], int]:
    heard: list[bytes] = []

    async def listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = len(heard)
        heard.append(b"")
        while data := await reader.read(65536):
            heard[mine] += data
            with contextlib.suppress(h11.RemoteProtocolError):
                done = len(understood(heard[mine]))
                writer.write(OK if done else b"")

    async with serving(listening) as port, box([READ], LOCAL) as inside:
        client = await inside.open()
        client.writer.write(said.replace("{p}", str(port)).encode("latin-1"))
        client.writer.write_eof()
        await client.rest()
        return heard, port


@given(st.lists(ALLOWED | NEARLY | ODD, min_size=1, max_size=4).map("".join))
@settings(max_examples=80)
def test_nothing_but_allowed_requests_is_ever_heard(said: str) -> None:
    heard, port = asyncio.run(outside_hears(said))
    for data in heard:
        for request in understood(data):
            headers = dict(request.headers)
            assert request.method in (b"GET", b"PUT") and request.target.startswith(b"/v1")
            assert headers[b"host"] == f"api.example:{port}".encode()
            assert not {b"content-length", b"transfer-encoding"} <= set(headers)


class _Deaf(BaseHTTPRequestHandler):
    """As many servers do, it answers without reading a body, and keeps the connection unless it is told not to."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.server.served.append(f"{self.command} {self.path}")  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("limited", [False, True], ids=["any request", "only some"])
async def test_a_body_that_a_server_does_not_read_is_no_further_request(method: str, limited: bool) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Deaf)
    server.served = []  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, daemon=True).start()
    rule = NetworkRule("api", ("api.example",), addresses=LOOPBACK)
    rule = replace(rule, methods=("GET", "POST"), paths=("/v1",)) if limited else rule
    place = f"api.example:{server.server_port}"
    hidden = f"DELETE /admin HTTP/1.1\r\nHost: {place}\r\nX: "
    lines = (f"{method} http://{place}/v1/a HTTP/1.1", f"Host: {place}", f"Content-Length: {len(hidden)}")
    first = "\r\n".join((*lines, "", hidden)).encode()
    second = f"GET http://{place}/v1/b HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode()
    try:
        async with box([rule], LOCAL) as inside:
            reader, writer = await asyncio.open_connection("127.0.0.1", inside.port)
            writer.write(first + second)
            await reader.read()
            writer.close()
    finally:
        server.shutdown()
        server.server_close()
    served = server.served  # type: ignore[attr-defined]
    assert "GET /v1/b" in served or (method == "GET" and limited)
    assert not [each for each in served if each.startswith("DELETE")], served
