"""The forms of a value, made by the encoders that people use, not by ours."""

from __future__ import annotations

import base64
import html
import json
import random
import string
from collections.abc import Callable
from urllib.parse import quote, quote_plus

ALPHABETS = (
    string.ascii_letters + string.digits,
    string.ascii_letters + string.digits + "+/=",
    string.ascii_letters + string.digits + "-_.~",
    "0123456789abcdef",
    string.ascii_letters + string.digits + string.punctuation + " ",
    string.ascii_letters + "äöüßéñ€→漢字😀" + string.digits + '"\\/&',
    string.ascii_letters + string.digits + "\n",
)


def value(dice: random.Random) -> str:
    alphabet = dice.choice(ALPHABETS)
    length = dice.choice((12, 13, 14, 16, 20, 24, 32, 40, 64, dice.randint(12, 128)))
    inner = "".join(dice.choice(alphabet) for _ in range(length - 2))
    ends = [letter for letter in alphabet if not letter.isspace()]
    return dice.choice(ends) + inner + dice.choice(ends)


def lower_escapes(text: str) -> str:
    """Percent-escapes in lower case; everything else as it is."""
    quoted = quote(text, safe="")
    return "".join(piece.lower() if index % 2 else piece for index, piece in enumerate(_escapes(quoted)))


def _escapes(quoted: str) -> list[str]:
    """Plain and escaped pieces in turn."""
    pieces = [""]
    at = 0
    while at < len(quoted):
        if quoted[at] == "%":
            pieces += [quoted[at : at + 3], ""]
            at += 3
        else:
            pieces[-1] += quoted[at]
            at += 1
    return pieces


def _joined(text: str, join: str, *, upper: bool = False) -> str:
    pairs = [f"{byte:02X}" if upper else f"{byte:02x}" for byte in text.encode()]
    return join.join(pairs)


# Each yields exactly the value's own characters: all of them must go.
EXACT: dict[str, Callable[[str], str]] = {
    "plain": str,
    "json": lambda text: json.dumps(text)[1:-1],
    "json as unicode": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text))[3:-3],
    "quote": quote,
    "quote, all": lambda text: quote(text, safe=""),
    "quote_plus": quote_plus,
    "quote, lower case": lower_escapes,
    "quote twice": lambda text: quote(quote(text, safe=""), safe=""),
    "html": html.escape,
    "hex": lambda text: text.encode().hex(),
    "hex, upper case": lambda text: text.encode().hex().upper(),
    "hex, colons": lambda text: _joined(text, ":"),
    "hex, spaces": lambda text: _joined(text, " ", upper=True),
    "hex, dashes": lambda text: _joined(text, "-"),
    "hex, as bytes": lambda text: _joined(text, "\\x"),
    "hex, as array": lambda text: _joined(text, ", 0x"),
    "hex, percent": lambda text: _joined(text, "%"),
    "reversed": lambda text: text[::-1],
    "reversed, json": lambda text: json.dumps(text[::-1])[1:-1],
    "reversed, url": lambda text: quote(text[::-1], safe=""),
}


def _plain64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Each takes the value within other data.
WITHIN: dict[str, Callable[[bytes], str]] = {
    "base64": _plain64,
    "base64, no padding": lambda data: _plain64(data).rstrip("="),
    "base64url": lambda data: base64.urlsafe_b64encode(data).decode(),
    "base64url, no padding": lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="),
    "base64, wrapped": lambda data: base64.encodebytes(data).decode(),
    "base64, wrapped by return and newline": lambda data: base64.encodebytes(data).decode().replace("\n", "\r\n"),
    "base64, wrapped in json": lambda data: json.dumps(base64.encodebytes(data).decode()),
    "base64, wrapped and indented": lambda data: base64.encodebytes(data).decode().replace("\n", "\n        "),
    "base64, quoted": lambda data: quote(_plain64(data), safe=""),
    "base64, php's json": lambda data: _plain64(data).replace("/", "\\/"),
}


def core(text: str, before: int) -> str:
    """The base64 characters that the value alone decides, behind so many bytes."""
    data = text.encode()
    encoded = base64.b64encode(bytes(before) + data).decode()
    return encoded[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]


def unwrapped(text: str) -> str:
    """Base64 as one line of the standard alphabet."""
    for old, new in (("%2B", "+"), ("%2F", "/"), ("\\n", ""), ("\\/", "/"), ("-", "+"), ("_", "/")):
        text = text.replace(old, new)
    return "".join(text.split())
