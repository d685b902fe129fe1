"""Runs in an install box: fetches pieces of an image from its registry, unchecked. The supervisor checks them.

It connects only to the origins of its order: if a registry demands a token, or redirects to another host, it stops and
reports that. Imports nothing of ours.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

_INPUT = "/workspace/input"
_OUTPUT = "/workspace/output"
_TRUSTED = f"{_INPUT}/trusted.pem"
_SECONDS = 60
_MAX_REDIRECTS = 5
_MAX_TOKEN = 1_000_000
_CHUNK = 1 << 20
_TRIES = 3
_PARAMETER = re.compile(r'([a-z]+)="([^"]*)"', re.IGNORECASE)


class _Need(Exception):
    """What is needed to go on."""


class _Client:
    def __init__(self, order: dict[str, Any]) -> None:
        context = ssl.create_default_context()
        if os.path.exists(_TRUSTED):
            context.load_verify_locations(_TRUSTED)
        self._opener = urllib.request.OpenerDirector()  # follows no redirect by itself
        for handler in (
            *(urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPDefaultErrorHandler()),
            *(urllib.request.HTTPErrorProcessor(), urllib.request.HTTPSHandler(context=context)),
        ):
            self._opener.add_handler(handler)
        self._order = order
        self._token = ""

    def get(self, path: str, accept: str) -> Any:
        """An open response. Raises _Need."""
        first = url = self._order["origin"] + path
        for _ in range(_MAX_REDIRECTS):
            headers = {"Accept": accept, "Accept-Encoding": "identity", "User-Agent": "ringfence"}
            if self._token and _origin(url) == self._order["origin"]:
                headers["Authorization"] = f"Bearer {self._token}"
            try:
                request = urllib.request.Request(url, headers=headers)  # noqa: S310 — its origin is among those of the order
                return self._opener.open(request, timeout=_SECONDS)
            except urllib.error.HTTPError as answer:
                if answer.code == 401 and _origin(url) == self._order["origin"] and not self._token:
                    self._let_in(answer.headers.get_all("WWW-Authenticate") or [])
                elif answer.code in (301, 302, 303, 307, 308) and answer.headers.get("Location"):
                    url = urljoin(url, answer.headers["Location"])
                    if _origin(url) not in self._order["origins"]:
                        raise _Need({"origin": _origin(url)}) from None
                else:
                    sys.exit(f"{first} is answered with {answer.code} {str(answer.reason)[:80]}{_said(answer)}")
        sys.exit(f"{first} is answered with one redirect after the other")

    def _let_in(self, challenges: list[str]) -> None:
        for challenge in challenges:
            parameters = dict(_PARAMETER.findall(challenge))
            if challenge.lower().startswith("bearer ") and parameters.get("realm"):
                if parameters["realm"] != self._order["realm"]:
                    raise _Need({"realm": parameters["realm"]})
                # Only the scope that is needed, whatever the registry offers.
                asked = {"service": parameters.get("service", ""), "scope": f"repository:{self._order['name']}:pull"}
                self._token = self._fetched(f"{parameters['realm']}?{urlencode(asked)}")
                return
        if any(challenge.lower().startswith("basic") for challenge in challenges) and not self._order["basic"]:
            raise _Need({"basic": True})
        sys.exit("the registry refuses access")

    def _fetched(self, url: str) -> str:
        try:
            with self._opener.open(url, timeout=_SECONDS) as answer:
                reply = json.loads(answer.read(_MAX_TOKEN))
        except urllib.error.HTTPError as answer:
            sys.exit(f"{url.partition('?')[0]} gives no token: {answer.code} {str(answer.reason)[:80]}")
        return str(reply.get("token") or reply.get("access_token") or "")


def get(order: dict[str, Any]) -> None:
    os.makedirs(f"{_OUTPUT}/files")
    client = _Client(order)
    try:
        for piece in order["pieces"]:
            _piece(client, piece)
    except _Need as need:
        with open(f"{_OUTPUT}/needs.json", "w", encoding="utf-8") as stream:
            json.dump(need.args[0], stream)
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        sys.exit(f"the registry's answer cannot be read: {type(problem).__name__}")  # without a token in it


def _piece(client: _Client, piece: dict[str, Any]) -> None:
    path = f"{_OUTPUT}/files/{piece['into']}"
    for left in reversed(range(_TRIES)):
        try:
            with client.get(piece["path"], piece["accept"]) as answer, open(path, "wb") as stream:
                _copy(answer, stream, piece)
            return
        except (OSError, http.client.HTTPException) as problem:
            if os.path.exists(path):
                os.unlink(path)
            if not left:
                sys.exit(f"{piece['path']} was not received: {problem}")


def _copy(answer: Any, stream: Any, piece: dict[str, Any]) -> None:
    size = 0
    while chunk := answer.read(_CHUNK):
        size += len(chunk)
        if size > piece["most"]:
            sys.exit(f"{piece['path']} has more than the {piece['most']} bytes that it may have")
        stream.write(chunk)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}"


def _said(answer: urllib.error.HTTPError) -> str:
    """The registry's own message, if any."""
    try:
        error = json.loads(answer.read(10_000))["errors"][0]
        return f": {str(error.get('message') or error.get('code'))[:200]}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""


if __name__ == "__main__":
    with open(f"{_INPUT}/order.json", encoding="utf-8") as given_order:
        {"get": get}[sys.argv[1]](json.load(given_order))
