"""Which folders of the host may be mounted: where they really are, and that no credentials are among them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import config
from ringfence.config.folders import declared, governs, kept_apart, real_path, touches_credentials
from ringfence.core.box import Mount
from ringfence.core.errors import ConfigError


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
    with pytest.raises(ValueError, match="loop"):
        real_path(f"{tmp_path}/loop")


# ── What governs must not lie where something governed may write ──


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("conf", "state", "keys", "work", "conf/policies"):
        (tmp_path / name).mkdir()
    (tmp_path / "conf/policies/p.yaml").write_text("rules: []")
    monkeypatch.setenv("RINGFENCE_KEYS", str(tmp_path / "keys"))
    return tmp_path / "conf"


def found(conf: Path, text: str, state: str = "../state") -> list[str]:
    path = conf / "ringfence.yaml"
    path.write_text(f"gateway: {{state: {state}}}\npolicy: {{files: [policies/p.yaml]}}\n{text}")
    return [problem.text for problem in config.overlaps(config.load(path))]


def box(host: str, mode: str = "rw") -> str:
    mounts = f"[{{host: {host}, at: /w, mode: {mode}, unsafe: to see that it is found}}]"
    return f"capabilities: {{e: {{transport: sandboxed_exec, tool: run_shell, filesystem: {{mounts: {mounts}}}}}}}"


def server(*arguments: str, more: str = "") -> str:
    return f"servers: {{s: {{command: [{', '.join(('prog', *arguments))}], placement: unsafe_host{more}}}}}"


def test_apart_is_fine(conf: Path) -> None:
    assert found(conf, "") == []
    assert found(conf, box("../work")) == []
    assert found(conf, server("../work", "--root=../work", "missing", "ringfence.yaml")) == []


def test_a_writable_mount_over_everything_names_everything(conf: Path) -> None:
    texts = found(conf, box(".."))
    assert [text.split(" (")[0] for text in texts] == [
        "the configuration",
        "the policy file",
        "the state",
        "the signing key",
    ]
    assert all("which capability 'e' may write" in text for text in texts)


def test_a_read_only_mount_with_a_reason_is_fine(conf: Path) -> None:
    assert found(conf, box("..", "ro")) == []


@pytest.mark.parametrize("state", ["../state", "../work/state/of/it"])
def test_a_read_only_mount_that_shows_the_state_needs_a_reason(conf: Path, state: str) -> None:
    seen = "../work" if "work" in state else "../state"
    with pytest.raises(ConfigError, match="holds Ringfence's own state"):
        found(conf, box(seen, "ro").replace(", unsafe: to see that it is found", ""), state)


@pytest.mark.parametrize("mode", ["ro", "rw"])
@pytest.mark.parametrize(
    ("named", "what"),
    [
        ("secrets: {tok: {from: file, path: ../work/tok.txt, env: TOK}}", "secret 'tok'"),
        ("vault: {address: 'https://vault.example/', token_file: ../work/tok.txt}", "the token of the vault"),
    ],
)
def test_a_mount_that_shows_a_file_named_as_a_secret_needs_a_reason(
    conf: Path, mode: str, named: str, what: str
) -> None:
    mounted = f"{box('../work', mode)}\n{named}"
    with pytest.raises(ConfigError, match=f"holds {what}"):
        found(conf, mounted.replace(", unsafe: to see that it is found", ""))
    assert found(conf, mounted) == []


def test_what_is_kept_apart_from_boxes_is_named_where_it_is_and_where_it_leads(conf: Path) -> None:
    (conf / "real").mkdir()
    (conf / "tok.txt").symlink_to("real/tok")
    text = "secrets: {tok: {from: file, path: ./tok.txt, env: TOK}, other: {from: env, name: X, env: X}}\n"
    text += "vault: {address: 'https://vault.example/', token_file: ./vault}\n"
    (conf / "ringfence.yaml").write_text(f"gateway: {{state: ./state, listen: 'unix:./gw.sock'}}\n{text}")
    names = ("state", "real/tok", "vault", "gw.sock", "tok.txt")
    kept = kept_apart(config.load(conf / "ringfence.yaml"))
    assert sorted(kept) == sorted(f"{os.path.realpath(conf)}/{name}" for name in names)


@pytest.mark.parametrize(
    ("host", "what"), [("policies", "the policy file"), ("../state", "the state"), ("../keys", "the signing key")]
)
def test_each_is_found_by_itself(conf: Path, host: str, what: str) -> None:
    (text,) = found(conf, box(host))
    assert text.startswith(what)


def test_a_server_pointed_at_the_configuration_is_found(conf: Path) -> None:
    assert len(found(conf, server("."))) == 2
    assert len(found(conf, server("--root=.."))) == 4
    assert len(found(conf, server(more=", cwd: .."))) == 4


def test_a_server_in_a_box_can_write_to_its_mounts_alone(conf: Path) -> None:
    boxed = "servers: {s: {command: [prog, --root=..], mounts: [{host: .., at: /w, mode: rw, unsafe: it is a test}]}}"
    assert len(found(conf, boxed)) == 4
    assert found(conf, boxed.replace("mode: rw", "mode: ro")) == []
    assert found(conf, "servers: {s: {command: [prog, --root=..], cwd: ..}}") == []


def test_links_are_followed(conf: Path) -> None:
    (conf.parent / "link").symlink_to(conf.parent / "state")
    assert len(found(conf, box("../link"))) == 1
    assert len(found(conf, box("../state"), state="../link")) == 1


def test_a_key_in_the_state_could_sign_what_was_forged(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_KEYS", str(conf.parent / "state/keys"))
    (text,) = found(conf, "")
    assert "lies in the state folder" in text


def test_a_neighbour_with_a_longer_name_is_not_inside(conf: Path) -> None:
    (conf.parent / "sta").mkdir()
    assert found(conf, box("../sta")) == []


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("project", "the configuration"),
        (".", "configuration"),
        ("..", "configuration"),
        ("project/rules", "the policy"),
        ("project/rules/sub/..", "the policy"),
        ("project/state", "the state"),
        ("project/state/deep", "the state"),
        (".config/ringfence/keys", "the signing key"),
        (".local/state", "the state"),
        (".local/state/ringfence/x", "the state"),
        ("other", "a configuration"),
        ("project/link", "the policy"),
        (str(Path(config.__file__).parent), "Ringfence itself"),
        (str(Path(config.__file__).parents[2]), "Ringfence itself"),
    ],
)
def test_what_rules_over_boxes_is_in_the_folder_or_around_it(home: Path, place: str, what: str) -> None:
    for name in ("project/rules/sub", "project/state", "project/out", "other", ".local/state/ringfence"):
        (home / name).mkdir(parents=True)
    (home / "project/link").symlink_to("rules")
    (home / "other/ringfence.yaml").write_text("version: 1\n")
    (home / "project/rules/a.yaml").write_text("rules: []\n")
    path = home / "project/ringfence.yaml"
    path.write_text("version: 1\ngateway: {state: ./state}\npolicy: {files: [rules/a.yaml]}\n")
    loaded = config.load(path)
    assert what in str(governs(home / place, loaded))
    assert governs(home / "project/out", loaded) is None
    assert governs(home / "project/rules/sub", loaded) is None
    assert governs(home / "new", loaded) is None


# ── The code of servers must not lie where something governed may write ──


def project(conf: Path) -> Path:
    """A server with a script, one from a virtual environment, and one whose script is mounted."""
    work = conf.parent / "work"
    for name in ("srv/data", "venv/bin", "venv/lib/python3.13/site-packages", "app", "lib", "docs"):
        (work / name).mkdir(parents=True)
    (work / "srv/server.py").touch()
    (work / "app/main.py").touch()
    (work / "venv/pyvenv.cfg").touch()
    tool = work / "venv/bin/tool"
    tool.touch()
    tool.chmod(0o755)
    return work


SERVERS = """servers:
  a: {command: [/usr/bin/python3, server.py], cwd: ../work/srv, env: {PYTHONPATH: ../lib}}
  b: {command: [../work/venv/bin/tool], cwd: .}
  c: {command: [/usr/bin/python3, /app/main.py], mounts: [{host: ../work/app, at: /app}, {host: ../work/docs, at: /d}]}
"""


@pytest.mark.parametrize(
    ("host", "who"),
    [
        ("../work/srv", "a"),
        ("../work/lib", "a"),
        ("../work/venv", "b"),
        ("../work/venv/bin", "b"),
        ("../work/venv/lib/python3.13/site-packages", "b"),
        ("../work/app", "c"),
    ],
)
def test_the_code_of_a_server_that_an_agent_may_write_is_found(conf: Path, host: str, who: str) -> None:
    project(conf)
    writable = SERVERS + box(host).replace(", unsafe: to see that it is found", "")
    texts = found(conf, writable)
    assert texts and all(f"server '{who}'" in text and "capability 'e' may write" in text for text in texts)
    assert all("mount it ro, keep the code elsewhere, or say why: unsafe: REASON" in text for text in texts)
    assert found(conf, writable.replace("mode: rw", "mode: ro")) == []
    assert found(conf, SERVERS + box(host)) == [], "its operator says why"


def test_all_code_of_servers_in_one_folder_is_named(conf: Path) -> None:
    project(conf)
    texts = found(conf, SERVERS + box("../work").replace(", unsafe: to see that it is found", ""))
    assert {name for name in "abc" for text in texts if f"server '{name}'" in text} == {"a", "b", "c"}


def test_a_folder_beside_the_code_of_a_server_is_doubtful_and_data_is_not(conf: Path) -> None:
    project(conf)
    for host, doubtful in (("../work/srv/data", 1), ("../work/docs", 0)):
        assert found(conf, SERVERS + box(host).replace(", unsafe: to see that it is found", "")) == []
        texts = [problem.text for problem in config.doubts(config.load(conf / "ringfence.yaml"))]
        assert len(texts) == doubtful and all("if it loads code from there" in text for text in texts)


def test_a_server_that_may_write_to_its_own_code_or_that_of_another_is_found(conf: Path) -> None:
    project(conf)
    own = SERVERS.replace("{host: ../work/docs, at: /d}", "{host: ../work/srv, at: /d, mode: rw}")
    (text, *_) = found(conf, own)
    assert "the code of server 'a'" in text and "server 'c' may write" in text
    itself = SERVERS.replace("{host: ../work/app, at: /app}", "{host: ../work/app, at: /app, mode: rw}")
    assert "the code of server 'c'" in found(conf, itself)[0]
