"""Where servers run, and what is mounted for them: as it is meant, or a problem at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.box import MIB
from ringfence.errors import ConfigError

NETWORK = "networks: {n: {allow: ['h.example:443']}}\n"


def loaded(text: str, base: Path) -> config.Config:
    return config.loads(text, file="f", base=base)


def problems(text: str, base: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, base)
    return [str(problem) for problem in caught.value.problems]


def test_what_a_server_says_of_its_box(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    text = """
servers:
  s: {command: [x], placement: shared, mounts: [{host: ./docs, at: /docs}], network: n,
      limits: {memory_mb: 512, disk_mb: 64, processes: 128, cpu_cores: 2}}
  t: {command: [y], placement: shared, network: n}
"""
    found = loaded(NETWORK + text, tmp_path)
    server = found.servers["s"]
    assert (server.placement, server.network, found.warnings) == ("shared", "n", ())
    assert [(m.host, m.at, m.mode) for m in server.mounts] == [(str(tmp_path / "docs"), "/docs", "ro")]
    limits = {"memory_bytes": 512 * MIB, "disk_bytes": 64 * MIB, "processes": 128, "cpu_cores": 2.0}
    assert server.limits == limits
    assert found.servers["t"].limits == {}


BAD = {
    "servers: {s: {url: 'https://h/mcp', placement: unsafe_host}}": "runs elsewhere",
    "servers: {s: {command: [x], placement: remote}}": "needs a url",
    "servers: {s: {command: [x], placement: unsafe-host}}": "did you mean",
    "servers: {s: {command: [x], placement: unsafe_host, limits: {memory_mb: 99}}}": "has no box of its own",
    "servers: {s: {command: [x], placement: unsafe_host, mounts: [{host: /srv, at: /x}]}}": "has no box of its own",
    "servers: {s: {command: [x], placement: session, network: n}}": "has no box of its own",
    "servers: {s: {command: [x], placement: session}}\ncapabilities: {c: {server: s, mode: write}}": "only read",
    "servers: {s: {command: [x], placement: b, network: n}, t: {command: [x], placement: b}}": "must be the same",
    "servers: {s: {command: [x], mounts: [{host: /, at: /x}]}}": "unsafe: REASON",
    "capabilities: {run_shell: {transport: sandboxed_exec, filesystem: {mounts: [{host: /, at: /x}]}}}": "unsafe",
    "servers: {s: {command: [x], limits: {max_memory_mb: 5}}}": "did you mean 'memory_mb'",
}


@pytest.mark.parametrize(("text", "why"), BAD.items(), ids=list(BAD))
def test_what_cannot_be_meant(text: str, why: str, tmp_path: Path) -> None:
    (problem,) = problems(NETWORK + text, tmp_path)
    assert why in problem


def test_alone_in_a_shared_box(tmp_path: Path) -> None:
    (warning,) = loaded("servers: {s: {command: [x], placement: team}}", tmp_path).warnings
    assert "no other server is in the box 'team'" in str(warning)


def test_a_link_that_a_box_could_have_put_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "docs").symlink_to("/etc")
    text = "servers: {s: {command: [x], mounts: [{host: ./work, at: /w, mode: rw}]}, t: {command: [x], mounts: [{host: "
    (problem,) = problems(text + "./work/docs, at: /d}]}}", tmp_path)
    assert "a box may write to" in problem


def test_what_a_server_in_an_agents_box_says_is_not_trusted(tmp_path: Path) -> None:
    text = "servers: {s: {command: [x], placement: session}}\ncapabilities: {c: {server: s, mode: read"
    assert loaded(text + "}}", tmp_path).contracts["c"].result.trust == "untrusted"
    assert loaded(text + ", result: {trust: trusted}}}", tmp_path).contracts["c"].result.trust == "untrusted"
