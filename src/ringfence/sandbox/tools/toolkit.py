"""All our own tools together, and what follows from the tool of a call."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.core import canonical
from ringfence.core.box import NO_OUTSIDE, Limits, Outside
from ringfence.core.model import Call, Contract, Definition, Json, Mode, Transport
from ringfence.sandbox.tools import files, languages, processes, request, run, sessions
from ringfence.sandbox.tools.definition import Tool, ToolOffer
from ringfence.sandbox.tools.request import BoxContents, SessionLifetimes

SERVER = "ringfence"
"""Takes the place of a server's name; no server of a configuration can have this name."""
KIT: Mapping[str, Tool] = {
    each.name: each
    for module in (run, sessions, files, processes)
    for each in vars(module).values()
    if isinstance(each, Tool)
}
"""By name, in the order in which they are declared and offered."""
PROGRAMS = tuple(name for name, tool in KIT.items() if not tool.needs_session)
BOX_MAKERS = tuple(name for name, tool in KIT.items() if tool.makes_box)
"""The tools that make a box; the others are for an existing one."""
RUNS_IN_A_SESSION = tuple(name for name, tool in KIT.items() if tool.runs)
FORKS_A_SESSION = sessions.fork_session.name
WRITES_FILES = tuple(name for name, tool in KIT.items() if tool.writes_files)
SIGNALS_A_PROCESS = processes.stop_process.name
LASTING = tuple(name for name, tool in KIT.items() if tool.lasting)
TOOLS = tuple(name for name, tool in KIT.items() if not tool.only_wide and not tool.if_declared)
DECLARABLE = (*TOOLS, *(name for name, tool in KIT.items() if tool.if_declared))
"""Tools that a contract can be for; an agent has the last ones only where there is one."""
WIDE_TOOLS = tuple(KIT)
"""Those for callers in this process as well."""


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
    return contract.tool in BOX_MAKERS and not (contract.tool in PROGRAMS and "session" in call.arguments)


def needs_session(call: Call, contract: Contract) -> bool:
    """Whether the keeper of sessions carries it out."""
    return contract.tool not in PROGRAMS or "session" in call.arguments


def forks(contract: Contract) -> bool:
    """Whether its calls open sessions by forking one."""
    return contract.transport is Transport.SANDBOXED_EXEC and contract.tool == FORKS_A_SESSION


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
