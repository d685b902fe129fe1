"""Every hostile case, in the order in which they are told."""

from ringfence.promises.cases import (
    artifacts,
    devices,
    environment,
    filesystem,
    integrity,
    ipc,
    kernel,
    memory,
    network,
    proc,
    processes,
    resources,
    spending,
)

CATALOGUE = (
    *filesystem.CASES,
    *processes.CASES,
    *proc.CASES,
    *devices.CASES,
    *network.CASES,
    *ipc.CASES,
    *kernel.CASES,
    *memory.CASES,
    *resources.CASES,
    *spending.CASES,
    *artifacts.CASES,
    *environment.CASES,
    *integrity.CASES,
)

__all__ = ["CATALOGUE"]
