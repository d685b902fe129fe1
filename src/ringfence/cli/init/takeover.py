"""`ringfence init --from`: each server is shown and confirmed, fetched if needed, started in its box and asked for its
tools; then one file is written, and what to paste into the client is printed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import anyio

from ringfence import config, identity
from ringfence.cli.common import own_command
from ringfence.cli.definitions import Change
from ringfence.cli.init.planning import NeededSecret, Planner, ServerPlan, bare_name, image_keys, start_words
from ringfence.cli.progress import ProgressLine, progress
from ringfence.cli.terminal import confirm, json_text, quoted, safe
from ringfence.compose.gateway import App
from ringfence.compose.packages import fetch as fetch_packages
from ringfence.compose.servers import volumes_folder
from ringfence.config import Config, clientfiles, writing
from ringfence.config.clientfiles import ClientFile
from ringfence.config.writing import WrittenEntry
from ringfence.core.errors import ConfigError, RingfenceError, Unavailable
from ringfence.core.model import Definition, Json
from ringfence.core.record import dataclass
from ringfence.packages.cache import AT, Tree
from ringfence.packages.install import InstallRequest
from ringfence.sandbox.process.host import diagnosis
from ringfence.sandbox.servers.volumes import is_free, owner_of
from ringfence.sandbox.tools.toolkit import offered_tools

_INTRO = """\
Ringfence in front of the servers of {file}.
Each runs in a box of its own. Its contracts are a cautious draft: read them, and change what does not fit.
`mode: read` stands where the server says that a tool only reads. That is a hint: look at it.
`ringfence check` says whether the file is right, `ringfence init --learn NAME` what a server lacks."""
_MAX_REMARKS = 5
_VALUE = "(the value that is in {file} now)"
_FETCHED_AT_ONCE = 3
_LONGEST_VOLUME = 40
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class InitRequest:
    """What the command line says."""

    source: Path
    output: Path
    yes: frozenset[str] = frozenset()
    """Servers to accept without a question on the terminal, by their names in the client's file."""
    scripts: bool = False
    plain: frozenset[str] = frozenset()
    """Variables that are not secrets, so that their values may be copied."""


@dataclass(slots=True)
class TakenOver:
    """The servers of a client's file, and what became of each."""

    file: ClientFile
    plans: list[ServerPlan]
    secrets: list[NeededSecret]
    definitions: dict[str, list[Definition]] = field(default_factory=dict)

    text: str = ""
    """The configuration."""

    @property
    def kept(self) -> list[ServerPlan]:
        return [plan for plan in self.plans if plan.problem is None]


async def take_over(request: InitRequest) -> TakenOver:
    """The configuration to write, with its definitions accepted. Raises ConfigError, Unavailable."""
    file = clientfiles.read(request.source)
    _heard(file, request)
    if any(server.url is None and not server.unusable for server in file.servers):
        await anyio.to_thread.run_sync(_need_boxes)
    planner = Planner(file, request.plain | await _said_plain(file, request))
    taken = TakenOver(file, planner.plans(), planner.secrets)
    _keep_apart(taken, request.output)
    for plan in taken.plans:
        await _agree(plan, request)
    for plan in taken.kept:
        _fits(plan, request.output)
    _something(taken)
    settings = _settings(_text(taken), request.output)
    at_once = anyio.CapacityLimiter(_FETCHED_AT_ONCE)
    fetching = [plan for plan in taken.kept if plan.runner is not None]
    if fetching:
        with progress("Fetching packages in boxes", len(fetching)) as line:
            async with anyio.create_task_group() as group:
                for plan in fetching:
                    group.start_soon(_fetched, plan, settings, _Fetching(request.scripts, at_once, line))
    for plan in taken.kept:
        _fits(plan, request.output)
    _something(taken)
    await _started(taken, request)
    taken.text = _text(taken)
    return taken


def _heard(file: ClientFile, request: InitRequest) -> None:
    """Warn of names on the command line that the file does not have, such as mistyped ones."""
    servers = {server.name for server in file.servers}
    variables = {setting.name for server in file.servers for setting in server.env}
    for option, given, there in (("--yes", request.yes, servers), ("--plain", request.plain, variables)):
        for name in sorted(given - there):
            print(safe(f"{option} {name}: {file.path} has nothing of that name"), file=sys.stderr)


def _need_boxes() -> None:
    """Before anybody is asked anything: where no box can be made, no server can be fetched or started."""
    found = diagnosis.diagnose_refusals()
    if found.missing:
        raise Unavailable("missing_protection", f"no box can be made on this host: {found.sentence()}")


def _fits(plan: ServerPlan, output: Path) -> None:
    """Leave out a server whose entry cannot be part of a configuration, so that it does not spoil the whole file."""
    keys = {key: value for key, value in _keys(plan).items() if key != "secrets"}
    try:
        _settings(writing.configuration([], {"servers": [WrittenEntry(plan.name, keys)]}), output)
    except ConfigError as exc:
        plan.problem = f"its entry cannot be part of a configuration: {exc.problems[0].text}"
        print(quoted(f"server {plan.name} is left out: {plan.problem}", ""), file=sys.stderr)


def _keep_apart(taken: TakenOver, output: Path) -> None:
    """Give a new name to each volume under whose name something is kept already, by whatever configuration."""
    folder = volumes_folder(_settings(writing.configuration([], {}), output).gateway.state)
    ending = hashlib.sha256(os.path.realpath(output).encode(errors="surrogateescape")).hexdigest()[:8]
    for plan in taken.plans:
        for volume in plan.keys.get("volumes", []):
            name = volume["name"]
            # A name that no volume can have is refused later, with its entry.
            if _VOLUME.fullmatch(name) and not is_free(folder, name, output):
                volume["name"] = f"{name[:_LONGEST_VOLUME]}_{ending}"
                whose = owner_of(folder, name) or "an earlier version made it"
                plan.remarks.append(
                    f"A volume {name} exists already ({whose}). This server does not get it, but {volume['name']}."
                )


def _something(taken: TakenOver) -> None:
    if not taken.kept:
        raise Unavailable("nothing_taken", f"no server of {taken.file.path} was taken over; nothing was written")


# ── Asking ────────────────────────────────────────────────────────────────────────────────────────


async def _said_plain(file: ClientFile, request: InitRequest) -> frozenset[str]:
    """Variables that the person at the terminal says are not secrets; without a terminal, none."""
    said: set[str] = set()
    for server in file.servers:
        if server.unusable or server.name in request.yes:
            continue
        for setting in server.env:
            if setting.kind != "plain" or setting.name in request.plain | said:
                continue
            shown = f"\nserver {safe(server.name)}\n  with     {safe(setting.name)}: {safe(setting.text)}"
            try:
                if await anyio.to_thread.run_sync(confirm, shown, "Copy its value? Only if it is not a secret."):
                    said.add(setting.name)
            except Unavailable:
                return frozenset(said)
    return frozenset(said)


async def _agree(plan: ServerPlan, request: InitRequest) -> None:
    shown = "\n".join(_shown(plan))
    if plan.problem is not None:
        print(shown)
        return
    if plan.server.name in request.yes:
        print(shown)
        return
    question = "Take it over?" if plan.server.url is not None else "Take it over, and start it in a box?"
    try:
        agreed = await anyio.to_thread.run_sync(confirm, shown, question)
    except Unavailable:
        print(shown)
        raise Unavailable(
            "no_terminal",
            f"there is no terminal here to ask a person on: name what is accepted, as in --yes '{plan.server.name}'",
        ) from None
    if not agreed:
        plan.problem = "you declined it"


def _shown(plan: ServerPlan) -> Iterator[str]:
    server = plan.server
    yield ""
    yield f"server {safe(server.name)}"
    if server.url is not None:
        yield f"  url      {safe(server.url)}"
    else:
        yield f"  command  {safe(json.dumps(list(server.command), ensure_ascii=False))}"
    if plan.runner is not None:
        where = {"npm": "npm", "pypi": "PyPI", "image": "its registry"}[plan.runner.kind]
        yield f"  fetched  once, from {where}: {safe(' '.join(plan.runner.packages))}"
    if server.cwd is not None:
        yield f"  in       {safe(server.cwd)}"
    for setting in (*server.env, *server.headers):
        # Of a header only a reference is taken over; what else it holds is as likely a secret as not.
        shown = setting.kind == "reference" or (setting.kind == "plain" and setting in server.env)
        value = safe(setting.text) if shown else "(its value is not copied)"
        if setting.kind == "hidden" and setting.name in plan.variables:
            value = f"(not copied; taken from your variable {safe(plan.variables[setting.name])} if it is set)"
        yield f"  with     {safe(setting.name)}: {value}"
    for path in plan.found:
        yield f"  sees     {safe(path)} (read-only, because its command needs it)"
    for mount in plan.keys.get("mounts", []):
        yield f"  sees     {safe(mount['host'])} (read-only)"
    for volume in plan.keys.get("volumes", []):
        yield f"  keeps    {safe(volume['at'])}, in the volume {safe(volume['name'])}"
    for remark in plan.remarks:
        yield quoted(remark, "  note     ")
    if plan.problem is not None:
        yield quoted(f"is left out: {plan.problem}", "  ")


# ── Fetching and starting ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Fetching:
    """What all packages are fetched with."""

    scripts: bool
    at_once: anyio.CapacityLimiter
    line: ProgressLine


async def _fetched(plan: ServerPlan, settings: Config, how: _Fetching) -> None:
    runner = plan.runner
    assert runner is not None
    wanted = InstallRequest(runner.kind, runner.packages, how.scripts)
    try:
        async with how.at_once:
            how.line.say(safe(f"Fetching {' '.join(runner.packages)} in a box …"))
            tree = await fetch_packages(settings.gateway.state, settings.sandbox, wanted)
        mine = _of_image(plan, tree) if tree.kind == "image" else _of_packages(plan, tree)
    except (RingfenceError, ValueError) as exc:
        plan.problem = str(exc)
        how.line.say(quoted(f"server {plan.name} is left out: {exc}", ""))
        return
    finally:
        how.line.step()
    plan.keys = {**mine, **{key: value for key, value in plan.keys.items() if key not in mine}}


def _of_image(plan: ServerPlan, tree: Tree) -> dict[str, Any]:
    """The keys of a server that its image and its entry define. Raises Unavailable."""
    assert plan.runner is not None
    imaged = image_keys(tree, plan.runner, plan.keys)
    plan.remarks += imaged.remarks
    if "volumes" in plan.keys:
        hiding = [each for each in plan.keys["volumes"] if _has(tree, each["at"])]
        plan.keys["volumes"] = [each for each in plan.keys["volumes"] if each not in hiding]
        for each in hiding:
            plan.remarks.append(
                f"The volume {each['name']} is not mounted: it would hide what the image has at {each['at']}."
            )
    for setting in plan.server.env:
        if setting.kind != "plain":  # the image's own value would take precedence over the secret
            imaged.keys["env"].pop(setting.name, None)
    return {**imaged.keys, "packages": _pin(tree, [package.name for package in tree.packages])}


def _has(tree: Tree, at: str) -> bool:
    """Whether the image has something at a path."""
    there = f"{tree.folder}{at}"
    return os.path.lexists(there) and not (os.path.isdir(there) and not os.listdir(there))


def _of_packages(plan: ServerPlan, tree: Tree) -> dict[str, Any]:
    runner = plan.runner
    assert runner is not None
    start = start_words(tree, runner)
    names = [_pinned(tree, name) for name in runner.packages]
    mine: dict[str, Any] = {"command": [*start, *runner.arguments], "packages": _pin(tree, names)}
    if tree.kind == "pypi":
        mine["env"] = {**plan.keys.get("env", {}), "PYTHONPATH": AT}
    return mine


def _pin(tree: Tree, names: list[str]) -> dict[str, Any]:
    return {"from": tree.kind, "names": names, "tree": tree.digest}


def _pinned(tree: Tree, name: str) -> str:
    """The package with the version that was fetched."""
    sign = "@" if tree.kind == "npm" else "=="
    bare = bare_name(name) if tree.kind == "npm" else name.partition("=")[0].partition("[")[0]
    same = bare.lower().replace("_", "-")
    for package in tree.packages:
        if package.name.lower().replace("_", "-") == same:
            return f"{bare}{sign}{package.version}"
    return name


async def _started(taken: TakenOver, request: InitRequest) -> None:
    """Start every server and ask for its tools. One that fails stays in the file, with a remark that says why."""
    settings = _settings(_text(taken), request.output)
    print("Starting each server in its box …", file=sys.stderr)
    # None is started by the gateway itself: that would be over before anything is counted.
    async with App.open(settings, servers=()) as app:
        found: dict[str, list[Definition]] = {}
        with progress("Starting servers", len(taken.kept)) as line:

            async def start(plan: ServerPlan) -> None:
                try:
                    offered = await app.pool.definitions(plan.name, app.agent)
                    found[plan.name], wrong = await app.pins.offerable(plan.name, offered)
                    plan.remarks += [f"Of what it has, this is not offered: {each}" for each in wrong[:_MAX_REMARKS]]
                except RingfenceError as exc:
                    plan.remarks.append(f"It did not start: {exc}")
                    plan.failure = exc
                    line.say(quoted(f"server {plan.name} did not start: {exc}", ""))
                line.step()

            async with anyio.create_task_group() as group:
                for plan in taken.kept:
                    group.start_soon(start, plan)
        taken.definitions.update({plan.name: found[plan.name] for plan in taken.kept if plan.name in found})
        await _accept(app, taken, request)


async def _accept(app: App, taken: TakenOver, request: InitRequest) -> None:
    found = [each for plan in taken.kept for each in taken.definitions.get(plan.name, []) if each.kind == "tool"]
    if not found:
        return
    shown = "\n".join(_tools(taken))
    named = {plan.name for plan in taken.kept if plan.server.name in request.yes}
    if named >= set(taken.definitions):
        print(shown)
    elif not await anyio.to_thread.run_sync(confirm, shown, f"Accept these {len(found)} tools?"):
        print("Nothing was accepted: `ringfence check --accept` asks again.", file=sys.stderr)
        return
    person = identity.person_of(app.config.people, identity.os_user())
    await app.pins.accept(found, person.name if person is not None else identity.os_user())


def _tools(taken: TakenOver) -> Iterator[str]:
    for plan in taken.kept:
        tools = [each for each in taken.definitions.get(plan.name, []) if each.kind == "tool"]
        yield ""
        yield safe(f"server {plan.name} has {len(tools)} tools")
        for tool in tools:
            yield from Change(tool, None).shown()
            yield f"  drafted here as mode: {writing.draft_contract(tool.body)['mode']}"


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


def _settings(text: str, output: Path) -> Config:
    return config.loads(text, file=str(output), base=output.absolute().parent)


def _text(taken: TakenOver) -> str:
    servers = [WrittenEntry(plan.name, _keys(plan), plan.remarks) for plan in taken.kept]
    left = [f"{plan.server.name} is left out: {plan.problem}" for plan in taken.plans if plan.problem is not None]
    kept = {plan.name for plan in taken.kept}
    secrets = [asked.entry() for asked in taken.secrets if kept & set(asked.servers)]
    intro = [_INTRO.format(file=taken.file.path.name), *left]
    return writing.configuration(intro, {"servers": servers, "capabilities": _capabilities(taken), "secrets": secrets})


def _keys(plan: ServerPlan) -> dict[str, Any]:
    """The keys of a server. Before its package is fetched, they hold the client's command, which is never run."""
    if "command" in plan.keys or "url" in plan.keys:
        return plan.keys
    return {"command": list(plan.server.command), **plan.keys}


def _capabilities(taken: TakenOver) -> list[WrittenEntry]:
    tools = [
        (plan.name, each) for plan in taken.kept for each in taken.definitions.get(plan.name, []) if each.kind == "tool"
    ]
    names = [each.name for _, each in tools]
    entries: list[WrittenEntry] = []
    taken_names: set[str] = set(offered_tools())  # the names of our own tools are taken
    for server, each in tools:
        free = names.count(each.name) == 1 and each.name not in offered_tools() and _is_name(each.name)
        name = each.name if free else f"{server}_{_as_name(each.name)}"
        while name in taken_names:
            name += "_"
        taken_names.add(name)
        keys: dict[str, Any] = {"server": server}
        if name != each.name:
            keys["tool"] = each.name
        entries.append(WrittenEntry(name, {**keys, **writing.draft_contract(each.body)}))
    return entries


def _is_name(text: str) -> bool:
    return _as_name(text) == text


def _as_name(text: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in text)[:100]
    return kept if kept[:1].isalnum() or kept[:1] == "_" else f"_{kept}"


# ── Telling ───────────────────────────────────────────────────────────────────────────────────────


def report(taken: TakenOver, output: Path) -> None:
    tools = sum(1 for found in taken.definitions.values() for each in found if each.kind == "tool")
    started = [plan.name for plan in taken.kept if plan.name in taken.definitions]
    print()
    print(safe(f"Wrote {output}: {_count(len(taken.kept), 'server')}, {_count(tools, 'tool')}."))
    for plan in taken.plans:
        if plan.problem is not None:
            print(safe(f"  {plan.server.name} is left out: {plan.problem}"))
        elif plan.name not in started:
            print(safe(f"  {plan.name} did not start{_next(plan)}"))
    kept = {plan.name for plan in taken.kept}
    secrets = [asked for asked in taken.secrets if kept & set(asked.servers)]
    for asked in secrets:
        print(safe(f"  The secret {asked.name} is taken from the variable {asked.variable}, when Ringfence starts."))
    print(f"\nPut this into {safe(taken.file.path.name)} instead of those servers:\n")
    print(pasted(taken.file, secrets, output))


def _next(plan: ServerPlan) -> str:
    """What to do about a server that did not start. `--learn` cannot help one that lacks its secret."""
    if isinstance(plan.failure, Unavailable) and plan.failure.reason_code == "no_secret":
        return f": {plan.failure}. Set it, and run this again"
    return f"; see what it lacks: ringfence init --learn {plan.name}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def pasted(file: ClientFile, secrets: Iterable[NeededSecret], written: Path) -> str:
    """What to paste into the client's file: one server. It holds references to secrets, no values."""
    entry: Json = {"command": own_command()[0], "args": [*own_command()[1:], *_arguments(written)]}
    if file.client in ("claude-code", "vscode"):
        entry = {"type": "stdio", **entry}
    env = {asked.variable: asked.given or _VALUE.format(file=file.path.name) for asked in secrets}
    if env:
        entry["env"] = env
    top = "servers" if file.client == "vscode" else "mcpServers"
    return json_text({top: {"ringfence": entry}})


def _arguments(written: Path) -> list[str]:
    return ["serve", "--stdio", "--config", str(written.absolute())]
