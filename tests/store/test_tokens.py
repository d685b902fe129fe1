"""A token is what signed records say of it: what a table says beside them is worth nothing."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.audit.keys import Keys
from ringfence.core.model import IssuedToken
from ringfence.store import Store
from tests.store.test_states import put_into

NOW = time.time()
MADE = IssuedToken("tok_1", "d" * 64, "agent", "ann", "local", "me", NOW, NOW + 3600)

CHANGES = {
    "another secret": "UPDATE tokens SET digest = 'e'",
    "another agent": "UPDATE tokens SET name = 'zoe'",
    "another tenant": "UPDATE tokens SET tenant = 'acme'",
    "a person's": "UPDATE tokens SET kind = 'person'",
    "longer": "UPDATE tokens SET expires_at = expires_at + 1",
    "added": "INSERT INTO tokens SELECT 'tok_2', digest, kind, name, tenant, made_by, made_at, expires_at, NULL"
    " FROM tokens",
}


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as database:
        assert database.execute(statement).rowcount


def state(store: Store, ident: str = "tok_1") -> str:
    found, now = store.token(ident)
    assert found is not None
    return found.state(now)


@pytest.mark.parametrize("name", CHANGES)
def test_a_token_that_was_changed_in_the_database_is_good_for_nothing(folder: Path, keys: Keys, name: str) -> None:
    with Store.open(folder, keys) as store:
        store.write_sync(lambda tx: tx.put_token(MADE))
        assert state(store) == "valid"
        change(folder, CHANGES[name])
        assert state(store, "tok_2" if name == "added" else "tok_1") == "unproven"


def test_a_token_stays_revoked_whatever_the_table_says(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as store:
        store.write_sync(lambda tx: tx.put_token(MADE))
        store.write_sync(lambda tx: tx.revoke_token("tok_1", "me", time.time()))
        change(folder, "UPDATE tokens SET revoked_at = NULL")
        assert state(store) == "revoked"


def test_a_token_of_another_state_is_good_for_nothing(folder: Path, keys: Keys, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other", keys) as other:
        other.write_sync(lambda tx: tx.put_token(MADE))
    with Store.open(folder, keys) as store:
        put_into(folder, tmp_path / "other", "tokens")
        assert state(store) == "unproven"


def test_a_token_that_an_earlier_version_made_is_good_for_nothing(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as store:
        store.write_sync(lambda tx: tx.put_token(MADE))
        change(folder, "UPDATE tokens SET id = 'tok_2'")
        assert state(store, "tok_2") == "unproven" and not store.reader().has_unsigned_making("tok_2")
        store.write_sync(lambda tx: tx.append("token_created", None, {"token": "tok_2", "name": "ann"}))
        assert state(store, "tok_2") == "unproven" and store.reader().has_unsigned_making("tok_2")


@pytest.mark.parametrize("revoked", [False, True])
def test_a_prune_keeps_what_says_of_a_token_that_it_is_good_or_not(
    folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, revoked: bool
) -> None:
    with Store.open(folder, keys) as store:
        store.write_sync(lambda tx: tx.put_token(replace(MADE, id="tok_0", expires_at=NOW - 1)))
        store.write_sync(lambda tx: tx.put_token(MADE))
        if revoked:
            store.write_sync(lambda tx: tx.revoke_token("tok_1", "me", time.time()))
            change(folder, "UPDATE tokens SET revoked_at = NULL WHERE id = 'tok_1'")
        for number in range(3):
            store.write_sync(lambda tx, number=number: tx.append("note", None, {"n": number}))  # type: ignore[misc]
        assert store.prune(time.time(), "anna").records == 2, "the opening of the chain, and what has expired"
        assert state(store) == ("revoked" if revoked else "valid")
        # A program that takes the row away for the time of a prune does not get rid of the records either.
        change(folder, "DELETE FROM tokens")
        assert store.prune(time.time(), "anna").records == 0
