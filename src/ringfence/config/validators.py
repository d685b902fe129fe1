"""What single words of the file may look like: names, hosts, addresses, URLs, patterns. Each raises ValueError."""

from __future__ import annotations

import difflib
import ipaddress
import posixpath
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from ringfence.config.paths import TRACES_PATH
from ringfence.core.box import MIB, NetworkRule
from ringfence.core.quoting import quoted
from ringfence.core.sizes import parse_size
from ringfence.egress import rules
from ringfence.governance.call_meta import TRACE
from ringfence.governance.cases import COMBINABLE
from ringfence.governance.policy import PRESETS
from ringfence.identity.answers import PUBLIC_KEY, public_key
from ringfence.packages.allowlist import AllowedPackage

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_HOST_PORT = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::(0|[1-9][0-9]{0,4}))?")
_UNIX = "unix:"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_META = re.compile(
    r"([A-Za-z]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z]([A-Za-z0-9-]*[A-Za-z0-9])?)*/)?"
    r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
)
_KEPT = re.compile(r"([1-9][0-9]{0,4})([dh])")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def word(text: str) -> str:
    """A name of the operator's own making."""
    if not _WORD.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a name: letters, digits, '_', '-', '.' and '@', at most 128")
    return text


def retention(text: str | int) -> str | int:
    """How long records are kept."""
    retention_seconds(text)
    return text


def retention_seconds(text: str | int) -> float:
    found = _KEPT.fullmatch(f"{text}d" if isinstance(text, int) else text)
    if found is None:
        raise ValueError(f"{quoted(text)} is not a duration: write days, as in 90 or 90d, or hours, as in 36h")
    return int(found[1]) * (86_400.0 if found[2] == "d" else 3_600.0)


def mebibytes(value: Any) -> Any:
    """A size in MiB: a number as it is, or text with a unit, which has to come to whole MiB."""
    if not isinstance(value, str):
        return value
    number = parse_size(value)
    if number % MIB:
        raise ValueError(f"{quoted(value)} is not a whole number of MiB: write {-(-number // MIB)}M, say")
    return number // MIB


def module(text: str) -> str:
    """A Python module's name."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError(f"{quoted(text)} is not the name of a Python module")
    return text


def glob(text: str) -> str:
    """A pattern of `*`, `?` and `[…]`."""
    if not text:
        raise ValueError("an empty pattern matches nothing")
    if text.count("[") != text.count("]"):
        raise ValueError(f"bad pattern {quoted(text)}: a '[' without its ']'")
    return text


def package(text: str) -> str:
    """A name or pattern of Python packages, with or without a version and hashes."""
    AllowedPackage.of(text)
    return glob(text)


def _host(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    labels = text.removesuffix(".").split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdecimal():
        raise ValueError(f"{quoted(text)} is not a host")
    return text


def _split(text: str) -> tuple[str, int | None]:
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ValueError(f"{quoted(text)} is not host:port: write a host without scheme or path, as in example.com:443")
    port = None if match[2] is None else int(match[2])
    if port is not None and port > 65535:
        raise ValueError(f"{port} is not a port")
    return match[1], port


def listen_address(text: str) -> tuple[str, int]:
    """`host:port` of an address to listen on; port 0 takes a free one. Raises ValueError."""
    host, port = _split(text)
    if port is None:
        raise ValueError(f"{quoted(text)} names no port: write host:port")
    return _host(host), port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def listen(text: str) -> str:
    path = socket_path(text)
    if path is None:
        listen_address(text)
    elif not path or "\0" in path:
        raise ValueError(f"{quoted(text)} names no socket: write unix:PATH")
    return text


def socket_path(text: str) -> str | None:
    """The path of `unix:PATH`; None for an address."""
    return text.removeprefix(_UNIX) if text.startswith(_UNIX) else None


def host_pattern(text: str) -> str:
    """An entry of `networks.allow` or `secrets.hosts`, read by the parser that reads what boxes ask for."""
    rules.pattern(text)
    return text


def secret_host(text: str) -> str:
    """An entry of `secrets.hosts`."""
    if rules.pattern(text).kind == "any":
        raise ValueError(f"{quoted(text)} would send the secret to every host: name the hosts")
    return text


def path_prefix(text: str) -> str:
    """An entry of `networks.paths`."""
    rules.Rules([NetworkRule("path", (), paths=(text,))])
    return text


def url(text: str) -> str:
    """An http(s) URL without a password in it."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{quoted(text)} is not an http:// or https:// URL")
    _ = parts.port  # raises ValueError where it is none
    _host(parts.hostname or "")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL must not carry a user or password")
    if parts.fragment or re.search(r"\s", text):
        raise ValueError(f"{quoted(text)} is not the URL of a server")
    return text


def request_url(text: str) -> str:
    """The URL of a request, with places for arguments in its path: `https://api.example/items/{id}`."""
    url(re.sub(r"\{\w+\}", "x", text))
    if not text.isascii():
        raise ValueError("a URL has ASCII characters alone: encode the others")
    return text


FROM_ENVIRONMENT = "env"
"""In the place of a collector's address: OpenTelemetry's own variables say it."""


def otlp(text: str) -> str:
    """The address of a collector of traces, with its path."""
    if text == FROM_ENVIRONMENT:
        return text
    parts = urlsplit(url(text))
    return text if parts.path not in ("", "/") else f"{text.rstrip('/')}{TRACES_PATH}"


def goes_in_clear(text: str) -> bool:
    """Whether what is sent to a URL can be read beyond this machine."""
    parts = urlsplit(text)
    return parts.scheme != "https" and not is_loopback(parts.hostname or "")


def own_url(text: str) -> str:
    """The address that clients use. Beyond this machine it is https, since clients send tokens to it."""
    parts = urlsplit(url(text))
    if parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{quoted(text)} has a path: write https://HOST[:PORT], and clients add /mcp")
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"{quoted(text)} would have clients send tokens in clear: write https://")
    usual = ":443" if parts.scheme == "https" else ":80"  # which clients leave out
    return f"{parts.scheme}://{parts.netloc.lower().removesuffix(usual)}"


def webhook(text: str) -> str:
    """Where records, or heads of the log, are posted to. Beyond this machine they do not go in clear."""
    if goes_in_clear(url(text)):
        raise ValueError(f"{quoted(text)} would have records sent in clear: write https://")
    return text


def answer_key(text: str) -> str:
    """The public key of a person who signs answers. The private half begins otherwise, and is never in a file of
    ours."""
    try:
        public_key(text)
    except ValueError:
        shape = f"{PUBLIC_KEY} and the Base64 of an Ed25519 public key's 32 bytes"
        raise ValueError(f"{quoted(text)} is no key to check answers with: write {shape}") from None
    return text


_FUNCTION = re.compile(r"(?:.+\.py:|[A-Za-z_][\w.]*:)?[A-Za-z_][\w.-]*")


def function(text: str) -> str:
    """A function in Python, by where it is."""
    if not _FUNCTION.fullmatch(text) or text.endswith(".py"):
        raise ValueError(f"{quoted(text)} is none of FILE.py:FUNCTION, MODULE:FUNCTION and the name of an entry point")
    return text


def issuer(text: str) -> str:
    """An identity provider's address, exactly as its tokens name it."""
    parts = urlsplit(url(text))
    if parts.query:
        raise ValueError(f"{quoted(text)} is not the address of an identity provider: it has a query")
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"{quoted(text)}: its keys must come over https://")
    return text


def scope(text: str) -> str:
    """A scope of OAuth."""
    if not re.fullmatch(r"[!#-\[\]-~]{1,256}", text):
        raise ValueError(f"{quoted(text)} is not a scope: letters, digits and signs, without spaces and quotes")
    return text


def variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a variable's name")
    return text


def header(text: str) -> str:
    if not _HEADER.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a header's name")
    return text


def header_format(text: str) -> str:
    """The text of a header around `{value}`."""
    if text.count("{value}") != 1 or re.search(r"[{}]", text.replace("{value}", "")):
        raise ValueError(f"{quoted(text)} must hold {{value}} once, and no other braces")
    if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", text):
        raise ValueError(f"{quoted(text)} cannot stand in a header")
    return text


def method(text: str) -> str:
    if not re.fullmatch(r"[A-Z][A-Z0-9-]{0,31}", text):
        raise ValueError(f"{quoted(text)} is not an HTTP method: they are written in capitals")
    return text


def address_range(text: str) -> str:
    """An address or a range of them."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not an address or a range of them") from None
    return text


def path_inside(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError(f"{quoted(text)} must be an absolute path without '..'")
    return text


def volume(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError(f"{quoted(text)} is not the name of a volume: letters, digits, '.', '_' and '-', at most 64")
    return text


def program(text: str) -> str:
    """A program by its name, or by an absolute path."""
    if text.startswith("/"):
        if text != posixpath.normpath(text) or text.startswith("//") or re.search(r"[\0-\x1f]", text):
            raise ValueError(f"{quoted(text)} must be an absolute path without '..' and double slashes")
    elif not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9._+@:\[\]-]{0,127}", text):
        raise ValueError(f"{quoted(text)} is not the name of a program, nor an absolute path")
    return text


def digest(text: str) -> str:
    if not re.fullmatch("sha256:[0-9a-f]{64}", text):
        raise ValueError(f"{quoted(text)} is not a digest: sha256: and 64 digits")
    return text


def meta_key(text: str) -> str:
    """A key of a call's `_meta` that a server may be sent."""
    if text in TRACE:
        raise ValueError(f"{text} is always passed on, after a check")
    if text == "progressToken" or text.startswith(("io.modelcontextprotocol/", "ringfence/")):
        raise ValueError(f"{quoted(text)} is for one hop: it is made anew for the server")
    if not _META.fullmatch(text) or len(text) > 256:
        raise ValueError(f"{quoted(text)} is not a key of _meta: name, or prefix.example/name")
    return text


def preset(text: str) -> str:
    if text not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"must be one of {known}; this is {quoted(text)}{did_you_mean(text, PRESETS)}")
    return text


def version(number: int) -> int:
    if number != 1:
        raise ValueError(f"this Ringfence reads version 1, not {number}")
    return number


def argv(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("write a list: [program, argument, …]")
    return value


def switch(value: Any) -> Any:
    """`true` and `false` for `on` and `off`."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def one_or_more(value: Any) -> Any:
    """One word, or a list of words."""
    return [value] if isinstance(value, str) else value


def expected(words: list[str]) -> list[str]:
    """What a case expects: one verdict."""
    if len(set(words)) < len(words):
        raise ValueError("the same word twice")
    if len(words) > 1 and not set(words) <= set(COMBINABLE):
        raise ValueError(f"{' and '.join(words)} cannot both be: only {' and '.join(COMBINABLE)} go together")
    return words


def secret_names(value: Any) -> Any:
    """`none`, one name, or a list of names."""
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


def filesystem(value: Any) -> Any:
    if isinstance(value, str):
        if value != "workspace_only":
            raise ValueError(f"must be workspace_only or {{mounts: […]}}; this is {quoted(value)}")
        return None
    return value


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known word is near."""
    words = list(known)
    folded = given.casefold().replace("-", "_")
    same = [word for word in words if word.casefold().replace("-", "_") == folded]
    near = same or difflib.get_close_matches(given[:128], words, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
