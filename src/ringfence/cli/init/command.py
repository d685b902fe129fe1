"""`ringfence init`: a first `ringfence.yaml`."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import typer

from ringfence import config
from ringfence.cli import common
from ringfence.cli.progress import progress
from ringfence.cli.terminal import confirm, quoted, safe
from ringfence.config import writing
from ringfence.core import canonical, system
from ringfence.core.errors import ConfigError, RingfenceError, Unavailable

_From = typer.Option(
    None, "--from", metavar="FILE", help="A client's file: .mcp.json, claude_desktop_config.json or mcp.json."
)
_Output = typer.Option(
    None, "--output", metavar="FILE", help="The configuration to read or write. Default: ringfence.yaml."
)
_Yes = typer.Option(None, "--yes", metavar="NAME", help="A server to accept without a question. May be repeated.")
_Plain = typer.Option(
    None, "--plain", metavar="VARIABLE", help="A variable that is not a secret: its value is copied. May be repeated."
)
_Fetch = typer.Option(False, "--fetch", help="Fetch the packages of the configuration into the cache of this machine.")
_Learn = typer.Option(None, "--learn", metavar="NAME", help="Find out what a server of the configuration lacks.")
_Call = typer.Option(
    None, "--call", metavar="TOOL=JSON", help="With --learn: a call that has to succeed. May be repeated."
)
_Grant = typer.Option(
    None, "--grant", metavar="GRANT", help="With --learn: a grant to give without a question. May be repeated."
)
_Replace = typer.Option(False, "--replace", help="Replace an existing file without a question.")
_Scripts = typer.Option(False, "--scripts", help="Let install scripts of npm packages run, in a box without network.")

_NO_BOX = 125


def init(
    source: Path | None = _From,
    given: Path | None = _Output,
    yes: list[str] | None = _Yes,
    plain: list[str] | None = _Plain,
    replace: bool = _Replace,
    scripts: bool = _Scripts,
    fetch: bool = _Fetch,
    learn: str | None = _Learn,
    call: list[str] | None = _Call,
    grant: list[str] | None = _Grant,
) -> None:
    """Write a first ringfence.yaml: a small one to start with, or one for the servers of an MCP client.

    With --from, each server's command is shown in full, and you confirm it. Packages of npx and uvx, and images of
    docker run, are fetched once, in a box that can reach only their registries, and pinned by version and integrity.
    Each server is then started in a box of its own and asked for its tools; those you accept are pinned. The file has
    the names of variables; a value is copied only if you say that it is not a secret.

    \b
    ringfence init                                a small file to start with
    ringfence init --from .mcp.json               for the servers of Claude Code
    ringfence init --from .mcp.json --yes files   without a terminal: name what you accept
    ringfence init --learn files                  what does it lack in its box? asks for each, then shows a diff
    ringfence init --learn files --call 'write_file={"path": "/docs/a", "content": "x"}'
    """
    if (source is not None or learn is not None or fetch) and (why := system.no_boxes()) is not None:
        common.fail(f"ringfence: {why}", _NO_BOX)
    output = given or Path("ringfence.yaml")
    if learn is not None:
        if source is not None or yes or plain or scripts or fetch:
            common.fail("--learn goes only with --output, --call, --grant and --replace", 2)
        _require_trusted_output(given)
        _learn(output, learn, call or [], frozenset(grant or ()), replace)
        return
    if call or grant:
        common.fail("--call and --grant go with --learn", 2)
    if source is None and (yes or plain or scripts):
        common.fail("--yes, --plain and --scripts go with --from", 2)
    if fetch:
        if source is not None or replace:
            common.fail("--fetch goes only with --output", 2)
        _require_trusted_output(given)
        _fetch(output)
        return
    _may_write(output, replace)
    if source is not None:
        _take(source, output, frozenset(yes or ()), frozenset(plain or ()), scripts)
        return
    _write(output, writing.STARTER)
    print(safe(f"Wrote {output}. Describe what it governs, then run: ringfence check"))


def _take(source: Path, output: Path, yes: frozenset[str], plain: frozenset[str], scripts: bool) -> None:
    from ringfence.cli.init import takeover  # noqa: PLC0415 - loads the whole gateway

    try:
        taken = common.run(takeover.take_over, takeover.InitRequest(source, output, yes, scripts, plain))
        config.loads(taken.text, file=str(output), base=output.absolute().parent)
    except ConfigError as exc:
        common.fail(str(exc), 1)
    except Unavailable as exc:
        common.fail(str(exc), _NO_BOX if exc.reason_code == "missing_protection" else 1)
    _write(output, taken.text)
    takeover.report(taken, output)


def _require_trusted_output(given: Path | None) -> None:
    """Exit where no output was named and the file in this folder may be another user's."""
    found = Path("ringfence.yaml").absolute()
    if given is None and found.is_file():
        common.require_trusted(found, found, option="--output")


def _fetch(path: Path) -> None:
    try:
        well = common.run(_fetched, path)
    except ConfigError as exc:
        common.fail(str(exc), 1)
    if not well:
        raise typer.Exit(1)


async def _fetched(path: Path) -> bool:
    """Fetch the packages of every server into the cache; whether each came out as it is pinned. Raises ConfigError."""
    from ringfence.compose import packages  # noqa: PLC0415 - only --fetch makes boxes
    from ringfence.packages.install import InstallRequest  # noqa: PLC0415 - only --fetch makes boxes

    settings = config.load(path)
    well = True
    for server in settings.servers.values():
        pin = server.packages
        if pin is None:
            continue
        print(safe(f"{server.name}: fetching {' '.join(pin.names)} …"), file=sys.stderr)
        wanted = InstallRequest(pin.kind, pin.names)
        try:
            with progress(f"{server.name}: fetching"):
                tree = await packages.fetch(settings.gateway.state, settings.sandbox, wanted)
        except (RingfenceError, ValueError) as exc:
            print(quoted(str(exc), f"{server.name}: "), file=sys.stderr)
            well = False
            continue
        if tree.digest == pin.tree:
            packages.package_cache(settings.gateway.state).used_by(settings.path)
            print(safe(f"{server.name}: as it was pinned"))
            continue
        well = False
        print(safe(f"{server.name}: the tree differs from {pin.tree[:19]}…: newer dependencies, another kind of"))
        print(safe(f"  machine, or another Python. If that is right, write: tree: {tree.digest}"))
    return well


def _learn(path: Path, server: str, calls: list[str], allowed: frozenset[str], write: bool) -> None:
    from ringfence.cli.init import learning  # noqa: PLC0415 - loads the whole gateway

    if not path.is_file():
        common.fail(f"There is no {path}: name the configuration with --output", 2)
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
            print("Nothing was written: there is no terminal to ask on; use --replace")
            return
    if write:
        _write(path, learnt.after)
        print(safe(f"Wrote {path}. Accept the definitions of its tools with: ringfence check --accept {path}"))


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
    """Ask before the work begins whether an existing file may be replaced. Raises Exit."""
    if not output.parent.is_dir():
        common.fail(f"{output.parent} is not a folder", 2)
    if not os.path.lexists(output) or replace:
        return
    try:
        agreed = confirm("", f"{safe(str(output))} exists already. Replace it?")
    except Unavailable:
        common.fail(f"{output} exists already: name another with --output, or use --replace", 2)
    if not agreed:
        common.fail("Nothing was written.", 1)


def _write(output: Path, text: str) -> None:
    """Write the file as a whole or not at all."""
    part = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        # At most for us to write, whatever our umask says: what it says runs as us.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.PRIVATE, 0o644)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, output)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
