"""HashiCorp Vault, played by a small server with its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from aiohttp import web

from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import SecretSpec, Status
from ringfence.core.secret import reveal
from ringfence.secrets.hashicorp import HashiCorp
from ringfence.secrets.vault import SecretUse, Vault, VaultEntry

pytestmark = pytest.mark.anyio
USE = SecretUse("acme", "development")
VALUE = "correct-horse-battery"
TOKEN = "hvs-of-the-test"


class Played:
    def __init__(self) -> None:
        self.port = 0
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.answers = {
            "/v1/secret/data/cloud": {
                "data": {"data": {"token": VALUE}, "metadata": {"version": 3}},
                "lease_duration": 0,
            },
            "/v1/kv/cloud": {"data": {"token": VALUE}, "lease_duration": 2764800},
            "/v1/kv/number": {"data": {"token": 12}},
        }

    async def answer(self, request: web.Request) -> web.Response:
        headers = request.headers
        self.asked.append((request.path, headers.get("X-Vault-Token"), headers.get("X-Vault-Namespace")))
        if request.path == "/v1/kv/moved":
            return web.Response(status=307, headers={"Location": "/v1/kv/cloud"})
        if request.path not in self.answers or headers.get("X-Vault-Token") != TOKEN:
            return web.json_response({"errors": [VALUE]}, status=404 if headers.get("X-Vault-Token") == TOKEN else 403)
        return web.json_response(self.answers[request.path])


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    server = Played()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


async def loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def vault(source: HashiCorp, path: str = "secret/cloud") -> Vault:
    return Vault([VaultEntry(SecretSpec("token", "vault", {"path": path, "field": "token"}))], {"vault": source})


async def test_both_versions_of_its_store_are_read(played: Played) -> None:
    source = HashiCorp(f"http://vault.corp.example:{played.port}", lambda: TOKEN, loopback, namespace="team")
    for path in ("secret/cloud", "secret/data/cloud", "kv/cloud"):
        assert reveal(await vault(source, path).secret("token", USE)) == VALUE
    assert {asked[1:] for asked in played.asked} == {(TOKEN, "team")}


async def test_the_address_that_was_checked_is_the_one_dialled(played: Played) -> None:
    checked = []

    async def check(host: str, port: int) -> Sequence[str]:
        checked.append((host, port))
        return ["127.0.0.1"]

    await vault(HashiCorp(f"http://nowhere.invalid:{played.port}", lambda: TOKEN, check)).secret("token", USE)
    assert checked == [("nowhere.invalid", played.port)]


@pytest.mark.parametrize("host", ["127.0.0.1", "vault.corp.example"])
async def test_an_address_that_is_refused_is_not_dialled(played: Played, host: str) -> None:
    async def check(host: str, port: int) -> Sequence[str]:
        raise Refused(Status.DENIED, "private_address", "no")

    with pytest.raises(Refused):
        await vault(HashiCorp(f"http://{host}:{played.port}", lambda: TOKEN, check)).secret("token", USE)
    assert played.asked == []


@pytest.mark.parametrize("path", ["kv/absent", "kv/number", "kv/moved"])
async def test_what_is_no_text_or_not_there_is_unavailable_and_no_answer_is_shown(played: Played, path: str) -> None:
    source = HashiCorp(f"http://vault.corp.example:{played.port}", lambda: TOKEN, loopback)
    with pytest.raises(Unavailable) as caught:
        await vault(source, path).secret("token", USE)
    assert caught.value.reason_code == "no_secret"
    assert VALUE not in str(caught.value) and TOKEN not in str(caught.value) + repr(source)


async def test_without_server_token_or_leave_it_is_unavailable(played: Played) -> None:
    address = f"http://vault.corp.example:{played.port}"
    for source in (
        HashiCorp(address, lambda: None, loopback),
        HashiCorp(address, lambda: "another-token", loopback),
        HashiCorp("http://vault.corp.example:1", lambda: TOKEN, loopback),
        HashiCorp("ftp://vault.corp.example", lambda: TOKEN, loopback),
    ):
        with pytest.raises(Unavailable):
            await vault(source).secret("token", USE)
