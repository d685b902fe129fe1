"""Every hostile case, in the order in which they are told."""

from ringfence.promises.cases import (
    artifacts,
    brokering,
    devices,
    egress,
    environment,
    filesystem,
    integrity,
    ipc,
    kernel,
    memory,
    network,
    proc,
    processes,
    requests,
    resources,
    spending,
)

CATALOGUE = (
    *filesystem.CASES,
    *processes.CASES,
    *proc.CASES,
    *devices.CASES,
    *network.CASES,
    *egress.CASES,
    *requests.CASES,
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
