"""Control groups for boxes, used again: to make one and set its limits costs more than to look at what it counted."""

from __future__ import annotations

import itertools
from contextlib import suppress

from ringfence.box import Limits
from ringfence.sandbox.process.cgroup import Cgroups, Group

IDLE = 64
"""So many are kept."""
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
        self._idle: dict[Limits, list[Group]] = {}
        self._closing = False

    def take(self, limits: Limits) -> Group | None:
        """An empty group under these limits; None where there can be none. Raises OSError."""
        if idle := self._idle.get(limits):
            return idle.pop()
        if not self._cgroups.available:
            return None
        group = self._cgroups.make(str(next(_numbers)), _ROLES)
        group.limit(
            memory_bytes=limits.memory_bytes,
            hard_bytes=limits.memory_bytes + limits.disk_bytes,
            processes=limits.processes + 1,
            cpu_cores=limits.cpu_cores,
        )
        return group

    def give_back(self, group: Group, limits: Limits) -> None:
        """Once its box is gone. Raises OSError where something of it is left."""
        if self._closing or sum(map(len, self._idle.values())) >= IDLE:
            group.remove()
            return
        try:
            group.reset()
            spent = (group.usage() or 0) > STALE_BYTES
        except OSError:
            spent = True  # where something is just ending it takes a moment
        if spent:
            group.remove()
        else:
            self._idle.setdefault(limits, []).append(group)

    def close(self) -> None:
        """What is given back from now on is removed."""
        self._closing = True
        for idle in self._idle.values():
            while idle:
                with suppress(OSError):  # the next start sweeps
                    idle.pop().remove()
