"""An MCP server over HTTP without any SDK: returns what no revision knows, and shows what reached it.

The hints are what its tools claim of themselves in their annotations.

    python mirror_server.py --port 9703 --era handshake|modern [--hints mild|wild]
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = dict[str, Any]
MODERN = "2026-07-28"

SCHEMA: JSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"leaf": {"$anchor": "leaf", "type": ["string", "null"], "default": None, "x-vendor": [None]}},
    "properties": {"value": {"$ref": "#leaf"}, "big": {"const": 2**70}, "any": True},
    "unevaluatedProperties": {"not": False},
    "examples": [{"value": None}],
}
EXOTIC: JSON = {
    "content": [
        {"type": "hologram", "data": {"deep": [None, 2**70, -0.5, "\u2028"]}, "annotations": None},
        {"type": "text", "text": "known", "x-more": {"kept": None}},
    ],
    "structuredContent": {"big": 2**64, "none": None, "list": [[], {}]},
    "x-unknown": [1, None, {"a": 2**64}],
    "_meta": {"vendor.example/trace": {"id": 1}},
}
FAILED: JSON = {**EXOTIC, "isError": True}
HINTS: dict[str, JSON] = {
    "mild": {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False},
    "wild": {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": True},
}


def definitions(hints: JSON) -> list[JSON]:
    extra = {"annotations": hints, "x-unknown": {"n": None}, "_meta": {"vendor.example/rank": 2**60}, "icons": []}
    return [
        {"name": name, "description": name, "inputSchema": SCHEMA, **extra} for name in ("exotic", "failed", "seen")
    ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    era = "modern"
    hints: JSON = HINTS["mild"]

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "id" not in message:
            self.reply(202, None)
        elif (self.headers.get("mcp-protocol-version") == MODERN) != (self.era == "modern"):
            self.reply(400, {"id": None, "error": {"code": -32600, "message": "not my revision"}})
        else:
            self.reply(200, {"id": message["id"], **self.answer(message["method"], message.get("params") or {})})

    def do_GET(self) -> None:
        self.reply(405, None)

    do_DELETE = do_GET

    def answer(self, method: str, params: JSON) -> JSON:
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "mirror", "version": "1"}}
        if method == "initialize":
            return {"result": {"protocolVersion": "2025-11-25", **about}}
        if method == "server/discover":
            return {"result": {"supportedVersions": [MODERN], **about}}
        if method == "tools/list":
            return {"result": {"tools": definitions(self.hints), "x-page": None}}
        if method == "tools/call":
            return {"result": self.called(params)}
        return {"error": {"code": -32601, "message": f"Method not found: {method}"}}

    def called(self, params: JSON) -> JSON:
        if params["name"] == "seen":
            seen = {"headers": dict(self.headers.items()), "params": params}
            return {"content": [{"type": "text", "text": json.dumps(seen)}]}
        return EXOTIC if params["name"] == "exotic" else FAILED

    def reply(self, status: int, message: JSON | None) -> None:
        body = b"" if message is None else json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--era", choices=["handshake", "modern"], default="modern")
    parser.add_argument("--hints", choices=list(HINTS), default="mild")
    options = parser.parse_args()
    Handler.era, Handler.hints = options.era, HINTS[options.hints]
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
