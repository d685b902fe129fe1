"""The signing key is made once and can be reached by its owner alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from ringfence.audit.keys import PRIVATE, PUBLIC, load_or_create, public_key_from_file
from ringfence.core.errors import StoreError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_made_once_with_tight_modes(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    previous = os.umask(0)
    try:
        made = load_or_create(folder)
    finally:
        os.umask(previous)
    assert (mode(folder), mode(folder / PRIVATE), mode(folder / PUBLIC)) == (0o700, 0o600, 0o644)
    assert mode(folder.parent) == 0o700
    assert load_or_create(folder).id == made.id
    assert sorted(path.name for path in folder.iterdir()) == [PRIVATE, PUBLIC]
    public_key_from_file(folder / PUBLIC).verify(made.private.sign(b"x"), b"x")
    assert "private" not in repr(made)


def test_two_starts_at_once_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: load_or_create(tmp_path / "keys").id, range(16)))
    assert len(set(made)) == 1


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    load_or_create(tmp_path / "keys")
    (tmp_path / "keys" / PRIVATE).chmod(bits)
    with pytest.raises(StoreError, match="chmod 600"):
        load_or_create(tmp_path / "keys")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        load_or_create(tmp_path / "keys")


def test_somebody_elses_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_create(tmp_path / "keys")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="another user"):
        load_or_create(tmp_path / "keys")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    load_or_create(tmp_path / "real")
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / PRIVATE).symlink_to(tmp_path / "real" / PRIVATE)
    with pytest.raises(StoreError, match="cannot be used"):
        load_or_create(tmp_path / "keys")


@pytest.mark.parametrize("name", [PRIVATE, PUBLIC])
def test_a_pipe_in_the_place_of_a_key_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "keys"
    load_or_create(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name, 0o600)
    with pytest.raises(StoreError, match="is not a plain file"):
        load_or_create(folder)


def test_halves_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    one, other = load_or_create(tmp_path / "one"), load_or_create(tmp_path / "other")
    (other.folder / PUBLIC).replace(one.folder / PUBLIC)
    with pytest.raises(StoreError, match="public half"):
        load_or_create(tmp_path / "one")


def test_what_is_no_key_is_said_so(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    load_or_create(folder)
    (folder / PRIVATE).write_bytes(b"nonsense")
    with pytest.raises(StoreError, match="not a private key"):
        load_or_create(folder)
    (tmp_path / "p.pem").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match="not a public key"):
        public_key_from_file(tmp_path / "p.pem")
    with pytest.raises(StoreError, match="cannot be read"):
        public_key_from_file(tmp_path / "absent.pem")


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    load_or_create(folder)
    other = generate_private_key(SECP256R1())
    (folder / PRIVATE).write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(StoreError, match="another kind"):
        load_or_create(folder)
    pem = other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / PUBLIC).write_bytes(pem)
    with pytest.raises(StoreError, match="another kind"):
        public_key_from_file(folder / PUBLIC)


def test_a_place_that_cannot_hold_a_key_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        load_or_create(tmp_path / "file" / "keys")
