"""Which folders of the host may be mounted: where they really are, and that no credentials are among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.box import Mount
from ringfence.config.folders import declared, real_path, touches_credentials


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home" / "me"
    for name in (".ssh", ".aws", ".config/gcloud", ".kube", "project", ".config/editor"):
        (home / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("RINGFENCE_KEYS", raising=False)
    return home


@pytest.mark.parametrize(
    "path",
    [
        *(".", "..", "../..", ".ssh", ".ssh/id_ed25519", ".aws", ".aws/credentials", ".config", ".config/gcloud"),
        *(".netrc", ".npmrc", ".pypirc", ".kube/config", ".mozilla/firefox"),
        *(".local/state/ringfence", ".config/ringfence/keys"),
    ],
)
def test_credentials_at_it_in_it_or_around_it(home: Path, path: str) -> None:
    real = real_path(str(home / path))
    assert touches_credentials(real) is not None
    with pytest.raises(ValueError, match="unsafe: REASON"):
        declared(Mount(str(home / path), "/x"), Path("/"))
    assert declared(Mount(str(home / path), "/x", unsafe="it is a test"), Path("/")).host == real


@pytest.mark.parametrize("path", ["project", "project/src", ".config/editor"])
def test_what_holds_none(home: Path, path: str) -> None:
    (home / path).mkdir(exist_ok=True)
    assert touches_credentials(str(home / path)) is None
    assert declared(Mount(f"~/{path}", "/x"), Path("/")).host == str(home / path)


@pytest.mark.parametrize(
    "path", ["/", "/home", "/root", "/etc", "/etc/shadow", "/run/user", "/proc", "/dev", "/var/run"]
)
def test_places_of_the_system(path: str) -> None:
    assert touches_credentials(path) is not None


def test_our_own_state_and_keys_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RINGFENCE_KEYS", str(tmp_path / "keys"))
    (tmp_path / "keys").mkdir()
    assert touches_credentials(str(tmp_path / "state" / "ringfence" / "x")) == "Ringfence's own state"
    assert touches_credentials(str(tmp_path / "keys")) == "Ringfence's own keys"
    assert touches_credentials(str(tmp_path)) is not None


def test_links_are_followed_once_and_not_where_a_box_may_have_put_them(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "link" / "deep")
    assert real_path(f"{tmp_path}/link/deep/../deep") == f"{tmp_path}/real/deep"
    assert real_path(f"{tmp_path}/absolute") == f"{tmp_path}/real/deep"
    assert real_path(f"{tmp_path}/absent/x") == f"{tmp_path}/absent/x"
    assert real_path(f"{tmp_path}/link", [f"{tmp_path}/real"]) == f"{tmp_path}/real"
    for path in ("link", "absolute"):
        with pytest.raises(ValueError, match="a box may write to"):
            real_path(f"{tmp_path}/{path}", [str(tmp_path)])
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="circle"):
        real_path(f"{tmp_path}/loop")
