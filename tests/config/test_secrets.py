"""Secrets as the file declares them: where they come from, whom they are for, and how they get there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.config import Config, loosens
from ringfence.core.errors import ConfigError
from ringfence.core.model import VaultSpec

BASE = Path("/srv/gateway")
NETWORK = "networks: {n: {allow: [api.example]}}\n"


def loads(text: str) -> Config:
    return config.loads(text, file="f", base=BASE)


def warnings(text: str) -> list[str]:
    return [str(warning) for warning in loads(text).warnings]


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text)
    return [str(problem) for problem in caught.value.problems]


def test_every_key_is_taken() -> None:
    settings = loads(
        "secrets:\n"
        "  a: {from: file, path: token, hosts: [api.example, '*.cdn.example:8443'], header: X-Key,\n"
        "      format: 'k={value}', methods: [GET, POST], env: A_KEY, lifetime_seconds: 60, tenants: [local],\n"
        "      environments: [dev*],\n"
        "      capabilities: [], servers: [s], agents: ['*']}\n"
        "  b: {from: vault, path: secret/b, field: x, env: B}\n"
        "vault: {address: 'https://vault.example:8200', token_file: tokens/vault, addresses: [10.0.0.0/8]}\n"
    )
    a, b = settings.secrets.values()
    assert (a.hosts, a.header, a.format) == (("api.example", "*.cdn.example:8443"), "X-Key", "k={value}")
    assert (a.methods, a.variable, a.lifetime_seconds) == (("GET", "POST"), "A_KEY", 60)
    assert (a.tenants, a.environments, a.capabilities) == (("local",), ("dev*",), ())
    assert (a.servers, a.agents, a.options) == (("s",), ("*",), {"path": "/srv/gateway/token"})
    assert a.brokered and not b.brokered and b.methods == ("GET", "HEAD")
    assert settings.vault == VaultSpec(
        "https://vault.example:8200", token_file="/srv/gateway/tokens/vault", addresses=("10.0.0.0/8",)
    )
    assert settings.places == {"a": ("f", 2, 3), "b": ("f", 6, 3)}


def test_the_placeholders_variable_and_the_header_have_defaults() -> None:
    text = "secrets: {api-token.1: {from: command, command: [x], hosts: [h.example]}, b: {from: env, name: B_TOKEN}}"
    first, second = loads(text).secrets.values()
    assert (first.variable, first.header) == ("API_TOKEN_1", "Authorization")
    assert (second.variable, second.header, second.brokered) == ("B_TOKEN", None, False)


@pytest.mark.parametrize(
    ("secret", "told"),
    [
        ("header: X", "f:1:39: a header without hosts: name those that may get it"),
        ("methods: [GET]", "f:1:39: methods belongs to hosts"),
        ("hosts: [h.example], header: Host", "f:1:67: Host belongs to the proxy itself"),
        ("hosts: [h.example], format: Bearer", "f:1:67: 'Bearer' must hold {value} once, and no other braces"),
        (
            "hosts: [h.example], format: '{value} {x}'",
            "f:1:67: '{value} {x}' must hold {value} once, and no other braces",
        ),
        ('hosts: [h.example], format: "a\\n{value}"', "f:1:67: 'a\\n{value}' cannot stand in a header"),
        ("hosts: [h.example], methods: [get]", "f:1:69: 'get' is not an HTTP method: they are written in capitals"),
        ("env: 1A", "f:1:44: '1A' is not a variable's name"),
        ("value: hunter2", "f:1:39: unknown key 'value' (did you mean 'from'?)"),
    ],
)
def test_what_cannot_be_meant_is_told_at_its_place(secret: str, told: str) -> None:
    assert problems(f"secrets: {{k: {{from: env, name: TOKEN, {secret}}}}}") == [told]


def test_a_vault_is_named_once_and_where_it_is_needed() -> None:
    assert problems("secrets: {k: {from: vault, path: a, field: b}}") == [
        "f:1:21: which vault? Write vault: {address: …} at the top of the file"
    ]
    assert problems("vault: {token_env: T}") == ["f:1:1: missing key 'address'"]
    assert problems("vault: {address: 'https://v', addresses: [corp]}") == [
        "f:1:43: 'corp' is not an address or a range of them"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "secrets: {k: {from: env, name: K, hosts: [api.example]}}\n"
            "capabilities: {run_shell: {transport: sandboxed_exec, secrets: k}}",
            ["f:2:64: every call of 'run_shell' will be refused: secret 'k' is for api.example, and network is denied:"
             " name one that has it"],
        ),
        (
            "secrets: {k: {from: env, name: K}}\nservers: {s: {command: [x], secrets: [k]}}",
            ["f:2:39: server 's' will not start: secret 'k' has neither hosts nor env: in which variable is it"
             " expected?"],
        ),
        ("secrets: {k: {from: env, name: K, env: K}}\nservers: {s: {command: [x], secrets: [k]}}", []),
        (
            "secrets: {k: {from: env, name: K, hosts: [api.example]}}\n"
            "servers: {s: {url: 'https://other.example/mcp'}}\ncapabilities: {a: {secrets: k}}",
            ["f:3:29: every call of 'a' will be refused: secret 'k' is not for the host of https://other.example/mcp:"
             " name it in its hosts"],
        ),
        (
            NETWORK + "secrets: {k: {from: env, name: K, hosts: [api.example]}}\n"
            "capabilities: {execute_python: {transport: sandboxed_exec, network: n, secrets: k}}",
            [],
        ),
    ],
)  # fmt: skip
def test_a_secret_without_a_way_is_warned_of(text: str, told: list[str]) -> None:
    assert warnings(text) == told


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("methods: [GET, POST]", "methods: [GET]", 0),
        ("methods: [GET]", "methods: [GET, DELETE]", 1),
        ("servers: [a]", "servers: [a, b]", 1),
        ("servers: [a]", "lifetime_seconds: 299", 1),
        ("lifetime_seconds: 10", "lifetime_seconds: 20", 1),
        ("header: X", "header: Y", 1),
    ],
)
def test_what_loosens_a_secret_waits_to_be_asked_for(old: str, new: str, count: int) -> None:
    text = "secrets: {k: {from: env, name: K, hosts: [h.example], @}}"
    assert len(loosens(loads(text.replace("@", old)), loads(text.replace("@", new)))) == count
