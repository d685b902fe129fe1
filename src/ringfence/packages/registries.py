"""Where packages come from: what the operator's own npm and pip are told, asked of those two themselves.

Never what lies in a project: a repository could send us to a registry of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ringfence.errors import Unavailable

_SECONDS = 30.0
_MOST_BYTES = 4_000_000
_PIP_ASKED = """
import json
from pip._internal.commands import create_command
from pip._internal.models.index import PyPI
given = create_command("install").parser.get_default_values()
print(json.dumps({
    "index": None if given.no_index else given.index_url, "extra": given.extra_index_urls or [],
    "links": given.find_links or [], "cert": given.cert, "default": PyPI.simple_url, "files": PyPI.file_storage_domain,
}))
"""
"""Its own words for its own defaults: those of the environment and of its files included."""


@dataclass(frozen=True, slots=True)
class Registry:
    """How one client reaches its registries from within a box."""

    client: tuple[str, ...]
    """The command."""
    hosts: tuple[str, ...]
    """`host:port`, all that the box may reach."""
    trees: tuple[Path, ...] = ()
    """Folders of the host that the client or its registries lie in."""
    env: dict[str, str] = field(default_factory=dict)
    certificates: bytes = field(default=b"", repr=False)
    """Whom the client trusts, where that is not the system's choice."""


async def npm() -> Registry:
    """Raises Unavailable."""
    program, node = shutil.which("npm"), shutil.which("node")
    if program is None or node is None:
        raise Unavailable("no_npm", "npm and node are not installed here, so npm packages cannot be fetched")
    told = await _asked([program, "config", "list", "--json"], "npm")
    urls = {key: value for key, value in told.items() if key == "registry" or key.endswith(":registry")}
    if not all(isinstance(url, str) for url in urls.values()) or "registry" not in urls:
        raise Unavailable("no_registry", "npm does not say which registry it uses")
    return _of_npm(node, program, urls, told)


def _of_npm(node: str, program: str, urls: dict[str, str], told: dict[str, Any]) -> Registry:
    real, script = os.path.realpath(node), os.path.realpath(program)
    return Registry(
        client=(real, script) if script.endswith(".js") else (script,),
        hosts=tuple(_hosts(urls.values(), "npm")),
        trees=tuple(_outside_system(Path(real).parent.parent, Path(script).parent.parent)),
        env={f"npm_config_{key}": url for key, url in urls.items()},
        certificates=_read(told.get("cafile")),
    )


async def pip(interpreter: Path) -> Registry:
    """Raises Unavailable."""
    told = await _asked([str(interpreter), "-I", "-c", _PIP_ASKED], "pip")
    links = [str(link) for link in told.get("links") or []]
    index = told.get("index")
    urls = [*([str(index)] if index else []), *map(str, told.get("extra") or [])]
    hosts = list(_hosts([*urls, *(link for link in links if "://" in link)], "pip"))
    if index == told.get("default"):
        hosts.append(f"{told.get('files')}:443")
    env = {"PIP_INDEX_URL": urls[0]} if index else {"PIP_NO_INDEX": "1"}
    more = urls[1:] if index else urls
    env |= {"PIP_EXTRA_INDEX_URL": " ".join(more)} if more else {}
    env |= {"PIP_FIND_LINKS": " ".join(links)} if links else {}
    return Registry(
        client=(str(interpreter),),
        hosts=tuple(dict.fromkeys(hosts)),
        trees=tuple(_folders([*urls, *links])),
        env=env,
        certificates=_read(told.get("cert")),
    )


async def _asked(command: Sequence[str], who: str) -> dict[str, Any]:
    try:
        # From the root: what lies where we stand is not the operator's own.
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd="/",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as exc:
        raise Unavailable("no_registry", f"{who} cannot be asked for its registry: {exc.strerror}") from None
    try:
        async with asyncio.timeout(_SECONDS):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Unavailable("no_registry", f"{who} does not say which registry it uses") from None
    try:
        told = json.loads(out[:_MOST_BYTES])
    except ValueError:
        told = None
    if process.returncode or not isinstance(told, dict):
        raise Unavailable("no_registry", f"{who} is not installed here, or does not say which registry it uses")
    return told


def _hosts(urls: Iterable[str], who: str) -> Iterable[str]:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme == "file":
            continue
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unavailable("no_registry", f"{who} has a registry that is none: {parts.scheme}://…")
        if parts.username is not None or parts.password is not None:
            raise Unavailable(
                "registry_credentials",
                f"a registry of {who} has a credential in its address, and no secret enters an install box",
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        yield f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _folders(places: Iterable[str]) -> Iterable[Path]:
    """Registries that are folders. The pages of an index name files beside it."""
    for place in places:
        parts = urlsplit(place)
        if parts.scheme not in ("", "file"):
            continue
        folder = Path(unquote(parts.path))
        folder = folder.parent if folder.name in ("", "simple") and folder.parent != Path("/") else folder
        if folder.is_dir():
            yield folder


def _outside_system(*folders: Path) -> Iterable[Path]:
    return (folder for folder in dict.fromkeys(folders) if not folder.is_relative_to("/usr"))


def _read(path: Any) -> bytes:
    try:
        return Path(path).read_bytes()[:_MOST_BYTES] if isinstance(path, str) and path else b""
    except OSError:
        return b""
