"""Sessions by tools: they are opened as asked, belong to whoever opened them, and tell what became of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core import canonical
from ringfence.core.box import MIB, Attached, Input, NetworkRule
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Status
from ringfence.core.sessions import Owner
from tests.sandbox.fake_sessions import ME
from tests.sandbox.tools.calling import MINE, OTHERS, calling, words

pytestmark = pytest.mark.anyio


async def test_a_session_is_opened_with_what_the_configuration_gives_and_the_caller_asks_for(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        told = await call.told("open_session", lifetime_seconds=60, idle_seconds=20, metadata={"for": "tests"})
        assert (told["state"], told["template"], told["step"], told["metadata"]) == (
            "running",
            "python",
            0,
            {"for": "tests"},
        )
        (box,) = call.place.backend.boxes
        assert (box.spec.limits.wall_seconds, box.spec.limits.memory_bytes) == (5, 256 * MIB)
        answer = await call("open_session")
        assert answer.within is not None and answer.within.state == "running"
        assert answer.isolation == {"backend": "fake"}
        assert "is running; it is closed at" in words(answer)
        mine = await call.place.manager.list(ME)
        assert [info.owner for info in mine] == [ME, ME], "tenant and agent of the caller"


async def test_set_up_code_is_an_argument_like_any_other(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        await call.told("open_session", setup="x = 1")
        (box,) = call.place.backend.boxes
        assert (box.spec.setup, box.spec.layout) == ("x = 1", "fresh")
        await call.told("open_session", setup="")
        assert (call.place.backend.boxes[-1].spec.setup, call.place.backend.boxes[-1].spec.layout) == (None, "shared")
        for wrong in ("x = '\0'", "#" * (10 * MIB + 1)):
            with pytest.raises(Refused, match="setup") as refused:
                await call("open_session", setup=wrong)
            assert refused.value.reason_code == "bad_arguments"


async def test_a_caller_in_this_process_says_more(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        attached = Attached(inputs=(Input("a", b"x"),))
        told = await call.told(
            "open_session",
            attached,
            limits={"memory_bytes": 64 * MIB},
            env={"A": "b"},
            idle_seconds=None,
            auto_resume=False,
            memory_layout="fresh",
            inputs=[{"name": "a", "bytes": 1, "sha256": "-"}],
        )
        assert told["limits"]["memory_bytes"] == 64 * MIB
        assert told["isolation"] == {"backend": "fake"}
        (box,) = call.place.backend.boxes
        assert (box.spec.env, box.spec.layout, box.spec.inputs) == ({"A": "b"}, "fresh", attached.inputs)
        session = told["session"]
        await call("pause_session", attached, session=session)
        with pytest.raises(Refused) as refused:
            await call("execute_python", attached, session=session, code="say x")
        assert refused.value.reason_code == "session_paused"


async def test_states_are_told_and_a_stopped_one_says_why(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        assert (await call.told("pause_session", session=session))["state"] == "paused"
        assert (await call.told("resume_session", session=session))["state"] == "running"
        told = await call.told("close_session", session=session)
        assert (told["state"], told["why"]) == ("stopped", "closed")
        assert (await call.told("close_session", session=session))["why"] == "closed", "as often as one likes"
        listed = await call("list_sessions")
        assert listed.within is None
        assert f"{session}: stopped" in words(listed) and "(closed)" in words(listed)
        with pytest.raises(Refused) as refused:
            await call("execute_python", session=session, code="say x")
        assert (refused.value.status, refused.value.reason_code) == (Status.VALIDATION_FAILURE, "session_stopped")
        assert session in refused.value.message


async def test_lists_are_of_those_that_live_and_for_an_agent_of_those_that_ended_too(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        first, second = await call.opened(), await call.opened()
        await call("close_session", session=first)

        async def listed(attached: Attached | None, **more: Any) -> list[str]:
            return [each["session"] for each in (await call.told("list_sessions", attached, **more))["sessions"]]

        assert await listed(None) == [second, first]
        assert await listed(Attached()) == [second]
        assert await listed(Attached(), ended=True) == [second, first]
        assert await listed(Attached(), session=first) == [first]


async def test_a_model_is_told_of_sessions_what_it_needs_and_a_caller_in_this_process_everything(
    tmp_path: Path,
) -> None:
    async with calling(tmp_path) as call:
        needed = {"session", "state", "template", "step", "expires_at", "why", "contexts", "metadata"}
        opened = await call.told("open_session", metadata={"for": "tests"})
        assert set(opened) == needed
        assert set(await call.told("pause_session", session=opened["session"])) < needed
        (listed,) = (await call.told("list_sessions"))["sessions"]
        assert (set(listed), listed["metadata"]) == (needed, {"for": "tests"})
        (forked,) = (await call.told("fork_session", session=opened["session"], count=1))["sessions"]
        assert set(forked) == needed
        all_of_it = needed | {"created_at", "ended_at", "snapshot", "memory_bytes", "limits", "network", "isolation"}
        all_of_it |= {"given_back_bytes"}
        for tool in ("open_session", "list_sessions"):
            told = await call.told(tool, Attached())
            assert set(told["sessions"][0] if tool == "list_sessions" else told) == all_of_it


async def test_a_list_of_many_sessions_is_short(tmp_path: Path) -> None:
    async with calling(tmp_path, max_sessions=40) as call:
        wordy = {f"{number}-{'key' * 20}": "value" * 100 for number in range(20)}
        for _ in range(20):
            await call.opened()
        plain = await call("list_sessions")
        assert plain.result is not None
        assert len(plain.result["structuredContent"]["sessions"]) == len(words(plain).splitlines()) == 20
        assert len(canonical.dumps(plain.result)) < 20 * 350
        for _ in range(20):
            await call.opened(metadata=wordy)
        wide = (await call.told("list_sessions", Attached()))["sessions"]
        assert sum(each["metadata"] == wordy for each in wide) == 20
        cut = await call("list_sessions")
        assert len(canonical.dumps(cut.result)) < 40 * 500
        assert cut.result is not None
        shown = cut.result["structuredContent"]["sessions"][-1]["metadata"]
        assert list(shown) == list(wordy)[: len(shown)] and list(shown.values())[-1].endswith("…")
        for each in wide:
            await call("close_session", session=each["session"])
        assert len((await call.told("list_sessions"))["sessions"]) == 10
        assert len((await call.told("list_sessions", Attached(), ended=True))["sessions"]) == 32


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("close_session", {"session": ""}, "there is no session ''"),
        ("close_session", {"session": "s" * 500_000}, "there is no session … (500000 characters)"),
        ("execute_python", {"session": "", "code": "say x"}, "there is no session ''"),
        ("execute_python", {"code": "say x", "context": "other"}, "context: only in a session"),
        ("run_shell", {"command": "ls", "background": True}, "background: only in a session"),
        ("execute_python", {"session": ..., "code": "say x", "context": ""}, "cannot be the name of a context"),
        ("execute_python", {"session": ..., "code": "say x", "context": "c" * 500_000}, "the name of a context"),
        ("copy_file", {"session": ..., "path": "a", "to_session": "", "to_path": "a"}, "there is no session ''"),
        ("copy_file", {"session": ..., "path": "a", "to_path": ""}, "is not a path"),
        ("read_file", {"session": ..., "path": ""}, "is not a path"),
        ("list_files", {"session": ..., "path": ""}, "is not a path"),
        ("write_file", {"session": ..., "path": "", "text": "x"}, "is not a path"),
        ("write_file", {"session": ..., "path": "a"}, "exactly one of text, base64 must be given"),
        ("write_file", {"session": ..., "path": "a", "text": "", "base64": ""}, "exactly one of text, base64"),
        ("snapshot_session", {"session": ..., "name": "n" * 100_000}, "cannot be the name of a snapshot"),
        ("wait_process", {"session": ..., "process": 0}, "there is no process 0"),
        ("wait_process", {"session": ..., "process": -1}, "there is no process -1"),
        ("stop_process", {"session": ..., "process": 1, "signal": "term"}, "signal: it is one of HUP, INT"),
        ("stop_process", {"session": ..., "process": 1, "signal": 99}, "a number from 1 to 64"),
        ("stop_process", {"session": ..., "process": 1, "signal": 0}, "a number from 1 to 64"),
        ("open_session", {"volumes": [{"name": "v", "at": "v"}] * 17}, "a session can have 16 volumes"),
        ("open_session", {"metadata": {"a": "x" * 20_000}}, "metadata may have 64 entries"),
    ],
)
async def test_what_the_schemas_leave_open_is_refused_in_few_words(
    tool: str, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a", text="x")
        given: dict[str, Any] = {key: session if value is ... else value for key, value in arguments.items()}
        with pytest.raises(Refused) as refused:
            await call(tool, **given)
        assert refused.value.status is Status.VALIDATION_FAILURE
        assert said in refused.value.message and len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("tool", "more"),
    [
        ("close_session", {}),
        ("pause_session", {}),
        ("resume_session", {}),
        ("snapshot_session", {}),
        ("fork_session", {"count": 1}),
        ("interrupt_session", {}),
        ("execute_python", {"code": "say x"}),
        ("run_shell", {"command": "ls"}),
        ("run_shell", {"command": "ls", "background": True}),
        ("list_files", {}),
        ("read_file", {"path": "a"}),
        ("write_file", {"path": "a", "text": "x"}),
        ("remove_file", {"path": "a"}),
        ("make_folder", {"path": "a"}),
        ("copy_file", {"path": "a", "to_path": "b"}),
        ("list_processes", {}),
        ("process_output", {"process": 1}),
        ("wait_process", {"process": 1}),
        ("stop_process", {"process": 1}),
        ("send_input", {"process": 1, "text": "x"}),
    ],
)
async def test_somebody_elses_session_is_one_that_does_not_exist(tool: str, more: Any, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a", text="mine")
        call.principal = OTHERS
        said = []
        for name in (session, "box_" + "0" * 27):
            with pytest.raises(Refused) as refused:
                await call(tool, session=name, **more)
            assert (refused.value.status, refused.value.reason_code) == (Status.VALIDATION_FAILURE, "unknown_session")
            said.append(refused.value.message.replace(name, "-"))
        assert said[0] == said[1]
        assert (await call.told("list_sessions"))["sessions"] == []


async def test_a_file_goes_into_no_session_of_somebody_else(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        call.principal = OTHERS
        other = await call.opened()
        await call("write_file", session=other, path="a", text="theirs")
        with pytest.raises(Refused) as refused:
            await call("copy_file", session=other, path="a", to_session=session, to_path="a")
        assert refused.value.reason_code == "unknown_session"


async def test_snapshots_and_forks_begin_with_the_files(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="data/a.txt", text="one")
        kept = await call.told("snapshot_session", session=session, name="first")
        assert (kept["name"], kept["files"], kept["bytes"]) == ("first", 1, 3)
        copy = await call.opened(snapshot="first")
        assert (await call.told("read_file", session=copy, path="data/a.txt"))["text"] == "one"
        forked = await call.told("fork_session", session=session, count=2)
        assert [each["state"] for each in forked["sessions"]] == ["running", "running"]
        names = {each["session"] for each in forked["sessions"]}
        assert len(names) == 2 and session not in names
        held = await call.told("list_snapshots", Attached())
        assert [each["name"] for each in held["snapshots"]] == ["first"]
        await call("remove_snapshot", Attached(), snapshot="first")
        assert (await call.told("list_snapshots", Attached()))["snapshots"] == []


async def test_what_a_program_kept_of_its_own_session_is_no_agents_to_open(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        programs = (await call.told("open_session", Attached()))["session"]
        theirs = await call.told("snapshot_session", Attached(), session=programs, name="theirs")
        for reference in ("theirs", theirs["snapshot"]):
            with pytest.raises(Refused) as refused:
                await call("open_session", snapshot=reference)
            assert refused.value.reason_code == "not_found"
            assert (await call.told("open_session", Attached(), snapshot=reference))["state"] == "running"
        own = await call.opened()
        await call("snapshot_session", Attached(), session=own, name="by-a-program")
        assert await call.opened(snapshot="by-a-program"), "of a session that an agent has anyway"
        call.executor.handed_over |= {programs}
        await call("snapshot_session", session=programs, name="handed-over")
        assert await call.opened(snapshot="handed-over"), "an agent took it"


async def test_nothing_more_leaves_a_session_whose_network_was_tightened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with calling(tmp_path) as call:
        named, other = await call.opened(), await call.opened()
        boxes = dict(zip((named, other), call.place.backend.boxes, strict=True))
        there = call.executor._sessions()
        rule = NetworkRule("near", ("a.example:443",))
        for session, reach in there.known.items():
            there._known[session] = reach._replace(rules=(rule,))

        def tightened(reach: object) -> None:
            raise Refused(Status.DENIED, "session_network", "it was tightened")

        monkeypatch.setattr(there, "_check_network", tightened)
        with pytest.raises(Refused, match="tightened"):
            await call("execute_python", session=named, code="say x")
        assert [box.held for box in boxes.values()] == [True, False], "by the call that names it"
        await call.executor.hold_tightened([call.executor])
        assert [box.held for box in boxes.values()] == [True, True], "by a reload"


async def test_forks_are_told_one_by_one_and_none_at_all_is_a_failure(tmp_path: Path) -> None:
    async with calling(tmp_path, max_sessions=2, queue_seconds=0.05) as call:
        session = await call.opened()
        answer = await call("fork_session", session=session, count=2)
        assert answer.result is not None
        made = answer.result["structuredContent"]["sessions"]
        assert sorted("error" in each for each in made) == [False, True]
        assert next(each for each in made if "error" in each)["error"]["reason_code"] == "capacity"
        with pytest.raises(Refused) as refused:
            await call("fork_session", session=session, count=1)
        assert (refused.value.status, refused.value.reason_code) == (Status.FAILED, "capacity")


async def test_a_full_house_says_what_is_full(tmp_path: Path) -> None:
    async with calling(tmp_path, max_sessions=1, queue_seconds=0.05) as call:
        await call.opened()
        with pytest.raises(Unavailable) as refused:
            await call.opened()
        assert refused.value.reason_code == "capacity"


async def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        with pytest.raises(Refused) as unknown:
            await call("open_session", template="nothing")
        with pytest.raises(Refused) as gone:
            await call("open_session", snapshot="nothing")
        assert (unknown.value.reason_code, gone.value.reason_code) == ("unknown_template", "not_found")


async def test_a_session_can_be_given_more_time(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        before = await call.told("open_session", lifetime_seconds=60)
        after = await call.told("extend_session", Attached(), session=before["session"], lifetime_seconds=6000)
        assert after["expires_at"] > before["expires_at"]


async def test_volumes_are_made_listed_and_removed(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        made = await call.told("create_volume", Attached(), name="keep", max_bytes=MIB)
        assert (made["name"], made["max_bytes"], made["mode"]) == ("keep", MIB, "ro")
        assert [each["name"] for each in (await call.told("list_volumes", Attached()))["volumes"]] == ["keep"]
        await call("remove_volume", Attached(), name="keep")
        assert (await call.told("list_volumes", Attached()))["volumes"] == []


async def test_interrupting_says_whether_anything_ran(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        assert (await call.told("interrupt_session", session=session))["interrupted"] is False


async def test_what_a_program_of_the_user_opened_is_not_there_for_an_agent(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        private = str((await call.told("open_session", Attached()))["session"])
        await call("write_file", Attached(), session=private, path="output/a", text="mine")
        own = await call.opened()
        for tool, more in (
            ("execute_python", {"code": "1"}),
            ("read_file", {"path": "output/a"}),
            ("fork_session", {"count": 1}),
            ("close_session", {}),
            ("copy_file", {"path": "a", "to_session": own, "to_path": "a"}),
        ):
            with pytest.raises(Refused) as refused:
                await call(tool, session=private, **more)
            assert refused.value.reason_code == "unknown_session", tool
        with pytest.raises(Refused) as refused:
            await call("copy_file", session=own, path="a", to_session=private, to_path="a")
        assert refused.value.reason_code == "unknown_session"
        assert [each["session"] for each in (await call.told("list_sessions"))["sessions"]] == [own]
        assert (await call.listing("resources/list"))["resources"] == []
        seen = {each["session"] for each in (await call.told("list_sessions", Attached()))["sessions"]}
        assert seen == {own, private}, "the user sees what agents opened"
        call.executor.handed_over |= {private}
        assert (await call.told("read_file", session=private, path="output/a"))["text"] == "mine"


async def test_a_copy_has_what_the_session_has_that_it_goes_to(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        own, keeping = await call.opened(), await call.opened()
        call.executor._sessions()._known.clear()
        info = await call.place.manager.info(Owner(MINE.tenant, MINE.agent), keeping)
        call.executor._sessions()._learn(replace(info, keeps=True))
        copy = call.granted("copy_file", {"session": own, "path": "a", "to_session": keeping, "to_path": "a"}).call
        assert (await call.executor.outside(copy)).writes
        assert not (await call.executor.outside(replace(copy, arguments={**copy.arguments, "to_session": own}))).writes
        before = await call.executor.state_of(copy)
        await call("write_file", session=keeping, path="b", text="changed")
        assert await call.executor.state_of(copy) != before, "an approval is bound to both"


async def test_a_fork_lives_no_longer_than_the_session_that_an_agent_was_given(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened(lifetime_seconds=600)
        forks = (await call.told("fork_session", session=session, count=1))["sessions"]
        fork = call.place.manager.get(Owner(MINE.tenant, MINE.agent), forks[0]["session"])
        assert fork.spec.lifetime_seconds < 600, "some of it was gone already"
