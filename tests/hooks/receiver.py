"""What somebody else runs to be told of calls: an address that keeps what it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """It answers with one status after the other, and then with success."""

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.got: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.got.append((self.path, {name.lower(): text for name, text in self.headers.items()}, body))
        status = server.answers.pop(0) if server.answers else 204
        self.send_response(status)
        if status == 302:
            self.send_header("location", f"{server.url}/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def receiving(*answers: int) -> Iterator[Receiver]:
    with Receiver(*answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
