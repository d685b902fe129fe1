"""From a name to addresses that may be dialled, for boxes and for ourselves."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence

import pytest

from ringfence.core.errors import Refused, Unavailable
from ringfence.egress import names
from ringfence.egress.dial import Dialler, check_url, system_resolve
from ringfence.egress.gate import Gate
from ringfence.egress.ledger import Failed, Forbidden
from ringfence.egress.wire import ProxyLimits
from tests.egress.outside import Names
from tests.tooling import until

pytestmark = pytest.mark.anyio

PUBLIC = ["192.0.78.9", "2606:4700::1"]
KNOWN = Names(
    public_example=PUBLIC, inner_example=["10.1.2.3"], mixed_example=[*PUBLIC, "::ffff:10.1.2.3"], none_example=[]
)


async def test_every_answer_has_to_pass() -> None:
    dialler = Dialler(KNOWN, ProxyLimits())
    assert [str(found) for found in await dialler.addresses(names.host("public.example"), ())] == PUBLIC
    with pytest.raises(Forbidden, match="no rule names") as caught:
        await dialler.addresses(names.host("mixed.example"), (), "corp")
    assert (caught.value.rule, caught.value.reason) == ("corp", "address_private")
    assert "10.1.2.3" not in caught.value.detail, "the box is not told what is inside"
    ten = (ipaddress.ip_network("10.1.0.0/16"),)
    found = await dialler.addresses(names.host("mixed.example"), ten)
    assert str(found[2]) == "10.1.2.3", "what was checked is what is dialled"


@pytest.mark.parametrize("name", ["none.example", "unknown.example"])
async def test_what_has_no_address_failed(name: str) -> None:
    with pytest.raises(Failed):
        await Dialler(KNOWN, ProxyLimits()).addresses(names.host(name), ())


async def test_a_resolver_that_does_not_answer_fails_in_time() -> None:
    async def never(name: str) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(Failed):
        await Dialler(never, ProxyLimits(resolve_seconds=0.05)).addresses(names.host("a.example"), ())


async def test_nothing_is_looked_up_while_the_gate_is_shut() -> None:
    done: list[str] = []

    async def resolve(name: str) -> Sequence[str]:
        done.append(name)
        return PUBLIC

    gate = Gate()
    dialler = Dialler(resolve, ProxyLimits(), gate=gate)
    gate.shut()
    waiting = [asyncio.create_task(dialler.addresses(names.host("public.example"), ())) for _ in range(6)]
    await until(lambda: gate.waiting == 4)
    assert done == []
    gate.open()
    await asyncio.gather(*waiting)
    assert done == ["public.example"] * 6


async def test_a_lookup_keeps_its_place_until_it_is_over() -> None:
    over = asyncio.Event()
    begun: list[str] = []

    async def slow(name: str) -> Sequence[str]:
        begun.append(name)
        await over.wait()
        return PUBLIC

    dialler = Dialler(slow, ProxyLimits(resolve_seconds=0.01))
    waiting = [asyncio.create_task(dialler.addresses(names.host(f"n{n}.example"), ())) for n in range(8)]
    for task in waiting[:4]:
        with pytest.raises(Failed):
            await task
    assert len(begun) == 4, "those that gave up still hold their threads"
    over.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(begun) == 8


async def test_an_address_is_never_looked_up() -> None:
    asked = Names()
    with pytest.raises(Forbidden):
        await Dialler(asked, ProxyLimits()).addresses(names.host("0x7f.1"), ())
    assert asked.asked == []


async def test_the_system_resolves() -> None:
    assert set(await system_resolve("localhost")) <= {"127.0.0.1", "::1"}


async def test_requests_of_our_own_pass_the_same_check() -> None:
    assert await check_url("https://public.example/x", resolve=KNOWN) == PUBLIC
    assert await check_url("http://inner.example", ["10.0.0.0/8"], KNOWN) == ["10.1.2.3"]
    for url, code in (
        ("http://inner.example/", "address_private"),
        ("http://169.254.169.254/latest", "address_metadata"),
        ("http://[::1]:8080/", "address_loopback"),
        ("http://u:p@public.example/", "bad_url"),
        ("file:///etc/passwd", "bad_url"),
    ):
        with pytest.raises(Refused) as caught:
            await check_url(url, resolve=KNOWN)
        assert caught.value.reason_code == code
    with pytest.raises(Unavailable):
        await check_url("http://unknown.example/", resolve=KNOWN)
