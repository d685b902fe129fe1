"""Which way a server is reached: over the pipes of a process that is launched for it, or over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ringfence.model import ServerSpec
from ringfence.ports import Launched
from ringfence.upstream.checked import Check
from ringfence.upstream.connection import Connection, Consent
from ringfence.upstream.http import Credentials, HttpLink
from ringfence.upstream.link import Link
from ringfence.upstream.pacing import Floods
from ringfence.upstream.stdio import StdioLink

Means = tuple[Callable[[], Awaitable[Launched]], Credentials, Check | None, Floods]
"""What launches the process, what tells the headers of a request that carries secrets, where names may lead, and who
else floods."""


def connect(spec: ServerSpec, means: Means, consent: Consent) -> Connection:
    """Nothing is started or sent yet."""
    launch, credentials, check, floods = means
    link: Link = StdioLink(spec, launch, floods)
    if spec.url is not None:
        link = HttpLink(spec.name, spec.url, credentials if spec.secrets else None, check, floods)
    return Connection(spec, link, consent)
