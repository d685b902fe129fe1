"""Every hostile case, in the order in which they run."""

from ringfence.doctor.cases import (
    artifacts,
    brokering,
    commands,
    devices,
    egress,
    environment,
    filesystem,
    guarded,
    integrity,
    ipc,
    kernel,
    listening,
    memory,
    network,
    packages,
    proc,
    processes,
    requests,
    resources,
    spending,
)

CATALOGUE = (
    *filesystem.CASES,
    *guarded.CASES,
    *processes.CASES,
    *commands.CASES,
    *proc.CASES,
    *devices.CASES,
    *network.CASES,
    *listening.CASES,
    *egress.CASES,
    *requests.CASES,
    *packages.CASES,
    *ipc.CASES,
    *kernel.CASES,
    *memory.CASES,
    *resources.CASES,
    *spending.CASES,
    *artifacts.CASES,
    *environment.CASES,
    *brokering.CASES,
    *integrity.CASES,
)

__all__ = ["CATALOGUE"]
