"""The sources on this machine."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from ringfence.core.errors import Unavailable
from ringfence.core.model import SecretSpec
from ringfence.core.secret import reveal
from ringfence.secrets.sources import local_sources
from ringfence.secrets.vault import SecretUse, Vault, VaultEntry

pytestmark = pytest.mark.anyio
USE = SecretUse("acme", "development")
VALUE = "correct-horse-battery"


def vault(spec: SecretSpec, environment: dict[str, str] | None = None) -> Vault:
    return Vault([VaultEntry(spec)], local_sources(({"PATH": os.defpath} if environment is None else environment).get))


async def value(kept: Vault) -> str:
    return reveal(await kept.secret("token", USE))


async def test_the_environment_is_asked_every_time() -> None:
    variables = {"TOKEN": VALUE}
    kept = vault(SecretSpec("token", "env", {"name": "TOKEN"}), variables)
    assert await value(kept) == VALUE
    variables["TOKEN"] = "another-horse-battery"
    assert await value(kept) == "another-horse-battery"
    del variables["TOKEN"]
    with pytest.raises(Unavailable, match="TOKEN is not set"):
        await value(kept)


async def test_a_file_is_read_anew_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{VALUE}\n")
    path.chmod(0o600)
    kept = vault(SecretSpec("token", "file", {"path": str(path)}))
    assert await value(kept) == VALUE
    other = tmp_path / "new"
    other.write_text("another-horse-battery\r\n")
    other.chmod(0o600)
    other.rename(path)
    assert await value(kept) == "another-horse-battery"
    path.unlink()
    with pytest.raises(Unavailable, match="No such file"):
        await value(kept)


async def test_a_file_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(VALUE)
    path.chmod(0o646)
    with pytest.raises(Unavailable, match="every user of this machine can write") as caught:
        await value(vault(SecretSpec("token", "file", {"path": str(path)})))
    assert VALUE not in str(caught.value)


async def test_what_is_no_file_or_no_text_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe, binary = tmp_path / "pipe", tmp_path / "binary"
    os.mkfifo(pipe, 0o600)
    binary.write_bytes(b"\xff\xfe" * 20)
    binary.chmod(0o600)
    for path, problem in ((pipe, "no file"), (binary, "not UTF-8"), (tmp_path, "no file")):
        path.chmod(0o700)
        with pytest.raises(Unavailable, match=problem):
            await value(vault(SecretSpec("token", "file", {"path": str(path)})))


async def test_what_a_command_prints_is_the_secret(tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    command = ("sh", "-c", f"echo run >> {counter}; echo {VALUE}")
    kept = vault(SecretSpec("token", "command", {"command": command}))
    assert [await value(kept), await value(kept)] == [VALUE, VALUE]
    assert counter.read_text() == "run\n"


async def test_a_command_that_fails_tells_nothing_of_what_it_printed() -> None:
    for command, problem in (
        (("sh", "-c", f"echo {VALUE}; exit 3"), "ended with 3"),
        (("/nowhere/at/all",), "cannot be run"),
    ):
        with pytest.raises(Unavailable, match=problem) as caught:
            await value(vault(SecretSpec("token", "command", {"command": command})))
        assert VALUE not in str(caught.value)


async def test_a_command_gets_no_variable_that_it_does_not_need() -> None:
    spec = SecretSpec("token", "command", {"command": ("sh", "-c", "echo ${OTHER:-nothing-was-there}")})
    assert await value(vault(spec, {"PATH": os.defpath, "OTHER": VALUE})) == "nothing-was-there"


async def test_the_keyring_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = types.ModuleType("keyring")
    keyring.get_password = lambda service, name: VALUE if (service, name) == ("mail", "robot") else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", keyring)
    assert await value(vault(SecretSpec("token", "keyring", {"service": "mail", "name": "robot"}))) == VALUE
    with pytest.raises(Unavailable, match="has no other of mail"):
        await value(vault(SecretSpec("token", "keyring", {"service": "mail", "name": "other"})))
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(Unavailable, match="pip install keyring"):
        await value(vault(SecretSpec("token", "keyring", {"service": "mail", "name": "robot"})))
