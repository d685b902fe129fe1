"""The plan for each server of a client's file: keys of a `ringfence.yaml`, before anything is fetched or started."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ringfence.cli.init import keeping
from ringfence.cli.init.keeping import KnownStore
from ringfence.config import paths
from ringfence.config.clientfiles import ClientFile, ClientServer, Setting, looks_secret
from ringfence.config.docker_run import ContainerRun
from ringfence.config.folders import touches_credentials
from ringfence.config.writing import WrittenEntry
from ringfence.core.box import Mount, within
from ringfence.core.errors import RingfenceError, Unavailable
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.secret import MIN_CHARACTERS
from ringfence.core.system import interpreter
from ringfence.packages.cache import AT, Tree
from ringfence.packages.images import manifests
from ringfence.packages.images.references import Reference
from ringfence.packages.images.rootfs import program
from ringfence.sandbox.process import mounting
from ringfence.sandbox.servers.provenance import Hidden
from ringfence.sandbox.servers.resolve import ResolvedCommand, resolve

_NPM = re.compile(r"(@[a-z0-9~_.-]+/)?[a-z0-9~_.-]+(@[A-Za-z0-9^~<>=*.+_-]+)?", re.IGNORECASE)
_PYPI = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?((==|@)[A-Za-z0-9.+!_-]+)?")
_NPX_ALONE = {"-y", "--yes", "-q", "--quiet", "--prefer-offline", "--offline", "--prefer-online", "--silent", "-s"}
_UVX_ALONE = {"-q", "--quiet", "--isolated", "--offline", "--refresh", "--no-cache", "-n", "--no-progress"}
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)\}")
_LONGEST_NAME = 60
_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/var")  # noqa: S108 - as they are called on every host
_MAX_LOOKED_AT = 50_000
"""Files of a folder that is to be mounted."""


@dataclass(slots=True)
class ServerPlan:
    """One server on its way into the configuration."""

    name: str
    server: ClientServer
    keys: dict[str, Any] = field(default_factory=dict)
    runner: Runner | None = None
    remarks: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """What its box sees of the host outside of the project, because its command needs it."""
    problem: str | None = None
    """Why it is left out."""
    failure: RingfenceError | None = None
    """Why it did not start."""
    variables: dict[str, str] = field(default_factory=dict)
    """By the name of a setting: the user's variable that its value is taken from."""


@dataclass(slots=True)
class NeededSecret:
    """A secret that servers of the file need, and how the client passes it on when it starts Ringfence."""

    name: str
    variable: str
    keys: dict[str, Any]
    servers: list[str]
    given: str | None
    """The reference to it in the client's file; None if the file has the value itself."""

    def entry(self) -> WrittenEntry:
        return WrittenEntry(self.name, {**self.keys, "servers": self.servers})


class Planner:
    """Goes through a client's file. Names and secrets are shared by all servers of the file."""

    def __init__(self, file: ClientFile, plain: Collection[str] = (), ours: Mapping[str, str] | None = None) -> None:
        """`plain`: the variables that a person says are not secrets. No other value is copied: neither its name nor its
        looks tell whether it is a secret. `ours`: the variables that are set here, by default those of this process.
        """
        self._file = file
        self._plain = frozenset(plain)
        self._ours = paths.variable if ours is None else ours.get
        self._names: set[str] = {"ringfence"}
        self.secrets: list[NeededSecret] = []

    def plans(self) -> list[ServerPlan]:
        return [self._plan(server) for server in self._file.servers]

    def _plan(self, given: ClientServer) -> ServerPlan:
        unsaid = [s.name for s in given.env if s.kind == "plain" and s.name not in self._plain]
        env = tuple(Setting(s.name, "hidden", value=s.text) if s.name in unsaid else s for s in given.env)
        store = _store(given)
        moved = store is not None and store.variable in unsaid
        if store is not None and moved:
            # Its file is in the volume now, so that its old place is of no use, secret or not.
            unsaid.remove(str(store.variable))
            env = tuple(s for s in env if s.name != store.variable)
        server = replace(given, env=env)
        plan = ServerPlan(self._name(server.name), server, remarks=list(server.notes))
        if unsaid:
            plan.remarks.append(
                f"Not copied, since it may be a secret: {', '.join(unsaid)}. Set it where Ringfence is started, or say "
                f"--plain {unsaid[0]}."
            )
        short = [s.name for s in given.env if s.name in unsaid and len(s.text) < MIN_CHARACTERS]
        if short:
            plan.remarks.append(
                f"Too short to be kept as a secret (fewer than {MIN_CHARACTERS} characters): {', '.join(short)}. "
                f"If it is none, say --plain {' --plain '.join(short)}, or write it under env: instead of secrets:."
            )
        reasons = list(server.unusable)
        try:
            if server.container is None:
                plan.runner = taken_apart(server.command) if server.command else None
            elif not reasons:
                plan.runner = of_image(server.container)
        except NotTaken as exc:
            reasons = reasons or [str(exc)]
        if reasons:
            plan.problem = "; ".join(reasons)
            return plan
        if server.url is not None:
            plan.keys["url"] = server.url
        elif server.container is not None:
            self._container(plan, server.container)
        else:
            self._command(plan)
        self._settings(plan)
        if store is not None:
            self._keeps(plan, store, moved)
        return plan

    def _keeps(self, plan: ServerPlan, store: KnownStore, moved: bool) -> None:
        """Put the server's file where it outlives its box, unless it is told to use a file of the host's."""
        words = list(plan.runner.arguments if plan.runner is not None else plan.keys["command"][1:])
        env = plan.keys.get("env", {})
        named = env.get(store.variable or "") if store.option is None else keeping.told(words, store.option)
        if named is not None and _exists(named):
            plan.remarks.append(
                f"{named} is mounted read-only; to let the server write to it, mount its folder with `mode: rw`."
            )
            return
        if named is not None and any(within(named, each["at"]) for each in plan.keys.get("volumes", ())):
            return
        folder = keeping.place()
        file = f"{folder}/{os.path.basename(named) if named else store.file}"
        if folder == keeping.AT:
            plan.keys["volumes"] = [*plan.keys.get("volumes", ()), {"name": plan.name, "at": folder}]
            old = f" What it has in {store.variable} is not copied." if moved else ""
            plan.remarks.append(f"What it keeps is in {file}, in the volume {plan.name}, and outlives its box.{old}")
        else:
            plan.remarks.append(
                f"What it keeps is in {file}, and gone when its box ends: the file system of the state maps no ids, so "
                "that a box of root's cannot have a volume there."
            )
        if store.option is None:
            plan.keys["env"] = {**env, str(store.variable): file}
            return
        words = keeping.telling(words, store.option, file)
        if plan.runner is not None:
            plan.runner = replace(plan.runner, arguments=tuple(words))
        else:
            plan.keys["command"] = [plan.keys["command"][0], *words]

    def _name(self, given: str) -> str:
        base = _UNFIT.sub("_", given).strip("_-")[:_LONGEST_NAME] or "server"
        name = base
        number = 1
        while name in self._names:
            number += 1
            name = f"{base}_{number}"
        self._names.add(name)
        return name

    # ── Commands and the folders that they name ──

    def _command(self, plan: ServerPlan) -> None:
        server = plan.server
        base = self._base()
        arguments = list(plan.runner.arguments if plan.runner else server.command[1:])
        arguments = [self._placed(word, base) for word in arguments]
        if plan.runner is not None:
            plan.runner = Runner(plan.runner.kind, plan.runner.packages, plan.runner.program, tuple(arguments))
        else:
            program = server.command[0]
            plan.keys["command"] = [self._placed(program, base) if "/" in program else program, *arguments]
        if server.cwd is not None:
            plan.keys["cwd"] = str(paths.resolve(server.cwd, base))
        named = [*arguments, *(s.text for s in server.env if s.kind == "plain"), *filter(None, [plan.keys.get("cwd")])]
        mounts = list(self._mounts(plan, named))
        if mounts:
            plan.keys["mounts"] = mounts

    def _container(self, plan: ServerPlan, run: ContainerRun) -> None:
        """Its arguments are about the image. Of the host it sees what is bound into it, read-only."""
        base = paths.resolve(plan.server.cwd or "", self._base())
        mounts: list[dict[str, Any]] = []
        for bound in run.bound:
            host = str(paths.resolve(bound.host, base))
            at = os.path.normpath(bound.at)
            try:
                mounting.check([*(Mount(**each) for each in mounts), Mount(host, at)], ())
            except ValueError as exc:
                plan.remarks.append(f"{bound.host} is not mounted: {exc}.")
                continue
            if not _exists(host):
                plan.remarks.append(f"{bound.host} is not mounted: it is not there.")
            elif (why := self._withheld(host)) is not None:
                plan.remarks.append(why)
            else:
                mounts.append({"host": os.path.realpath(host), "at": at, "mode": "ro"})
                if bound.writable:
                    plan.remarks.append(f"{at} is mounted read-only; `mode: rw` lets it write there.")
        if mounts:
            plan.keys["mounts"] = mounts
        taken = [each["at"] for each in mounts]
        for name, at in run.volumes:
            if any(within(at, other) or within(other, at) for other in taken):
                plan.remarks.append(f"The volume {name} is not mounted: {at} is taken.")
                continue
            taken.append(at)
            plan.keys.setdefault("volumes", []).append({"name": name, "at": at})
        if run.cwd is not None:
            plan.keys["cwd"] = run.cwd

    def _base(self) -> Path:
        folder = self._file.path.absolute().parent
        return folder.parent if folder.name in (".vscode", ".cursor") else folder

    def _placed(self, word: str, base: Path) -> str:
        """A relative path as an absolute one: in the box, there is no folder that it could be relative to."""
        option, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if value in (".", "..", "~") or value.startswith(("./", "../", "~/")):
            return f"{option}{sign}{paths.resolve(value, base)}"
        return word

    def _mounts(self, plan: ServerPlan, named: list[str]) -> Iterator[dict[str, str]]:
        """Mounts for the files and folders of the host that the arguments name, read-only."""
        seen: set[str] = set()
        base = self._base()
        needed = _needed(plan)
        shown = [*needed.trees, *needed.files]
        project = os.path.realpath(base)
        plan.found = sorted(each for each in {*needed.trees, *needed.files.values()} if not within(each, project))
        for word in named:
            value = word.partition("=")[2] if word.startswith("-") else word
            if not os.path.isabs(value) or value in seen or not _exists(value):
                continue
            if any(within(value, folder) for folder in shown):
                continue
            seen.add(value)
            if (why := self._withheld(value)) is not None:
                plan.remarks.append(why)
                continue
            # Where links lead now is what the person sees and accepts, and no later change of a link changes it.
            yield {"host": os.path.realpath(value), "at": os.path.normpath(value), "mode": "ro"}

    def _withheld(self, path: str) -> str | None:
        """Why a path must not be mounted unasked."""
        if (real := _leads_out(path, self._base())) is not None:
            return f"{path} is not mounted: a link leads from there to {real}. If you want that, name it under mounts:."
        why = _holds(path)
        rest = "Name what it needs of it under mounts:, or mount it with `unsafe: REASON`."
        return None if why is None else f"{path} is not mounted: it holds {why}. {rest}"

    # ── Environment and headers ──

    def _settings(self, plan: ServerPlan) -> None:
        server = plan.server
        plain = {s.name: s.text for s in server.env if s.kind == "plain"}
        if plain and server.url is None:
            plan.keys["env"] = plain
        names = [self._secret(plan, s, {"env": s.name}) for s in server.env if s.kind != "plain"]
        host = urlsplit(server.url or "").hostname or ""
        for header in server.headers:
            if header.kind == "plain":
                plan.remarks.append(f"The header {header.name} is left out: only headers that hold secrets are sent.")
                continue
            more: dict[str, Any] = {"hosts": [host], "header": header.name}
            shown = _VARIABLE.sub("{value}", header.text)
            if header.kind == "reference" and shown != "{value}":
                more["format"] = shown
            names.append(self._secret(plan, header, {**more, "methods": ["GET", "POST", "DELETE"]}))
        if names:
            plan.keys["secrets"] = names

    def _secret(self, plan: ServerPlan, setting: Setting, more: dict[str, Any]) -> str:
        """The name of the secret for this setting, which is added to those needed."""
        whole = _VARIABLE.fullmatch(setting.text)
        within = _VARIABLE.findall(setting.text) if setting.kind == "reference" else []
        variable = within[0] if len(within) == 1 and (whole or "header" in more) else None
        given = f"${{{variable}}}" if variable else (setting.text if setting.kind == "reference" else None)
        variable = variable or _UNFIT.sub("_", setting.name).replace("-", "_").upper()
        keys = {"from": "env", "name": variable, **more}
        for known in self.secrets:
            if known.variable == variable and known.keys == keys and known.given == given is not None:
                known.servers.append(plan.name)
                plan.variables[setting.name] = variable
                return known.name
        taken = {known.name for known in self.secrets}, {known.variable for known in self.secrets}
        if given is None:
            keys["name"] = variable = self._own_variable(plan, setting, variable, taken[1], leaves="header" in more)
        name = variable.lower()
        number = 1
        while name in taken[0] or name == "none":
            number += 1
            name = f"{variable.lower()}_{number}"
        self.secrets.append(NeededSecret(name, variable, keys, [plan.name], given))
        plan.variables[setting.name] = variable
        return name

    def _own_variable(self, plan: ServerPlan, setting: Setting, wanted: str, taken: set[str], *, leaves: bool) -> str:
        """The variable for a value that stands in the file. It is none that the user has set to something else: the
        server would get the user's value because its file knows the name. `leaves`: it is sent to another machine, so
        that its variable must be none that the user could ever have for something else."""
        longer = f"{_UNFIT.sub('_', plan.name).replace('-', '_').upper()}_{wanted}"

        def is_free(variable: str) -> bool:
            return variable not in taken and self._ours(variable) in (None, setting.value)

        variable = next(filter(is_free, () if leaves else (wanted, longer)), f"FOR_{longer}")
        while variable in taken:
            variable += "_"
        if self._ours(wanted) is not None and variable != wanted:
            plan.remarks.append(
                f"Your {wanted} differs from the value in the file, so this server does not get it; set {variable}."
            )
        return variable


def _store(server: ClientServer) -> KnownStore | None:
    """Where a server that is known to keep data keeps it."""
    if server.url is not None:
        return None
    try:
        fetched = taken_apart(server.command) if server.container is None and server.command else None
    except NotTaken:
        return None
    packages = fetched.packages if fetched is not None else (server.container.image,) if server.container else ()
    return keeping.known(server.command if server.container is None else (), packages)


def _needed(plan: ServerPlan) -> ResolvedCommand:
    """What the box of a command sees of the host in any case."""
    command = plan.keys.get("command")
    if command is None:
        return ResolvedCommand()
    try:
        return resolve(command, paths.process_environment(), plan.keys.get("cwd", "/"), Hidden(touches_credentials))
    except ValueError:  # it cannot be started, and starting it will report that
        return ResolvedCommand()


def _leads_out(path: str, project: Path) -> str | None:
    """Where a path really is, if it is in the project by its name alone: the links in it were chosen by its author."""
    real = os.path.realpath(path)
    named_inside = within(os.path.normpath(path), str(project))
    return real if named_inside and not within(real, os.path.realpath(project)) else None


def _holds(path: str) -> str | None:
    """What is at a path that must not be mounted unasked."""
    real = os.path.realpath(path)
    if real == "/":
        return "the whole file system"
    if real in _SHARED_FOLDERS:
        return "what all programs of this host leave there, their sockets among it"
    return touches_credentials(real) or _sockets(real)


def _sockets(folder: str) -> str | None:
    """A socket below the folder. A box that sees one can talk to the program behind it, often with all rights of its
    user: an ssh agent, a terminal. A read-only mount does not prevent that."""
    looked = 0
    for place, _, names in os.walk(folder):
        for name in names:
            looked += 1
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(f"{place}/{name}").st_mode):
                    return f"a socket of a program of this host ({os.path.relpath(f'{place}/{name}', folder)})"
        if looked > _MAX_LOOKED_AT:
            break
    return None


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except (OSError, ValueError):  # too long to be a path, for one
        return False


# ── Commands that fetch a package before they run it ──────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Runner:
    """The package that a command like `npx` fetches and runs, and its arguments."""

    kind: Literal["npm", "pypi", "image"]
    packages: tuple[str, ...]
    """As the registry's client names them; the first has the program."""
    program: str | None
    """The program's name where it is not the package's own; of an image, what is run instead of its entry point."""
    arguments: tuple[str, ...]


class NotTaken(Exception):
    """A command that fetches what cannot be pinned."""


def taken_apart(command: tuple[str, ...]) -> Runner | None:
    """The package that a command fetches; None if it fetches none. Raises NotTaken with the reason and what to do."""
    words = _without_shell(list(command))
    name = os.path.basename(words[0]).removesuffix(".cmd").removesuffix(".exe")
    match [name, *words[1:]]:
        case ["npx" | "bunx", *rest] | ["npm", "exec", *rest] | ["pnpm" | "yarn", "dlx", *rest]:
            return _npx(rest)
        case ["uvx", *rest] | ["uv", "tool", "run", *rest]:
            return _uvx(rest, "--from")
        case ["pipx", "run", *rest]:
            return _uvx(rest, "--spec")
    return None


def of_image(run: ContainerRun) -> Runner:
    """Raises NotTaken."""
    try:
        Reference.of(run.image)
    except ValueError as exc:
        raise NotTaken(str(exc)) from None
    if run.platform is not None and not manifests.is_here(run.platform):
        raise NotTaken(f"it is for {run.platform[:40]}, and this machine is linux/{manifests.machine()}")
    return Runner("image", (run.image,), run.entrypoint, run.arguments)


def _without_shell(words: list[str]) -> list[str]:
    """The command without the `cmd /c` before `npx …` in files that are shared with Windows."""
    if len(words) > 2 and os.path.basename(words[0]).lower() in ("cmd", "cmd.exe") and words[1].lower() == "/c":
        return words[2:]
    return words


def _npx(words: list[str]) -> Runner:
    named: list[str] = []
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "--":
            break
        if option in ("-p", "--package"):
            named.append(value or (words.pop(0) if words else ""))
        elif option not in _NPX_ALONE:
            raise NotTaken(f"the option {option} of npx is not known here")
    if not words:
        raise NotTaken("it names no package")
    first, *arguments = words
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    packages = tuple(named or [first])
    for package in packages:
        if not _NPM.fullmatch(package):
            raise NotTaken(f"{quoted(package)} is no package of a registry, so it cannot be pinned by its integrity")
    return Runner("npm", packages, first if named else None, tuple(arguments))


def _uvx(words: list[str], source: str) -> Runner:
    named = ""
    beside = []
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "--":
            break
        if option in (source, "--with", "--python", "-p"):
            value = value or (words.pop(0) if words else "")
            if option == source:
                named = value
            elif option == "--with":
                beside += value.split(",")
        elif option not in _UVX_ALONE:
            raise NotTaken(f"the option {option} of uvx is not known here")
    if not words:
        raise NotTaken("it names no package")
    first, *arguments = words
    packages = [_requirement(package) for package in (named or first, *beside)]
    program = first if named else re.split(r"[\[@=]", first)[0]
    return Runner("pypi", tuple(packages), program, tuple(arguments))


def _requirement(text: str) -> str:
    """uvx writes `name@1.2` for `name==1.2`."""
    if not _PYPI.fullmatch(text):
        raise NotTaken(f"{quoted(text)} is no package of an index, so it cannot be pinned by its hash")
    name, _, version = text.partition("@")
    return name if version in ("", "latest") else f"{name}=={version}"


def start_words(tree: Tree, runner: Runner) -> list[str]:
    """The command that runs a program of fetched packages, without its arguments. Raises Unavailable."""
    program = runner.program or runner.packages[0]
    name = bare_name(program) if tree.kind == "npm" else program
    path = tree.programs.get(name)
    if path is None:
        known = ", ".join(sorted(tree.programs)[:8]) or "none"
        raise Unavailable("no_program", f"{' '.join(runner.packages)} has no program {name!r}; it has: {known}")
    if tree.kind == "pypi":
        return [str(interpreter()), f"{AT}/{path}"]
    node = shutil.which("node")
    if node is None:
        raise Unavailable("no_npm", "node is not installed here: install it, as in `apt install nodejs`")
    return [node, f"{AT}/{path}"]


def bare_name(package: str) -> str:
    """A package of npm without its version."""
    return package if "@" not in package[1:] else package[: package.rindex("@")]


# ── Servers in images ─────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Imaged:
    keys: dict[str, Any]
    remarks: list[str] = field(default_factory=list)


def image_keys(tree: Tree, runner: Runner, given: Mapping[str, Any]) -> Imaged:
    """The keys of an image's server. `given`: those of its entry. Raises Unavailable if the image runs nothing."""
    about = tree.about
    env = {"PATH": _USUAL_PATH, **about["env"], **given.get("env", {})}
    cwd = posixpath.normpath(posixpath.join(about["cwd"], given.get("cwd") or ""))
    words = _words(about, runner)
    if not words:
        raise Unavailable("no_program", f"{runner.packages[0]} names no program to run; write one after the image")
    path = program(tree.folder, words[0], env["PATH"], cwd)
    made = Imaged({"command": [path or words[0], *words[1:]], "env": env, "cwd": cwd})
    if path is None:
        made.remarks.append(f"The image has no program {words[0]!r} that can be found.")
    if about["user"] not in ("", "root", "0"):
        made.remarks.append(f"The image wants to run as {about['user']!r}; a box has an id of its own.")
    for name, value in about["env"].items():
        if name not in given.get("env", {}) and looks_secret(name, value):
            made.remarks.append(f"{name} is as the image has it, and looks like a secret: it stands here in the clear.")
    for what, count in about["left_out"].items():
        made.remarks.append(f"Left out of the image: {what} ({count}).")
    return made


def _words(about: Mapping[str, Any], runner: Runner) -> list[str]:
    """The command of the image's server. Another entry point replaces the image's own arguments too."""
    if runner.program is not None:
        return [*filter(None, [runner.program]), *runner.arguments]
    return [*about["entrypoint"], *(runner.arguments or about["cmd"])]
