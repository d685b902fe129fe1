"""The table of reason codes: every code of the source is in it, and the page of the docs is made from it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ringfence.core import errors, reasons
from ringfence.core.errors import RingfenceError, SetUpFailed, Unavailable
from ringfence.core.reasons import REASONS
from tests.tooling import ROOT

SOURCE = ROOT / "src" / "ringfence"
PLACES = {"Unavailable": 0, "QuotaExceeded": 0, "OutcomeUnknown": 0, "TimedOut": 0, "UpstreamFailed": 0}
PLACES |= dict.fromkeys(("Refused", "Denied", "NotFound", "SandboxNotFound", "SandboxStopped", "Outcome"), 1)
PLACES |= {"Answer": 2, "refusal": 0}
"""At which place among the arguments the code stands."""


def literal(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*literal(node.body), *literal(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def codes(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PLACES:
            place = PLACES[node.func.id]
            if len(node.args) > place:
                found.update(literal(node.args[place]))
    return {code for code in found if re.fullmatch("[a-z_]+", code)}


def test_every_code_of_the_source_is_in_the_table() -> None:
    missing = {code: path.name for path in SOURCE.rglob("*.py") for code in codes(path) if code not in REASONS}
    assert missing == {}
    assert len(REASONS) > 150


def test_each_is_a_sentence_with_a_remedy() -> None:
    for code, reason in REASONS.items():
        assert reason.meaning.endswith("."), code
        assert reason.remedy.endswith("."), code


def test_the_page_of_the_docs_is_the_table() -> None:
    assert (ROOT / "docs" / "reasons.md").read_text().endswith(f"\n{reasons.page()}\n")


def test_an_error_knows_what_to_do() -> None:
    assert Unavailable("no_group", "no").remedy == "the operator: Run `ringfence host`."
    assert SetUpFailed("boom").remedy == f"the caller: {REASONS['setup_failed'].remedy}"
    assert Unavailable("made up", "no").remedy is None
    assert RingfenceError("no").remedy is None


@pytest.mark.parametrize("kind", [errors.StoreError, errors.TamperError])
def test_an_error_without_a_code_says_so(kind: type[RingfenceError]) -> None:
    assert kind("no").reason_code == ""
