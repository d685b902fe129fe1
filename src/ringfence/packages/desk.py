"""The index as one box sees it, at a place of its own: what it may install, and what it has had.

Pages and files of the "simple" kind that pip and uv ask for. A page never has more than the box may have; what it may
not have is said where clients show it, in the version of a wheel that cannot be had.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from ringfence.box import Installs, Reply
from ringfence.errors import Unavailable
from ringfence.packages.entries import Entries, normal
from ringfence.packages.index import Held, Offer

_HTML = "text/html; charset=utf-8"
_PAGE = re.compile(r"/simple/([A-Za-z0-9._-]{1,100})/?", re.ASCII)
_FILE = re.compile(r"/files/([0-9a-f]{64})/[^/]+", re.ASCII)
_REFUSED = re.compile(r"/refused/([a-z0-9-]{1,100})/[^/]+", re.ASCII)
_NOT_FOUND = Reply(b"there is no such thing here\n", status=404, words="Not Found")
_MOST_ASKED = 500
"""Whoever may have anything could else tell a registry anything, name by name."""
_REASON = "package_denied"
_DENIED = "0+not.in.sandbox.allow.packages"
_FAILED = "0+the.registry.did.not.answer"


class Offering(Protocol):
    """What there is, as `index.Index` has it. Whoever asks for it may be told Unavailable."""

    async def offers(self, name: str) -> tuple[Offer, ...]: ...

    async def wheel(self, offer: Offer) -> Held: ...

    def expect(self, names: Iterable[str]) -> None: ...


class IndexDesk:
    """Implements `box.Desk`, for one box."""

    def __init__(self, index: Offering, installs: Installs) -> None:
        """Raises ValueError for entries that are none."""
        self._index = index
        self._entries = Entries(installs.names, installs.required)
        self._along = installs.required != "hashed"
        """Whether what a package needs may come along with it as it is."""
        self._needed: set[str] = set()
        self._asked: set[str] = set()
        self._shown: dict[str, Offer] = {}
        self._problems: dict[str, str] = {}
        """Of names that were asked for: of any others, a box could have us keep as many as it likes."""
        self.trouble: Unavailable | None = None
        """Why the last that failed did."""
        self._had: dict[tuple[str, str, str, str], int] = {}

    async def answer(self, target: str) -> Reply:
        if match := _PAGE.fullmatch(target):
            return await self._page(match[1])
        if match := _FILE.fullmatch(target):
            return await self._file(match[1])
        if match := _REFUSED.fullmatch(target):
            words = _line(self._why_not(match[1]))
            return Reply(f"{words}\n".encode(), status=403, words=words, refused=_REASON)
        return _NOT_FOUND

    def handed_out(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(_fact(*key, count) for key, count in self._had.items())

    async def _page(self, text: str) -> Reply:
        try:
            name = normal(text)
        except ValueError:
            return _NOT_FOUND
        if not self._covers(name) or (name not in self._asked and len(self._asked) >= _MOST_ASKED):
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
        if name not in self._asked and len(self._asked) >= _MOST_ASKED:
            return f"this box has asked for {_MOST_ASKED} packages: that is enough"
        return self._problems.get(name, "it may not be installed")

    def _may(self, offer: Offer) -> bool:
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
            # A status that clients do not ask again for.
            return Reply(f"{words}\n".encode(), status=424, words=words, refused=exc.reason_code)
        if self._along:
            self._needed |= {name for name in held.needs if not self._entries.name(name)}
            self._index.expect(name for name in held.soon if name in self._needed)
        had = (offer.name, offer.version, held.sha256, offer.sha256 if offer.sources else "")
        self._had[had] = self._had.get(had, 0) + 1
        return Reply(held.path, "application/octet-stream")


def _refusing(name: str, version: str) -> Reply:
    """Clients show which versions there are, and how a file that they cannot have is answered; nothing else."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    page = _page([f'<a href="/refused/{name}/{file.replace("+", "%2B")}">{file}</a>'])
    return replace(page, refused=_REASON)


def _fact(name: str, version: str, digest: str, sources: str, count: int) -> Mapping[str, Any]:
    told = {"name": name, "version": version, "integrity": f"sha256:{digest}"}
    return {**told, **({"built_from": f"sha256:{sources}"} if sources else {}), "count": count}


def _link(offer: Offer) -> str:
    more = f' data-requires-python="{html.escape(offer.python)}"' if offer.python else ""
    more += ' data-yanked=""' if offer.yanked else ""
    digest = "" if offer.sources else f"#sha256={offer.sha256}"
    file = offer.wheel.replace("+", "%2B")
    return f'<a href="/files/{offer.sha256}/{file}{digest}"{more}>{offer.wheel}</a>'


def _page(links: list[str]) -> Reply:
    listed = "<br>\n".join(links)
    return Reply(f"<!DOCTYPE html><html><body>\n{listed}\n</body></html>\n".encode(), _HTML)


def _line(text: str) -> str:
    """As it can stand in the first line of an answer."""
    return re.sub(r"[^ -~]+", " ", text)[:300]
