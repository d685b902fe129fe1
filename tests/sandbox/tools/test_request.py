"""A call becomes a box to be made: what the arguments, the contract and the configuration say, in that order."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import MAX_SOURCE_BYTES, MIB, Attached, Input, Limits, Listening, Program, Programs
from ringfence.core.errors import Refused
from ringfence.core.model import Decision, Grant
from ringfence.governance.contract import build, built_in
from ringfence.sandbox.tools import request
from tests.faking import make_call

DEFAULTS = Limits(memory_bytes=128 * MIB, processes=5)
PYTHON, SHELL = built_in("execute_python", 8), built_in("run_shell", 30)


def spec(contract: Any = PYTHON, arguments: Any = None, **call: Any) -> Any:
    return request.spec(make_call(contract.name, arguments or {"code": "1"}, **call), contract, DEFAULTS)


def test_code_and_nothing_else() -> None:
    made = spec()
    assert made.program == Program("python", b"1", cell=True)
    assert made.limits == replace(DEFAULTS, wall_seconds=8)
    assert (made.env, made.inputs, made.output, made.trees) == ({}, (), None, ())
    assert (made.template, made.layout, made.tenant) == ("python", "shared", "local")


def test_a_command_is_a_line_for_the_shell_or_words() -> None:
    assert spec(SHELL, {"command": "ls | wc"}).program == Program("command", argv=("/bin/sh", "-c", "ls | wc"))
    assert spec(SHELL, {"argv": ["ls", "-l"]}).program == Program("command", argv=("ls", "-l"))


def test_all_that_a_caller_in_this_process_can_say() -> None:
    attached = Attached((Input("a", b"x"),), b"in", Path("/out"))
    made = spec(
        arguments={
            "code": "1", "argv": ["a"], "name": "x.py", "env": {"A": "b"}, "limits": {"memory_bytes": 64 * MIB},
            "trees": ["/srv"], "template": "data", "memory_layout": "fresh", "metadata": {"k": "v"},
        },
        attached=attached,
    )  # fmt: skip
    assert made.program == Program("python", b"1", ("a",), "x.py", b"in")
    assert (made.limits.memory_bytes, made.limits.processes, made.limits.wall_seconds) == (64 * MIB, 5, 8)
    assert (made.inputs, made.output, made.trees) == (attached.inputs, Path("/out"), (Path("/srv"),))
    assert (made.env, made.template, made.layout) == ({"A": "b"}, "data", "fresh")


def shell(**commands: Any) -> Any:
    return build("run_shell", {"transport": "sandboxed_exec", "commands": commands})[0]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("git log", True),
        ("/usr/bin/git log", True),
        ("cd x&&git|cat", True),
        ("echo 'git'", True),
        ("cat .git/config", True),
        ("legit digit git_log", False),
        ("g''it", False),
        ("", False),
    ],
)
def test_a_program_is_asked_for_where_its_name_is_a_word_of_the_command(line: str, named: bool) -> None:
    for name in ("git", "/usr/bin/git"):
        contract = shell(ask=[name])
        assert request.asked_for(make_call("run_shell", {"command": line}), contract) == ((name,) if named else ())
        assert bool(request.asked_for(make_call("run_shell", {"argv": line.split()}), contract)) is named
    assert request.asked_for(make_call("run_shell", {"command": line}), SHELL) == ()


def programs(contract: Any, line: str, approval: str | None) -> Any:
    grant = Grant(make_call("run_shell", {"command": line}), contract, Decision("d", True, ""), None, "", approval, 0.0)
    return request.programs(grant)


def test_what_a_person_agreed_to_is_there_for_this_command_alone() -> None:
    few, most = shell(allow=["ls"], ask=["git", "make"], deny=["id"]), shell(ask=["git", "make"], deny=["id"])
    assert programs(few, "git log", None) == Programs(("ls",), ("id",))
    assert programs(few, "git log", "apr_1") == Programs(("ls", "git"), ("id",))
    assert programs(most, "git log", None) == Programs(None, ("id", "git", "make"))
    assert programs(most, "git log", "apr_1") == Programs(None, ("id", "make"))
    assert programs(SHELL, "git log", "apr_1") is None


def test_listening_is_the_contracts_unless_a_caller_here_says_otherwise() -> None:
    contract, _ = build("run_shell", {"transport": "sandboxed_exec", "listen": {"web": 80}})
    assert spec(contract, {"command": "x"}).listening == Listening(True, (("web", 80),))
    assert spec(contract, {"command": "x", "listen": "denied"}).listening == Listening()
    assert spec(SHELL, {"command": "x"}).listening == Listening()
    assert spec(SHELL, {"command": "x", "listen": "allowed"}).listening == Listening(True)


def test_what_a_contract_demands_no_argument_takes_back() -> None:
    contract, _ = build(
        "py",
        {"transport": "sandboxed_exec", "tool": "execute_python", "memory_layout": "fresh", "template": "data"},
    )
    made = spec(contract, {"code": "1", "memory_layout": "shared"})
    assert (made.layout, made.template) == ("fresh", "data")


def test_the_clock_is_the_callers_the_contracts_or_the_deadlines() -> None:
    assert spec(arguments={"code": "1", "limits": {"wall_seconds": 60}}).limits.wall_seconds == 60
    began = time.monotonic()
    given = spec(deadline=began + 7).limits.wall_seconds
    assert 7 - (time.monotonic() - began) <= given <= 7
    assert spec(deadline=time.monotonic() + 2000).limits.wall_seconds == 8
    assert 0 < spec(deadline=time.monotonic() - 1).limits.wall_seconds < 0.01


@pytest.mark.parametrize(
    ("contract", "arguments", "problem"),
    [
        (PYTHON, {"code": "a\0b"}, "code: a program has no NUL"),
        (PYTHON, {"code": "x" * (MAX_SOURCE_BYTES + 1)}, "code: longer than 10 MiB"),
        (PYTHON, {"code": "é" * (MAX_SOURCE_BYTES // 2 + 1)}, "code: longer than 10 MiB"),
        (PYTHON, {"code": "1", "argv": ["a\0"]}, "argv: no NUL"),
        (PYTHON, {"code": "1", "argv": ["x" * 131_072]}, "argv: longer than 131071"),
        (PYTHON, {"code": "1", "name": "\0"}, "name: no NUL"),
        (PYTHON, {"code": "1", "trees": ["/a\0"]}, "trees: no NUL"),
        (PYTHON, {"code": "1", "env": {"A=B": "c"}}, "env: a variable has a name without '='"),
        (PYTHON, {"code": "1", "env": {"": "c"}}, "env: a variable has a name"),
        (PYTHON, {"code": "1", "env": {"A": "\0"}}, "no NUL"),
        (PYTHON, {"code": "1", "env": {"A": "x" * 131_072}}, "env: a variable is longer"),
        (SHELL, {"command": "a\0b"}, "command: no NUL"),
        (SHELL, {"command": "x" * 131_072}, "command: longer than"),
        (SHELL, {"argv": []}, "argv: there is no command in it"),
    ],
)
def test_what_makes_no_sense_is_refused_without_repeating_it(contract: Any, arguments: Any, problem: str) -> None:
    with pytest.raises(Refused) as refused:
        spec(contract, arguments)
    assert (refused.value.status, refused.value.reason_code) == ("validation_failure", "bad_arguments")
    assert problem in refused.value.message and len(refused.value.message) < 200


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_without_nul_arrives_byte_for_byte(code: str) -> None:
    if "\0" in code:
        with pytest.raises(Refused):
            spec(arguments={"code": code})
    else:
        assert spec(arguments={"code": code}).program.source == code.encode()
