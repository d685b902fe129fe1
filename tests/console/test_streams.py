"""Streams of open pages, and what a browser may send: how much, how long, and what becomes of both at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request

from ringfence.console import forms
from ringfence.console.live import MAX_STREAMS
from tests import tooling
from tests.console import people
from tests.console.people import Browser, token, visitor
from tests.gateways import Served


@contextmanager
def page_open(browser: Browser) -> Iterator[socket.socket]:
    """The stream of a page, after its first event."""
    place = urlsplit(browser.url)
    with socket.create_connection((place.hostname or "", place.port or 0), tooling.PATIENCE) as stream:
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        stream.sendall(f"GET /console/events HTTP/1.1\r\nhost: {place.netloc}\r\ncookie: {cookie}\r\n\r\n".encode())
        told = b""
        while b"event: change" not in told:
            told += (piece := stream.recv(4096))
            assert piece, told
        yield stream


def rest(stream: socket.socket) -> bytes:
    """Everything until the stream ends."""
    pieces = []
    while piece := stream.recv(4096):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For all tests but those that end its gateway, or want no other pages there."""
    with people.serve(tmp_path_factory.mktemp("streams")) as served:
        yield served


def test_a_gateway_ends_quietly_under_open_pages(tmp_path: Path) -> None:
    with people.serve(tmp_path) as served, ExitStack() as open_pages:
        bob = visitor(served, token(served, "person", "bob")["token"])
        streams = [open_pages.enter_context(page_open(bob)) for _ in range(5)]
        os.kill(served.pid, signal.SIGTERM)
        for stream in streams:
            assert rest(stream).endswith(b"0\r\n\r\n"), "it ends as a whole answer, after which a browser asks again"
        served.started.process.wait(tooling.PATIENCE)
        assert "Traceback" not in served.started.output()


def test_an_event_says_of_which_kinds_new_records_are_and_nothing_of_what_is_in_them(served: Served) -> None:
    bob = visitor(served, token(served, "person", "bob")["token"])
    with page_open(bob) as stream:
        token(served, "person", "carl")
        told = b""
        while b"token_created" not in told:
            told += (piece := stream.recv(4096))
            assert piece, told
        people.call(served, "search_docs", {"query": "canary-1"})
        while b"finished" not in told:
            told += (piece := stream.recv(4096))
            assert piece, told
    events = [json.loads(line.removeprefix(b"data:")) for line in told.splitlines() if line.startswith(b"data:")]
    assert all(event.keys() == {"waiting", "kinds"} for event in events)
    assert b"canary" not in told and b"search_docs" not in told and b"carl" not in told


def test_a_page_too_many_is_told_to_look_now_and_then(served: Served) -> None:
    bob = visitor(served, token(served, "person", "bob")["token"])
    with ExitStack() as open_pages:
        for _ in range(MAX_STREAMS):
            open_pages.enter_context(page_open(bob))
        answer = bob.get("/console/events")
        assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
        assert "event: change" in answer.text and "retry: 10000" in answer.text


def test_a_person_with_many_pages_leaves_others_theirs(tmp_path: Path) -> None:
    with people.serve(tmp_path) as served, ExitStack() as open_pages:
        bob, carl = (visitor(served, token(served, "person", name)["token"]) for name in ("bob", "carl"))
        oldest = open_pages.enter_context(page_open(bob))
        for _ in range(MAX_STREAMS - 1):
            open_pages.enter_context(page_open(bob))
        his = open_pages.enter_context(page_open(carl))
        assert rest(oldest).endswith(b"0\r\n\r\n"), "it ends, and its page has another"
        assert "retry: 10000" in bob.get("/console/events").text
        visitor(served, token(served, "person", "dora")["token"])  # whose login is on record, so pages are told
        told = b""
        while b"event: change" not in told:
            told += (piece := his.recv(4096))
            assert piece, "his stays"


def test_too_many_fields_are_refused_and_counted(served: Served) -> None:
    many = {f"field{number}": "" for number in range(40)}
    answer = Browser(served.url).send("/console/login", many)
    assert answer.status == 400 and "more than 30 fields" in answer.text
    assert Browser(served.url).send("/console/login", {"credential": "x" * 70_000}).status == 413
    bob = visitor(served, token(served, "person", "bob")["token"])
    assert bob.get("/console/history?" + "&".join(many)).status == 400
    assert "Traceback" not in served.started.output()


def test_a_form_that_never_arrives_is_not_waited_for() -> None:
    async def receive() -> dict[str, object]:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    parts = [b"c"]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(forms.FormRefused) as refused:
        asyncio.run(forms.read(request, 0.01))
    assert (refused.value.status, refused.value.reason) == (408, "too_slow")
