"""`ringfence state`: what is kept on this machine, where and how much; and `ringfence state prune` for its caches."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path

import typer

from ringfence import config
from ringfence.audit.keys import SIGNER
from ringfence.cli import common, options
from ringfence.cli.terminal import MARGIN, confirm, cut, safe
from ringfence.config import Config, paths
from ringfence.core import system
from ringfence.core.errors import ConfigError, StoreError, Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.core.sizes import short_size
from ringfence.hooks import position
from ringfence.packages.allowlist import normalized
from ringfence.packages.cache import FOLDER, CacheEntry, PackageCache
from ringfence.packages.install_boxes import project_name
from ringfence.store import Reader, history
from ringfence.store.schema import DATABASE

_MAX_NAMED = 6
_WIDEST = 100
_DATABASE = tuple(f"{DATABASE}{ending}" for ending in ("", "-wal", "-shm", "-journal"))
_TREES = ("npm", "pypi", "image")
_YES = typer.Option(False, "--yes", help="Do not ask on the terminal.")

state = typer.Typer(rich_markup_mode=None)


@dataclass(slots=True)
class StatePlace:
    """One kind of thing that is kept."""

    name: str
    path: Path
    purpose: str
    how: str
    """What becomes of it: who removes it, and by what."""
    parts: tuple[Path, ...] | None = None
    """The files and folders that it is; None: all of `path`."""
    removable: bool = False
    """Whether `ringfence state prune` may remove it, or parts of it."""
    within: str | None = None
    """The place that it is a part of, and is counted in."""
    there: bool = False
    bytes: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)

    def plain(self) -> Json:
        return {
            "name": self.name,
            "path": str(self.path),
            "there": self.there,
            "bytes": self.bytes,
            "files": self.files,
            "purpose": self.purpose,
            "removable": self.removable,
            "how": self.how,
            "within": self.within,
            "problems": self.problems,
        }


@state.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    config_path: Path | None = common.ConfigOption,
    as_json: options.PrintJson = False,
) -> None:
    """Show what Ringfence keeps on this machine: where, how much, what for, and whether it may be removed.

    Without any configuration it is the user's own state. The exit code is 1 if something could not be read.

    \b
    ringfence state                           the log, keys, sessions, volumes, packages, …
    ringfence state --json                    the same for a program
    ringfence state prune                     remove what can be fetched again
    """
    if context.invoked_subcommand is not None:
        if config_path is not None or as_json:
            common.fail(f"options go last: ringfence state {context.invoked_subcommand} [OPTIONS]", 2)
        return
    folder = common.state_of(config_path, demo=False)
    places = survey(folder, config_path)
    total = sum(each.bytes for each in places if each.within is None and each.path.is_relative_to(folder))
    if as_json:
        common.dump({"state": str(folder), "bytes": total, "places": [each.plain() for each in places]})
    else:
        there = os.path.isdir(folder) or any(each.problems for each in places)
        print(safe(f"{folder}: {short_size(total) if there else 'there is no state yet'}"))
        for each in places:
            if each.there or each.problems:
                print("\n".join(_lines(each)))
    problems = [problem for each in places for problem in each.problems]
    for problem in problems:
        common.say(problem)
    if problems:
        raise typer.Exit(1)


def _lines(place: StatePlace) -> Iterator[str]:
    files = f"{place.files} file{'' if place.files == 1 else 's'}"
    yield ""
    yield safe(f"{place.name:<14}{short_size(place.bytes):>10}  {files:>12}  {place.path}")
    yield safe(f"{'':<14}{place.purpose}")
    yield safe(f"{'':<14}{place.how}")


# ── Looking ───────────────────────────────────────────────────────────────────────────────────────


def survey(folder: Path, named: Path | None) -> list[StatePlace]:
    """Everything that belongs to a state folder, measured."""
    places = [*_outside(folder, named), *_log(folder), *_sessions(folder), *_packages(folder)]
    how = "stays: it has a log of its own"
    places.append(StatePlace("demo", folder / "demo", "the state of `ringfence serve --demo`", how))
    how = "stays: it holds for an hour, and is made anew"
    places.append(StatePlace("self-test", folder / "selftest.json", "what boxes were seen to have on this host", how))
    known = {each.path.relative_to(folder).parts[0] for each in places if each.path.is_relative_to(folder)}
    known |= {*_DATABASE, "chains"}
    other = StatePlace("other", folder, "files that are none of ours", "stays", ())
    try:
        other.parts = tuple(path for path in sorted(folder.iterdir()) if path.name not in known)
    except FileNotFoundError:
        pass
    except OSError as exc:
        other.problems.append(f"{folder}: {exc.strerror}")
    places.append(other)
    for each in places:
        if each.name == "payloads":
            _count_payloads(each, folder)
            continue
        seen: set[tuple[int, int]] = set()
        for part in (each.path,) if each.parts is None else each.parts:
            _add(each, part, seen)
    return places


def _outside(folder: Path, named: Path | None) -> Iterator[StatePlace]:
    """What lies elsewhere."""
    for path in _configurations(named):
        yield StatePlace("configuration", path, "servers, contracts, policy and settings", "stays: it is yours")
    purpose = "the keys that sign the log and seal payloads, and the token of local clients"
    keys = config.key_folder()
    yield StatePlace("keys", keys, purpose, "stays: nothing could be signed or verified without it")
    if (keys / SIGNER).is_dir():
        purpose = f"the signing key, and the last head of each chain; of the signer ({_owner(keys / SIGNER)}) alone"
        how = "stays: only the signer, which signs nothing but what follows these heads, can sign the log"
        yield StatePlace("signer", keys / SIGNER, purpose, how, within="keys")
    for path in paths.socket_folders(folder) if system.no_boxes() is None else ():
        if path != Path(os.path.realpath(folder)) / "keeper":
            yield StatePlace("socket", path, "where the keeper is reached", "stays: the keeper needs it")


def _owner(path: Path) -> str:
    uid = path.stat().st_uid
    return "this user" if uid == os.geteuid() else f"uid {uid}"


def _configurations(named: Path | None) -> list[Path]:
    """The configuration that was named, and those that are found."""
    found = [] if named is None else [named.absolute()]
    with suppress(ConfigError):
        found += [path for path in config.default_paths() if path.is_file()]
    return list(dict.fromkeys(found))


def _log(folder: Path) -> Iterator[StatePlace]:
    database = folder / DATABASE
    purpose = "the audit log, approvals, idempotency keys, accepted definitions and kept payloads"
    how = "stays: `ringfence audit prune` removes old records, on record"
    yield StatePlace("log", database, purpose, how, tuple(folder / name for name in _DATABASE))
    purpose = "arguments and results that contracts keep, counted in the log"
    yield StatePlace("payloads", database, purpose, "stays: `ringfence audit erase` forgets a call's", within="log")
    purpose = "signed ends of the log's chains, and their locks"
    parts = (folder / "checkpoints", folder / "chains")
    yield StatePlace("checkpoints", parts[0], purpose, "stays: they prove the log", parts)
    how = "stays: without it a hook begins with what comes"
    yield StatePlace("hooks", folder / position.FOLDER, "how far each hook has come in the log", how)
    how = "stays: it follows the log, and is made anew where it is gone"
    yield StatePlace("history", folder / history.FOLDER, "an index of the log, for the console", how)


def _sessions(folder: Path) -> Iterator[StatePlace]:
    kept = folder / "sessions"
    purpose = "the keeper's socket, locks and messages"
    yield StatePlace("keeper", folder / "keeper", purpose, "stays: its messages are cut at 1 MiB")
    journal = kept / "sessions.jsonl"
    purpose = "which sessions there were, and how they ended"
    yield StatePlace("sessions", journal, purpose, "stays: it is shortened by itself", (journal, kept / "lock"))
    purpose = "files in /workspace/output of ended sessions"
    how = "stays: it goes by itself (sandbox.session_retain_seconds, session_retain_mb)"
    yield StatePlace("artifacts", kept / "artifacts", purpose, how)
    how = "stays: `ringfence box rm --snapshot REF` removes one"
    yield StatePlace("snapshots", kept / "snapshots", "files that sessions can start from", how)
    how = "stays: `ringfence box rm --volume NAME` removes one"
    yield StatePlace("volumes", kept / "volumes", "durable folders of sessions", how)
    how = "stays: it is what servers keep; remove a folder in it while its server does not run"
    yield StatePlace("server data", folder / "servers", "volumes of MCP servers, for each agent", how)


def _packages(folder: Path) -> Iterator[StatePlace]:
    root = folder / FOLDER
    found: list[CacheEntry] = []
    problems: list[str] = []
    try:
        found = list(PackageCache(root).entries())
    except OSError as exc:
        problems.append(f"{exc.filename}: {exc.strerror}")

    def of(*kinds: str) -> tuple[Path, ...]:
        return tuple(entry.path for entry in found if entry.kind in kinds)

    how = "`ringfence state prune` removes what no configuration wants and no process uses"
    purpose = "fetched packages of npm and PyPI, for servers and boxes"
    parts = (*of("npm", "pypi"), root / "asked", root / "configurations", root / ".lock")
    yield StatePlace("packages", root, purpose, how, parts, removable=True, problems=problems)
    yield StatePlace("images", root, "unpacked container images, for servers", how, of("image"), removable=True)
    how = "`ringfence state prune` removes it if no process uses it"
    purpose = "single packages that programs in boxes installed"
    yield StatePlace("wheels", root / "wheels", purpose, how, removable=True)
    purpose = "what processes left that ended while they fetched"
    yield StatePlace("leftovers", root, purpose, how, of("leftover"), removable=True)


def _add(place: StatePlace, path: Path, seen: set[tuple[int, int]]) -> None:
    waiting = [path]
    while waiting:
        each = waiting.pop()
        try:
            info = os.lstat(each)
            if stat.S_ISDIR(info.st_mode):
                waiting += map(Path, sorted(os.path.join(each, name) for name in os.listdir(each)))
        except FileNotFoundError:  # never there, or just gone
            continue
        except OSError as exc:
            place.problems.append(f"{each}: {exc.strerror or exc}")
            continue
        place.there = True
        # A file with several names is one file.
        if not stat.S_ISDIR(info.st_mode) and (info.st_nlink < 2 or (info.st_dev, info.st_ino) not in seen):
            seen.add((info.st_dev, info.st_ino))
            place.files += 1
            place.bytes += info.st_size


def _count_payloads(place: StatePlace, folder: Path) -> None:
    if not os.path.isfile(place.path):
        return
    try:
        reader = Reader.open(folder)
        try:
            place.files, place.bytes = reader.payload_total()
        finally:
            reader.close()
    except StoreError as exc:
        place.problems.append(str(exc))
    place.there = place.files > 0


# ── Pruning ───────────────────────────────────────────────────────────────────────────────────────


@state.command("prune", short_help="Remove what can be fetched again, and leftovers.")
def prune(
    config_path: Path | None = common.ConfigOption,
    yes: bool = _YES,
    as_json: options.PrintJson = False,
) -> None:
    """Remove what can be fetched again: packages, images, wheels, and leftovers of ended processes.

    It shows what goes, and asks on the terminal. What a configuration pins or its templates install stays, wherever you
    are: the one used here, and every one whose servers ran from these packages. So does what a running process uses.
    The log, keys, sessions, snapshots and volumes are never touched. A gateway and a keeper may run meanwhile.

    \b
    ringfence state prune
    ringfence state prune --config ringfence.yaml --yes
    ringfence state prune --yes --json
    """
    folder = common.state_of(config_path, demo=False)
    _check_own(folder)
    cache = PackageCache(folder / FOLDER)
    wanted = WantedTrees.of(folder, dict.fromkeys([*_configurations(config_path), *cache.configurations()]))
    going: list[CacheEntry] = []
    left: list[Json] = []
    for entry in _entries(cache):
        why = wanted.reason(entry)
        if why is None:
            going.append(entry)
        else:
            left.append({**_described(entry), "why": why})
    removed: list[Json] = []
    if going and not yes and not _agreed(folder, going):
        common.fail("Nothing was removed.")
    for entry in going:
        about = _described(entry)
        why = _discarded(cache, entry, folder)
        if why is None:
            removed.append(about)
        else:
            left.append({**about, "why": why})
    freed = sum(each["bytes"] for each in removed)
    if as_json:
        common.dump({"state": str(folder), "bytes": freed, "removed": removed, "left": left})
        return
    for each in left:
        print(safe(f"left {_title(each)}: {each['why']}"))
    for each in removed:
        print(safe(f"removed {_title(each)}"))
    print(f"{short_size(freed)} removed." if removed else "There is nothing to remove.")


def _entries(cache: PackageCache) -> list[CacheEntry]:
    try:
        return list(cache.entries())
    except OSError as exc:
        common.fail(f"{exc.filename}: {exc.strerror}; nothing was removed")


def _discarded(cache: PackageCache, entry: CacheEntry, folder: Path) -> str | None:
    try:
        return cache.discard(entry, lambda: _keeper(folder))
    except OSError as exc:
        return f"it cannot be removed: {exc.strerror}"


def _check_own(folder: Path) -> None:
    try:
        info = os.stat(folder)
    except FileNotFoundError:
        return
    if system.stranger(info):
        common.fail(f"{folder} belongs to another user (uid {info.st_uid}), who alone may prune it")
    if not os.path.lexists(folder / FOLDER):
        return
    # A configuration may name any folder, and what lies there may be the user's own.
    if system.open_to_others(info, 0o077):
        common.fail(f"{folder} is no state folder: others can reach it; nothing was removed")
    try:
        Reader.open(folder).close()
    except StoreError as exc:
        common.fail(f"{folder} is no state folder: {exc}; nothing was removed")


@dataclass(frozen=True, slots=True)
class WantedTrees:
    """What the configurations that use a state folder want of its cache."""

    trees: dict[str, str]
    """Digests of trees, and who pins each."""
    installs: list[tuple[str, frozenset[str]]]
    """Who installs packages by name, and which."""
    unknown: str | None = None
    """Why it is not known what is wanted."""

    @classmethod
    def of(cls, folder: Path, configurations: Iterable[Path]) -> WantedTrees:
        wanted = cls({}, [])
        real = os.path.realpath(folder)
        for path in configurations:
            try:
                settings = config.load(path)
            except ConfigError:
                return cls({}, [], f"{path} cannot be used, so it is not known what it pins (ringfence check)")
            if os.path.realpath(settings.gateway.state) == real:
                wanted._take(path, settings)
        return wanted

    def _take(self, path: Path, settings: Config) -> None:
        for server in settings.servers.values():
            if server.packages is not None:
                self.trees[server.packages.tree] = f"server {server.name} of {path} pins it"
        for template, names in settings.sandbox.installs.items():
            wanted = frozenset(_project(project_name(name)) for name in names)
            self.installs.append((f"template {template} of {path} installs it", wanted))

    def reason(self, entry: CacheEntry) -> str | None:
        """Why an entry has to stay; None if it need not."""
        if entry.kind not in _TREES:
            return None
        if self.unknown is not None:
            return self.unknown
        if entry.digest in self.trees:
            return self.trees[entry.digest]
        has = set(map(_project, entry.projects)) if entry.kind == "pypi" else set()
        return next((who for who, wanted in self.installs if wanted <= has), None)


def _project(name: str) -> str:
    try:
        return normalized(name)
    except ValueError:
        return name


def _keeper(folder: Path) -> str | None:
    """Why trees have to stay while a keeper runs: its sessions may see them, and it does not say which."""
    try:
        descriptor = os.open(folder / "keeper" / "lock", os.O_RDWR | system.PRIVATE)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return f"whether a keeper runs is not known: {exc.strerror}"
    try:
        return None if system.lock(descriptor) else "the keeper runs, and a session of it may use it"
    except OSError as exc:
        return f"whether a keeper runs is not known: {exc.strerror}"
    finally:
        os.close(descriptor)


def _described(entry: CacheEntry) -> Json:
    place = StatePlace("", entry.path, "", "")
    _add(place, entry.path, set())
    about = {"kind": entry.kind, "path": str(entry.path), "names": list(entry.names)}
    return {**about, "digest": entry.digest or None, "bytes": place.bytes, "files": place.files}


def _title(about: Json) -> str:
    names = ", ".join(about["names"][:_MAX_NAMED])
    more = len(about["names"]) - _MAX_NAMED
    words = f"{names}, and {more} more" if more > 0 else names or Path(about["path"]).name
    what = {"wheels": "wheels of the index", "leftover": "a leftover"}.get(about["kind"], str(about["kind"]))
    return f"{what} ({short_size(about['bytes'])}): {cut(words, _WIDEST)}"


def _agreed(folder: Path, going: Sequence[CacheEntry]) -> bool:
    described = [_described(entry) for entry in going]
    total = short_size(sum(each["bytes"] for each in described))
    shown = "\n".join(f"{MARGIN}{safe(_title(each))}" for each in described)
    where = f"In {safe(os.path.realpath(folder / FOLDER))}:"
    unknown = "What a configuration pins that was never used is not known"
    note = f"{unknown}, and has to be fetched again: ringfence init --fetch"
    try:
        return confirm(f"{where}\n{shown}\n{note}", f"Remove these, {total} together?")
    except Unavailable as exc:
        print(f"{where}\n{shown}")
        raise Unavailable(exc.reason_code, f"{exc}, or read the above and remove it with --yes") from None
