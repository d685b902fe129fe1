"""An example MCP server: a small help desk. It keeps its tickets in memory and never leaves the process."""

from __future__ import annotations

from typing import Literal

from mcp.server import MCPServer
from pydantic import BaseModel

server = MCPServer("helpdesk-demo")

_DOCS = {
    "refunds": "Refunds are paid within 14 days. Anything above 500 needs a manager.",
    "shipping": "Orders ship within two working days. Express ships the same day.",
    "accounts": "An account is closed 30 days after its owner asks for it.",
}
_tickets: list[dict[str, str]] = []


class Found(BaseModel):
    """Pages of the handbook that mention what was asked for."""

    pages: list[str]
    texts: list[str]


class Ticket(BaseModel):
    """A ticket as it was filed."""

    number: int
    title: str
    priority: str


@server.tool()
def search_docs(query: str) -> Found:
    """Search the help desk's handbook."""
    words = query.lower().split()
    hits = {name: text for name, text in _DOCS.items() if any(w in name or w in text.lower() for w in words)}
    return Found(pages=list(hits), texts=list(hits.values()))


@server.tool()
def create_ticket(title: str, priority: Literal["low", "high"] = "low") -> Ticket:
    """File a ticket."""
    _tickets.append({"title": title, "priority": priority})
    return Ticket(number=len(_tickets), title=title, priority=priority)


@server.tool()
def delete_all_tickets() -> str:
    """Delete every ticket."""
    count = len(_tickets)
    _tickets.clear()
    return f"{count} tickets deleted"


if __name__ == "__main__":
    server.run("stdio")
