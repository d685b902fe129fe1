"""All our own tools together, and what follows from the tool of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType

from ringfence.core import canonical, deferred
from ringfence.core.box import NO_OUTSIDE, Limits, Outside
from ringfence.core.model import Call, Contract, Definition, Json, Mode, Transport
from ringfence.sandbox.tools import files, languages, processes, request, run, sessions
from ringfence.sandbox.tools.definition import Tool, ToolOffer
from ringfence.sandbox.tools.request import BoxContents, SessionLifetimes

SERVER = "ringfence"
"""Takes the place of a server's name; no server of a configuration can have this name."""


class _Kit(Mapping[str, Tool]):
    """By name, in the order in which they are declared and offered. A run of one program asks for the first ones alone,
    and does not load those of sessions."""

    def __getitem__(self, name: str) -> Tool:
        return _FIRST[name] if name in _FIRST else _all()[name]

    def __contains__(self, name: object) -> bool:
        return name in _FIRST or name in _all()

    def __iter__(self) -> Iterator[str]:
        return iter(_all())

    def __len__(self) -> int:
        return len(_all())


def _tools(*modules: ModuleType) -> dict[str, Tool]:
    return {each.name: each for module in modules for each in deferred.names(module).values() if isinstance(each, Tool)}


@cache
def _all() -> Mapping[str, Tool]:
    return _FIRST | _tools(sessions, files, processes)


_FIRST = _tools(run)
KIT: Mapping[str, Tool] = _Kit()
FORKS_A_SESSION = "fork_session"
PROGRAMS = tuple(name for name, tool in _FIRST.items() if not tool.needs_session)


def _chosen(which: Callable[[Tool], bool]) -> tuple[str, ...]:
    return tuple(name for name, tool in KIT.items() if which(tool))


@cache
def box_makers() -> tuple[str, ...]:
    """The tools that make a box; the others are for an existing one."""
    return _chosen(lambda tool: tool.makes_box)


@cache
def offered_tools() -> tuple[str, ...]:
    """What an agent has without a contract of its own for it."""
    return _chosen(lambda tool: not tool.only_wide and not tool.if_declared)


@cache
def declarable_tools() -> tuple[str, ...]:
    """Tools that a contract can be for; an agent has the last ones only where there is one."""
    return (*offered_tools(), *_chosen(lambda tool: tool.if_declared))


@cache
def all_tools() -> tuple[str, ...]:
    """Those for callers in this process as well."""
    return tuple(KIT)


def mode(tool: str) -> Mode:
    """The risk of one of our own tools by itself."""
    return KIT[tool].mode


def definition(
    contract: Contract,
    limits: Limits,
    contents: BoxContents,
    lives: SessionLifetimes | None = None,
    *,
    wide: bool = False,
) -> Definition:
    """The definition under which a capability of ours is offered.

    `contents` is what its boxes have; `lives` is how long sessions exist, None where there are none.
    """
    body = KIT[contract.tool].body(ToolOffer(contract, limits, contents, lives), wide=wide)
    return Definition(SERVER, contract.tool, canonical.definition_digest(body), body)


def makes_box(call: Call, contract: Contract) -> bool:
    """Whether the call makes a box, and is not for an existing one."""
    return is_box_maker(contract.tool) and not (contract.tool in PROGRAMS and "session" in call.arguments)


def is_box_maker(tool: str) -> bool:
    """Whether calls of the tool can make a box."""
    return tool in KIT and KIT[tool].makes_box


def needs_session(call: Call, contract: Contract) -> bool:
    """Whether the keeper of sessions carries it out."""
    return contract.tool not in PROGRAMS or "session" in call.arguments


def forks(contract: Contract) -> bool:
    """Whether its calls open sessions by forking one."""
    return contract.transport is Transport.SANDBOXED_EXEC and contract.tool == FORKS_A_SESSION


def may_run_as(contract: Contract) -> str | None:
    """The program's tool as which calls of this one may be decided as well; `carried_code` says which of them are."""
    tool = KIT.get(contract.tool) if contract.transport is Transport.SANDBOXED_EXEC else None
    if tool is None:
        return None
    if tool.name == run.EXECUTE_PYTHON:
        return run.RUN_SHELL
    return tool.carries.program if tool.carries is not None else None


def carried_code(call: Call, contract: Contract, session: Outside = NO_OUTSIDE) -> tuple[str, Json] | None:
    """The program's tool that would run the code which a call of another tool runs, and the arguments it would have.

    None: it runs no code, or is a program's own tool; code in another language than Python is a command. `session` is
    what the box of its session has.
    """
    tool = KIT.get(contract.tool) if contract.transport is Transport.SANDBOXED_EXEC else None
    given = call.arguments
    named = {"session": given["session"]} if "session" in given else {}
    if tool is not None and tool.name == run.EXECUTE_PYTHON and request.language(given) != languages.PYTHON:
        return run.RUN_SHELL, {**named, "command": languages.as_shell(request.language(given), given["code"])}
    if tool is None or tool.carries is None:
        return None
    carries = tool.carries
    known: Json = {carries.taken_as: given[carries.argument]} if given.get(carries.argument) else {}
    if not known and not (contract.tool == FORKS_A_SESSION and session.sets_up) and "data" not in given:
        return None
    return carries.program, {**named, **known}
