"""All our own tools together, and what follows from the tool of a call."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.core import canonical
from ringfence.core.box import Limits
from ringfence.core.model import Call, Contract, Definition, Mode
from ringfence.sandbox.tools import files, processes, run, sessions
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
