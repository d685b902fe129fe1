"""`ringfence host`: what boxes need of this host: what works, what is weaker or missing, and how to fix it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import typer

from ringfence.cli import common, options
from ringfence.cli.terminal import confirm, safe, word
from ringfence.config.paths import caller_of_sudo
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.process.host import diagnosis, remedies
from ringfence.sandbox.process.host.diagnosis import Diagnosis, Finding
from ringfence.sandbox.process.host.info import HostInfo

_USAGE = 2
_WORDS = {"ok": "ok", "weaker": "weaker", "missing": "MISSING"}
_SECONDS = 300.0


def host(
    fix: bool = typer.Option(
        False, "--fix", help="As root: fix what is missing, after showing each change and asking."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="With --fix: do not ask."),
    user: str | None = typer.Option(
        None,
        "--user",
        metavar="NAME",
        help="As root: check for this user. Default: the user who called sudo, else root.",
    ),
    as_json: options.PrintJson = False,
    config_path: options.SandboxConfig = None,
) -> None:
    """Check what boxes need of this host, and make one. No setting is changed without --fix.

    Each line is ok, weaker (boxes can be made, with less protection) or MISSING (no box can be made), with what to do
    about it. --fix, as root, changes what can be fixed here: settings, an AppArmor profile, ranges of user ids,
    delegation by systemd. It shows each change first.

    Exit code 0 if boxes can be made, 1 if they cannot.

    \b
    ringfence host                           what works here, for you
    sudo ringfence host --fix                show what would help, ask, and do it
    sudo ringfence host --fix --user build   the same for another user
    """
    if fix and as_json:
        common.fail("--fix and --json exclude each other", _USAGE)
    if yes and not fix:
        common.fail("--yes goes with --fix", _USAGE)
    whom = _user(user)
    report = _of_other(whom) if whom is not None else _of_ourselves(common.own_config(config_path).sandbox)
    if as_json:
        common.dump(report)
    else:
        print(text(report))
    if fix:
        report = _fix(report, whom, yes=yes) or report
    raise typer.Exit(0 if report["works"] else 1)


# ── For whom ──


def _user(named: str | None) -> remedies.User | None:
    """The user to check for, if that is not ourselves."""
    if os.geteuid() != 0:
        if named is not None:
            common.fail("only root can look for another user; run it with sudo", _USAGE)
        return None
    named = named or caller_of_sudo()
    if named is None:
        return None
    try:
        found = remedies.User.named(named)
    except LookupError:
        common.fail(f"there is no user {named!r} on this host", _USAGE)
    return found if found.uid else None


def _of_ourselves(sandbox: SandboxSettings) -> Json:
    found = diagnosis.diagnose()
    findings = [_accepted(finding, sandbox) for finding in found.findings]
    if not any(finding.state == "missing" for finding in findings):
        findings.append(common.run(_box, sandbox, found))
    return {
        "user": _name(os.geteuid()),
        "works": not any(finding.state == "missing" for finding in findings),
        "container": found.host.engine,
        "options": remedies.options(found.causes, found.host),
        "findings": [finding.as_json() for finding in findings],
    }


def _accepted(finding: Finding, sandbox: SandboxSettings) -> Finding:
    """A protection that the operator gave up is not missing any more."""
    if finding.name != "Landlock" or finding.state != "missing" or "landlock" not in sandbox.accept_missing:
        return finding
    return replace(
        finding, state="weaker", follows="you accepted that boxes lack their second line of defence for files"
    )


async def _box(sandbox: SandboxSettings, found: Diagnosis) -> Finding:
    """The last word: a box is made like any other, and looked at from within."""
    from ringfence.compose.backends import make_backend  # noqa: PLC0415 - not every host can load it

    backend = None
    try:
        backend = make_backend(sandbox)
        await backend.run(BoxSpec(Program("python", b"pass")))
    except Unavailable as exc:
        cures = remedies.of("unknown", found.host)
        return Finding("a box", "missing", exc.message, "no box can be made", "unknown", cures)
    finally:
        if backend is not None:
            with anyio.CancelScope(shield=True):
                await backend.close()
    return Finding("a box", "ok", "made, looked at from within, and removed")


def _of_other(whom: remedies.User) -> Json:
    """What that user would see: only a check that runs as that user can tell."""
    found = pwd.getpwuid(whom.uid)
    env = {"HOME": found.pw_dir, "USER": found.pw_name, "LOGNAME": found.pw_name, "PATH": os.defpath, "LANG": "C.UTF-8"}
    runtime = f"/run/user/{whom.uid}"
    if os.path.isdir(runtime):
        env |= {"XDG_RUNTIME_DIR": runtime, "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus"}
    command = [sys.executable, "-I", "-m", "ringfence.cli.main", "host", "--json"]
    try:
        ran = subprocess.run(
            command,
            user=whom.uid,
            group=found.pw_gid,
            extra_groups=os.getgrouplist(found.pw_name, found.pw_gid),
            env=env,
            cwd="/",
            # Nothing of ours is for that user: not the terminal that root types into, and not by way of its session.
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        report: Json = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
        common.fail(
            f"{whom.name} cannot run this installation of Ringfence ({sys.executable}): {exc}. Install Ringfence where "
            f"that user can run it, such as /opt, or have {whom.name} run `ringfence host` from one of their own"
        )
    return report


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ── Fixing ──


def _fix(report: Json, whom: remedies.User | None, *, yes: bool) -> Json | None:
    """What holds afterwards; nothing where nothing was done."""
    causes: list[Any] = [finding["cause"] for finding in report["findings"] if finding["cause"] is not None]
    if report["options"]:
        print("\nThis is a container: what is missing has to be granted when it is started.")
        return None
    root = os.geteuid() == 0
    whom = whom or (None if root else remedies.User(os.geteuid(), _name(os.geteuid())))
    changes = remedies.plan(causes, HostInfo.read(uid=whom.uid if whom is not None else None), whom)
    if not changes:
        every = all(finding["state"] == "ok" for finding in report["findings"])
        print("\nThere is nothing to fix here." if every else "\nNone of this can be fixed from here.")
        return None
    shown = "\n".join(["\nTo fix it:", *(_shown(change) for change in changes)])
    if not root:
        print(safe(shown, lines=True), flush=True)
        common.fail(f"\nThat takes root: {remedies.fix()}")
    if yes:
        print(safe(shown, lines=True))
    elif not confirm(safe(shown, lines=True), f"Make {_many(len(changes))}?"):
        common.fail("Nothing was changed.")
    failed = False
    for change in changes:
        problem = remedies.make(change)
        failed = failed or bool(problem)
        print(safe(f"{'FAILED' if problem else 'done'}: {change.shown.splitlines()[0].rstrip(':')} {problem}".rstrip()))
    print("\nAfterwards:", flush=True)
    after = _of_other(whom) if whom is not None else _of_ourselves(common.own_config(None).sandbox)
    print(text(after, brief=True))
    if failed:
        common.fail("Not every change could be made.")
    return after


def _shown(change: remedies.Change) -> str:
    return f"  • {change.why}\n{textwrap.indent(change.shown, ' ' * 6)}"


def _many(count: int) -> str:
    return "this change" if count == 1 else f"these {count} changes"


# ── For people ──


def text(report: Json, *, brief: bool = False) -> str:
    """A table, then, unless `brief`, what to do about the lines that are not ok, then one line that says it all."""
    width = max(80, min(120, shutil.get_terminal_size((100, 24)).columns))
    findings: Sequence[Json] = report["findings"]
    lines = [safe(f"Boxes on this host, for {report['user']}"), ""]
    longest = max(len(finding["name"]) for finding in findings)
    for finding in findings:
        how = f"{_WORDS[finding['state']]:8}"
        head = safe(f"  {how} {finding['name']:{longest}}  ")
        first, *rest = _wrapped(head, safe(finding["seen"]), width)
        lines += [first.replace(how, word(how), 1), *rest]
    alike: dict[str, list[Json]] = {}
    for finding in findings:
        if finding["state"] != "ok":
            alike.setdefault(_key(finding), []).append(finding)
    for group in () if brief else alike.values():
        lines += ["", *_what_to_do(group, report["options"], width)]
    return "\n".join([*lines, "", *_summary(report)])


def _key(finding: Json) -> str:
    """The same for those that one and the same remedy helps."""
    cures: Sequence[Json] = finding["remedies"]
    return "option" if any(remedy["option"] for remedy in cures) else json.dumps(cures)


def _what_to_do(group: Sequence[Json], options: str, width: int) -> list[str]:
    names = ", ".join(finding["name"] for finding in group)
    follows = "; ".join(dict.fromkeys(finding["follows"] for finding in group))
    lines = _wrapped("", safe(f"{_WORDS[group[0]['state']]}: {names}"), width) + _wrapped("  ", safe(follows), width)
    for remedy in group[0]["remedies"]:
        words = remedy["text"]
        if remedy["option"]:
            words = f"start the container with {options}"
        elif remedy["page"]:
            words = f"read {remedy['page']}: {words}"
        lines += _wrapped("  → ", safe(words), width)
        if remedy["command"]:
            lines.append(safe(f"      {remedy['command']}"))
    return lines


def _summary(report: Json) -> list[str]:
    findings = report["findings"]
    weaker = sum(finding["state"] == "weaker" for finding in findings)
    if not report["works"]:
        mends = any(remedy["mends"] for finding in findings for remedy in finding["remedies"])
        hint = f" `{remedies.fix()}` fixes what can be fixed here." if mends and not report["options"] else ""
        return [f"No box can be made.{hint}"]
    rest = f"; {weaker} {'thing is' if weaker == 1 else 'things are'} weaker than they could be" if weaker else ""
    return [f"Boxes can be made{rest}."]


def _wrapped(head: str, body: str, width: int) -> list[str]:
    return textwrap.wrap(
        head + body,
        width,
        subsequent_indent=" " * len(head),
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    ) or [head]
