"""The command line as a whole: what it teaches, what it loads, and how it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.cli.main import VERBS, command_line
from ringfence.cli.verbs import overview
from tests.gateways import run
from tests.tooling import ROOT

SUBVERBS = {
    "box": ("create", "list", "exec", "files", "pause", "resume", "snapshot", "fork", "rm", "volume", "shell", "mcp"),
    "approvals": ("list", "approve", "deny", "allow", "standing", "revoke"),
    "audit": ("list", "show", "explain", "verify", "export", "erase", "replay"),
    "state": ("prune",),
}
EVERY_VERB: list[tuple[str, ...]] = [(verb,) for verb in VERBS]
EVERY_VERB += [(verb, sub) for verb, subs in SUBVERBS.items() for sub in subs]
EVERY_VERB += [("box", "files", verb) for verb in ("ls", "get", "put", "rm")]


def test_without_a_verb_it_lists_them() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(f"\n  {verb} " in shown.stdout for verb in VERBS)


@pytest.mark.parametrize(
    "words", [(), ("box",), ("box", "files"), ("approvals",), ("audit",), ("state",)], ids=" ".join
)
def test_a_listing_cuts_no_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(list(words))([*words, "--help"])
    listed = capsys.readouterr().out.partition("\nCommands:\n")[2]
    assert listed and "..." not in listed


def test_the_list_of_commands_is_printed_as_typer_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command_line([])(["--help"], prog_name="ringfence")
    assert overview() == capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    assert overview() is None


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ringfence", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("ringfence ")


@pytest.mark.parametrize("words", EVERY_VERB, ids=" ".join)
def test_every_verb_teaches_by_an_example(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line(list(words))([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"\n  ringfence {' '.join(words[:-1] or words)}" in shown
    assert "Usage:" in shown


@pytest.mark.parametrize("words", EVERY_VERB, ids=" ".join)
def test_every_option_is_documented(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(list(words))([*words, "--help"])
    options = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    documented = (ROOT / "docs/cli.md").read_text()
    assert [option for option in sorted(options) if option not in documented] == []
    assert f"## {words[0]}\n" in documented and words[-1] in documented


def test_a_listing_loads_no_gateway() -> None:
    heavy = ("mcp", "aiohttp", "uvicorn", "starlette")
    code = (
        "import sys; from ringfence.cli.main import command_line; command_line(['audit']);"
        f"print([name for name in sys.modules if name.split('.')[0] in {heavy}])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_gateway_on_the_pipe_of_its_client_loads_nothing_of_http_before_it_answers() -> None:
    others = ("aiohttp", "jinja2", "mcp.client.client", "mcp.server.mcpserver", "ringfence.front.http")
    code = (
        "import sys; from ringfence.cli import main; main._gateway(['serve', '--stdio']);"
        f"print([name for name in {others} if name in sys.modules], 'ringfence.front.stdio' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[] True"


@pytest.mark.parametrize("words", [("chek",), ("audit", "lst"), ("call",), ("audit", "list", "--limt", "3")])
def test_wrong_usage_exits_2(words: tuple[str, ...]) -> None:
    shown = run(*words)
    assert shown.returncode == 2
    assert "Usage:" in shown.stderr and "Traceback" not in shown.stderr
    assert len(shown.stderr.splitlines()) == 2


def test_usage_is_written_as_it_is_typed() -> None:
    wrong = run("run", "--tmeout", "3")
    assert wrong.stderr.splitlines()[0] == "ringfence run: No such option: --tmeout. Did you mean --timeout?"
    for far in ("--nope", "--verbose", "--networks"):
        assert run("run", far).stderr.splitlines()[0] == f"ringfence run: No such option: {far}"
    assert "Did you mean --memory?" in run("run", "--mem", "1G").stderr
    shown = run("box", "exec", "--help").stdout
    assert "Usage: ringfence box exec [OPTIONS] ID [FILE]" in shown and "<str>" not in shown and "{ID}" not in shown


@pytest.mark.parametrize(
    "words", [("check", "--o\u202e\x1b[2J"), ("--o\u202e\x1b[2J",), ("audit", "list", "--o\u202e\x1b")]
)
def test_wrong_words_are_escaped(words: tuple[str, ...]) -> None:
    shown = run(*words)
    assert shown.returncode == 2
    assert "No such option" in shown.stderr and "Traceback" not in shown.stderr
    assert "\u202e" not in shown.stderr and "\x1b" not in shown.stderr


def test_an_error_is_one_sentence(own_home: Path, tmp_path: Path) -> None:
    missing = run("audit", "list", "--demo")
    assert missing.returncode == 1
    assert missing.stderr.startswith("there is no database in ") and missing.stderr.count("\n") == 1
    path = tmp_path / "ringfence.yaml"
    path.write_text("gateway: {state: ./state}\n")
    for words in (("undo", "call_1"), ("approvals", "list"), ("audit", "exposure", "A"), ("audit", "replay", "call_1")):
        missing = run(*words, "--config", str(path))
        assert missing.returncode == 1 and "ringfence serve" in missing.stderr and "--config" in missing.stderr, words
    never = run("audit", "verify", "--witness", str(tmp_path / "heads"), "--config", str(path))
    assert never.returncode == 1 and "ringfence serve" in never.stderr and never.stderr.count("\n") == 1
    unusable = run("audit", "verify", str(tmp_path), "--public-key", str(tmp_path / "key\x1b[2J.pem"))
    assert unusable.returncode == 1
    assert "cannot be read" in unusable.stderr and "\\x1b" in unusable.stderr and "\x1b" not in unusable.stderr
    assert unusable.stderr.count("\n") == 1


def test_an_unusable_home_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "home"
    broken.write_text("a file, no folder")
    command = [sys.executable, "-m", "ringfence.cli.main", "call", "search_docs", "--demo"]
    ended = subprocess.run(command, env={"HOME": str(broken)}, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr


def test_a_configuration_in_a_folder_whose_name_is_no_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff  b"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    (folder / "ringfence.yaml").write_text("version: 1\n")
    verbs = (("check",), ("call", "x"), ("approvals", "list"), ("audit", "list"), ("state",), ("token", "list"))
    for words in verbs:
        told = run(*words, cwd=folder)
        said = told.stdout + told.stderr
        assert told.returncode != 0 and "whose name is not UTF-8 text; rename it" in said, (words, said)
        assert "Traceback" not in said
