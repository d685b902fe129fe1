"""Where things lie; only paths come from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ringfence
from ringfence import config
from ringfence.config import paths
from ringfence.core.errors import ConfigError


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RINGFENCE_CONFIG", "RINGFENCE_KEYS", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults(plain: Path) -> None:
    home = plain / "home"
    assert config.default_paths() == (plain / "ringfence.yaml", home / ".config/ringfence/ringfence.yaml")
    assert config.state_folder() == home / ".local/state/ringfence"
    assert config.key_folder() == home / ".config/ringfence/keys"


def test_base_directories(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/c")
    assert config.state_folder() == Path("/s/ringfence")
    assert config.key_folder() == Path("/c/ringfence/keys")
    assert config.default_paths()[1] == Path("/c/ringfence/ringfence.yaml")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert config.state_folder() == plain / "home/.local/state/ringfence"


def test_named_paths(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain / "mine.yaml").touch()
    monkeypatch.setenv("RINGFENCE_CONFIG", "mine.yaml")
    monkeypatch.setenv("RINGFENCE_KEYS", "/keys")
    assert config.default_paths() == (plain / "mine.yaml",)
    assert config.key_folder() == Path("/keys")


def test_a_run_of_ones_own_takes_nothing_from_the_current_folder(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.own_paths() == (plain / "home/.config/ringfence/ringfence.yaml",)
    (plain / "mine.yaml").touch()
    monkeypatch.setenv("RINGFENCE_CONFIG", "mine.yaml")
    assert config.own_paths() == (plain / "mine.yaml",)


@pytest.mark.parametrize("look", [config.default_paths, config.own_paths])
def test_a_named_file_that_is_not_there_is_no_reason_to_do_without_its_rules(
    look: Callable[[], tuple[Path, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_CONFIG", "gone.yaml")
    with pytest.raises(ConfigError, match="RINGFENCE_CONFIG names this file, which does not exist"):
        look()


def test_resolve(plain: Path) -> None:
    assert paths.resolve("a/../b", Path("/base")) == Path("/base/b")
    assert paths.resolve("/a", Path("/base")) == Path("/a")
    assert paths.resolve("~/a", Path("/base")) == plain / "home/a"
    assert paths.resolve("~other/a", Path("/base")) == Path("/base/~other/a")
    assert paths.resolve("a", Path()) == plain / "a"


def test_a_started_server_sees_nothing_that_may_be_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("GITHUB_TOKEN", "x")
    seen = config.process_environment()
    assert "PATH" in seen
    assert not {"AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"} & set(seen)


def test_only_this_file_reads_the_environment() -> None:
    package = Path(ringfence.__file__).parent
    reading = re.compile(r"os\.environ|getenv|Path\.home\(|expanduser")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if reading.search(path.read_text())}
    # These are programs of their own, started with an environment that we made; and the cases look for ours.
    inside = (
        "doctor/",
        "sandbox/process/zygote/",
        "sandbox/process/guest/",
        "sandbox/wasm/inside.",
        "sandbox/wasm/worker.",
    )
    programs = {f"cli/bench/{name}.py" for name in ("box", "egress", "measure", "start")}
    width = {"cli/verbs.py"}  # the width of the terminal, before anything else is loaded
    assert {name for name in found if not name.startswith(inside)} <= {"config/paths.py", *programs, *width}


def test_sockets_lie_beside_the_state_or_where_the_user_keeps_them(
    plain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = Path("/srv/state")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    last = Path("/run/ringfence") if os.geteuid() == 0 else Path("/s/ringfence/run")
    real = paths._is_private
    monkeypatch.setattr(paths, "_is_private", lambda folder, user: "user" not in folder.parts and real(folder, user))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    first, second = paths.socket_folders(state)
    assert (first, second.parent) == (state / "keeper", last)
    assert second not in paths.socket_folders(Path("/srv/other"))
    assert paths.socket_folders(Path("/srv/other/../state")) == (first, second)
    run = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    assert [path.parent for path in paths.socket_folders(state)] == [state, run / "ringfence", last]
    for unusable in ("relative", "/does/not/exist", "/" + "x" * 100):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert paths.socket_folders(state) == (first, second)
    monkeypatch.setattr(paths, "_is_private", lambda folder, user: True)
    assert Path(f"/run/user/{os.geteuid()}/ringfence") in [path.parent for path in paths.socket_folders(state)]


def test_no_socket_lies_where_another_user_could_have_made_its_folder(
    plain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = Path("/" + "long" * 30)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for mode in (0o777, 0o1777, 0o770):
        tmp_path.chmod(mode)
        assert not [path for path in paths.socket_folders(state) if path.is_relative_to(tmp_path / "ringfence")]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert not [path for path in paths.socket_folders(state) if path.is_relative_to("/tmp/ringfence")]


def test_where_container_engines_keep_what_they_are_told(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "CONTAINERS_REGISTRIES_CONF", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    home = plain / "home"
    found = paths.engine_files()
    assert found["auths"] == (home / ".docker/config.json", home / ".config/containers/auth.json")
    assert found["daemon"] == (home / ".config/docker/daemon.json", Path("/etc/docker/daemon.json"))
    assert found["registries"][-1] == Path("/etc/containers/registries.conf")
    (home / ".config/containers").mkdir(parents=True)
    (home / ".config/containers/registries.conf").touch()
    assert paths.engine_files()["registries"][-1] == home / ".config/containers/registries.conf"
    monkeypatch.setenv("DOCKER_CONFIG", "/docker")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/auth.json")
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", "/r.conf")
    found = paths.engine_files()
    assert found["auths"][:2] == (Path("/auth.json"), Path("/docker/config.json"))
    assert found["registries"] == (Path("/r.conf"),)
