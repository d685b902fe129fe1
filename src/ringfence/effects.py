"""What a call may change outside, known before it runs: one function of the call and its contract.

The *started* record and whether it waits for the disk, the `effect` of the facts and both explanations go by it, so
they cannot contradict each other. What was seen later can only narrow it: a box that was seen to send nothing sent
nothing.
"""

from __future__ import annotations

from ringfence.box import NO_OUTSIDE, Outside
from ringfence.model import Call, Contract, Mode, ServerSpec, Transport
from ringfence.plain import plain
from ringfence.sandbox import order
from ringfence.sandbox.tools import FORKS_A_SESSION, PROGRAMS, RUNS_IN_A_SESSION, WRITES_FILES


@plain
class Possible:
    """By which ways something outside may change. None of them: nothing can."""

    acts: bool = False
    """A server, or a program without a box, does whatever it does."""
    sends: bool = False
    """Its box has a way out, which we serve, so that what was sent is known where the box's end was seen."""
    writes: bool = False
    """Its box, or we ourselves for it, may write to a folder of the host's."""

    def __bool__(self) -> bool:
        return self.acts or self.sends or self.writes


NOTHING = Possible()


def possible(call: Call, contract: Contract, session: Outside = NO_OUTSIDE) -> Possible:
    """`session` is what the box of the session has that the call names."""
    if contract.transport is not Transport.SANDBOXED_EXEC:
        return NOTHING if contract.mode is Mode.READ else Possible(acts=True)
    # What runs in a box is whatever the caller sent, so here the box says what is possible, and not the mode.
    if order.makes_box(call, contract):
        # A session that is opened without set-up code runs nothing of anybody's yet.
        runs = contract.tool in PROGRAMS or bool(call.arguments.get("setup"))
        return _by(order.outside(call, contract)) if runs else NOTHING
    if contract.tool in RUNS_IN_A_SESSION or (contract.tool == FORKS_A_SESSION and session.sets_up):
        return _by(session)
    return Possible(writes=session.writes) if contract.tool in WRITES_FILES else NOTHING


def of_start(spec: ServerSpec) -> Possible:
    """The start of a server: what its program may do before anybody asks it anything."""
    if spec.url is not None:
        return NOTHING
    if spec.placement == "unsafe_host":
        return Possible(acts=True)
    sends = spec.network != "denied" or bool(spec.secrets)
    return Possible(sends=sends, writes=any(mount.mode == "rw" for mount in spec.mounts))


def _by(outside: Outside) -> Possible:
    return Possible(sends=outside.sends, writes=outside.writes)
