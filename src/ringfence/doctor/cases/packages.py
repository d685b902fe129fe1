"""N for a box whose programs may install packages: the index is theirs to ask, and leads nowhere else."""

from __future__ import annotations

from ringfence.core.box import Installs, NetworkRule
from ringfence.doctor.case import Case
from ringfence.doctor.cases.egress import PROXY, SHARED
from ringfence.doctor.judging import answered, looked_up, network_denied
from ringfence.governance.route import INSTALLS
from ringfence.packages.index_address import INDEX_HOST

_INDEX = (NetworkRule(INSTALLS, (f"{INDEX_HOST}:80",), installs=Installs(("allowed",))),)
_WHOLE = (
    PROXY
    + f"""
HOST = {INDEX_HOST!r}
def whole(target, method="GET", host=HOST, body=""):
    with way() as out:
        lines = [f"{{method}} http://{{host}}{{target}} HTTP/1.1", f"Host: {{host}}"]
        lines += [f"Content-Length: {{len(body)}}"] if body else []
        out.sendall("\\r\\n".join([*lines, "", body]).encode())
        out.settimeout(a_while(1))
        answer = b""
        try:
            while more := out.recv(65536):
                answer += more
        except OSError:
            pass
        return answer
"""
)

CASES = (
    Case(
        "N80",
        "have more of the index of packages than is allowed: other names, spellings of them, files that no page named",
        "refused, and no registry is asked for it",
        _WHOLE
        + """
digest = "a" * 64
names = ("evil", "allowed-evil", "evil-allowed", "allowed/../evil", "allowed%2f..%2fevil", "..%2fevil", "al*", "Evil.")
targets = [f"/simple/{name}/" for name in (*names, given["mark"])]
targets += [f"/files/{digest}/{name}" for name in ("evil-1.0-py3-none-any.whl", "../../etc/passwd", "/etc/passwd")]
answers = {target: whole(target) for target in targets}
got = [target for target, answer in answers.items() if code(answer) == "200" and b"/refused/" not in answer]
say(bool(got), ", ".join(got) or "refused")
""",
        looked_up,
        owed=(answered("refused"), network_denied(INSTALLS)),
        network=_INDEX,
        control=SHARED,
    ),
    Case(
        "N81",
        "have the index of packages carry something out: in bodies, tunnels, other ports, names of other hosts",
        "403, and nothing arrives outside",
        _WHOLE
        + """
mark = given["mark"]
answers = [code(whole("/simple/allowed/", method, body=mark)) for method in ("POST", "PUT", "PATCH")]
answers += [tunnel(f"{HOST}:{port}", mark.encode()) for port in (80, 443)]
answers += [code(whole("/" + mark, host=host)) for host in (f"{HOST}:81", f"x.{HOST}", "evil.example")]
answers += [get(f"http://{HOST}/{mark}", host="evil.example")]
say("200" in answers, ", ".join(answers))
""",
        looked_up,
        owed=(answered("403"), network_denied(INSTALLS)),
        network=_INDEX,
        control=SHARED,
    ),
)
