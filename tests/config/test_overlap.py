"""What governs must not lie where something governed may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config


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


def test_a_read_only_mount_is_fine(conf: Path) -> None:
    assert found(conf, box("..", "ro")) == []


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
