"""A gateway with people of two tenants and agents of both, and a browser of plain requests."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from ringfence import identity
from tests import gateways, tooling

USER = identity.os_user()


@contextmanager
def serve(
    folder: Path, more: str = "", servers: str = "", rule: str = "approvals: {manager: {roles: [manager]}}"
) -> Iterator[gateways.Served]:
    """`ringfence serve` with a help desk, an agent for each tenant, and people: one has the account of the gateway.

    `more`: further capabilities; `servers`: a further server; `rule`: who is asked."""
    with tooling.serve_fixture("helpdesk_server.py") as url:
        path = gateways.write(
            folder,
            f"""version: 1
gateway: {{listen: "127.0.0.1:0", state: ./state, approval_wait_seconds: 120}}
people:
  alice: {{roles: [manager, admin], os_user: {USER}}}
  bob: {{roles: [manager]}}
  carl: {{roles: []}}
  dora: {{roles: [admin]}}
  omar: {{roles: [auditor]}}
  eve: {{roles: [manager, admin], tenant: acme}}
agents:
  analyst: {{capabilities: ["*"], os_user: {USER}, person: carl}}
  visitor: {{capabilities: ["*"], tenant: acme}}
servers:
  helpdesk: {{url: "{url}", pins: first_use}}
  {servers}
{rule}
capabilities:
  search_docs: {{server: helpdesk, mode: read}}
  create_ticket: {{server: helpdesk, mode: write, approval: manager}}
{more}""",
        )
        with gateways.serve(path) as served:
            yield served


def link(served: gateways.Served) -> str:
    """What `serve` printed for the person of its account."""
    found = re.search(r"(http://\S+/console/login)#(\S+)", served.started.wait_for("/console/login#"))
    assert found is not None
    return found[2]


def token(served: gateways.Served, whose: str, name: str, **more: str) -> dict[str, Any]:
    shown = gateways.run("token", "create", f"--{whose}", name, "--json", "--config", served.config)
    assert shown.returncode == 0, shown.stderr
    made: dict[str, Any] = json.loads(shown.stdout)
    return made


def call(
    served: gateways.Served,
    tool: str,
    arguments: dict[str, Any],
    agent: Path | None = None,
    *,
    key: str | None = None,
    fails: bool = False,
) -> dict[str, Any]:
    """A call of the account's own agent, or of the one whose token is in a file. `fails`: its gateway does not live to
    answer it."""
    shown = gateways.run(
        *("call", tool, "--args", json.dumps(arguments), "--url", served.url, "--json"),
        *(() if agent is None else ("--token-file", str(agent))),
        *(() if key is None else ("--idempotency-key", key)),
    )
    if fails:
        return {}
    said: dict[str, Any] = json.loads(shown.stdout)
    return said


def calls_on(page: str) -> list[str]:
    """The calls that a page links to."""
    return re.findall(r'href="/console/calls/(call_\w+)"', page)


@contextmanager
def waiting(served: gateways.Served, arguments: dict[str, Any], agent: Path | None = None) -> Iterator[list[Any]]:
    """A call that waits for a person while the block lasts; then what it said."""
    said: list[Any] = []
    caller = threading.Thread(target=lambda: said.append(call(served, "create_ticket", arguments, agent)))
    caller.start()
    try:
        yield said
    finally:
        caller.join(tooling.PATIENCE)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Browser:
    """What a browser sends, and nothing more: cookies, and the origin with its forms."""

    url: str
    cookies: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        place = urlsplit(self.url)
        return f"{place.scheme}://{place.netloc}"

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=tooling.PATIENCE)
        try:
            cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {**({"cookie": cookie} if cookie else {}), **named})
            got = connection.getresponse()
            found = {name.lower(): value for name, value in got.getheaders()}
            if match := re.match(r"([^=]+)=([^;]*)", found.get("set-cookie", "")):
                self.cookies[match[1]] = match[2].strip('"')
            return Answer(got.status, found, got.read().decode())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def send(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        headers = {"origin": self.origin, "content_type": "application/x-www-form-urlencoded", **headers}
        return self.ask("POST", path, urlencode(fields), **headers)

    def log_in(self, credential: str) -> Answer:
        return self.send("/console/login", {"credential": credential})

    def fields(self, path: str) -> dict[str, str]:
        """The hidden fields of the first form for an answer on a page."""
        form = re.search(r'<form[^>]*class="answer">.*?</form>', self.get(path).text, re.DOTALL)
        assert form is not None
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form[0]))

    def questions(self) -> list[str]:
        """The questions that wait, by what their page shows."""
        return re.findall(r'<article[^>]* id="(apr_\w+)"', self.get("/console/approvals").text)

    def answer(self, which: str, verdict: str, reason: str = "", **changed: str) -> Answer:
        fields = {**self.fields(f"/console/approvals/{which}"), "answer": verdict, "reason": reason, **changed}
        return self.send(f"/console/approvals/{which}", fields)


def visitor(served: gateways.Served, credential: str) -> Browser:
    browser = Browser(served.url)
    answer = browser.log_in(credential)
    assert answer.status == 303, answer.text
    return browser
