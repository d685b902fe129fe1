"""The little that the nouns can do."""

from __future__ import annotations

import pytest

from ringfence.model import NetworkSpec, network_allows


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("api.example", "api.example", 443, True),
        ("api.example", "API.Example.", 80, True),
        ("API.example.", "api.example", 80, True),
        ("api.example", "x.api.example", 443, False),
        ("api.example:443", "api.example", 443, True),
        ("api.example:443", "api.example", 80, False),
        ("*.corp.example", "a.corp.example", 1, True),
        ("*.corp.example", "a.b.corp.example", 1, True),
        ("*.corp.example", "corp.example", 1, False),
        ("*.corp.example", ".corp.example", 1, False),
        ("*.corp.example", "evilcorp.example", 1, False),
        ("*.corp.example:443", "a.corp.example", 443, True),
        ("*.corp.example:443", "a.corp.example", 444, False),
        ("127.0.0.1:9101", "127.0.0.1", 9101, True),
        ("[::1]:80", "::1", 80, True),
        ("[::1]", "[::1]", 80, True),
        ("::1", "::1", 80, False),
        ("*", "a", 1, False),
        ("*.", "a.", 1, False),
        ("", "", 1, False),
        ("a:b:c", "a", 1, False),
    ],
)
def test_a_network_allows_what_it_lists(entry: str, host: str, port: int, allowed: bool) -> None:
    assert network_allows(NetworkSpec("n", (entry,)), host, port) is allowed


def test_a_network_without_a_list_allows_nothing() -> None:
    assert not network_allows(NetworkSpec("n"), "a", 1)
    assert network_allows(NetworkSpec("n", ("b", "a")), "a", 1)
