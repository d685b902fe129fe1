"""What is not built is refused by name; what only leads to refused calls is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.errors import ConfigError

BASE = Path("/etc/ringfence")
LOCAL = "servers: {s: {command: [x]}}\n"
REMOTE = "servers: {s: {url: 'https://api.corp.example/mcp'}}\n"
NAMES = "networks: {n: {allow: ['*.corp.example:443']}}\nsecrets: {k: {from: env, name: K}}\n"

NOT_BUILT = {
    "1:11": "gateway: {code_mode: on}",
    "1:11 ": "gateway: {code_mode: true}",
    "1:11  ": "gateway: {code_mode: optional}",
    "1:19": "gateway: {listen: '0.0.0.0:8700'}",
    "1:19 ": "gateway: {listen: 'gateway.corp.example:8700'}",
    "1:18": "gateway: {state: 'postgresql://db/ringfence'}",
    "1:1": "agents: {analyst: {roles: [reader]}}",
    "1:15": "servers: {s: {openapi: a.yaml, base_url: 'https://h'}}",
    "1:20": "capabilities: {a: {transport: direct}}",
    "2:31 ": LOCAL + "capabilities: {a: {isolation: gvisor}}",
    "2:31  ": LOCAL + "capabilities: {a: {isolation: microvm}}",
    "2:31   ": REMOTE + "capabilities: {a: {isolation: gvisor}}",
    "2:31    ": REMOTE + "capabilities: {a: {isolation: microvm}}",
    "2:30": LOCAL + "capabilities: {a: {effects: {compensate: b}}, b: {}}",
    "2:30 ": LOCAL + "capabilities: {a: {effects: {preview: b}}, b: {}}",
    "1:40 ": "policy: {rules: [{id: a, action: deny, taint_labels: [secret]}]}",
    "1:40  ": "policy: {rules: [{id: a, action: deny, conditions: {a: b}}]}",
    "1:11   ": "sandbox: {backend: docker}",
    "1:11    ": "sandbox: {backend: auto}",
    "1:11       ": "sandbox: {docker_image: python}",
    "1:11        ": "sandbox: {firecracker_kernel_path: /k}",
    "1:11         ": "sandbox: {firecracker_rootfs_path: /r}",
}


@pytest.mark.parametrize(("place", "text"), NOT_BUILT.items(), ids=list(NOT_BUILT.values()))
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


def test_calls_that_will_be_refused_are_warned_of() -> None:
    box = "capabilities: {run_shell: {transport: sandboxed_exec, secrets: [k], network: n, isolation: microvm, "
    assert warnings(NAMES + box + "filesystem: {mounts: [{host: /a, at: /b}]}}}") == [
        "f:3:65: every call of 'run_shell' will be refused: secret 'k' names no hosts that it is for, and its value may"
        " not enter a box",
        "f:3:81: every call of 'run_shell' will be refused: isolation microvm is not built yet",
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
