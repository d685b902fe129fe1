"""Landlock: the kernel's own list of what may be done to files, beneath all mounts. Used inside the zygote.

It holds even where a mount was made wrongly: what is not under one of the folders named here cannot be touched.
"""

from __future__ import annotations

import struct

from ringfence.sandbox.process.zygote import kernel

EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_DIR = 8
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15

READ = EXECUTE | READ_FILE | READ_DIR
WORK = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
WORK |= REFER | TRUNCATE
"""Everything a program does in a folder of its own; no device nodes. Newer kernels let any user make the empty ones all
the same, so seccomp refuses those."""
CHANGE = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
"""What a program does to a single file."""
DEVICE = READ_FILE | WRITE_FILE | READ_DIR
TERMINAL = READ_FILE | WRITE_FILE | IOCTL_DEV

# What a later version adds is not handled, and so allowed as before; the newest that is known here is asked for.
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_SCOPE_ABSTRACT_SOCKETS = 1
_SCOPE_SIGNALS = 2
_LOG_SAME_EXEC_OFF = 1
_LOG_SUBDOMAINS_OFF = 4
PATH_BENEATH = 1


def version() -> int:
    """The version that this kernel offers; 0 for none."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, 1)
    except (OSError, KeyError):
        return 0


def attributes(offered: int) -> bytes:
    """The attributes of a ruleset: handled_access_fs, handled_access_net (from version 4), scoped (from version 6)."""
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if offered >= 6 else 0
    size = 24 if offered >= 6 else 16 if offered >= 4 else 8
    return struct.pack("QQQ", _RIGHTS_BY_VERSION[min(offered, 5)], 0, scoped)[:size]


def restriction(offered: int) -> int:
    """Flags (from version 7): a refusal makes no line in the host's log, which a box could fill."""
    return _LOG_SAME_EXEC_OFF | _LOG_SUBDOMAINS_OFF if offered >= 7 else 0


def rule(offered: int, rights: int, descriptor: int) -> bytes:
    """These rights in the folder, or on the file, that the descriptor stands for."""
    return struct.pack("=Qi", rights & _RIGHTS_BY_VERSION[min(offered, 5)], descriptor)
