"""A grant of one of our own tools is carried out: what is refused, how each ending counts, what comes back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.core import canonical
from ringfence.core.box import Attached, BoxReport, BoxSpec, Captured, FileFact, Input
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Answer, Contract, Decision, Grant, Recheck, Status, always
from ringfence.governance.contract import build, built_in
from ringfence.sandbox.tools.results import judge
from tests.boxing import FakeBackend, captured, fake, report
from tests.faking import make_call

pytestmark = pytest.mark.anyio

PYTHON = built_in("execute_python", 8)
DECISION = Decision("dec_1", True, "allowed", sandbox=True)


def grant(arguments: Any = None, contract: Contract = PYTHON, attached: Attached | None = None) -> Grant:
    call = make_call(contract.name, arguments or {"code": "1"}, attached=attached)
    return Grant(call, contract, DECISION, None, "d", None, time.monotonic() + 600)


async def answered(*replies: BoxReport | Exception, **given: Any) -> Answer:
    return await fake(*replies)[0].run(grant(**given))


# ── how each ending counts ──

ENDINGS: dict[str, tuple[BoxReport, Status, str]] = {
    "well": (report(), Status.SUCCESS, "ok"),
    "badly": (report(exit_status=3), Status.FAILED, "exit_status"),
    "by a signal": (report("signalled", signal=11), Status.FAILED, "signalled"),
    "by the clock": (report("timeout", signal=9, limit="wall"), Status.TIMEOUT, "timeout"),
    "by processor time": (report("timeout", signal=24, limit="cpu"), Status.TIMEOUT, "timeout"),
    "for memory": (report("oom", signal=9, limit="memory"), Status.KILLED, "memory"),
    "for processes": (report("pids", signal=9, limit="pids"), Status.KILLED, "pids"),
    "for disk": (report("disk", signal=9, limit="disk"), Status.KILLED, "disk"),
    "for a long file": (report("disk", signal=25, limit="file_size"), Status.KILLED, "file_size"),
    "for output": (report("output", signal=9, limit="output"), Status.KILLED, "output"),
    "for breaking rules": (report("policy", signal=9), Status.KILLED, "policy"),
    "by the caller": (report("cancelled", signal=9), Status.KILLED, "cancelled"),
    "by itself, for no reason": (report("infra"), Status.UNKNOWN, "box_failed"),
}


async def test_a_program_that_ends_as_if_node_were_missing_keeps_its_facts() -> None:
    seen = report(exit_status=127, stderr=b"node: ", planted=("/host/.envrc",))
    answer = await answered(seen, arguments={"code": "1", "language": "javascript"})
    assert (answer.status, answer.reason_code) == (Status.FAILED, "exit_status")
    assert answer.ran is not None and answer.ran.report.planted == ("/host/.envrc",)
    assert answer.result is not None and "Node.js" in answer.result["content"][-1]["text"]


@pytest.mark.parametrize("case", ENDINGS)
async def test_every_ending_has_its_status_and_reason(case: str) -> None:
    seen, status, code = ENDINGS[case]
    assert judge(seen) == (status, code)
    answer = await answered(seen)
    assert (answer.status, answer.reason_code) == (status, code)
    assert answer.ran is not None and answer.ran.report.ended == seen.ended
    if seen.ended == "infra":
        assert answer.result is None and "the box itself failed" in answer.message
    else:
        assert answer.result is not None and answer.result.get("isError", False) is (status is not Status.SUCCESS)


async def test_what_comes_back() -> None:
    seen = report(stdout=b"out\xff\n", stderr=b"err\n", files=(FileFact("/workspace/output/r", 3, "ab"),))
    answer = await answered(seen)
    assert answer.result == {
        "content": [
            {"type": "text", "text": "out\N{REPLACEMENT CHARACTER}\n"}, {"type": "text", "text": "stderr:\nerr\n"},
        ],
        "structuredContent": {
            "stdout": "out\N{REPLACEMENT CHARACTER}\n", "stderr": "err\n", "exit_code": 0, "ended": "exited",
            "files": [{"path": "/workspace/output/r", "bytes": 3, "sha256": "ab"}],
        },
    }  # fmt: skip
    assert answer.isolation == seen.isolation
    quiet = await answered(report("signalled", signal=9))
    assert quiet.result is not None
    assert (quiet.result["content"], quiet.result["structuredContent"]["exit_code"]) == (
        [{"type": "text", "text": ""}],
        None,
    )


@pytest.mark.parametrize("byte", [b"x", b"\n", b"\0", b"\xff", b"\x1b"], ids=repr)
@pytest.mark.parametrize("streams", ["stdout", "stderr", "both"])
async def test_a_result_never_exceeds_its_contract(byte: bytes, streams: str) -> None:
    contract, _ = build(
        "py", {"transport": "sandboxed_exec", "tool": "execute_python", "result": {"max_bytes": 20_000}}
    )
    long = Captured(byte * 30_000, b"the end", 1_000_000, "ab")
    some: dict[str, Any] = {name: long for name in ("stdout", "stderr") if streams in (name, "both")}
    answer = await answered(replace(report(), **some), contract=contract)
    assert answer.result is not None and answer.ran is not None
    assert len(canonical.dumps(answer.result)) <= 20_000
    for name in some:
        text = answer.result["structuredContent"][name]
        assert "bytes left out" in text and text.endswith("the end")
        assert len(text.encode()) > 100
        assert getattr(answer.ran.report, name).truncated
        assert getattr(answer.ran.report, name).total == 1_000_000, "what was seen stays what was seen"


async def test_what_fits_is_not_cut() -> None:
    whole = captured(b"y" * 200_000)
    answer = await answered(replace(report(), stdout=whole))
    assert answer.ran is not None and answer.ran.report.stdout is whole


# ── what goes in ──


async def test_the_box_gets_what_was_granted() -> None:
    executor, backend = fake()
    heard: list[Any] = []
    attached = Attached((Input("a", b"x"),), b"in", Path("/out"), lambda stream, data: heard.append((stream, data)))
    await executor.run(grant({"code": "1", "env": {"A": "b"}}, attached=attached))
    (spec,) = backend.specs
    assert (spec.program.source, spec.program.stdin, spec.env, spec.inputs) == (
        b"1",
        b"in",
        {"A": "b"},
        attached.inputs,
    )
    assert (spec.output, spec.limits.wall_seconds) == (Path("/out"), 8)
    assert heard == [("stdout", b"done\n")]


@pytest.mark.parametrize("more", [{"redact": ["done"]}, {"result": {"fields": ["stdout"]}}])
async def test_what_a_contract_has_removed_nobody_sees_as_it_comes(more: Any) -> None:
    contract, _ = build("py", {"transport": "sandboxed_exec", "tool": "execute_python", **more})
    heard: list[Any] = []
    executor, _ = fake()
    await executor.run(grant(contract=contract, attached=Attached(tell=lambda *said: heard.append(said))))
    assert heard == []


@pytest.mark.parametrize(("sha256", "code"), [("ab", "ok"), ("cd", "input_changed")])
async def test_an_input_that_changed_since_it_was_named_fails_the_call(sha256: str, code: str) -> None:
    seen = report(inputs=(FileFact("/workspace/input/d/a.csv", 1, "ab"),))
    given = {"code": "1", "inputs": [{"name": "d/a.csv", "bytes": 1, "sha256": sha256}]}
    answer = await answered(seen, arguments=given)
    assert answer.reason_code == code
    assert (answer.result is None) is (code != "ok")


async def test_a_backend_that_could_not_is_unavailable_and_a_senseless_box_is_invalid() -> None:
    with pytest.raises(Unavailable, match="no zygote"):
        await answered(Unavailable("no_box", "no zygote"))
    with pytest.raises(Refused) as refused:
        await answered(ValueError("two inputs have one name"))
    assert (refused.value.status, refused.value.reason_code) == ("validation_failure", "bad_arguments")


async def test_a_run_that_is_cancelled_has_the_time_to_remove_its_box() -> None:
    """However often it is cancelled: a scope of anyio does it again and again."""
    steps: list[str] = []

    class Slow(FakeBackend):
        async def run(self, spec: BoxSpec, tell: Any = None, recheck: Recheck = always) -> BoxReport:
            try:
                scope.cancel()
                await anyio.sleep(600)
            finally:
                for step in ("killed", "reaped", "removed"):
                    await anyio.sleep(0.05)
                    steps.append(step)
            return report()

    executor, _ = fake()
    executor.backend = Slow()
    with anyio.CancelScope() as scope:
        await executor.run(grant())
    assert steps == ["killed", "reaped", "removed"]


# ── what is refused ──

REFUSED: dict[str, tuple[Contract, dict[str, Any], str]] = {
    "a session": (PYTHON, {"code": "1", "session": "s"}, "no_session"),
    "a secret": (replace(PYTHON, secrets=("k",)), {"code": "1"}, "no_secret"),
    "a network": (replace(PYTHON, network="inside"), {"code": "1"}, "no_network_control"),
    "gvisor": (replace(PYTHON, isolation="gvisor"), {"code": "1"}, "no_isolation"),
    "microvm": (replace(PYTHON, isolation="microvm"), {"code": "1"}, "no_isolation"),
    "a template": (PYTHON, {"code": "1", "template": "dta"}, "unknown_template"),
    "a NUL": (PYTHON, {"code": "\0"}, "bad_arguments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_as_asked_is_refused_before_anybody_is_bothered(case: str) -> None:
    contract, arguments, code = REFUSED[case]
    executor, backend = fake()
    with pytest.raises((Refused, Unavailable)) as refused:
        executor.check(make_call(contract.name, arguments), contract)
    assert isinstance(refused.value, Refused | Unavailable)
    assert refused.value.reason_code == code
    assert backend.specs == []


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_what_the_backend_gives_is_enough(isolation: Any) -> None:
    fake()[0].check(make_call("execute_python", {"code": "1"}), replace(PYTHON, isolation=isolation))
    fake(level="gvisor")[0].check(make_call("x", {"code": "1"}), replace(PYTHON, isolation="gvisor"))


def test_the_refusal_names_what_is_missing() -> None:
    with pytest.raises(Unavailable, match="demands isolation microvm: there is no backend here but process, which"):
        fake()[0].check(make_call("x", {"code": "1"}), replace(PYTHON, isolation="microvm"))
