"""Heads: what is understood is written anew, and what could be understood in two ways is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.http1 import (
    NO_BODY,
    Framing,
    end_to_end,
    origin_form,
    refusal,
    request,
    response,
    write_request,
    write_response,
)
from ringfence.egress.ledger import Failed, Malformed


def head(*headers: str, line: str = "POST http://a/ HTTP/1.1") -> bytes:
    return ("\r\n".join([line, "Host: a", *headers]) + "\r\n\r\n").encode("latin-1")


def test_a_request_is_read() -> None:
    got = request(head("Content-Length: 5", "X-A:  b c\t", "Expect: 100-Continue", "Connection: Close, TE"))
    assert (got.method, got.target, got.framing) == ("POST", "http://a/", Framing("length", 5))
    assert got.values("x-a") == ["b c"] and got.close and got.expects_continue


SMUGGLING = [
    (head("Content-Length: 5", "Transfer-Encoding: chunked"), "te_and_cl"),
    (head("Content-Length: 5", "Content-Length: 5"), "content_length"),
    (head("Content-Length: 5", "content-length: 6"), "content_length"),
    *(
        (head(f"Content-Length: {bad}"), "content_length")
        for bad in ("+5", "-1", "5, 5", "0x5", "5 5", "", "²", "1" * 19, "5;")
    ),
    *(
        (head(f"Transfer-Encoding: {bad}"), "transfer_encoding")
        for bad in ("xchunked", "chunked, chunked", "gzip, chunked")
    ),
    *((head(f"Transfer-Encoding: {bad}"), "transfer_encoding") for bad in ("identity", "chunked;a=b", '"chunked"', "")),
    (head("Transfer-Encoding: chunked", "Transfer-Encoding: identity"), "transfer_encoding"),
    (head("Transfer-Encoding : chunked"), "header_syntax"),
    (head("Transfer-Encoding\x0b: chunked"), "header_syntax"),
    (head("X: y\r\n Transfer-Encoding: chunked"), "obs_fold"),
    (head("X: y\r\n\tz"), "obs_fold"),
    (head("X: y\nContent-Length: 5"), "bare_lf"),
    (head("X: y\rContent-Length: 5"), "header_syntax"),
    (head("X: y\0z"), "header_syntax"),
    (head("X: \x7f"), "header_syntax"),
    (head("no colon"), "header_syntax"),
    (head(": empty"), "header_syntax"),
    (head("Connection: close, X-Secret"), "connection_option"),
    (head("Connection: Content-Length"), "connection_option"),
    (head("Upgrade: websocket", "Connection: Upgrade"), "upgrade"),
    (head("HTTP2-Settings: x"), "upgrade"),
    (head("Expect: 200-maybe"), "expect"),
    (head("Expect: 100-continue", "Expect: 100-continue"), "expect"),
    (head(*["X: y"] * 200), "too_many_headers"),
    (head(line="TRACE http://a/ HTTP/1.1"), "trace"),
    (head(line="CONNECT a:1 HTTP/1.1")[:-2] + b"Content-Length: 1\r\n\r\n", "connect_body"),
    (b"PRI * HTTP/2.0\r\n\r\n", "http2"),
    *(
        (head(line=line), "http_version")
        for line in ("GET / HTTP/1.0", "GET / HTTP/0.9", "GET / HTTP/2.0", "GET / HTTP/1.2")
    ),
    *(
        (head(line=line), "request_line")
        for line in ("GET /", "GET  / HTTP/1.1", "get / HTTP/1.1", "GET / HTTP/1.1 ", " GET / HTTP/1.1")
    ),
    *(
        (head(line=line), "request_line")
        for line in ("GET\t/ HTTP/1.1", "GET / http/1.1", "G@T / HTTP/1.1", "GET /a b HTTP/1.1", "")
    ),
    *((head(line=line), "request_line") for line in ("GET /\x80 HTTP/1.1", "GET / HTTP/1.11", "GET /\0 HTTP/1.1")),
]


@pytest.mark.parametrize(("data", "reason"), SMUGGLING)
def test_what_two_parsers_could_read_differently_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Malformed) as caught:
        request(data)
    assert caught.value.reason == reason


@pytest.mark.parametrize("target", ["a", "*", "//a\\b", "/a#b", "http://a/", ""])
def test_a_target_for_a_server_is_a_path(target: str) -> None:
    with pytest.raises(Malformed):
        origin_form(target)


def test_an_old_client_may_open_a_tunnel() -> None:
    assert request(b"CONNECT a:443 HTTP/1.0\r\n\r\n").target == "a:443"


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        request(b"GET http://a/ HTTP/1.1\r\n" + data + b"\r\n\r\n")
    with contextlib.suppress(Failed):
        response(b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n", "GET")


NAMES = st.text("abcXYZ-_1", min_size=1, max_size=12)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)


@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=10),
    st.sampled_from([NO_BODY, Framing("length", 7), Framing("chunked")]),
)
def test_what_is_written_reads_as_it_was_meant(headers: list[tuple[str, str]], framing: Framing) -> None:
    meant = end_to_end((name, value.strip(" \t\x85\xa0")) for name, value in headers)
    got = request(write_request("PUT", "/x", meant, framing))
    assert (got.method, got.target, got.framing) == ("PUT", "/x", framing)
    assert end_to_end(got.headers) == meant


@pytest.mark.parametrize(
    ("data", "method", "framing", "close"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3", "GET", Framing("length", 3), False),
        (b"HTTP/1.1 200\r\nTransfer-Encoding: Chunked", "GET", Framing("chunked"), False),
        (b"HTTP/1.1 200 OK", "GET", Framing("close"), True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3", "GET", Framing("length", 3), True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close", "GET", Framing("length", 3), True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3", "HEAD", NO_BODY, False),
        (b"HTTP/1.1 204 No", "GET", NO_BODY, False),
        (b"HTTP/1.1 304 No\r\nContent-Length: 3", "GET", NO_BODY, False),
        (b"HTTP/1.1 100 Continue", "GET", NO_BODY, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", "GET", NO_BODY, False),
    ],
)
def test_where_the_body_of_an_answer_ends(data: bytes, method: str, framing: Framing, close: bool) -> None:
    got = response(data + b"\r\n\r\n", method)
    assert (got.framing, got.close) == (framing, close)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
        b"HTTP/2 200",
        b"HTTP/1.1 101 Switching",
        b"x",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4",
        b"HTTP/1.1 204 No\r\nTransfer-Encoding: chunked",
    ],
)
def test_an_answer_that_could_be_read_in_two_ways_failed(data: bytes) -> None:
    with pytest.raises(Failed):
        response(data + b"\r\n\r\n", "GET")


def test_an_answer_is_framed_anew() -> None:
    got = response(b"HTTP/1.1 200 OK\r\nKeep-Alive: 5\r\nX: y\r\n\r\n", "GET")
    assert write_response(got, "GET", True) == (
        b"HTTP/1.1 200 OK\r\nX: y\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    got = response(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "HEAD")
    assert b"Content-Length: 9\r\n" in write_response(got, "HEAD", False)


def test_a_refusal_names_its_rule_and_cannot_be_made_to_say_more() -> None:
    answer = refusal(403, "corp", "method", "a\r\nSet-Cookie: x", True)
    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n") and b"X-Ringfence-Rule: corp\r\n" in answer
    assert b"\r\nSet-Cookie" not in answer
