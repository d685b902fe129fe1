"""The packages of the environment that Ringfence runs in, by what their own installers wrote down of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib import metadata

from ringfence.core.errors import Unavailable
from ringfence.packages.images.host.contents import site_folders

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EnvironmentPackages:
    """What is installed here."""

    def __init__(self) -> None:
        self._folders = site_folders()
        self._known: dict[str, metadata.Distribution] = {}
        for each in metadata.distributions(path=list(self._folders)):
            name = each.metadata["Name"]
            if name:
                self._known.setdefault(_normal(name), each)

    def has(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and _normal(name) in self._known

    def all(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self._known if name != "ringfence"))

    def of_modules(self, modules: Iterable[str]) -> tuple[str, ...]:
        """The packages with these modules; those that are not here are left out, as in a box with that template."""
        provide = metadata.packages_distributions()
        named = {each.partition(".")[0] for each in modules}
        return tuple(sorted({_normal(who) for each in named for who in provide.get(each, ())} & self._known.keys()))

    def with_requirements(self, names: Iterable[str]) -> tuple[str, ...]:
        """These, and what they require of what is here. Raises Unavailable."""
        waiting = [_normal(name) for name in names]
        found = set[str]()
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            if name not in self._known:
                raise Unavailable("no_image", f"the package {name} is not installed in this environment")
            found.add(name)
            for text in self._known[name].requires or ():
                match = _NAME.match(text)
                # What an extra wants was not asked for; what other systems want is not here.
                if match is not None and "extra ==" not in text and _normal(match[0]) in self._known:
                    waiting.append(_normal(match[0]))
        return tuple(sorted(found))

    def files(self, names: Iterable[str]) -> dict[str, str]:
        """Their files, by paths below `site-packages`."""
        return {inside: place for name in names for inside, place in self._files(self._known[name])}

    def _files(self, package: metadata.Distribution) -> Iterator[tuple[str, str]]:
        for each in package.files or ():
            # In its whole: the part after the folder may lead out of it (`../../../bin/…`).
            place = os.path.realpath(str(package.locate_file(each)))
            for folder in self._folders:
                inside = os.path.relpath(place, folder)
                if not inside.startswith("..") and os.path.isfile(place):
                    yield inside, place
                    break

    def said(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names with versions."""
        return tuple(f"{name} {self._known[name].version}" for name in names)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
