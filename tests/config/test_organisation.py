"""An organisation's policy: teams tighten it, and nothing in their own files loosens it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.compose.runs import policy_of
from ringfence.config import paths
from ringfence.core.errors import ConfigError
from ringfence.core.model import Contract, Decision, Mode
from tests.making import call

READ = Contract(name="search_docs", server="docs", tool="search_docs", mode=Mode.READ)
WRITE = Contract(name="send_mail", server="mail", tool="send_mail", mode=Mode.WRITE)
ASKS = "rules: [{id: org-send, action: ask, tool_patterns: ['send_.*']}]"
ALLOWS = "rules: [{id: ours, action: allow, tool_patterns: ['.*']}]"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "etc/organisation.yaml"
    path.parent.mkdir()
    monkeypatch.setattr(paths, "ORGANISATION", path)
    return path


def load(folder: Path, team: str, organisation: str | None = None) -> config.Config:
    if organisation is not None:
        (folder / "org.yaml").write_text(organisation)
        team += ", organisation: org.yaml"
    return config.loads(f"policy: {{{team}}}", file="f", base=folder)


def decide(settings: config.Config, contract: Contract) -> Decision:
    return policy_of(settings).decide(call(contract.name), contract)


def problems(folder: Path, team: str, organisation: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(folder, team, organisation)
    return str(raised.value)


@pytest.mark.parametrize(
    ("organisation", "team", "contract", "allowed", "asks", "sandbox"),
    [
        # What the team allows, the organisation restricts.
        (ASKS, f"preset: none, {ALLOWS}", WRITE, True, ("always",), False),
        (ASKS, f"preset: none, {ALLOWS}", READ, True, (), False),
        ("rules: [{id: no, action: deny, tool_patterns: ['send_.*']}]", ALLOWS, WRITE, False, (), False),
        ("rules: [{id: box, action: sandbox}]", f"preset: none, {ALLOWS}", WRITE, True, (), True),
        ("preset: strict", "preset: permissive", WRITE, True, ("always",), False),
        ("preset: strict", "preset: strict", WRITE, True, ("always",), False),
        ("preset: strict", "preset: permissive", READ, True, (), False),
        # What the team does not allow, nothing of the organisation does.
        (ASKS, "preset: none", WRITE, False, (), False),
        ("rules: [{id: box, action: sandbox}]", "preset: none", WRITE, False, (), False),
        ("rules: [{id: mark, action: audit}, {id: more, action: warn}]", "preset: none", WRITE, False, (), False),
        ("preset: permissive", "preset: none", READ, False, (), False),
        (ASKS, "preset: none, default: allow_read", READ, True, (), False),
        # And the team may tighten.
        (ASKS, "rules: [{id: never, action: deny, tool_patterns: ['send_.*']}]", WRITE, False, (), False),
    ],
)
def test_an_organisation_restricts_and_never_allows(
    tmp_path: Path,
    organisation: str,
    team: str,
    contract: Contract,
    allowed: bool,
    asks: tuple[str, ...],
    sandbox: bool,
) -> None:
    decision = decide(load(tmp_path, team, organisation), contract)
    assert (decision.allowed, decision.asks, decision.sandbox) == (allowed, asks, sandbox)


def test_that_of_the_machine_holds_whatever_a_configuration_says(tmp_path: Path, machine: Path) -> None:
    assert decide(load(tmp_path, f"preset: none, {ALLOWS}"), WRITE).asks == ()
    machine.write_text(ASKS)
    assert decide(load(tmp_path, f"preset: none, {ALLOWS}"), WRITE).asks == ("always",)
    both = decide(load(tmp_path, f"preset: none, {ALLOWS}", "rules: [{id: box, action: sandbox}]"), WRITE)
    assert (both.asks, both.sandbox, set(both.rules)) == (("always",), True, {"ours", "org-send", "box"})
    machine.write_text("rules: [")
    with pytest.raises(ConfigError):
        load(tmp_path, "preset: none")


@pytest.mark.parametrize(
    ("organisation", "team", "problem"),
    [
        ("rules: [{id: a, action: allow}]", "preset: none", "an organisation's rules only restrict"),
        ("rules: [{id: a, action: ask, approval: boss}]", "preset: none", "boss"),
        ("default: deny", "default: allow_read", "which no team loosens"),
        ("default: allow_read", "preset: none", "must be 'deny'"),
        (ASKS, "rules: [{id: org-send, action: ask, mode: shadow}]", "duplicate rule id 'org-send'"),
        ("[]", "preset: none", "a mapping with rules: or preset:"),
        ("approvals: {}", "preset: none", "approvals"),
    ],
)
def test_what_would_loosen_is_an_error(tmp_path: Path, organisation: str, team: str, problem: str) -> None:
    assert problem in problems(tmp_path, team, organisation)


def test_a_file_that_is_not_there_is_an_error_where_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="f:1:"):
        config.loads("policy: {organisation: missing.yaml}", file="f", base=tmp_path)


def test_to_leave_it_out_loosens(tmp_path: Path) -> None:
    with_it, without = load(tmp_path, ALLOWS, ASKS), load(tmp_path, ALLOWS)
    assert config.loosens(with_it, without) != []
    assert config.loosens(without, with_it) == []
