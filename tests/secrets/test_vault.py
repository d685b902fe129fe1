"""Secrets by name: scope, life, rotation, and what is known."""

from __future__ import annotations

import pytest

from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import SecretSpec
from ringfence.core.secret import Secret, reveal
from ringfence.secrets.sources import SourceValue
from ringfence.secrets.vault import UNUSABLE, SecretScope, SecretUse, Vault, VaultEntry

pytestmark = pytest.mark.anyio
USE = SecretUse("acme", "production", capability="create_ticket", server="helpdesk", agent="analyst")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Remote:
    """A source that is asked only when a value has expired."""

    def __init__(self, value: str, lent: float | None = None) -> None:
        self.value: str | None = value
        self.lent = lent
        self.read = 0

    async def __call__(self, spec: SecretSpec, before: SourceValue | None) -> SourceValue:
        if before is not None:
            return before
        if self.value is None:
            raise Unavailable("no_secret", "it is down")
        self.read += 1
        return SourceValue(self.value, lifetime_seconds=self.lent)


def vault(source: Remote, clock: Clock, scope: SecretScope | None = None, lifetime: float = 60) -> Vault:
    spec = SecretSpec("token", "vault", {})
    return Vault([VaultEntry(spec, scope or SecretScope(), lifetime)], {"vault": source}, clock)


async def test_a_value_is_read_once_in_its_life_and_anew_after_it() -> None:
    source, clock = Remote("the-first-value"), Clock()
    kept = vault(source, clock)
    assert reveal(await kept.secret("token", USE)) == "the-first-value"
    source.value = "the-second-value"
    clock.now += 59
    assert reveal(await kept.secret("token", USE)) == "the-first-value"
    assert source.read == 1
    clock.now += 1
    assert reveal(await kept.secret("token", USE)) == "the-second-value"
    assert source.read == 2


async def test_a_source_may_lend_for_less() -> None:
    source, clock = Remote("the-first-value", lent=10), Clock()
    kept = vault(source, clock)
    await kept.secret("token", USE)
    source.value = "the-second-value"
    clock.now += 10
    assert reveal(await kept.secret("token", USE)) == "the-second-value"


async def test_an_expired_value_is_never_used_when_its_source_is_down() -> None:
    source, clock = Remote("the-first-value"), Clock()
    kept = vault(source, clock)
    await kept.secret("token", USE)
    source.value = None
    clock.now += 60
    with pytest.raises(Unavailable) as caught:
        await kept.secret("token", USE)
    assert caught.value.reason_code == "no_secret"


async def test_known_values_are_the_present_and_the_former_ones() -> None:
    source, clock = Remote("the-value-0"), Clock()
    kept = vault(source, clock)
    assert kept.known("acme") == ()
    source.value = "the-first-value"
    await kept.secret("token", USE)
    before = kept.known("acme")
    assert kept.known("acme") is before
    for number in range(6):
        clock.now += 60
        source.value = f"the-next-value-{number}"
        await kept.secret("token", USE)
    assert [reveal(secret) for secret in kept.known("acme")] == [
        f"the-next-value-{number}" for number in (5, 4, 3, 2, 1)
    ]


async def test_a_handle_that_was_revoked_takes_no_other_with_it() -> None:
    kept = vault(Remote("the-first-value"), Clock())
    handle = await kept.secret("token", USE)
    handle.revoke()
    assert reveal(await kept.secret("token", USE)) == "the-first-value"
    assert all(isinstance(secret, Secret) and reveal(secret) for secret in kept.known("acme"))


@pytest.mark.parametrize(
    ("scope", "outside"),
    [
        (SecretScope(tenants=("other",)), "tenant"),
        (SecretScope(environments=("staging", "dev*")), "environment"),
        (SecretScope(capabilities=("search_*",)), "capability"),
        (SecretScope(servers=()), "server"),
        (SecretScope(agents=("robot",)), "agent"),
    ],
)
async def test_outside_of_its_scope_a_secret_is_refused_and_not_even_read(scope: SecretScope, outside: str) -> None:
    source = Remote("the-first-value")
    with pytest.raises(Refused, match=f"not for this {outside}") as caught:
        await vault(source, Clock(), scope).secret("token", USE)
    assert (caught.value.reason_code, source.read) == ("secret_scope", 0)


async def test_within_its_scope_it_is_handed_out_and_who_names_nothing_is_outside() -> None:
    scope = SecretScope(("acme",), ("prod*",), ("create_*",), ("helpdesk",), ("analyst",))
    kept = vault(Remote("the-first-value"), Clock(), scope)
    assert (await kept.secret("token", USE)).name == "token"
    with pytest.raises(Refused):
        await kept.secret("token", SecretUse("acme", "production", server="helpdesk"))


async def test_another_tenants_values_are_not_known() -> None:
    kept = vault(Remote("the-first-value"), Clock(), SecretScope(tenants=("acme",)))
    assert await kept.load() == {}
    assert len(kept.known("acme")) == 1
    assert kept.known("other") == ()


async def test_a_short_value_is_unavailable_and_not_shown() -> None:
    kept = vault(Remote("elevenchars"), Clock())
    problems = await kept.load()
    problem = problems["token"]
    assert "fewer than 12 characters" in problem.message and "elevenchars" not in problem.message
    assert problem.reason_code == UNUSABLE
    with pytest.raises(Unavailable):
        await kept.secret("token", USE)


async def test_unknown_names_and_sources_are_unavailable() -> None:
    with pytest.raises(Unavailable, match="there is no secret"):
        await vault(Remote("the-first-value"), Clock()).secret("other", USE)
    with pytest.raises(Unavailable, match="cannot be read here"):
        await Vault([VaultEntry(SecretSpec("token", "vault", {}))], {}).secret("token", USE)


@pytest.mark.parametrize(("value", "warned"), [("x" * 19, True), ("x" * 20, False)])
async def test_a_short_value_loads_with_a_warning(value: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    kept = vault(Remote(value), Clock())
    assert await kept.load() == {}
    assert ("secret token has fewer than 20 characters" in caplog.text) is warned
    assert value not in caplog.text
    assert reveal(await kept.secret("token", USE)) == value
