"""The words of `ringfence run`: what is read without Typer is what Typer would have read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ringfence.cli import run, run_words
from ringfence.cli.main import command_line
from tests import boxing

BY_TYPER_ALONE = {"--batch", "--workers", "--help"}

PLAIN = [
    ["-c", "print(1)"],
    ["-c", "-x"],
    ["--shell", "wc -l"],
    ["a.py"],
    ["-", "--", "-v", "--timeout"],
    ["a.py", "--timeout", "2.5", "x", "--", "--", "y"],
    ["--timeout=3", "a.py", "--pids", "7", "--memory", "2G", "--disk=64"],
    ["a.py", "--allow", "h:1", "--allow", "*.x", "--env", "A=1", "--env=B=2=3", "--input", "d", "--input", "e"],
    ["a.py", "--package", "p==1", "--allow-package", "q", "--secret", "s", "--tree", "/t", "--listen", "--fresh"],
    ["a.py", "--output", "o", "--facts", "-", "--template", "data", "--config", "c.yaml", "--backend", "process"],
    ["-c", "1", "-c", "2", "--timeout", "1", "--timeout", "2"],
]
FOR_TYPER = [
    ["--help"],
    ["-h"],
    ["-cprint(1)"],
    ["--no-such", "x"],
    ["--timeout", "0"],
    ["--timeout", "86401"],
    ["--timeout", "nan"],
    ["--timeout", "1_0"],
    ["--pids", "0"],
    ["--pids", "1.5"],
    ["--memory", "1"],
    ["--memory", "much"],
    ["--timeout"],
    ["--output", ""],
    ["--listen=yes"],
    ["--batch", "x.jsonl"],
    ["-lc", "x"],
]


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_both_read_the_same(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "perform", lambda **given: heard.append(given))
    command_line(["run"])(["run", *words], standalone_mode=False)
    read = run_words.read(words)
    assert read is not None
    assert given(read) == given(heard[0])


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value not in (None, [], False)}


@pytest.mark.parametrize("words", FOR_TYPER, ids=" ".join)
def test_the_rest_is_for_typer(words: list[str]) -> None:
    assert run_words.read(words) is None


def test_no_option_is_forgotten() -> None:
    declared = get_command(command_line(["run"])).commands["run"].params  # type: ignore[attr-defined]
    options = {name for each in declared for name in each.opts if name.startswith("-")}
    assert options - BY_TYPER_ALONE == {*run_words.OPTIONS, *run_words.FLAGS}
    repeated = {each.opts[0] for each in declared if getattr(each, "multiple", False)}
    assert repeated == {name for name, (_, _, many) in run_words.OPTIONS.items() if many}


HEAVY = ("typer", "pydantic", "mcp", "starlette", "uvicorn", "aiohttp", "anyio", "ruamel", "cel_expr_python")
LOADED = f"""
import atexit, sys
sys.argv = ["ringfence", *{{words!r}}]
atexit.register(lambda: print(sorted({{{{name.split(".")[0] for name in sys.modules}}}} & {{{{*{HEAVY!r}}}}})))
from ringfence.cli.main import main
main()
"""


@pytest.mark.parametrize("words", [["--version"], ["run", "-c", "print('ran')"]], ids=" ".join)
def test_a_plain_run_loads_nothing_of_a_gateway(words: list[str], own_home: Path) -> None:
    if words[0] == "run":
        boxing.need_boxes()
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(words=words)], capture_output=True, text=True, timeout=300, check=True
    )
    first, last = done.stdout.splitlines()
    assert first == "ran" or first.startswith("ringfence ")
    assert last == "[]"


UNUSED = (
    *("asyncio.sslproto", "inspect", "locale", "shutil", "ssl", "tempfile"),
    *(f"ringfence.sandbox.tools.{name}" for name in ("files", "processes", "resources", "session_broker", "sessions")),
    *("ringfence.governance.approval_binding", "ringfence.governance.call_meta", "ringfence.governance.uris"),
    *("ringfence.audit.approvals", "ringfence.store.pruning", "ringfence.store.reader"),
)
EXECUTED = f"""
import atexit, sys, types
sys.argv = ["ringfence", "run", "-c", "print('ran')"]
atexit.register(lambda: print([name for name in {UNUSED!r} if type(sys.modules.get(name)) is types.ModuleType]))
from ringfence.cli.main import main
main()
"""


def test_a_plain_run_executes_no_module_that_it_does_not_use(own_home: Path) -> None:
    boxing.need_boxes()
    for _ in range(2):  # the first makes keys, and tests this host
        done = subprocess.run([sys.executable, "-c", EXECUTED], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["ran", "[]"]
