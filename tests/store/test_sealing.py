"""What is kept in full, at rest: sealed for its call and part, readable with the key alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.audit.keys import Keys
from ringfence.core.errors import StoreError
from ringfence.store import Reader, Store
from ringfence.store.sealing import KEY, is_sealed

TEXT = b'{"code": "print(6 * 7)"}'


def put(store: Store, call: str = "call_1", body: bytes | None = None) -> None:
    sealed = store.seal(call, "run", TEXT) if body is None else body
    store.write_sync(lambda tx: tx.put_payload(call, "run", b"s" * 16, sealed))


def test_it_is_nowhere_in_the_state_and_comes_back_as_it_was(store: Store, folder: Path, keys: Keys) -> None:
    put(store)
    found = store.reader().payload("call_1", "run")
    assert found is not None
    assert found.body == TEXT
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"6 * 7" not in everything
    assert (keys.folder / KEY).stat().st_mode & 0o777 == 0o600


def test_without_the_key_it_is_not_read(store: Store, folder: Path, keys: Keys) -> None:
    put(store)
    with pytest.raises(StoreError, match="is sealed, and this process has not its key"):
        Reader.open(folder).payload("call_1", "run")
    (keys.folder / KEY).unlink()
    with pytest.raises(StoreError, match=r"was sealed with payloads.key, which is not in"):
        Reader.open(folder, keys.folder).payload("call_1", "run")


def test_one_that_is_put_in_the_place_of_another_does_not_open(store: Store) -> None:
    moved = store.seal("call_1", "run", TEXT)
    put(store, "call_2", moved)
    put(store, "call_3", store.seal("call_3", "run", TEXT)[:-1] + b"!")
    for call in ("call_2", "call_3"):
        found = store.reader().payload(call, "run")
        assert found is not None
        assert is_sealed(found.body)


def test_a_key_of_another_length_is_refused(store: Store, keys: Keys) -> None:
    path = keys.folder / KEY
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(StoreError, match="is not a key of 32 bytes"):
        store.seal("call_1", "run", TEXT)
