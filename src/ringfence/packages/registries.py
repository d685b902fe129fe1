"""Where packages come from: the registries that the operator's own npm and pip are configured with.

npm and pip themselves are asked. The configuration of a project is never read: a repository could send us to a registry
of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass

_SECONDS = 180.0
"""For npm or pip to start and say what is set: seconds of work, on a machine that may be starved."""
_MAX_BYTES = 4_000_000
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
"""pip's own defaults, with those of its environment and its files."""
_NPM_ASKED = """
const [program, ...urls] = process.argv.slice(1);
const home = require("path").resolve(require("fs").realpathSync(program), "../..");
const load = (name) => require(require.resolve(name, {paths: [home + "/lib", home + "/node_modules", home]}));
const Config = load("@npmcli/config");
const {definitions, shorthands, flatten} = load("@npmcli/config/lib/definitions");
const config = new Config({definitions, shorthands, flatten, npmPath: home, argv: ["node", "npm"], warn: false});
config.load().then(() => {
  const out = {};
  for (const url of urls) {
    const {token, auth, password} = config.getCredentialsByURI(url);
    out[url] = {token, auth, password};
  }
  console.log(JSON.stringify(out));
});
"""


@dataclass(frozen=True, slots=True)
class Credential:
    """What a registry demands. The proxy adds it; it never enters a box."""

    host: str
    port: int
    path: str
    """The path prefix that it is for."""
    header: str = field(repr=False)
    """The value of `Authorization`."""
    parts: tuple[str, ...] = field(default=(), repr=False)
    """Texts that must not come back into a box."""


@dataclass(frozen=True, slots=True)
class Registry:
    """How npm, pip or an image's client reaches its registries from inside a box."""

    client: tuple[str, ...]
    """The command."""
    hosts: tuple[str, ...]
    """`host:port`: all that the box may reach."""
    trees: tuple[Path, ...] = ()
    """Folders of the host that the client or its registries lie in."""
    env: dict[str, str] = field(default_factory=dict)
    certificates: bytes = field(default=b"", repr=False)
    """The authorities that the client trusts, if not those of the system."""
    credentials: tuple[Credential, ...] = ()
    beside: tuple[str, ...] = ()
    """`host:port` that a registry redirects to: reached only at public addresses."""


async def npm() -> Registry:
    """Raises Unavailable."""
    program = shutil.which("npm")
    node = shutil.which("node")
    if program is None or node is None:
        raise Unavailable("no_npm", "npm and node are not installed here, so npm packages cannot be fetched")
    settings = await _asked([program, "config", "list", "--json"], "npm")
    urls = {key: value for key, value in settings.items() if key == "registry" or key.endswith(":registry")}
    if not all(isinstance(url, str) for url in urls.values()) or "registry" not in urls:
        raise Unavailable("no_registry", "npm does not say which registry it uses")
    credentials = (*await _of_registries(node, program, list(urls.values())), *_in_addresses(urls.values()))
    return replace(_of_npm(node, program, urls, settings), credentials=credentials)


def _of_npm(node: str, program: str, urls: dict[str, str], settings: dict[str, Any]) -> Registry:
    real = os.path.realpath(node)
    script = os.path.realpath(program)
    urls = {key: _without(url) for key, url in urls.items()}
    return Registry(
        client=(real, script) if script.endswith(".js") else (script,),
        hosts=tuple(_hosts(urls.values(), "npm")),
        trees=tuple(_outside_system(Path(real).parent.parent, Path(script).parent.parent)),
        env={f"npm_config_{key}": url for key, url in urls.items()},
        certificates=_read(settings.get("cafile")),
    )


async def _of_registries(node: str, program: str, urls: list[str]) -> tuple[Credential, ...]:
    """What npm would send. Only npm's own code tells, since it reads files and variables by rules of its own."""
    try:
        reply = await _asked([node, "-e", _NPM_ASKED, program, *urls], "npm")
    except Unavailable:
        return ()  # an npm that keeps this elsewhere; a registry that demands a credential will say so
    found: list[Credential] = []
    for url, given in reply.items():
        token = given.get("token")
        auth = given.get("auth")
        if url in urls and isinstance(token, str) and token:
            found.append(_credential(url, f"Bearer {token}", (token,)))
        elif url in urls and isinstance(auth, str) and auth:
            found.append(_credential(url, f"Basic {auth}", (str(given.get("password") or ""),)))
    return tuple(found)


async def pip(interpreter: Path) -> Registry:
    """Raises Unavailable."""
    settings = await _asked([str(interpreter), "-I", "-c", _PIP_ASKED], "pip")
    links = [str(link) for link in settings.get("links") or []]
    index = settings.get("index")
    urls = [*([str(index)] if index else []), *map(str, settings.get("extra") or [])]
    credentials = tuple(_in_addresses([*urls, *links]))
    urls, links = [_without(url) for url in urls], [_without(link) for link in links]
    hosts = list(_hosts([*urls, *(link for link in links if "://" in link)], "pip"))
    if index == settings.get("default"):
        hosts.append(f"{settings.get('files')}:443")
    env = {"PIP_INDEX_URL": urls[0]} if index else {"PIP_NO_INDEX": "1"}
    more = urls[1:] if index else urls
    env |= {"PIP_EXTRA_INDEX_URL": " ".join(more)} if more else {}
    env |= {"PIP_FIND_LINKS": " ".join(links)} if links else {}
    return Registry(
        client=(str(interpreter),),
        hosts=tuple(dict.fromkeys(hosts)),
        trees=tuple(_folders([*urls, *links])),
        env=env,
        certificates=_read(settings.get("cert")),
        credentials=credentials,
    )


async def _asked(command: Sequence[str], who: str) -> dict[str, Any]:
    try:
        # From the root: files in the current folder are not the operator's own.
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
        reply = json.loads(out[:_MAX_BYTES])
    except ValueError:
        reply = None
    if process.returncode or not isinstance(reply, dict):
        raise Unavailable("no_registry", f"{who} is not installed here, or does not say which registry it uses")
    return reply


def _hosts(urls: Iterable[str], who: str) -> Iterable[str]:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme == "file":
            continue
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unavailable("no_registry", f"{who} has a registry whose URL cannot be used: {parts.scheme}://…")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        yield f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _in_addresses(urls: Iterable[str]) -> Iterable[Credential]:
    """Credentials in addresses. Raises Unavailable for one that would be sent in the clear."""
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname and (parts.username is not None or parts.password is not None):
            user = unquote(parts.username or "")
            password = unquote(parts.password or "")
            yield _credential(url, _basic(f"{user}:{password}"), (user, password))


def _basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def _credential(url: str, header: str, known: tuple[str, ...]) -> Credential:
    """The credential of the whole host: an index names files beside its pages, not below them. Raises Unavailable."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        text = (
            f"the registry at {parts.hostname} wants a credential, which anyone on the way could read over plain HTTP"
        )
        raise Unavailable("registry_credentials", text)
    parts_known = (header, header.rpartition(" ")[2], *known)
    return Credential(str(parts.hostname), parts.port or 443, "/", header, tuple(filter(None, parts_known)))


def _without(url: str) -> str:
    """The address without user and password."""
    scheme, separator, rest = url.partition("://")
    if not separator or not urlsplit(url).hostname:
        return url
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


def _folders(places: Iterable[str]) -> Iterable[Path]:
    """Registries that are folders: with the folder above, since the pages of an index name files beside it."""
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
        return Path(path).read_bytes()[:_MAX_BYTES] if isinstance(path, str) and path else b""
    except OSError:
        return b""
