"""Control groups for boxes, used again: to make one and set its limits costs more than to look at what it counted."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from contextlib import suppress

from ringfence.box import Limits
from ringfence.sandbox.process.cgroup import Cgroups, Group

log = logging.getLogger(__name__)

KEPT = 128
STALE_BYTES = 1024 * 1024
"""Files of a box go with a delay; a group that is still charged for more of them is not given to another box."""
_ROLES = ("memory", "pids", "cpu", "time")
"""What a box needs that is never paused."""

_numbers = itertools.count(1)
"""Of all groups that this process makes, whichever backend wants them."""


class Groups:
    """Of one backend."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._used: dict[Limits, deque[Group]] = {}
        """The longest unused first: what a box left behind is gone by the time that its group is wanted again."""
        self._closing = False

    @property
    def of_v1(self) -> bool:
        """Whether a box enters groups of v1."""
        return self._cgroups.of_v1

    def take(self, limits: Limits, *, pauses: bool = False) -> Group | None:
        """An empty group under these limits; None where there can be none. Raises OSError."""
        while not pauses and (used := self._used.get(limits)):
            group = used.popleft()
            if _as_good_as_new(group):
                return group
        if not self._cgroups.available:
            return None
        group = self._cgroups.make(str(next(_numbers)), (*_ROLES, "freezer", "kill") if pauses else _ROLES)
        group.pauses = pauses
        group.limit(
            memory_bytes=limits.memory_bytes,
            hard_bytes=limits.memory_bytes + limits.disk_bytes,
            processes=limits.processes,
            cpu_cores=limits.cpu_cores,
        )
        if pauses:
            group.keep_files_open()  # of a box that stays, and is looked at in each step
        return group

    def give_back(self, group: Group, limits: Limits, *, reaped: bool) -> None:
        """Of a box that is gone. Whoever reaped its first process knows that nothing is left in the group.

        Raises OSError where something is.
        """
        if group.pauses or not reaped or self._closing or sum(map(len, self._used.values())) >= KEPT:
            group.remove()
        else:
            group.keep_files_open()
            self._used.setdefault(limits, deque()).append(group)

    def close(self) -> None:
        """What is given back from now on is removed."""
        self._closing = True
        for used in self._used.values():
            while used:
                with suppress(OSError):  # the next start sweeps
                    used.popleft().remove()


def _as_good_as_new(group: Group) -> bool:
    """Make it so; one that cannot be is removed."""
    try:
        group.reset()
        if group.charged <= STALE_BYTES or (group.usage() or 0) <= STALE_BYTES:
            return True
        group.remove(patience=0.0)
    except OSError as exc:
        log.warning("a control group cannot be used again, and stays until the next start: %s", exc)
    return False
