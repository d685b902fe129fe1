"""The index of Python packages that boxes install from, as pip and uv expect it.

`PackageIndex` looks up and fetches what the operator's registries have, through install boxes, when a box asks for it.
It keeps files under the sha256 that the registry's index gives, and checks each file before it is kept and at every
use. If that is allowed, a wheel is built from sources, in a box without a network; it is kept under the sha256 of the
sources.

`BoxIndex` is what one box sees of it, under a host name of its own: the pages and files of a "simple" index. A page
lists nothing that the box may not install; the reason stands where clients show it, in the version of a wheel that
cannot be had.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ringfence.core.box import BoxReport, Input, Installs, Reply
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.packages import registries
from ringfence.packages.allowlist import Allowlist, normalized
from ringfence.packages.cache import PackageCache
from ringfence.packages.install_boxes import BoxJob, InstallBoxes, altered, check_names, file_digest, read_json
from ringfence.packages.registries import Registry

_SCRIPT = "ringfence.packages.inside.index"
_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
_FRESH_SECONDS = 300.0
_SETTLED_SECONDS = 30.0
"""How long the operator's registries are not asked for again: one installation is many requests."""
_MAX_NAMES = 2_000
_MAX_AT_ONCE = 3
_MAX_EXPECTED = 50
_MAX_OFFERS = 5_000
_MAX_NEEDS = 500
_MAX_JSON = 16_000_000
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,200}(?:\.whl|\.tar\.gz|\.zip)", re.ASCII)
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,100}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_URL = re.compile(r"[!-~]{1,2000}", re.ASCII)
_PYTHON = re.compile(r"[0-9A-Za-z.,*=<>!~ ()'|-]{1,200}", re.ASCII)

# The requests of a box, and the answers that it gets.
_PAGE_PATH = re.compile(r"/simple/([A-Za-z0-9._-]{1,100})/?", re.ASCII)
_FILE_PATH = re.compile(r"/files/([0-9a-f]{64})/[^/]+", re.ASCII)
_REFUSED_PATH = re.compile(r"/refused/([a-z0-9-]{1,100})/[^/]+", re.ASCII)
_MAX_ASKED = 500
"""A box that may install anything could otherwise tell a registry anything, name by name."""
_HTML = "text/html; charset=utf-8"
_NOT_FOUND = Reply(b"there is no such thing here\n", status=404, phrase="Not Found")
_REASON = "package_denied"
_DENIED = "0+not.in.sandbox.allow.packages"
_FAILED = "0+the.registry.did.not.answer"


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One file that a registry's index lists."""

    name: str
    version: str
    file: str
    sha256: str
    python: str = ""
    """The versions of Python that it is for."""
    yanked: bool = False
    url: str = ""
    """Where an install box finds it; nothing else goes there."""

    @property
    def sources(self) -> bool:
        return not self.file.endswith(".whl")

    @property
    def wheel(self) -> str:
        """The file name that the installing client sees."""
        if not self.sources:
            return self.file
        return f"{self.name.replace('-', '_')}-{self.version.replace('-', '_')}-1built-{_TAG}-none-any.whl"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel in the cache."""

    path: Path
    sha256: str
    needs: tuple[str, ...]
    """Names of the packages that it may need."""
    soon: tuple[str, ...] = ()
    """Those that the client is likely to ask for next."""


@dataclass(frozen=True, slots=True)
class _Page:
    offers: tuple[IndexFile, ...]
    until: float


class PackageIndex:
    """One for all boxes of a process."""

    def __init__(
        self,
        cache: PackageCache,
        boxes: InstallBoxes,
        builds: Callable[[tuple[str, ...]], Awaitable[Path]] | None = None,
    ) -> None:
        """`builds` returns a folder with the packages that a build needs; None: nothing is built."""
        self._cache = cache
        self._boxes = boxes
        self._builds = builds
        self._pages: dict[str, _Page] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._registry: tuple[Registry, float] | None = None

    # ── Pages ──

    async def offers(self, name: str) -> tuple[IndexFile, ...]:
        """The files of a package; none if no registry knows it. Raises Unavailable."""
        if self._known(name) is None:
            try:
                await self._once([f"list {name}"], lambda: self._list([name]))
            except Unavailable:
                if self._known(name) is None:  # otherwise another name of the same lookup failed
                    raise
        page = self._known(name)
        return () if page is None else page.offers

    def expect(self, names: Iterable[str]) -> None:
        """A client is about to ask for these: look them up in advance, together."""
        new = [name for name in names if self._known(name) is None and f"list {name}" not in self._under_way]
        wanted = new[:_MAX_EXPECTED]
        if wanted:
            self._begun([f"list {name}" for name in wanted], lambda: self._list(wanted))

    def _known(self, name: str) -> _Page | None:
        page = self._pages.get(name)
        return None if page is None or page.until < time.monotonic() else page

    async def _list(self, names: list[str]) -> None:
        """List the files of these packages in a box that has read no archive, so that none can change the list."""
        order = {"names": names, "sources": self._builds is not None}
        folder = await asyncio.to_thread(self._cache.staging)
        try:
            report = await self._asked(names[0], "list", order, folder)
            listed = await asyncio.to_thread(read_json, folder / "offers.json", _MAX_JSON)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
        if len(self._pages) > _MAX_NAMES:
            self._pages.clear()
        pages = {name: _offers(name, listed.get(name)) for name in names}
        for name, offers in pages.items():
            if not offers:
                _check_answered(name, report)
            self._pages[name] = _Page(offers, time.monotonic() + _FRESH_SECONDS)

    # ── Files ──

    async def wheel(self, offer: IndexFile) -> Wheel:
        """The wheel from the cache; otherwise it is fetched or built first. Raises Unavailable."""
        held = await asyncio.to_thread(self._held, offer)
        if held is None:
            await self._once([f"get {offer.sha256}"], lambda: self._get(offer))
            held = await asyncio.to_thread(self._held, offer)
        if held is None:
            raise Unavailable("install_failed", f"{offer.file} was fetched, and is not here")
        return held

    def _place(self, offer: IndexFile) -> Path:
        return self._cache.wheels() / (f"{offer.sha256}-{_TAG}" if offer.sources else offer.sha256)

    def _held(self, offer: IndexFile) -> Wheel | None:
        """Every byte checked. Raises Unavailable."""
        place = self._place(offer)
        try:
            about = json.loads((place / "about.json").read_bytes())
            held = Wheel(place / about["file"], about["sha256"], tuple(about["needs"]), tuple(about["soon"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        whole = held.path.is_file() and file_digest(held.path, "sha256").hex() == held.sha256
        if not whole or (not offer.sources and held.sha256 != offer.sha256):
            raise Unavailable("package_altered", f"{held.path} is not what was fetched; remove it")
        return held

    async def _get(self, offer: IndexFile) -> None:
        folder = await asyncio.to_thread(self._cache.staging)
        try:
            await self._fetch(offer, folder / "got")
            found = folder / "got"
            if offer.sources:
                found = folder / "built"
                await self._build(offer, folder / "got", found)
            await asyncio.to_thread(self._keep, offer, found)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _fetch(self, offer: IndexFile, into: Path) -> None:
        order = {"url": offer.url, "file": offer.file, "sha256": offer.sha256, "sources": self._builds is not None}
        await self._asked(offer.name, "get", order, into)
        path = into / "files" / offer.file
        if path.is_symlink() or not path.is_file():
            raise Unavailable("install_failed", f"an install box did not bring {offer.file}")
        if (await asyncio.to_thread(file_digest, path, "sha256")).hex() != offer.sha256:
            raise altered(offer.file)

    async def _build(self, offer: IndexFile, got: Path, into: Path) -> None:
        if self._builds is None:
            raise Unavailable("no_build", f"{offer.name} {offer.version} has only sources (sandbox.build_packages)")
        needs = await asyncio.to_thread(_texts, got, "build")
        try:
            check_names("pypi", needs)
        except ValueError as exc:
            raise Unavailable("install_failed", f"{offer.file} cannot be built: {exc}") from None
        tools = (await self._builds(needs),) if needs else ()
        source = (Input(f"files/{offer.file}", got / "files" / offer.file, links=True),)
        job = BoxJob(_SCRIPT, "build", {"file": offer.file}, into, inputs=source, packages=tools)
        await self._boxes.run(f"{offer.name} {offer.version}", job)

    def _keep(self, offer: IndexFile, found: Path) -> None:
        files = [path for path in (found / "files").iterdir() if path.suffix == ".whl" and path.is_file()]
        if len(files) != 1 or files[0].is_symlink() or not _FILE.fullmatch(files[0].name):
            raise Unavailable("install_failed", f"{offer.file} did not come to one wheel")
        if offer.sources and not _is(offer, files[0].name):
            raise Unavailable("install_failed", f"{offer.file} came to another package than its own")
        place = self._place(offer)
        made = self._cache.staging()
        about: dict[str, Any] = {"file": files[0].name, "sha256": file_digest(files[0], "sha256").hex()}
        about |= {"needs": _names(found, "needs"), "soon": _names(found, "soon")}
        os.rename(files[0], made / files[0].name)
        (made / "about.json").write_text(json.dumps(about), encoding="ascii")
        place.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.rename(made, place)
        except OSError:  # another process was faster
            shutil.rmtree(made, ignore_errors=True)

    # ── Parts ──

    async def _asked(self, name: str, verb: str, order: Mapping[str, Any], into: Path) -> BoxReport:
        known, until = self._registry or (None, 0.0)
        if known is None or until < time.monotonic():
            known = await registries.pip(self._boxes.interpreter)
            self._registry = known, time.monotonic() + _SETTLED_SECONDS
        return await self._boxes.run(name, BoxJob(_SCRIPT, verb, order, into, known))

    async def _once(self, keys: list[str], work: Callable[[], Awaitable[None]]) -> None:
        """Requests for the same key share one task."""
        task = self._under_way.get(keys[0]) or self._begun(keys, work)
        await asyncio.shield(task)

    def _begun(self, keys: list[str], work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._in_turn(work))
        self._under_way |= dict.fromkeys(keys, task)
        task.add_done_callback(lambda done: self._over(keys, done))
        return task

    async def _in_turn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Only a few install boxes run at a time, however many boxes ask."""
        async with self._turns:
            await work()

    def _over(self, keys: list[str], done: asyncio.Task[None]) -> None:
        for key in keys:
            self._under_way.pop(key, None)
        if not done.cancelled():
            done.exception()  # the caller may be gone


def _offers(name: str, listed: Any) -> tuple[IndexFile, ...]:
    """The wheels of versions that have wheels; the sources of the others."""
    offers = [
        offer for each in (listed if isinstance(listed, list) else [])[:_MAX_OFFERS] for offer in _offer(name, each)
    ]
    built = {offer.version for offer in offers if not offer.sources}
    return tuple(offer for offer in offers if not offer.sources or offer.version not in built)


def _offer(name: str, entry: Any) -> list[IndexFile]:
    """A file as an install box reports it; nothing if the report is malformed."""
    if not isinstance(entry, dict):
        return []
    version, file, digest, python, url = (entry.get(key) for key in ("version", "file", "sha256", "python", "url"))
    shapes = ((version, _VERSION), (file, _FILE), (digest, _DIGEST), (python or ">=3", _PYTHON), (url, _URL))
    if not all(isinstance(value, str) and shape.fullmatch(value) for value, shape in shapes):
        return []
    yanked = entry.get("yanked") is True
    return [IndexFile(name, str(version), str(file), str(digest), str(python or ""), yanked, str(url))]


def _texts(folder: Path, what: str) -> tuple[str, ...]:
    """What an install box reports of an archive that it has read."""
    needs = read_json(folder / "about.json", _MAX_JSON).get(what)
    return tuple(text for text in (needs if isinstance(needs, list) else [])[:_MAX_NEEDS] if isinstance(text, str))


def _names(folder: Path, what: str) -> list[str]:
    names: set[str] = set()
    for text in _texts(folder, what):
        with suppress(ValueError):
            names.add(normalized(text))
    return sorted(names)


def _is(offer: IndexFile, file: str) -> bool:
    """Whether the name of a wheel is that of this package and version, each of which has several spellings."""
    said = [re.sub("[-_.+]+", "-", part).lower() for part in file.split("-")[:2]]
    return said == [offer.name, re.sub("[-_.+]+", "-", offer.version).lower()]


def _check_answered(name: str, report: BoxReport) -> None:
    """Raise Unavailable if nothing was found because a registry could not be reached."""
    failed = (report.network or {}).get("failed") or (report.network or {}).get("denied") or []
    if failed:
        places = ", ".join(f"{each['host']}:{each['port']} ({each['reason']})" for each in failed[:3])
        raise Unavailable("install_failed", f"{name} could not be looked up: {places}")


# ── What one box sees of it ───────────────────────────────────────────────────────────────────────


class IndexSource(Protocol):
    """What `BoxIndex` needs of `PackageIndex`. All raise Unavailable."""

    async def offers(self, name: str) -> tuple[IndexFile, ...]: ...

    async def wheel(self, offer: IndexFile) -> Wheel: ...

    def expect(self, names: Iterable[str]) -> None: ...


class BoxIndex:
    """The index as one box sees it: what it may install, and what it has had. Implements `box.InstallIndex`."""

    def __init__(self, index: IndexSource, installs: Installs) -> None:
        """Raises ValueError for malformed entries."""
        self._index = index
        self._entries = Allowlist(installs.names, installs.required)
        self._along = installs.required != "hashed"
        """Whether the dependencies of an allowed package are allowed too."""
        self._needed: set[str] = set()
        self._asked: set[str] = set()
        self._shown: dict[str, IndexFile] = {}
        self._problems: dict[str, str] = {}
        """Only of names that were asked for: otherwise a box could make us keep any number."""
        self.trouble: Unavailable | None = None
        """Why the last failed request failed."""
        self._had: dict[tuple[str, str, str, str], int] = {}

    async def answer(self, target: str) -> Reply:
        if match := _PAGE_PATH.fullmatch(target):
            return await self._page(match[1])
        if match := _FILE_PATH.fullmatch(target):
            return await self._file(match[1])
        if match := _REFUSED_PATH.fullmatch(target):
            words = _line(self._why_not(match[1]))
            return Reply(f"{words}\n".encode(), status=403, phrase=words, refused=_REASON)
        return _NOT_FOUND

    def handed_out(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(_fact(*key, count) for key, count in self._had.items())

    async def _page(self, text: str) -> Reply:
        try:
            name = normalized(text)
        except ValueError:
            return _NOT_FOUND
        if not self._covers(name) or (name not in self._asked and len(self._asked) >= _MAX_ASKED):
            return _refusing(name, _DENIED)
        self._asked.add(name)
        self._problems.pop(name, None)
        try:
            offers = await self._index.offers(name)
        except Unavailable as exc:
            self.trouble = exc
            self._problems[name] = _line(exc.message)
            return _refusing(name, _FAILED)
        if not offers:
            return _NOT_FOUND
        mine = [offer for offer in offers if self._may(offer)]
        if not mine:
            self._problems[name] = f"no version of {name} that there is may be installed here: sandbox.allow_packages"
            return _refusing(name, _DENIED)
        self._shown |= {offer.sha256: offer for offer in mine}
        return _page([_link(offer) for offer in mine])

    def _covers(self, name: str) -> bool:
        return self._entries.name(name) or name in self._needed

    def _why_not(self, name: str) -> str:
        if not self._covers(name):
            return f"{name} may not be installed here: sandbox.allow_packages"
        if name not in self._asked and len(self._asked) >= _MAX_ASKED:
            return f"this box has asked for {_MAX_ASKED} packages: that is enough"
        return self._problems.get(name, "it may not be installed")

    def _may(self, offer: IndexFile) -> bool:
        return offer.name in self._needed or self._entries.cover(offer.name, offer.version, frozenset({offer.sha256}))

    async def _file(self, digest: str) -> Reply:
        offer = self._shown.get(digest)
        if offer is None:
            return _NOT_FOUND
        try:
            held = await self._index.wheel(offer)
        except Unavailable as exc:
            self.trouble = exc
            words = _line(exc.message)
            # A status that clients do not retry.
            return Reply(f"{words}\n".encode(), status=424, phrase=words, refused=exc.reason_code)
        if self._along:
            self._needed |= {name for name in held.needs if not self._entries.name(name)}
            self._index.expect(name for name in held.soon if name in self._needed)
        had = (offer.name, offer.version, held.sha256, offer.sha256 if offer.sources else "")
        self._had[had] = self._had.get(had, 0) + 1
        return Reply(held.path, "application/octet-stream")


def _refusing(name: str, version: str) -> Reply:
    """Clients show the versions of a page and the answer to a file that they cannot have, and nothing else."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    page = _page([f'<a href="/refused/{name}/{file.replace("+", "%2B")}">{file}</a>'])
    return replace(page, refused=_REASON)


def _fact(name: str, version: str, digest: str, sources: str, count: int) -> Mapping[str, Any]:
    fact = {"name": name, "version": version, "integrity": f"sha256:{digest}"}
    return {**fact, **({"built_from": f"sha256:{sources}"} if sources else {}), "count": count}


def _link(offer: IndexFile) -> str:
    more = f' data-requires-python="{html.escape(offer.python)}"' if offer.python else ""
    more += ' data-yanked=""' if offer.yanked else ""
    digest = "" if offer.sources else f"#sha256={offer.sha256}"
    file = offer.wheel.replace("+", "%2B")
    return f'<a href="/files/{offer.sha256}/{file}{digest}"{more}>{offer.wheel}</a>'


def _page(links: list[str]) -> Reply:
    listed = "<br>\n".join(links)
    return Reply(f"<!DOCTYPE html><html><body>\n{listed}\n</body></html>\n".encode(), _HTML)


def _line(text: str) -> str:
    """The text as it can stand in the first line of an HTTP response."""
    return re.sub(r"[^ -~]+", " ", text)[:300]
