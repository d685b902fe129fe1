"""The one way out of a box: a listener in its own network namespace, made by its zygote and served by us."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from socket import socket
from typing import Any

from ringfence.core.box import Serve, ServedRoute
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.memory_file import memory_file
from ringfence.sandbox.process.zygote.template import CERTIFICATES

PORT = 3128
"""On a box's own loopback, where no program listened before."""
_PROXY = f"http://127.0.0.1:{PORT}"
_PROXIES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _PROXY),
    "NODE_USE_ENV_PROXY": "1",
    "PIP_CONFIG_FILE": "/dev/null",  # its content in boxes without a network does not apply here
}
_TRUSTS = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
)
"""Variables that name a file with trusted authorities."""
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


class NetworkOutlet:
    """The outlet of one box, from before its program begins until after it is gone."""

    def __init__(self, way: ServedRoute, env: Mapping[str, str]) -> None:
        self.env = env
        """The environment variables that programs need for it."""
        self.final_facts: dict[str, Any] | None = None
        """The `network` fact, once it is closed."""
        self.held = False
        """Nothing leaves, until `go_on`."""
        self._way = way

    @classmethod
    async def open(cls, box: Box, serve: Serve) -> NetworkOutlet:
        """Raises Unavailable."""
        listener = socket(fileno=(await box.ask_zygote({"request": "listen", "port": PORT}))[0])
        try:
            way = await serve(listener)
        except BaseException:
            listener.close()
            raise
        try:
            return cls(way, await _environment(box, way))
        except BaseException:
            await way.close()
            raise

    def facts(self) -> dict[str, Any]:
        """The `network` fact so far."""
        return self._way.facts() if self.final_facts is None else self.final_facts

    def since(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """The difference between the fact `before` and now."""
        return difference(before, self.facts())

    def hold(self) -> None:
        """Let nothing more out until `go_on`: what has not left by now waits, also what no process holds any more."""
        self.held = True
        self._way.hold()

    def go_on(self) -> None:
        self.held = False
        self._way.go_on()

    async def close(self) -> None:
        if self.final_facts is None:
            self.final_facts = await self._way.close()


async def _environment(box: Box, way: ServedRoute) -> dict[str, str]:
    trusted = trusted_authorities(way)
    if trusted is not None:
        given = memory_file(trusted)
        try:
            await box.ask_zygote({"request": "trust"}, [given])
        finally:
            os.close(given)
    return proxy_environment(way, CERTIFICATES)


def proxy_environment(way: ServedRoute, certificates: str) -> dict[str, str]:
    """The variables by which programs find the proxy, and the authorities to trust at that path of their box."""
    env = {**_PROXIES, **dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(way.unproxied)), **way.env}
    return env if way.authority is None else {**env, **dict.fromkeys(_TRUSTS, certificates)}


def trusted_authorities(way: ServedRoute) -> bytes | None:
    """The authorities that a box is to trust, in PEM; None: those of its own system."""
    return None if way.authority is None else _system_bundle() + way.authority


@cache
def _system_bundle() -> bytes:
    """The authorities that this host trusts; none where it keeps them in an unusual place."""
    own = ssl.get_default_verify_paths().cafile
    for path in (own, *_BUNDLES):
        with contextlib.suppress(OSError):
            if path is not None:
                return Path(path).read_bytes().rstrip() + b"\n"
    return b""


_SUMS = ("count", "bytes_in", "bytes_out")


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in now.items():
        if isinstance(value, int):
            out[name] = value - before.get(name, 0)
            continue
        old = {_place(entry): entry for entry in before.get(name, ())}
        new = [_grown(old.get(_place(entry), {}), entry) for entry in value]
        # What was under way before and did nothing since is no part of it.
        out[name] = [entry for entry in new if any(entry.get(each, 0) > 0 for each in _SUMS)]
    return out


def _place(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in entry.items() if name not in _SUMS)


def _grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value - old.get(name, 0) if name in _SUMS else value for name, value in new.items()}


def check_namespace(without: tuple[str, ...]) -> None:
    """Raises Unavailable where a box has no network namespace of its own."""
    if "net_namespace" in without:
        raise Unavailable("no_network_control", "the network of a box without a namespace of its own is not confined")
