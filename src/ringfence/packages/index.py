"""What the operator's registries have of Python packages, looked at and fetched through install boxes when somebody
wants it, and kept: files by the sha256 that the index gives, each checked before it is kept and whenever it is used.

Of sources a wheel is built, where that may be, in a box that reaches nothing; it is kept under the sha256 of the
sources.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.box import BoxReport, Input
from ringfence.errors import Unavailable
from ringfence.packages import archives, registries
from ringfence.packages.entries import normal
from ringfence.packages.errands import Errand, InstallBoxes
from ringfence.packages.registries import Registry
from ringfence.packages.shelf import Shelf

_SCRIPT = "ringfence.packages.inside_index"
_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
_FRESH_SECONDS = 300.0
_SETTLED_SECONDS = 30.0
"""As long as nobody asks anew which registries the operator has: one installation is many questions."""
_MOST_NAMES = 2_000
_MOST_AT_ONCE = 3
_MOST_EXPECTED = 50
_MOST_OFFERS = 5_000
_MOST_NEEDS = 500
_MOST_JSON = 16_000_000
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,200}(?:\.whl|\.tar\.gz|\.zip)", re.ASCII)
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,100}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_URL = re.compile(r"[!-~]{1,2000}", re.ASCII)
_PYTHON = re.compile(r"[0-9A-Za-z.,*=<>!~ ()'|-]{1,200}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Offer:
    """One file that an index has."""

    name: str
    version: str
    file: str
    sha256: str
    python: str = ""
    """Which versions of Python it is for."""
    yanked: bool = False
    url: str = ""
    """Where an install box finds it; nobody else goes there."""

    @property
    def sources(self) -> bool:
        return not self.file.endswith(".whl")

    @property
    def wheel(self) -> str:
        """What whoever installs it is to take it for."""
        if not self.sources:
            return self.file
        return f"{self.name.replace('-', '_')}-{self.version.replace('-', '_')}-1built-{_TAG}-none-any.whl"


@dataclass(frozen=True, slots=True)
class Held:
    """A wheel that is here."""

    path: Path
    sha256: str
    needs: tuple[str, ...]
    """Names of what may come along with it."""
    soon: tuple[str, ...] = ()
    """Those of them that are likely to be asked for next."""


@dataclass(frozen=True, slots=True)
class _Page:
    offers: tuple[Offer, ...]
    until: float


class Index:
    """One for all boxes of a process."""

    def __init__(
        self,
        shelf: Shelf,
        boxes: InstallBoxes,
        builds: Callable[[tuple[str, ...]], Awaitable[Path]] | None = None,
    ) -> None:
        """`builds` gives a folder with the packages that a build needs; None: nothing is built."""
        self._shelf = shelf
        self._boxes = boxes
        self._builds = builds
        self._pages: dict[str, _Page] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._registry: tuple[Registry, float] | None = None

    # ── Pages ──

    async def offers(self, name: str) -> tuple[Offer, ...]:
        """What there is of a package; nothing where no registry knows it. Raises Unavailable."""
        if self._known(name) is None:
            try:
                await self._once([f"list {name}"], lambda: self._list([name]))
            except Unavailable:
                if self._known(name) is None:  # else it was another of those that were looked up together
                    raise
        page = self._known(name)
        return () if page is None else page.offers

    def expect(self, names: Iterable[str]) -> None:
        """Somebody is going to ask for these: look them up meanwhile, together."""
        new = [name for name in names if self._known(name) is None and f"list {name}" not in self._under_way]
        wanted = new[:_MOST_EXPECTED]
        if wanted:
            self._begun([f"list {name}" for name in wanted], lambda: self._list(wanted))

    def _known(self, name: str) -> _Page | None:
        page = self._pages.get(name)
        return None if page is None or page.until < time.monotonic() else page

    async def _list(self, names: list[str]) -> None:
        """In a box that has read no archive: whatever is in those, they do not say what an index has."""
        order = {"names": names, "sources": self._builds is not None}
        folder = await asyncio.to_thread(self._shelf.staging)
        try:
            report = await self._asked(names[0], "list", order, folder)
            told = await asyncio.to_thread(archives.read_json, folder / "offers.json", _MOST_JSON)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
        if len(self._pages) > _MOST_NAMES:
            self._pages.clear()
        pages = {name: _offers(name, told.get(name)) for name in names}
        for name, offers in pages.items():
            if not offers:
                _check_answered(name, report)
            self._pages[name] = _Page(offers, time.monotonic() + _FRESH_SECONDS)

    # ── Files ──

    async def wheel(self, offer: Offer) -> Held:
        """Fetched, or built, where it is not here yet. Raises Unavailable."""
        held = await asyncio.to_thread(self._held, offer)
        if held is None:
            await self._once([f"get {offer.sha256}"], lambda: self._get(offer))
            held = await asyncio.to_thread(self._held, offer)
        if held is None:
            raise Unavailable("install_failed", f"{offer.file} was fetched, and is not here")
        return held

    def _place(self, offer: Offer) -> Path:
        return self._shelf.wheels / (f"{offer.sha256}-{_TAG}" if offer.sources else offer.sha256)

    def _held(self, offer: Offer) -> Held | None:
        """Every byte checked. Raises Unavailable."""
        place = self._place(offer)
        try:
            about = json.loads((place / "about.json").read_bytes())
            held = Held(place / about["file"], about["sha256"], tuple(about["needs"]), tuple(about["soon"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        whole = held.path.is_file() and archives.hashed(held.path, "sha256").hex() == held.sha256
        if not whole or (not offer.sources and held.sha256 != offer.sha256):
            raise Unavailable("package_altered", f"{held.path} is not what was fetched; remove it")
        return held

    async def _get(self, offer: Offer) -> None:
        folder = await asyncio.to_thread(self._shelf.staging)
        try:
            await self._fetch(offer, folder / "got")
            found = folder / "got"
            if offer.sources:
                found = folder / "built"
                await self._build(offer, folder / "got", found)
            await asyncio.to_thread(self._keep, offer, found)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _fetch(self, offer: Offer, into: Path) -> None:
        order = {"url": offer.url, "file": offer.file, "sha256": offer.sha256, "sources": self._builds is not None}
        await self._asked(offer.name, "get", order, into)
        path = into / "files" / offer.file
        if path.is_symlink() or not path.is_file():
            raise Unavailable("install_failed", f"an install box did not bring {offer.file}")
        if (await asyncio.to_thread(archives.hashed, path, "sha256")).hex() != offer.sha256:
            raise archives.other(offer.file)

    async def _build(self, offer: Offer, got: Path, into: Path) -> None:
        if self._builds is None:
            raise Unavailable("no_build", f"{offer.name} {offer.version} has only sources (sandbox.build_packages)")
        needs = await asyncio.to_thread(_texts, got, "build")
        try:
            archives.check("pypi", needs)
        except ValueError as exc:
            raise Unavailable("install_failed", f"{offer.file} cannot be built: {exc}") from None
        tools = (await self._builds(needs),) if needs else ()
        source = (Input(f"files/{offer.file}", got / "files" / offer.file),)
        errand = Errand(_SCRIPT, "build", {"file": offer.file}, into, inputs=source, packages=tools)
        await self._boxes.run(f"{offer.name} {offer.version}", errand)

    def _keep(self, offer: Offer, found: Path) -> None:
        files = [path for path in (found / "files").iterdir() if path.suffix == ".whl" and path.is_file()]
        if len(files) != 1 or files[0].is_symlink() or not _FILE.fullmatch(files[0].name):
            raise Unavailable("install_failed", f"{offer.file} did not come to one wheel")
        if offer.sources and not _is(offer, files[0].name):
            raise Unavailable("install_failed", f"{offer.file} came to another package than its own")
        place, made = self._place(offer), self._shelf.staging()
        about: dict[str, Any] = {"file": files[0].name, "sha256": archives.hashed(files[0], "sha256").hex()}
        about |= {"needs": _names(found, "needs"), "soon": _names(found, "soon")}
        os.rename(files[0], made / files[0].name)
        (made / "about.json").write_text(json.dumps(about), encoding="ascii")
        place.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.rename(made, place)
        except OSError:  # somebody else was faster
            shutil.rmtree(made, ignore_errors=True)

    # ── Parts ──

    async def _asked(self, name: str, verb: str, order: Mapping[str, Any], into: Path) -> BoxReport:
        known, until = self._registry or (None, 0.0)
        if known is None or until < time.monotonic():
            known = await registries.pip(self._boxes.interpreter)
            self._registry = known, time.monotonic() + _SETTLED_SECONDS
        return await self._boxes.run(name, Errand(_SCRIPT, verb, order, into, known))

    async def _once(self, keys: list[str], work: Callable[[], Awaitable[None]]) -> None:
        """Whoever asks for the same meanwhile, waits for the same."""
        task = self._under_way.get(keys[0]) or self._begun(keys, work)
        await asyncio.shield(task)

    def _begun(self, keys: list[str], work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._in_turn(work))
        self._under_way |= dict.fromkeys(keys, task)
        task.add_done_callback(lambda done: self._over(keys, done))
        return task

    async def _in_turn(self, work: Callable[[], Awaitable[None]]) -> None:
        """However many boxes ask for however much: few install boxes at a time are there for it."""
        async with self._turns:
            await work()

    def _over(self, keys: list[str], done: asyncio.Task[None]) -> None:
        for key in keys:
            self._under_way.pop(key, None)
        if not done.cancelled():
            done.exception()  # whoever wanted it may have left


def _offers(name: str, told: Any) -> tuple[Offer, ...]:
    """Of versions that have wheels, those; of others, their sources."""
    offers = [offer for each in (told if isinstance(told, list) else [])[:_MOST_OFFERS] for offer in _offer(name, each)]
    built = {offer.version for offer in offers if not offer.sources}
    return tuple(offer for offer in offers if not offer.sources or offer.version not in built)


def _offer(name: str, told: Any) -> list[Offer]:
    """What a box says that the index has; nothing where that cannot be."""
    if not isinstance(told, dict):
        return []
    version, file, digest, python, url = (told.get(key) for key in ("version", "file", "sha256", "python", "url"))
    shapes = ((version, _VERSION), (file, _FILE), (digest, _DIGEST), (python or ">=3", _PYTHON), (url, _URL))
    if not all(isinstance(value, str) and shape.fullmatch(value) for value, shape in shapes):
        return []
    yanked = told.get("yanked") is True
    return [Offer(name, str(version), str(file), str(digest), str(python or ""), yanked, str(url))]


def _texts(folder: Path, what: str) -> tuple[str, ...]:
    """What a box says of an archive that it has read."""
    told = archives.read_json(folder / "about.json", _MOST_JSON).get(what)
    return tuple(text for text in (told if isinstance(told, list) else [])[:_MOST_NEEDS] if isinstance(text, str))


def _names(folder: Path, what: str) -> list[str]:
    names: set[str] = set()
    for text in _texts(folder, what):
        with suppress(ValueError):
            names.add(normal(text))
    return sorted(names)


def _is(offer: Offer, file: str) -> bool:
    """Whether a wheel says that it is this package in this version; each is spelled in several ways."""
    said = [re.sub("[-_.+]+", "-", part).lower() for part in file.split("-")[:2]]
    return said == [offer.name, re.sub("[-_.+]+", "-", offer.version).lower()]


def _check_answered(name: str, report: BoxReport) -> None:
    """Nothing was found: is there nothing, or was nobody to be asked?"""
    failed = (report.network or {}).get("failed") or (report.network or {}).get("denied") or []
    if failed:
        places = ", ".join(f"{each['host']}:{each['port']} ({each['reason']})" for each in failed[:3])
        raise Unavailable("install_failed", f"{name} could not be looked up: {places}")
