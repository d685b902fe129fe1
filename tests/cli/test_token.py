"""`ringfence token`: a token is shown once, to whoever made it, and both its beginning and its end are on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence import identity
from ringfence.identity import TokenCheck
from ringfence.store import Reader
from tests import gateways

CONFIG = """\
gateway: {state: ./state}
agents: {analyst: {capabilities: ["run_*"], tenant: acme}}
people: {alice: {}}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateways.write(tmp_path_factory.mktemp("tokens"), CONFIG)


def token(path: Path, *words: str) -> tuple[int, str, str]:
    done = gateways.run("token", *words, "--config", path)
    return done.returncode, done.stdout, done.stderr


def test_a_token_is_made_listed_and_revoked_on_record(path: Path) -> None:
    code, made, _ = token(path, "create", "--agent", "analyst", "--expires", "3600", "--json")
    shown = json.loads(made)
    assert code == 0 and shown["token"].startswith("rft_") and shown["id"].startswith("tok_")
    assert (shown["agent"], shown["tenant"], shown["state"], shown["made_by"]) == (
        *("analyst", "acme", "valid"), identity.os_user()
    )  # fmt: skip
    assert shown["expires_at"] - shown["made_at"] == 3600
    code, listed, _ = token(path, "list", "--json")
    assert {key: value for key, value in shown.items() if key != "token"} in json.loads(listed)
    assert shown["token"] not in listed and shown["token"] not in token(path, "list")[1]
    reader = Reader.open(path.parent / "state")
    proofs = reader.token_proofs(gateways.keys().public)
    check = lambda: TokenCheck(lambda ident: reader.token(ident, proofs))(shown["token"])  # noqa: E731
    assert check().name == "analyst"
    code, said, _ = token(path, "revoke", shown["id"][:20])
    assert code == 0 and "revoked" in said and "analyst" in said
    assert token(path, "revoke", shown["id"])[0] == 1
    with pytest.raises(identity.NotAdmitted, match="revoked"):
        check()
    reader.close()
    for kind in ("token_created", "token_revoked"):
        (body,) = gateways.records(path.parent / "state", kind=kind)
        assert (body["token"], body["for"], body["name"], body["tenant"]) == (shown["id"], "agent", "analyst", "acme")
        assert body["by"] == identity.os_user()
    secret = shown["token"][25:]
    assert gateways.holding(path.parent / "state", [secret]) == []
    assert gateways.verified(path.parent / "state").ok


def test_it_is_printed_alone_so_that_a_program_can_take_it(path: Path) -> None:
    code, made, about = token(path, "create", "--person", "alice")
    assert code == 0 and made.startswith("rft_") and len(made.split()) == 1
    assert "person alice, tenant local; until" in about and made.strip() not in about


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("create",), "whose is it? Give --agent or --person, one of them"),
        (("create", "--agent", "analyst", "--person", "alice"), "one of them"),
        (("create", "--agent", "robot"), "declares no agent robot: it has analyst"),
        (("create", "--person", "bob"), "declares no person bob: it has alice"),
        (("create", "--agent", "analyst", "--expires", "0"), "should be greater than or equal to 1"),
        (("create", "--agent", "analyst", "--expires", "99999999"), "should be less than or equal to 31622400"),
        (("revoke", "tok_none"), "there is no token tok_none"),
        (("revoke", "\x1b[2Jx"), r"there is no token \x1b[2Jx"),
    ],
)
def test_what_cannot_be_done_says_why(path: Path, words: tuple[str, ...], problem: str) -> None:
    code, _, said = token(path, *words)
    assert code != 0 and problem in " ".join(said.split())


def test_a_configuration_without_agents_says_what_to_write(tmp_path: Path) -> None:
    code, _, said = token(gateways.write(tmp_path, "gateway: {state: ./state}"), "create", "--agent", "a")
    assert code == 1 and "declares no agent a: write agents: {a: …} there" in said
