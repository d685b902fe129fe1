"""What a call may change outside, known before it runs: one function of the call, its contract, and the place of
whatever answers it.

The *started* record and whether it waits for the disk, the `effect` in the facts and both explanations use it, so they
cannot contradict each other. Later observations can only narrow it: a box that we saw send nothing has sent nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from ringfence.core.box import NO_OUTSIDE, Outside
from ringfence.core.model import Call, Contract, Mode, ServerSpec, Transport
from ringfence.core.record import plain
from ringfence.sandbox.tools import request, toolkit
from ringfence.sandbox.tools.definition import Changes
from ringfence.sandbox.tools.toolkit import KIT, PROGRAMS


@plain
class PossibleEffects:
    """How something outside may change. None of them: nothing can."""

    acts: bool = False
    """A server, or a program without a box, does whatever it does."""
    sends: bool = False
    """Its box has a route out, which our proxy serves, so what was sent is known where the box's end was seen."""
    writes: bool = False
    """Its box, or we ourselves for it, may write to a folder of the host's."""
    copies: bool = False
    """We copy what it leaves in its output into a folder of the host's, where that replaces files of the same names;
    what was copied is known where the box's end was seen."""
    declared_read: bool = False
    """The operator declared the operation a read. The rest is what the place of its server leaves open to that server,
    which may do more than it is asked for."""

    @property
    def intended(self) -> bool:
        """Whether the operation itself may change something: then its records wait for the disk (decision 37)."""
        return bool(self) and not self.declared_read

    def __bool__(self) -> bool:
        return self.acts or self.sends or self.writes or self.copies


NO_EFFECTS = PossibleEffects()
_NEVER_HANDLED = ("KILL", "STOP", 9, 19)
_ALONE = ("own", "unsafe_host")


def possible_effects(
    call: Call,
    contract: Contract,
    session: Outside = NO_OUTSIDE,
    server: ServerSpec | None = None,
    others: Iterable[ServerSpec] = (),
) -> PossibleEffects:
    """`session` is what the box of the call's session can reach outside; `server` is what answers the call, placed as
    it is for this call, and `others` are those that may share its box."""
    if contract.transport is not Transport.SANDBOXED_EXEC:
        if contract.mode is not Mode.READ:
            return PossibleEffects(acts=True)
        # That it is a read is what the operator says of the operation; what its server does is up to the server.
        can = effects_of_server(server, others) if server is not None else PossibleEffects(acts=True)
        return PossibleEffects(can.acts, can.sends, can.writes, can.copies, declared_read=True) if can else NO_EFFECTS
    # What runs in a box is whatever the caller sent, so here the box says what is possible, and not the mode.
    if toolkit.makes_box(call, contract):
        # A session that is opened without set-up code runs no code of the caller's yet.
        runs = contract.tool in PROGRAMS or bool(call.arguments.get("setup"))
        copies = contract.tool in PROGRAMS and call.arguments.get("output") is not None
        return _by(request.outside(call, contract), copies=copies) if runs else NO_EFFECTS
    tool = KIT.get(contract.tool)
    return NO_EFFECTS if tool is None else _in_session(tool.changes, call, session)


def effects_of_start(
    spec: ServerSpec, others: Iterable[ServerSpec] = (), places: tuple[str, ...] = ()
) -> PossibleEffects:
    """The start of a server: what its program may do before the first request to it. `places` are those that its box
    may reach besides its network."""
    if spec.url is not None:
        return NO_EFFECTS  # it runs already
    can = effects_of_server(spec, others)
    return replace(can, sends=True) if places else can


def effects_of_server(spec: ServerSpec, others: Iterable[ServerSpec] = ()) -> PossibleEffects:
    """What a server may change outside, by its place, whatever it is asked for. `others` are those among which may be
    some that share its box, and with it all that the box has."""
    if spec.url is not None or spec.placement == "unsafe_host":
        return PossibleEffects(acts=True)
    if spec.placement.startswith("session"):
        return PossibleEffects(sends=True, writes=True)  # whatever the session has that it is put into
    shared = [spec, *(other for other in others if spec.placement not in _ALONE and other.placement == spec.placement)]
    return PossibleEffects(
        sends=any(each.network != "denied" or each.secrets for each in shared),
        writes=any(each.volumes or any(mount.mode == "rw" for mount in each.mounts) for each in shared),
    )


def _in_session(changes: Changes, call: Call, session: Outside) -> PossibleEffects:
    match changes:
        case Changes.NOTHING | Changes.SESSION:
            return NO_EFFECTS
        case Changes.FILES:
            return PossibleEffects(writes=session.writes)
        case Changes.SIGNAL:  # its handler may do anything
            return NO_EFFECTS if call.arguments.get("signal", "KILL") in _NEVER_HANDLED else _by(session)
        case Changes.SET_UP:
            return _by(session) if session.sets_up else NO_EFFECTS
        case Changes.CODE:
            return _by(session)
        case Changes.LASTING:
            return PossibleEffects(writes=True)
    assert_never(changes)


def _by(outside: Outside, *, copies: bool = False) -> PossibleEffects:
    return PossibleEffects(sends=outside.sends, writes=outside.writes, copies=copies)
