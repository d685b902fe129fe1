"""Where a server behind a name is dialled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from ringfence.compose.servers import _EVERYWHERE
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Status
from ringfence.egress.dial import check_url
from ringfence.egress.resolver import CheckedResolver

pytestmark = pytest.mark.anyio


async def test_only_what_was_checked_is_dialled() -> None:
    async def check(url: str) -> Sequence[str]:
        assert url == "http://far.example/mcp"
        return ["10.0.0.1", "fd00::1"]

    found = await CheckedResolver(partial(check, "http://far.example/mcp")).resolve("far.example", 80)
    assert [(each["host"], each["port"], each["family"]) for each in found] == [
        ("10.0.0.1", 80, 2),
        ("fd00::1", 80, 10),
    ]


@pytest.mark.parametrize("problem", [Refused(Status.DENIED, "address_metadata", "no"), Unavailable("resolve", "no")])
async def test_a_refusal_is_no_address(problem: Exception) -> None:
    async def check(url: str) -> Sequence[str]:
        raise problem

    with pytest.raises(OSError, match="no"):
        await CheckedResolver(partial(check, "http://far.example/mcp")).resolve("far.example", 80)


async def test_a_configured_url_may_lead_anywhere_but_to_credentials() -> None:
    answers = {"inner.example": "10.0.0.1", "rebound.example": "169.254.169.254"}

    async def resolve(name: str) -> Sequence[str]:
        return [answers[name]]

    assert await check_url("http://inner.example/mcp", _EVERYWHERE, resolve) == ["10.0.0.1"]
    with pytest.raises(Refused, match="no rule names the address"):
        await check_url("http://rebound.example/mcp", _EVERYWHERE, resolve)
