"""The server of `bench egress`, and its client; each a process of its own, started by file path.

serve CERT            an HTTPS server on loopback; says which port
ask                   reads orders, one JSON object a line, and answers each with seconds for each of its requests
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import sys
import time

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def _serve(certificate: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(_ANSWER)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _connection(order: dict[str, object]) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cadata=str(order["trust"]))
    port = int(str(order["port"]))
    if order["proxy"] is None:
        context.check_hostname = False  # it is dialled by its address; the certificate is verified all the same
        return http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    way = http.client.HTTPSConnection("127.0.0.1", int(str(order["proxy"])), context=context, timeout=10)
    way.set_tunnel(str(order["host"]), port)
    return way


def _asked(order: dict[str, object]) -> list[float]:
    """Make the requests on one kept connection, or on a new one each time."""
    headers = {"Authorization": str(order["token"])} if order["token"] else {}
    out: list[float] = []
    way = _connection(order)
    if not order["anew"]:
        way.request("GET", "/", headers=headers)
        way.getresponse().read()
    for _ in range(int(str(order["count"]))):
        began = time.perf_counter()
        if order["anew"]:
            way = _connection(order)
        way.request("GET", "/", headers=headers)
        answer = way.getresponse()
        if answer.read() != b"ok":
            raise SystemExit(f"{answer.status} {answer.headers.get('X-Ringfence-Reason')}")
        out.append(time.perf_counter() - began)
        if order["anew"]:
            way.close()
    way.close()
    return out


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(_asked(json.loads(line))), flush=True)
