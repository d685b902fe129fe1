"""Labels of what sessions leave as resources: two agents over HTTP, with a gateway and a keeper that are restarted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests import boxing, gateways, tooling
from tests.console.people import token
from tests.mcp import gateway

CONFIG = """version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
sandbox: {default_timeout_seconds: 60, max_memory_mb: 128}
policy: {label_seconds: 1.0e-6}
agents:
  clerk: {capabilities: ["*"], resources: ["*"]}
  guest: {capabilities: ["*"], resources: ["*"]}
capabilities:
  execute_python: {transport: sandboxed_exec, mode: high_risk, approval: none}
  payroll: {transport: sandboxed_exec, tool: execute_python, mode: high_risk, approval: none, labels: [private]}
"""
LEAVE = "import os; os.makedirs('output', exist_ok=True); open('output/x', 'w').write('4711')"


class Agent(gateway.RawHttp):
    """A client with a token."""

    def __init__(self, served: gateways.Served, token: str) -> None:
        super().__init__(gateway.Gateway(served.config, served.started, served.url))
        self.http.headers["authorization"] = f"Bearer {token}"

    def told(self, method: str, **params: Any) -> gateway.JSON:
        answer = gateway.read_answer(self.modern(gateway.request(method, params)))
        return answer["result"] if "result" in answer else answer["error"]

    def __call__(self, tool: str, **arguments: Any) -> gateway.JSON:
        result = self.told("tools/call", name=tool, arguments=arguments)
        assert gateway.about(result)["status"] == "success", result
        return result

    def opened(self) -> str:
        return str(self("open_session")["structuredContent"]["session"])


def labels(result: gateway.JSON) -> Any:
    return result["_meta"].get("ringfence/labels")


def test_what_a_session_left_carries_its_labels_to_who_reads_it_later_and_to_nobody_else(tmp_path: Path) -> None:
    boxing.need_boxes()
    path = gateways.write(tmp_path, CONFIG)
    with gateways.serve(path) as served:
        tokens = {name: token(served, "agent", name)["token"] for name in ("clerk", "guest")}
        with Agent(served, tokens["clerk"]) as clerk:
            left, clean = clerk.opened(), clerk.opened()
            assert labels(clerk("payroll", session=left, code=LEAVE)) == ["private"]
            assert labels(clerk("execute_python", session=clean, code=LEAVE)) is None
            for session in (left, clean):
                clerk("close_session", session=session)
    process = int(json.loads((tmp_path / "state/keeper/address").read_text())["process"])
    os.kill(process, signal.SIGTERM)
    tooling.wait_until_gone(process)
    with (
        gateways.serve(path) as served,
        Agent(served, tokens["clerk"]) as clerk,
        Agent(served, tokens["guest"]) as guest,
    ):
        uri = "ringfence://session/{}/output/x"
        read = clerk.told("resources/read", uri=uri.format(left))
        assert (read["contents"][0]["text"], labels(read)) == ("4711", ["private"])
        also = clerk.told("resources/read", uri=uri.format(clean))
        assert (also["contents"][0]["text"], labels(also)) == ("4711", None)
        (link,) = [each["uri"] for each in clerk.told("resources/list")["resources"] if left in each["uri"]]
        assert link == uri.format(left)
        refused = guest.told("resources/read", uri=uri.format(left))
        assert "contents" not in refused
        assert labels(guest("execute_python", session=guest.opened(), code=LEAVE)) is None
