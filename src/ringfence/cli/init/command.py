"""`ringfence init`: a first `ringfence.yaml`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import typer

from ringfence import canonical, config, system
from ringfence.cli import common
from ringfence.cli.terminal import confirm, safe
from ringfence.config import writing
from ringfence.errors import ConfigError, Unavailable

_From = typer.Option(
    None, "--from", metavar="FILE", help="A client's file: .mcp.json, claude_desktop_config.json, or an mcp.json."
)
_Output = typer.Option(Path("ringfence.yaml"), "--output", metavar="FILE", help="Where the configuration is written.")
_Yes = typer.Option(
    None, "--yes", metavar="NAME", help="A server that is accepted without a question. May be repeated."
)
_Plain = typer.Option(
    None, "--plain", metavar="VARIABLE", help="One that is no secret: its value is copied. May be repeated."
)
_Fetch = typer.Option(False, "--fetch", help="Fetch the packages of the configuration into the cache of this machine.")
_Learn = typer.Option(None, "--learn", metavar="NAME", help="Find out what a server of the configuration lacks.")
_Call = typer.Option(
    None, "--call", metavar="TOOL=JSON", help="With --learn: a call that has to succeed. May be repeated."
)
_Grant = typer.Option(
    None, "--grant", metavar="GRANT", help="With --learn: what is given without a question. May be repeated."
)
_Replace = typer.Option(False, "--replace", help="Replace the file that is there, without a question.")
_Scripts = typer.Option(False, "--scripts", help="Let install scripts of npm packages run, in a box without network.")

_NO_BOX = 125


def init(
    source: Path | None = _From,
    output: Path = _Output,
    yes: list[str] | None = _Yes,
    plain: list[str] | None = _Plain,
    replace: bool = _Replace,
    scripts: bool = _Scripts,
    fetch: bool = _Fetch,
    learn: str | None = _Learn,
    call: list[str] | None = _Call,
    grant: list[str] | None = _Grant,
) -> None:
    """Write a first ringfence.yaml: a small one to begin with, or one for the servers that an MCP client has.

    With --from, each server's command is shown in full and confirmed. Packages of npx and uvx, and images of docker
    run, are fetched once, in a box that reaches their registries alone, and pinned by version and integrity. Each
    server is then started in a box of its own and asked for its tools; what you accept is pinned. Variables become
    names: no value is copied unless you say that it is no secret.

    \b
    ringfence init                                a small file to begin with
    ringfence init --from .mcp.json               in front of the servers of Claude Code
    ringfence init --from .mcp.json --yes files   without a terminal: what is accepted is named
    ringfence init --learn files                  what does it lack in its box? each as a question, then a diff
    ringfence init --learn files --call 'write_file={"path": "/docs/a", "content": "x"}'
    """
    if (source is not None or learn is not None or fetch) and (why := system.no_boxes()) is not None:
        common.fail(f"ringfence: {why}", _NO_BOX)
    if learn is not None:
        if source is not None or yes or plain or scripts or fetch:
            common.fail("--learn goes with --output, --call, --grant and --replace alone", 2)
        _learn(output, learn, call or [], frozenset(grant or ()), replace)
        return
    if call or grant:
        common.fail("--call and --grant go with --learn", 2)
    if source is None and (yes or plain or scripts):
        common.fail("--yes, --plain and --scripts go with --from", 2)
    if fetch:
        if source is not None or replace:
            common.fail("--fetch goes with --output alone", 2)
        _fetch(output)
        return
    _may_write(output, replace)
    if source is not None:
        _take(source, output, frozenset(yes or ()), frozenset(plain or ()), scripts)
        return
    _write(output, writing.STARTER)
    print(safe(f"Wrote {output}. Say what it is to govern, then: ringfence check"))


def _take(source: Path, output: Path, yes: frozenset[str], plain: frozenset[str], scripts: bool) -> None:
    taking = common.loaded("ringfence.cli.init.taking")
    try:
        taken = common.run(taking.take_over, taking.Request(source, output, yes, scripts, plain))
        config.loads(taken.text, file=str(output), base=output.absolute().parent)
    except (ConfigError, Unavailable) as exc:
        common.fail(str(exc), 1)
    _write(output, taken.text)
    common.loaded("ringfence.cli.init.telling").tell(taken, output)


def _fetch(path: Path) -> None:
    try:
        well = common.run(common.loaded("ringfence.cli.init.fetching").fetch, path)
    except ConfigError as exc:
        common.fail(str(exc), 1)
    if not well:
        raise typer.Exit(1)


def _learn(path: Path, server: str, calls: list[str], allowed: frozenset[str], write: bool) -> None:
    if not path.is_file():
        common.fail(f"There is no {path}: name the configuration with --output", 2)
    learning = common.loaded("ringfence.cli.init.learning")
    lesson = learning.Lesson(path, server, tuple(map(_called, calls)), allowed)
    try:
        learnt = common.run(learning.learn, lesson)
    except (ConfigError, Unavailable) as exc:
        common.fail(str(exc), 1)
    if not learnt.works:
        common.fail(f"{server} does not work with what it was given: {learnt.problem}", 1)
    if learnt.after == learnt.before:
        print(safe(f"{server} works as it is; nothing has to be given."))
        return
    print(safe(learnt.diff(path.name), lines=True))
    if not write:
        try:
            write = confirm("", f"Write this to {safe(str(path))}?")
        except Unavailable:
            print("Nothing was written: there is no terminal to ask on; say --replace")
            return
    if write:
        _write(path, learnt.after)
        print(safe(f"Wrote {path}. What its tools say is accepted with: ringfence check --accept {path}"))


def _called(text: str) -> tuple[str, dict[str, object]]:
    name, _, given = text.partition("=")
    try:
        arguments = canonical.loads(given or "{}")
    except canonical.NotCanonical as exc:
        common.fail(f"--call {name}: {exc}", 2)
    if not name or not isinstance(arguments, dict):
        common.fail("--call: write TOOL={…}", 2)
    return name, arguments


def _may_write(output: Path, replace: bool) -> None:
    """Ask before anything is done for it. Raises Exit."""
    if not output.parent.is_dir():
        common.fail(f"{output.parent} is no folder", 2)
    if not os.path.lexists(output) or replace:
        return
    try:
        agreed = confirm("", f"{safe(str(output))} is there already. Replace it?")
    except Unavailable:
        common.fail(f"{output} is there already: name another with --output, or say --replace", 2)
    if not agreed:
        common.fail("Nothing was written.", 1)


def _write(output: Path, text: str) -> None:
    """As a whole or not at all."""
    part = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        with part.open("x", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, output)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
