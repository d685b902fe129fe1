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


MOUNTED = """
servers:
  s: {command: [x], mounts: [{host: ./docs, at: /docs, mode: rw}, {host: ./more, at: /more}]}
  far: {url: "http://127.0.0.1:1/mcp"}
  bare: {command: [y], placement: unsafe_host}
capabilities:
  read: {transport: mcp, server: SERVER, filesystem: {mounts: [{host: HOST, at: AT, mode: MODE}]}}
"""


def narrowed(server: str, host: str, at: str, mode: str) -> str:
    text = MOUNTED.replace("SERVER", server).replace("HOST", host)
    return text.replace("AT", at).replace("MODE", mode)


@pytest.mark.parametrize(
    ("host", "at", "mode"), [("./docs", "/docs", "ro"), ("./docs", "/docs", "rw"), ("more", "/more", "ro")]
)
def test_a_contract_of_a_server_may_have_less_than_its_server(tmp_path: Path, host: str, at: str, mode: str) -> None:
    for name in ("docs", "more"):
        (tmp_path / name).mkdir()
    found = loaded(narrowed("s", host, at, mode), tmp_path).contracts["read"]
    assert [(m.at, m.mode) for m in found.mounts] == [(at, mode)]


@pytest.mark.parametrize(
    ("server", "host", "at", "mode", "text"),
    [
        ("s", "./more", "/more", "rw", "write it under servers: s: mounts: [{host: ./more, at: /more, mode: rw}], too"),
        ("s", "./docs", "/elsewhere", "ro", "server 's' does not see this"),
        ("far", "./docs", "/docs", "ro", "server 'far' runs elsewhere, where nothing is mounted"),
        ("bare", "./docs", "/docs", "ro", "server 'bare' has no box of its own (placement unsafe_host)"),
    ],
)
def test_a_contract_of_a_server_has_no_more_than_its_server(
    tmp_path: Path, server: str, host: str, at: str, mode: str, text: str
) -> None:
    for name in ("docs", "more"):
        (tmp_path / name).mkdir()
    (problem,) = problems(narrowed(server, host, at, mode), tmp_path)
    assert problem.startswith("f:7:") and text in problem


def test_where_any_server_may_have_the_tool_it_is_a_warning(tmp_path: Path) -> None:
    for name in ("docs", "more"):
        (tmp_path / name).mkdir()
    found = loaded(narrowed("s", "./docs", "/docs", "ro").replace("server: s, ", ""), tmp_path)
    assert ["name its server, or: " in str(warning) for warning in found.warnings] == [True]


# ── The gateway's socket ──


@pytest.mark.parametrize(
    ("written", "where"), [("g.sock", "g.sock"), ("run/../g.sock", "g.sock"), ("/run/g", "/run/g")]
)
def test_a_gateway_may_listen_at_a_path(tmp_path: Path, written: str, where: str) -> None:
    gateway = loaded(f'gateway: {{listen: "unix:{written}"}}', tmp_path).gateway
    assert gateway.socket == tmp_path / where
    assert (gateway.host, gateway.port) == ("127.0.0.1", 8700), "for whoever wants it at an address after all"
    assert loaded("", tmp_path).gateway.socket is None
    assert loaded("", tmp_path).digest != loaded(f'gateway: {{listen: "unix:{written}"}}', tmp_path).digest


def test_a_path_that_no_socket_can_have_is_a_problem(tmp_path: Path) -> None:
    assert "names no socket" in problems('gateway: {listen: "unix:"}', tmp_path)[0]
    assert "too long for a socket" in problems(f'gateway: {{listen: "unix:/{"x" * 107}"}}', tmp_path)[0]
    assert loaded(f'gateway: {{listen: "unix:/{"x" * 106}"}}', tmp_path).gateway.socket is not None


@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_a_socket_that_boxes_would_see_is_a_problem(tmp_path: Path, mode: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to("shared")
    mount = f"{{host: shared, at: /workspace/input, mode: {mode}}}"
    server = f"servers: {{s: {{command: [x], mounts: [{mount}]}}}}"
    own = f"capabilities: {{execute_python: {{transport: sandboxed_exec, filesystem: {{mounts: [{mount}]}}}}}}"
    for text in (server, own):
        for path in ("shared/g.sock", "link/g.sock", "shared/new/g.sock"):
            found = problems(f'gateway: {{listen: "unix:{path}"}}\n{text}', tmp_path)
            assert len(found) == 1 and "mounts.0" in found[0] and found[0].startswith("f:1:")
        assert loaded(f'gateway: {{listen: "unix:beside/g.sock"}}\n{text}', tmp_path).gateway.socket
