"""Libraries that not every system has: what goes on without them, and what is refused instead of done by less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.core import expression
from ringfence.core.expression import Expression, ExpressionError
from tests import gateways

PLAIN = """version: 1
servers: {desk: {url: "http://127.0.0.1:9/mcp"}}
capabilities: {search_docs: {transport: mcp, server: desk, mode: read}}
policy: {preset: standard}
"""
CONDITION = PLAIN + "approvals: {big: {when: 'args.amount > 5'}}\n"


def without(module: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line where that module is not installed."""
    source = f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv = {['ringfence', *map(str, words)]!r}\n"
    source += "runpy.run_module('ringfence.cli.main', run_name='__main__', alter_sys=True)"
    return subprocess.run([sys.executable, "-c", source], timeout=300, capture_output=True, text=True, check=False)


def test_a_condition_is_refused_where_its_engine_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    monkeypatch.setitem(sys.modules, "cel_expr_python.cel", None)
    expression._engine.cache_clear()
    with pytest.raises(ExpressionError, match="not installed: pip install cel-expr-python"):
        Expression("true")
    monkeypatch.undo()
    assert Expression("true").test({}) is True


def test_a_file_with_conditions_is_refused_at_its_place_and_one_without_is_not(tmp_path: Path) -> None:
    plain = without("cel_expr_python", "check", gateways.write(tmp_path, PLAIN, "plain.yaml"))
    assert (plain.returncode, plain.stderr) == (0, "")
    path = gateways.write(tmp_path, CONDITION, "condition.yaml")
    refused = without("cel_expr_python", "check", path)
    assert refused.returncode == 1
    (line,) = refused.stdout.splitlines() or refused.stderr.splitlines()
    assert line.startswith(f"{path}:5:") and "docs/other-systems.md" in line


def test_without_re2_nothing_falls_back_to_another_engine(tmp_path: Path) -> None:
    refused = without("re2", "check", gateways.write(tmp_path, PLAIN))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    assert "pip install google-re2" in refused.stderr


def test_what_needs_neither_works(tmp_path: Path) -> None:
    for module in ("re2", "cel_expr_python"):
        assert without(module, "--help").returncode == 0
        shown = without(module, "call", "x", "--url", "http://127.0.0.1:9/mcp", "--json")
        assert json.loads(shown.stdout)["reason_code"] == "unreachable", shown.stderr
        listed = without(module, "audit", "verify", tmp_path / "none.jsonl", "--public-key", tmp_path / "none.pem")
        assert listed.returncode == 1 and "Traceback" not in listed.stderr
