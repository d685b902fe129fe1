"""A gateway that is killed while a call is in flight under a key: at most one dispatch, and a person settles it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from tests import gateways, tooling
from tests.console import people
from tests.console.people import Browser, call, token, visitor
from tests.gateways import Served


def person(served: Served, name: str) -> Browser:
    return visitor(served, token(served, "person", name)["token"])


def csrf(browser: Browser) -> str:
    return browser.get("/console/history").text.partition('name="csrf" value="')[2].partition('"')[0]


def settle(browser: Browser, which: str, happened: str, reason: str = "looked at the desk") -> people.Answer:
    fields = {"csrf": csrf(browser), "happened": happened, "reason": reason}
    return browser.send(f"/console/calls/{which}/settle", fields)


def test_a_call_whose_answer_was_lost_is_settled_by_a_person_and_made_again(tmp_path: Path) -> None:
    effects, gate = tmp_path / "effects", tmp_path / "gate"
    holding = gateways.server("holding_server.py", str(effects), str(gate))
    more = "  hold: {server: holding, mode: write}\n"
    server = f"holding: {{command: {holding}, placement: unsafe_host, pins: first_use}}"
    with people.serve(tmp_path, more, servers=server) as served:
        first = threading.Thread(target=lambda: call(served, "hold", {}, key="k1", fails=True))
        first.start()
        tooling.wait_until(lambda: effects.exists())
        os.kill(served.pid, signal.SIGKILL)
        first.join(tooling.PATIENCE)
        with gateways.serve(served.config) as again:
            gate.touch()
            repeated = call(again, "hold", {}, key="k1")
            assert (repeated["status"], repeated["reason_code"]) == ("unknown", "key_unknown")
            assert effects.read_text().splitlines() == ["called"], "it was sent once, and may have taken effect"
            dora, omar, eve = (person(again, name) for name in ("dora", "omar", "eve"))
            page = dora.get("/console/history").text
            assert "Of 1 call nobody knows" in page
            (which,) = set(people.calls_on(dora.get("/console/history?effect=unknown").text))
            assert "Did it take effect?" in dora.get(f"/console/calls/{which}").text
            assert "It did not</button>" not in omar.get(f"/console/calls/{which}").text
            assert (settle(omar, which, "no").status, settle(eve, which, "no").status) == (403, 404)
            assert (settle(dora, which, "no", reason=" ").status, settle(dora, which, "perhaps").status) == (400, 404)
            assert gateways.records(again.state, kind="outcome_settled") == []
            assert settle(dora, which, "no").status == 303
            assert settle(dora, which, "yes").status == 409
            (record,) = gateways.records(again.state, kind="outcome_settled")
            assert (record["person"], record["happened"], record["reason"]) == ("dora", False, "looked at the desk")
            page = dora.get(f"/console/calls/{which}").text
            assert "dora says that it did not take effect" in page and "Did it take effect?" not in page
            assert "nobody knows" not in dora.get("/console/history").text
            assert call(again, "hold", {}, key="k1")["status"] == "success"
            assert effects.read_text().splitlines() == ["called", "called"]
            assert gateways.verified(again.state).ok
