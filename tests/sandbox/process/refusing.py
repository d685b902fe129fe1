"""Runs a command on a host that refuses something: `python -I -S refusing.py WHAT COMMAND…`.

What is refused, is refused to this process and those that it starts alone.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


def _own_namespace(flags: int = 0) -> None:
    """In which the user is who it was."""
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEWUSER | flags), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def namespaces() -> None:
    _own_namespace()
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def proc() -> None:
    _own_namespace(_NEWNS)
    _check(_libc.mount(b"/dev/null", b"/proc/version", None, ctypes.c_ulong(4096), None), "mount")


def call() -> None:
    """As the filter of a container does."""
    number = _UNSHARE[os.uname().machine]
    instructions = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code)))
    _check(_libc.prctl(38, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(22, 2, program, 0, 0), "seccomp")


if __name__ == "__main__":
    {"namespaces": namespaces, "proc": proc, "call": call}[sys.argv[1]]()
    os.execv(sys.argv[2], sys.argv[2:])
