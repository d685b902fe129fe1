"""Files of sessions as MCP knows them: by address, with a type that follows from their content."""

from __future__ import annotations

from urllib.parse import quote, unquote

PREFIX = "ringfence://session/"
OUTPUT = "/workspace/output"
TEMPLATE = f"{PREFIX}{{session}}/output/{{+path}}"
_WORKSPACE = "/workspace/"
_BLOB = "application/octet-stream"
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
)
_TEXTS = {"csv": "text/csv", "html": "text/html", "json": "application/json", "md": "text/markdown"}
_TEXTS |= {"svg": "image/svg+xml", "xml": "application/xml"}


def address(session: str, path: str) -> str:
    """The address of a file in a session."""
    return f"{PREFIX}{quote(session, safe='')}/{quote(path.removeprefix(_WORKSPACE))}"


def located(uri: str) -> tuple[str, str] | None:
    """The session and path of an address of ours; None for any other."""
    if not uri.startswith(PREFIX):
        return None
    session, _, rest = uri[len(PREFIX) :].partition("/")
    path = unquote(rest)
    # The kernel would not let it out of the workspace; but only results are resources.
    if not session or not path.startswith("output/") or ".." in path.split("/"):
        return None
    return unquote(session), _WORKSPACE + path


def normal_address(uri: str) -> str | None:
    """An address of ours in the one form that rules compare: several lead to the same file. None for any other."""
    found = located(uri)
    if found is None:
        return None
    session, path = found
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return address(session, "/" + "/".join(parts))


def type_of(path: str, data: bytes) -> str:
    """The type by the first bytes; the name only matters for text. A box can name a file as it likes."""
    for magic, mime in _MAGIC:
        if data.startswith(magic):
            return mime
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if as_text(data) is None:
        return _BLOB
    return _TEXTS.get(path.rpartition(".")[2].lower(), "text/plain")


def as_text(data: bytes) -> str | None:
    """Bytes as text, or None where they are not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
