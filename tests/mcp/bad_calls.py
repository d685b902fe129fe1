"""Requests to call a tool that are wrong in some way, as bytes; each must get a readable result and a record."""

from __future__ import annotations

import json

from tests.mcp.gateway import JSON

MARK = b'"@"'
"""Where the bad part goes in a message that is good JSON otherwise."""

ARGUMENTS: dict[str, bytes] = {
    "duplicate key": b'{"text": "a", "text": "b"}',
    "duplicate key deep inside": b'{"text": "a", "more": [{"x": 1, "x": 2}]}',
    "NaN": b'{"text": NaN}',
    "Infinity": b'{"text": "a", "n": Infinity}',
    "-Infinity": b'{"text": "a", "n": -Infinity}',
    "5,000 digits": b'{"text": "a", "n": ' + b"7" * 5000 + b"}",
    "1e999": b'{"text": "a", "n": 1e999}',
    "invalid UTF-8": b'{"text": "\xff\xfe"}',
    "encoded surrogate": b'{"text": "\xed\xa0\x80"}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "lone surrogate in a key": b'{"\\udfff": "a"}',
    "nested 100 deep": b'{"text": ' + b"[" * 100 + b"]" * 100 + b"}",
    "nested 500 deep": b'{"text": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    "list": b"[]",
    "string": b'"text"',
    "number": b"5",
    "boolean": b"true",
    "not what the schema says": b'{"text": 5}',
}
NAMES: dict[str, bytes] = {
    "number": b"5",
    "null": b"null",
    "list": b'["echo"]',
    "object": b'{"name": "echo"}',
    "unknown": b'"ecko"',
    "empty": b'""',
    "lone surrogate": b'"ech\\ud800"',
    "a megabyte": b'"' + b"e" * 1_000_000 + b'"',
    "control characters": b'"echo\\u0000\\u001b[2J"',
}


def spliced(message: JSON, bad: bytes) -> bytes:
    whole = json.dumps(message).encode()
    assert whole.count(MARK) == 1
    return whole.replace(MARK, bad)


def with_arguments(kind: str, params: JSON | None = None, ident: int | str = 1) -> bytes:
    message = {"jsonrpc": "2.0", "id": ident, "method": "tools/call"}
    return spliced({**message, "params": {"name": "echo", "arguments": "@", **(params or {})}}, ARGUMENTS[kind])


def with_name(kind: str, params: JSON | None = None, ident: int | str = 1) -> bytes:
    message = {"jsonrpc": "2.0", "id": ident, "method": "tools/call"}
    return spliced({**message, "params": {"name": "@", "arguments": {}, **(params or {})}}, NAMES[kind])
