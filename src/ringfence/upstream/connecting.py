"""Which way a server is reached: over the pipes of a process that is launched for it, or over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ringfence.model import ServerSpec
from ringfence.ports import Launched
from ringfence.upstream.checked import Check
from ringfence.upstream.connection import Connection, Consent
from ringfence.upstream.http import Credentials, HttpLink
from ringfence.upstream.link import Link
from ringfence.upstream.stdio import StdioLink

Means = tuple[Callable[[], Awaitable[Launched]], Credentials, Check | None]
"""What launches the process, what tells the headers of a request that carries secrets, and where names may lead."""


def connect(spec: ServerSpec, means: Means, consent: Consent) -> Connection:
    """Nothing is started or sent yet."""
    launch, credentials, check = means
    link: Link = StdioLink(spec, launch)
    if spec.url is not None:
        link = HttpLink(spec.name, spec.url, credentials if spec.secrets else None, check)
    return Connection(spec, link, consent)
