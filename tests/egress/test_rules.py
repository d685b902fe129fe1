"""Rules: what they name, and what they do not let be called otherwise."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import NetworkRule
from ringfence.egress import names
from ringfence.egress.names import endpoint
from ringfence.egress.rules import Rules, judge, only_path, pattern, plain_path


def reached(allow: str, place: str) -> bool:
    return bool(Rules([NetworkRule("r", (allow,))]).reaching(endpoint(place)))


@pytest.mark.parametrize(
    ("allow", "place", "expected"),
    [
        ("allowed.com", "allowed.com:443", True),
        ("Allowed.com.:443", "ALLOWED.com:443", True),
        ("allowed.com:443", "allowed.com:80", False),
        ("allowed.com", "evilallowed.com:443", False),
        ("allowed.com", "allowed.com.evil.com:443", False),
        ("allowed.com", "a.allowed.com:443", False),
        ("*.allowed.com", "a.allowed.com:443", True),
        ("*.allowed.com", "a.b.allowed.com.:443", True),
        ("*.allowed.com", "allowed.com:443", False),
        ("*.allowed.com", "evilallowed.com:443", False),
        ("*.bücher.example:443", "a.xn--bcher-kva.example:443", True),
        ("*", "anything.example:1", True),
        ("*", "8.8.8.8:443", False),
        ("*:443", "a.example:80", False),
        ("8.8.8.8", "0x8.8.2056:443", True),
        ("8.8.8.8", "8.8.8.9:443", False),
        ("10.0.0.0/8", "10.2.3.4:1", True),
        ("10.0.0.0/8:443", "10.2.3.4:1", False),
        ("10.0.0.0/8", "11.2.3.4:1", False),
        ("[::1]:80", "[0::1]:80", True),
        ("::1", "[::1]:81", True),
        ("fd00::/8:443", "[fd00::1]:443", True),
    ],
)
def test_what_an_entry_covers(allow: str, place: str, expected: bool) -> None:
    assert reached(allow, place) is expected


@pytest.mark.parametrize(
    "text",
    ["", "*.", "*a.com", "a.*", "*.127.0.0.1", "*.1", "a:0", "a:x", "10.0.0.1/8", "a b", "**", "*.*.a", "u@a", "a/24"],
)
def test_an_entry_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        pattern(text)


def test_ports_bound_every_host_of_a_rule() -> None:
    rules = Rules([NetworkRule("r", ("a.example",), ports=(443,))])
    assert rules.reaching(endpoint("a.example:443"))
    assert not rules.reaching(endpoint("a.example:80"))


def test_named_ranges_are_those_of_the_rule_and_the_port() -> None:
    rule = NetworkRule("r", ("10.0.0.0/8:443", "a.example"), addresses=("192.168.0.0/16",))
    rules = Rules([rule])
    ten, lan = ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("192.168.0.0/16")
    assert set(rules.named(rule, 443)) == {ten, lan}
    assert set(rules.named(rule, 80)) == {lan}


def verdict(rules: list[NetworkRule], method: str, target: str, *headers: str) -> tuple[str, str | None]:
    found = judge(tuple(rules), method, target, headers)
    return found.rule, found.reason


def test_the_first_rule_that_allows_serves() -> None:
    rules = [
        NetworkRule("read", ("a",), methods=("GET",)),
        NetworkRule("post", ("a",), methods=("POST",), paths=("/v1/",)),
    ]
    assert verdict(rules, "GET", "/x") == ("read", None)
    assert verdict(rules, "POST", "/v1/x?y=/../") == ("post", None)
    assert verdict(rules, "POST", "/v2") == ("read", "method")
    assert verdict(rules, "get", "/x") == ("read", "method")
    assert verdict([], "GET", "/") == ("denied", "host")


def test_headers_that_change_the_request_behind_a_rule_are_refused() -> None:
    rules = [NetworkRule("r", ("a",), methods=("GET",), paths=("/",))]
    assert verdict(rules, "GET", "/", "x-http-method-override") == ("r", "method_override")
    assert verdict(rules, "GET", "/", "x-original-method") == ("r", "method_override")
    assert verdict(rules, "GET", "/", "x-original-url") == ("r", "path_override")
    assert verdict(rules, "GET", "/", "x-forwarded-uri") == ("r", "path_override")
    assert verdict(rules, "GET", "/", "x_http_method-override") == ("r", "method_override")
    assert verdict(rules, "GET", "/", "x_rewrite_url") == ("r", "path_override")
    assert verdict([NetworkRule("r", ("a",))], "GET", "/", "x-original-url") == ("r", None)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        *(
            ("/v1", None),
            ("/v1/x", None),
            ("/v1?x", None),
            ("/%761/x", None),
            ("/v1/a%25b", None),
            ("/v1/%C3%A9", None),
        ),
        *(("/v10", "path"), ("/", "path"), ("/V1", "path"), ("/x/v1", "path")),
        *((f"/v1/{bad}", "ambiguous_path") for bad in ("../x", "%2e%2e/x", "..%2fx", "%252e%252e/x", "..;a/x", "./x")),
        *((f"/v1/{bad}/x", "ambiguous_path") for bad in ("%c0%ae%c0%ae", "..%c0%af", "%e0%80%ae.", "..%20", "...")),
        *(
            (f"/v1/{bad}/x", "ambiguous_path")
            for bad in ("%ef%bc%8e%ef%bc%8e", "a%ef%bc%8fb", "%e2%80%a5", "%F0%80%80%AE")
        ),
        *((f"/v1/{good}/x", None) for good in ("..a", ".well-known", "a..", "%20", "%ef%bc%a1", "%e3%81%82")),
        *((f"/v1/{bad}", "ambiguous_path") for bad in ("/x", "a%5cb", "a%00", "%zz", "%2", "%25252e%25252e/", "a\\b")),
    ],
)
def test_a_path_is_under_its_prefix_or_refused(target: str, expected: str | None) -> None:
    assert verdict([NetworkRule("r", ("a",), paths=("/v1",))], "GET", target) == ("r", expected)


@pytest.mark.parametrize("prefix", ["/v1/", "/v1/*"])
def test_a_prefix_with_a_slash_covers_what_lies_under_it(prefix: str) -> None:
    rules = [NetworkRule("r", ("a",), paths=(prefix,))]
    assert verdict(rules, "GET", "/v1/x") == ("r", None)
    assert verdict(rules, "GET", "/v1") == ("r", "path")


@given(st.text("/.%25efEF;a\\", max_size=24).map(lambda text: f"/v1/{text}"))
def test_no_accepted_path_leaves_its_prefix_however_often_it_is_decoded(target: str) -> None:
    path = plain_path(target)
    while path is not None:
        assert ".." not in [segment.split(";")[0] for segment in path.split("/")] and "\\" not in path
        assert path.startswith("/v1/")
        path = plain_path(path) if "%" in path else None


@pytest.mark.parametrize(
    ("target", "path"),
    [
        *(("/admin?a=/../;b", "/admin"), ("/%61dmin", "/admin"), ("/a%25b/", "/a%b/"), ("/%C3%A9", "/é"), ("/", "/")),
        *((bad, None) for bad in ("//admin", "/./admin", "/%2e/admin", "/x/../admin", "/a%5cb", "/%u0061")),
        *((bad, None) for bad in ("/%2fadmin", "/a%2F..%2fb", "/a%252fb", "/a/%2e%2fb")),
        ("/projects/group%2Fproject?q=%2F", "/projects/group/project"),
        *((bad, None) for bad in ("/;/admin", "/a;b/admin", "/admin;", "/admin%3b", "/admin%253b", "/admin%3Fx")),
        *((bad, None) for bad in ("/%2561dmin", "/%25%36%31dmin", "/%C1%A1dmin", "/%E9")),
    ],
)
def test_a_path_has_one_normal_form_or_none(target: str, path: str | None) -> None:
    assert only_path(target) == path


@pytest.mark.parametrize(
    "rule",
    [
        *(
            NetworkRule("a b", ("a",)),
            NetworkRule("", ("a",)),
            NetworkRule("r", ("a",), methods=("get",)),
            NetworkRule("r", ("a",), paths=("v1",)),
        ),
        *(
            NetworkRule("r", ("a",), paths=("/a/../b",)),
            NetworkRule("r", ("a",), paths=("/a*b",)),
            NetworkRule("r", ("a",), addresses=("x",)),
        ),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_meant_is_refused(rule: NetworkRule) -> None:
    with pytest.raises(ValueError):
        Rules([rule])


def test_two_rules_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Rules([NetworkRule("r", ("a",)), NetworkRule("r", ("b",))])


def test_methods_paths_and_terminate_mean_inspection() -> None:
    assert not NetworkRule("r", ("a",)).inspects
    assert NetworkRule("r", ("a",), methods=()).inspects and NetworkRule("r", ("a",), paths=()).inspects
    assert NetworkRule("r", ("a",), terminate=True).inspects


# ── localhost ──


def test_who_writes_localhost_means_this_machine() -> None:
    rule = NetworkRule("here", ("localhost:8080", "api.example"))
    rules = Rules([rule])
    assert {str(found) for found in rules.named(rule, 8080)} == {"127.0.0.0/8", "::1/128"}
    assert rules.named(rule, 80) == ()
    assert Rules([wide := NetworkRule("any", ("*", "*.localhost"))]).named(wide, 80) == ()


def test_a_host_is_named_on_whichever_port() -> None:
    rules = Rules([NetworkRule("some", ("127.0.0.1:8080", "*.example"))])
    named = {text: rules.name(names.host(text)) for text in ("127.0.0.1", "::1", "localhost", "a.example", "example")}
    assert named == {"127.0.0.1": True, "::1": False, "localhost": False, "a.example": True, "example": False}
