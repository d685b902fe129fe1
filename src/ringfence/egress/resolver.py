"""A resolver for aiohttp: a server behind a name is dialled at addresses that were checked, and at no others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

from ringfence.core.errors import RingfenceError

Check = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses that may be dialled for a URL. Raises Refused, Unavailable."""


class CheckedResolver(AbstractResolver):
    """Answers with the checked addresses, whatever the name would resolve to now. aiohttp never asks for an address in
    numbers: the operator who wrote it down has named it."""

    def __init__(self, find: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """`find` gives the addresses of the one host that this is for, and raises Refused, Unavailable."""
        self._find = find

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        try:
            addresses = await self._find()
        except RingfenceError as error:
            raise OSError(str(error)) from error
        return [_found(host, address, port) for address in addresses]

    async def close(self) -> None:
        """Nothing is kept."""


def _found(host: str, address: str, port: int) -> ResolveResult:
    return ResolveResult(
        hostname=host,
        host=address,
        port=port,
        family=socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET,
        proto=0,
        flags=socket.AI_NUMERICHOST,
    )
