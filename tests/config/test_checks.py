"""Where servers run, and what is mounted for them: as it is meant, or a problem at its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence import config
from ringfence.core.box import MIB, NOT_BUILT
from ringfence.core.errors import ConfigError
from ringfence.core.model import AgentSpec, Issuer, Rate

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


def test_sizes_may_have_units_and_mean_the_same(tmp_path: Path) -> None:
    words = {
        "max_memory_mb": ("1.5G", 1536),
        "max_disk_mb": ("2GiB", 2048),
        "max_output_mb": ("65536k", 64),
        "max_sessions_memory_mb": ("1t", 2**20),
        "session_retain_mb": ("'800 MB'", 800),
    }
    server = "servers: {s: {command: [x], limits: {memory_mb: %s, disk_mb: %s}}}\n"
    written = {
        name: f"{{{', '.join(f'{key}: {each[at]}' for key, each in words.items())}}}"
        for at, name in ((0, "text"), (1, "number"))
    }
    text = loaded(server % ("1G", "64MB") + "sandbox: " + written["text"], tmp_path)
    number = loaded(server % (1024, 64) + "sandbox: " + written["number"], tmp_path)
    assert (text.sandbox, text.servers, text.digest) == (number.sandbox, number.servers, number.digest)
    assert (text.sandbox.max_memory_mb, text.servers["s"].limits["memory_bytes"]) == (1536, 1024 * MIB)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("32M", "must be at least 64, this is 32"),
        ("17T", "must be at most 16777216, this is 17825792"),
        ("0.1G", "'0.1G' is not a whole number of MiB: write 103M, say"),
        ("much", "'much' is not a size: write MiB as a plain number, as in 512, or a number with K, M, G or T"),
        ("1.5", "must be a whole number, this is 1.5"),
        ("true", "must be a whole number, this is true"),
    ],
)
def test_a_size_that_is_none_is_told_at_its_place(written: str, why: str, tmp_path: Path) -> None:
    (problem,) = problems(f"sandbox: {{max_memory_mb: {written}}}", tmp_path)
    assert problem.startswith("f:1:26: ") and why in problem


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


# ── A contract says what its server's box has, or leaves it out; one that says less is told so ──


BOTH = """
networks: {api: {allow: ['api.example:443']}}
secrets: {token: {from: env, name: TOKEN_OF_API, hosts: [api.example], header: Authorization}}
servers:
  asker: {command: [x], network: api, secrets: [token]}
  plain: {command: [x]}
  far: {url: 'https://far.example/mcp'}
  bare: {command: [x], placement: unsafe_host}
capabilities:
"""


def with_contract(contract: str, base: Path) -> config.Config:
    return config.loads(f"{BOTH}  fetch: {contract}\n", file="f", base=base)


@pytest.mark.parametrize(
    ("contract", "text"),
    [
        ("{server: asker, network: denied}", "server 'asker' has network 'api'"),
        ("{server: asker, secrets: none}", "server 'asker' is given token"),
        ("{server: asker, secrets: []}", "write secrets: [token]"),
        ("{server: asker, mode: high_risk, secrets: token}", "high_risk means none: write network: api"),
        ("{server: asker, mode: high_risk, network: api}", "high_risk means none: write secrets: [token]"),
    ],
)
def test_less_than_its_box_has_cannot_be_kept(contract: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_contract(contract, tmp_path)
    (problem,) = [str(each) for each in caught.value.problems]
    assert text in problem
    line = BOTH.count("\n") + 1
    assert problem.startswith(f"f:{line}:")


def test_what_is_left_out_is_the_servers(tmp_path: Path) -> None:
    contract = with_contract("{server: asker}", tmp_path).contracts["fetch"]
    assert (contract.network, contract.secrets) == ("api", ("token",))
    contract = with_contract("{server: asker, network: api, secrets: token}", tmp_path).contracts["fetch"]
    assert (contract.network, contract.secrets) == ("api", ("token",))


@pytest.mark.parametrize("server", ["plain", "far", "bare"])
def test_elsewhere_it_says_what_it_likes(server: str, tmp_path: Path) -> None:
    for contract in (f"{{server: {server}, network: denied, secrets: none}}", f"{{server: {server}, mode: high_risk}}"):
        found = with_contract(contract, tmp_path).contracts["fetch"]
        assert (found.network, found.secrets) == ("denied", ())


def test_where_it_is_not_sure_which_server_it_is_a_warning_says_so(tmp_path: Path) -> None:
    found = with_contract("{network: denied}", tmp_path)
    (warning,) = [str(each) for each in found.warnings if "has network" in str(each)]
    assert "name its server" in warning


# ── Servers that run from our cache: which tree, seen where; and images, which are the root of ──


TREE = "sha256:" + "0a" * 32
IMAGE = f"h.example/x:1@{TREE}"


def packaged(keys: str, *, kind: str = "image", names: str = f"['{IMAGE}']") -> config.Config:
    packages = f"packages: {{from: {kind}, names: {names}, tree: '{TREE}'}}"
    text = f"gateway: {{state: /state}}\nservers:\n  it: {{command: [/bin/it], cwd: /app, {packages}{keys}}}\n"
    return config.loads(text, file="ringfence.yaml", base=Path("/project"))


def test_packages_are_seen_in_the_box() -> None:
    spec = packaged("", kind="npm", names="[it@1.0.0]").servers["it"]
    folder = f"/state/packages/{TREE.removeprefix('sha256:')}/tree"
    assert [(mount.host, mount.at, mount.mode) for mount in spec.mounts] == [(folder, "/packages", "ro")]


def test_an_image_is_no_mount() -> None:
    spec = packaged("").servers["it"]
    assert spec.packages is not None
    assert spec.packages.folder == f"/state/packages/{TREE.removeprefix('sha256:')}/tree"
    assert (spec.mounts, spec.cwd, spec.packages.names) == ((), "/app", (IMAGE,))


@pytest.mark.parametrize(
    ("names", "keys", "why"),
    [
        ("['h.example/x:1']", "", "with its registry and digest"),
        (f"['x@{TREE}']", "", "with its registry and digest"),
        (f"['{IMAGE}', '{IMAGE}']", "", "an image is one"),
        ("['../x']", "", "not the name of an image"),
        (f"['{IMAGE}']", ", placement: shared", "so that box is its own"),
        (f"['{IMAGE}']", ", placement: unsafe_host", "so that box is its own"),
        (f"['{IMAGE}']", ", placement: session", "so that box is its own"),
    ],
)
def test_an_image_is_named_as_it_was_pinned_and_has_a_box_of_its_own(names: str, keys: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        packaged(keys, names=names)


@pytest.mark.parametrize("program", ["npx", "uvx", "docker", "podman"])
def test_a_command_that_fetches_what_it_runs_is_warned_of(program: str) -> None:
    found = config.loads(f"servers: {{it: {{command: [{program}, x]}}}}", file="ringfence.yaml", base=Path("/project"))
    assert [warning for warning in found.warnings if "ringfence init --from" in str(warning)]


# ── What is not built is refused by name; what only leads to refused calls is warned of ──


BASE = Path("/etc/ringfence")
LOCAL = "servers: {s: {command: [x]}}\n"
REMOTE = "servers: {s: {url: 'https://api.corp.example/mcp'}}\n"
NAMES = "networks: {n: {allow: ['*.corp.example:443']}}\nsecrets: {k: {from: env, name: K}}\n"

NOT_BUILT_YET = {
    "1:11": "gateway: {code_mode: on}",
    "1:11 ": "gateway: {code_mode: true}",
    "1:11  ": "gateway: {code_mode: optional}",
    "1:18": "gateway: {state: 'postgresql://db/ringfence'}",
    "2:31 ": LOCAL + "capabilities: {a: {isolation: gvisor}}",
    "2:31  ": LOCAL + "capabilities: {a: {isolation: microvm}}",
    "2:31   ": REMOTE + "capabilities: {a: {isolation: gvisor}}",
    "2:31    ": REMOTE + "capabilities: {a: {isolation: microvm}}",
    **{f"1:11 {' ' * number}": f"sandbox: {{backend: {name}}}" for number, name in enumerate(sorted(NOT_BUILT), 10)},
}


@pytest.mark.parametrize(("place", "text"), NOT_BUILT_YET.items(), ids=list(NOT_BUILT_YET.values()))
def test_what_is_not_built_says_so(place: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.loads(text, file="f", base=BASE)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"f:{place.strip()}: ")
    assert "is not built yet" in problem.text


@pytest.mark.parametrize(
    "text",
    [
        "agents: {}",
        "servers: {s: {command: [x], mounts: [], network: denied, secrets: none, placement: unsafe_host}}",
        LOCAL + "capabilities: {a: {isolation: none, record: full}}",
        REMOTE + "capabilities: {a: {isolation: process}}",
        LOCAL + "capabilities: {a: {isolation: process}}",
        "networks: {n: {allow: ['h:443']}}\nservers: {s: {command: [x], mounts: [{host: /a, at: /b}], network: n}}",
        "capabilities: {run_shell: {transport: sandboxed_exec, isolation: process, memory_layout: fresh}}",
        "sandbox: {max_processes: 8, max_output_mb: 1, capture_bytes: 0, templates: {ml: {packages: [sklearn.svm]}}}",
        "policy: {rules: [{id: a, action: deny, taint_labels: [], conditions: {}}]}",
        "networks: {n: {methods: null, paths: null, max_bytes_out: null}}",
        "networks: {n: {methods: [GET], paths: ['/v1/*'], max_bytes_out: 1, max_bytes_in: 1, per_minute: 1}}",
        "sandbox: {network_enabled: true, allowed_egress_domains: ['*.corp.example', 'api.example:443']}",
        "sandbox: {backend: process, network_enabled: false, allowed_egress_domains: [], max_memory_mb: 64}",
        "gateway: {listen: 'localhost:0', code_mode: off}",
        "gateway: {listen: '[::1]:8700'}",
    ],
)
def test_what_asks_for_nothing_unbuilt_loads(text: str) -> None:
    assert config.loads(text, file="f", base=BASE).warnings == ()


def warnings(text: str) -> list[str]:
    return [str(warning) for warning in config.loads(text, file="f", base=BASE).warnings]


def test_isolation_of_a_capability_that_may_be_on_a_server_without_a_box_needs_its_server_named() -> None:
    both = "servers: {s: {command: [x], placement: unsafe_host}, t: {url: 'https://h/mcp'}}\n"
    with pytest.raises(ConfigError, match="runs in no box"):
        config.loads(both + "capabilities: {a: {isolation: process}}", file="f", base=BASE)
    assert warnings(both + "capabilities: {a: {isolation: process, server: t}}") == []


@pytest.mark.parametrize("key", ["placement: own", "listen: allowed"])
def test_what_means_nothing_for_a_server_that_runs_elsewhere_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="runs elsewhere"):
        config.loads(f"servers: {{t: {{url: 'https://h/mcp', {key}}}}}", file="f", base=BASE)


def test_calls_that_will_be_refused_are_warned_of() -> None:
    box = "capabilities: {run_shell: {transport: sandboxed_exec, secrets: [k], network: n, "
    assert warnings(NAMES + box + "filesystem: {mounts: [{host: /a, at: /b}]}}}") == [
        "f:3:65: every call of 'run_shell' will be refused: secret 'k' names no hosts that it is for, and its value may"
        " not enter a box",
    ]
    assert warnings(NAMES + LOCAL + "capabilities: {a: {secrets: [k], network: n}}") == [
        "f:4:30: every call of 'a' will be refused: server 's' is not given secret 'k': write it under its secrets,"
        " too",
        "f:4:34: every call of 'a' will be refused: the box of its server does not have network 'n'",
    ]
    assert warnings("capabilities: {a: {}}") == ["f:1:16: every call of 'a' will be refused: no server is declared"]


def test_a_named_network_must_have_the_address_of_a_remote_server() -> None:
    capability = "capabilities: {a: {network: n}}"
    assert warnings(NAMES + REMOTE + capability) == []
    elsewhere = REMOTE.replace("corp.example", "elsewhere.example")
    assert warnings(NAMES + elsewhere + capability) == [
        "f:4:20: every call of 'a' will be refused: network 'n' does not allow its server's address"
    ]
    assert len(warnings(NAMES + REMOTE.replace("https", "http") + capability)) == 1


def test_loopback() -> None:
    assert all(config.is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost", "LocalHost."))
    assert not any(config.is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "example"))


# ── Agents ──


AGENTS = """\
people: {alice: {tenant: acme}, bob: {}}
agents:
  analyst: {roles: [reader], capabilities: ["search_*"], resources: ["file:///a/*"], prompts: [p], tenant: acme,
            environments: [development], quota: {per_minute: 60, per_day: 1000}, person: alice, os_user: carol}
  robot: {capabilities: ["*"]}
capabilities: {search_docs: {transport: sandboxed_exec, tool: run_shell}}
"""


def test_agents_are_read_with_a_tenant_that_is_the_usual_one_where_none_is_named() -> None:
    found = config.loads(AGENTS, file="f", base=BASE)
    assert found.warnings == ()
    assert found.agents["analyst"] == AgentSpec(
        "analyst", "acme", frozenset({"reader"}), ("search_*",), ("file:///a/*",), ("p",), ("development",),
        Rate(per_minute=60, per_day=1000), "alice", "carol"
    )  # fmt: skip
    assert (found.agents["robot"].tenant, found.people["bob"].tenant, found.people["alice"].tenant) == (
        *("local", "local"), "acme"
    )  # fmt: skip


def test_an_agent_that_may_call_nothing_or_names_what_does_not_exist_is_warned_of() -> None:
    text = "agents: {a: {}, b: {capabilities: [serch]}, B: {capabilities: [run_shell]}}\ncapabilities: {search: {}}"
    assert [w for w in warnings(text) if "server" not in w] == [
        "f:1:10: agent 'a' may call nothing: write capabilities: [NAME, …], or ['*'] for all",
        "f:1:36: no capability is named so (did you mean 'search'?)",
        "f:1:45: agent 'B' looks like agent 'b': people tell agents apart by their names",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("agents: {local: {}}", "1:10: the name 'local' is taken: choose another"),
        ("agents: {system: {}}", "1:10: the name 'system' is taken: choose another"),
        ("agents: {a: {person: ann}}\npeople: {anna: {}}", "1:22: no person named 'ann' (did you mean 'anna'?)"),
        (
            "agents: {a: {person: ann, tenant: t}}\npeople: {ann: {}}",
            "1:22: 'ann' is of tenant 'local', and the agent of 't':"
            " an agent cannot act for a person of another tenant",
        ),
        ("agents: {a: {os_user: u}, b: {os_user: u}}", "1:40: 'u' is 'a' already: one account is one agent"),
        ("agents: {a: {quota: {burst: 2}}}", "1:29: a burst needs per_minute"),
        ("agents: {a: {tools: [x]}}", "1:14: unknown key 'tools' (did you mean 'capabilities'?)"),
        (
            "agents: {a: {tenant: 'x/y'}}",
            "1:22: 'x/y' is not a name: letters, digits, '_', '-', '.' and '@', at most 128",
        ),
    ],
)
def test_agents_that_cannot_be(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.loads(text, file="f", base=BASE)
    assert [str(each) for each in caught.value.problems] == [f"f:{problem}"]


# ── An address that others can reach ──


OPEN = "gateway: {listen: '0.0.0.0:8700'%s}"
WHO = "\nagents: {a: {capabilities: ['*']}}"
TLS, PROXY, URL = "tls: {cert: c.pem, key: k.pem}", "trusted_proxy: [10.0.0.5]", "url: 'https://gateway.corp.example'"


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        (
            OPEN % "",
            ["agents: {NAME: {capabilities: [...]}}", "gateway.tls:", "gateway.trusted_proxy:", "gateway.url:"],
        ),
        (OPEN % "" + WHO, ["gateway.tls:", "gateway.url:"]),
        (OPEN % f", {TLS}, {URL}", ["agents:"]),
        (OPEN % f", {URL}" + WHO, ["gateway.tls:"]),
        (OPEN % f", {TLS}" + WHO, ["gateway.url:"]),
        ("gateway: {listen: 'gateway.corp.example:8700'}", ["others can reach gateway.corp.example"]),
        ("gateway: {listen: '[::]:8700'}", ["others can reach ::"]),
    ],
)
def test_an_address_that_others_can_reach_needs_identity_and_tls_and_says_what_to_write(
    text: str, lacking: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.loads(text, file="f", base=BASE)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (1, 19) and all(word in problem.text for word in lacking), problem.text
    assert ("agents:" in problem.text) is (WHO not in text)


@pytest.mark.parametrize("how", [TLS, PROXY, f"{TLS}, {PROXY}"])
def test_with_these_it_may_be_listened_on(how: str) -> None:
    gateway = config.loads(OPEN % f", {how}, {URL}" + WHO, file="f", base=BASE).gateway
    assert gateway.url == "https://gateway.corp.example"
    assert gateway.tls is None or gateway.tls.key == BASE / "k.pem"
    assert gateway.trusted_proxy in ((), ("10.0.0.5",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gateway: {trusted_proxy: [10.0.0.5]}", "whomever the proxy lets in would be your own agent"),
        ("gateway: {listen: 'unix:/run/x/s', tls: {cert: c, key: k}}", "tls is for an address to listen on"),
        ("gateway: {listen: 'unix:/run/x/s', trusted_proxy: [::1]}" + WHO, "trusted_proxy is for an address"),
        ("gateway: {url: 'http://gateway.corp.example'}", "would have clients send tokens in clear"),
        ("gateway: {url: 'https://gateway.corp.example/mcp'}", "has a path: write https://HOST[:PORT]"),
        ("gateway: {tls: {cert: c}}", "missing key 'key'"),
        ("gateway: {trusted_proxy: [proxy.corp.example]}" + WHO, "is not an address or a range of them"),
    ],
)
def test_what_is_wrong_with_it_is_told(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config.loads(text, file="f", base=BASE)


def test_the_usual_port_of_an_address_is_left_out_as_clients_do() -> None:
    for written, known in (
        ("https://G.example:443", "https://g.example"),
        ("http://localhost:80/", "http://localhost"),
    ):
        assert config.loads(f"gateway: {{url: '{written}'}}", file="f", base=BASE).gateway.url == known


def test_the_key_of_the_gateway_is_mounted_into_no_box(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    text = (
        "gateway: {tls: {cert: tls/c.pem, key: tls/k.pem}}\nservers: {s: {command: [x], mounts: [{host: tls, at: /t}]}}"
    )
    with pytest.raises(ConfigError, match=r"the key of gateway\.tls"):
        config.loads(text, file="f", base=tmp_path)


# ── An identity provider ──


OIDC = "gateway: {oidc: {issuer: 'https://id.corp.example', audience: a%s}}\n"
CLIENT = "agents: {a: {capabilities: ['*'], oidc_client: c, person: p}}\npeople: {p: {oidc_subject: s}}\n"


def test_an_identity_provider_is_read() -> None:
    more = ", scopes: [mcp], step_up: {'x:write': ['a*']}, algorithms: [EdDSA], roles: [r], roles_claim: realm.roles"
    found = config.loads(OIDC % more + CLIENT, file="f", base=BASE)
    assert found.gateway.oidc == Issuer(
        "https://id.corp.example", "a", ("EdDSA",), None, ("mcp",), "realm.roles", ("r",)
    )
    assert found.gateway.step_up == {"x:write": ("a*",)}
    assert (found.agents["a"].oidc_client, found.people["p"].oidc_subject) == ("c", "s")
    known = "gateway: {url: 'https://g.example', oidc: {issuer: 'https://id.corp.example'}}\n"
    oidc = config.loads(known + CLIENT, file="f", base=BASE).gateway.oidc
    assert oidc is not None and oidc.audience == "https://g.example/mcp" and oidc.algorithms == ("RS256", "ES256")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (OIDC % ", algorithms: [HS256]" + CLIENT, "must be 'RS256'"),
        (OIDC % ", algorithms: [none]" + CLIENT, "must be 'RS256'"),
        (OIDC % ", algorithms: []" + CLIENT, "must not be empty"),
        (OIDC % ", scopes: ['a b']" + CLIENT, "'a b' is not a scope"),
        (
            "gateway: {oidc: {issuer: 'http://id.corp.example', audience: a}}\n" + CLIENT,
            "its keys must come over https://",
        ),
        ("gateway: {oidc: {issuer: 'https://id.corp.example'}}\n" + CLIENT, "missing key 'audience'"),
        (OIDC % "", "no agent has an oidc_client"),
        (CLIENT, "which identity provider? Write gateway: {oidc: {issuer: …}}"),
        (OIDC % "" + CLIENT.replace("oidc_subject: s", ""), "person 'p' has no oidc_subject"),
        (OIDC % "" + "agents: {a: {oidc_client: c}, b: {oidc_client: c}}", "'c' for the same person is 'a' already"),
        ("people: {a: {oidc_subject: s}, b: {oidc_subject: s}}", "'s' is 'a' already"),
    ],
)
def test_an_identity_provider_that_cannot_be(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config.loads(text, file="f", base=BASE)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("a: {record: full, effects: {compensate: c}}, b: {}", "no capability named 'c'"),
        ("a: {record: full, effects: {compensate: a}}, b: {}", "no other capability named 'a'"),
        ("a: {effects: {compensate: b}}, b: {}", "write record: full"),
        ("a: {effects: {preview: b}}, b: {mode: write}", "'b' is no read"),
        ("a: {labels: [{label: x, when: 'args.'}]}", "when of x: "),
        ("a: {place: 'args.'}", "Syntax error"),
    ],
)
def test_what_undoes_shows_and_labels_a_call_has_to_be_there(written: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.loads(f"{LOCAL}capabilities: {{{written}}}", file="f", base=BASE)
    (only,) = caught.value.problems
    assert problem in only.text


def test_a_condition_names_what_rules_see() -> None:
    text = "policy: {rules: [{id: a, action: deny, taint_labels: [x], conditions: {contrct.mode: write}}]}"
    with pytest.raises(ConfigError) as caught:
        config.loads(text, file="f", base=BASE)
    (only,) = caught.value.problems
    assert "nothing is called 'contrct.mode'" in only.text
