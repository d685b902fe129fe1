"""A contract says what its server's box has, or leaves it out; one that says less is told so at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.errors import ConfigError

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


def loaded(contract: str, base: Path) -> config.Config:
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
        loaded(contract, tmp_path)
    (problem,) = [str(each) for each in caught.value.problems]
    assert text in problem
    line = BOTH.count("\n") + 1
    assert problem.startswith(f"f:{line}:")


def test_what_is_left_out_is_the_servers(tmp_path: Path) -> None:
    contract = loaded("{server: asker}", tmp_path).contracts["fetch"]
    assert (contract.network, contract.secrets) == ("api", ("token",))
    contract = loaded("{server: asker, network: api, secrets: token}", tmp_path).contracts["fetch"]
    assert (contract.network, contract.secrets) == ("api", ("token",))


@pytest.mark.parametrize("server", ["plain", "far", "bare"])
def test_elsewhere_it_says_what_it_likes(server: str, tmp_path: Path) -> None:
    for contract in (f"{{server: {server}, network: denied, secrets: none}}", f"{{server: {server}, mode: high_risk}}"):
        found = loaded(contract, tmp_path).contracts["fetch"]
        assert (found.network, found.secrets) == ("denied", ())


def test_where_it_is_not_sure_which_server_it_is_a_warning_says_so(tmp_path: Path) -> None:
    found = loaded("{network: denied}", tmp_path)
    (warning,) = [str(each) for each in found.warnings if "has network" in str(each)]
    assert "name its server" in warning
