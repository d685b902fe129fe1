"""How many are logged in at a time, and who gives way."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfence.audit.keys import load_or_create
from ringfence.console import logins
from ringfence.console.gateway import ConsoleGateway
from ringfence.console.logins import Logins
from ringfence.core.model import DEFAULT_TENANT, IssuedToken, Person
from ringfence.store import Store

pytestmark = pytest.mark.anyio


def _token(text: str) -> IssuedToken:
    now = time.time()
    return IssuedToken(f"tok_{text}", "digest", "person", text, DEFAULT_TENANT, "t", now, now + 600)


async def test_who_logs_in_again_and_again_ends_their_own_logins_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "_MAX_LOGINS", 4)
    with Store.open(tmp_path / "state", load_or_create(tmp_path / "keys")) as store:
        people = {name: Person(name) for name in ("bob", "dora")}
        gateway: Any = SimpleNamespace(store=store, tokens=_token, people=lambda: people, account="t")
        held = Logins(cast(ConsoleGateway, gateway))
        hers, _ = await held.begin("dora", None)
        his = [(await held.begin("bob", None))[0] for _ in range(9)]
        assert held.find(hers, None) is not None, "hers is older than all of his"
        assert [held.find(each, None) is not None for each in his] == [False] * 6 + [True] * 3
