"""P, continued: what /proc and /sys say about the machine, and what they let a program change."""

from __future__ import annotations

from ringfence.doctor.case import Case

_ABSENT = "ENOENT, or EACCES where the kernel cannot hide names: /proc shows the box's own processes and nothing else"

CASES = (
    Case(
        "P40",
        "reach the kernel's settings: core_pattern, modprobe, hotplug helper",
        _ABSENT,
        """
        there("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/sys/kernel/uevent_helper", "/proc/sys")
        """,
    ),
    Case(
        "P42",
        "read addresses in the kernel",
        _ABSENT,
        "attempt(lambda: open('/proc/kallsyms').readline())",
    ),
    Case(
        "P43",
        "reach the memory and the magic keys of the machine",
        _ABSENT,
        "there('/proc/kcore', '/proc/kpagecount', '/proc/kmsg', '/proc/sysrq-trigger', '/dev/mem')",
    ),
    Case(
        "P44",
        "read how the machine was started and configured",
        _ABSENT,
        """
        any_of({path: lambda path=path: open(path, "rb").read(64)
                for path in ("/proc/cmdline", "/proc/config.gz", "/proc/modules")})
        """,
    ),
    Case(
        "P45",
        "read what else happens on the machine: load, uptime, memory, processors, interrupts, disks",
        "absent, or the limits of the box and numbers that never change",
        """
        def told(path):
            words = open(path).read(8000).split()
            if path == "/proc/meminfo" and int(words[1]) * 1024 == given["limits"]["memory_bytes"]:
                raise FileNotFoundError(errno.ENOENT, "")
            if path in ("/proc/loadavg", "/proc/uptime") and not any(map(float, words[1:3])):
                raise FileNotFoundError(errno.ENOENT, "")
            if path == "/proc/stat" and words[1:8] == "0 0 0 100 0 0 0".split():
                raise FileNotFoundError(errno.ENOENT, "")
        any_of({path: lambda path=path: told(path)
                for path in ("/proc/loadavg", "/proc/uptime", "/proc/meminfo", "/proc/stat",
                             "/proc/interrupts", "/proc/diskstats", "/proc/vmstat", "/proc/schedstat")})
        """,
    ),
    Case(
        "P46",
        "read the identity of the machine: boot id, machine id, host id, serial numbers",
        _ABSENT,
        """
        any_of({path: lambda path=path: open(path).read(64)
                for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id", "/var/lib/dbus/machine-id",
                             "/etc/hostid", "/sys/class/dmi/id/product_uuid", "/sys/class/net/eth0/address")})
        """,
    ),
    Case("P47", "list keys and their users", _ABSENT, "any_of({'keys': lambda: open('/proc/keys').read(8)})"),
    Case(
        "P48",
        "walk through /sys: devices, modules, kernel parameters, control groups",
        "nothing but four files with the number of processors",
        """
        own = {"kernel_max", "online", "possible", "present"}
        found = [f"{where}/{name}" for where, _, names in os.walk("/sys") for name in names
                 if where != "/sys/devices/system/cpu" or name not in own]
        say(bool(found), ", ".join(found[:4]) or "ENOENT")
        """,
    ),
    Case(
        "P49",
        "find any other file in /proc that is not about a process",
        "none that is the kernel's: another file system covers it",
        """
        kernels = os.lstat("/proc").st_dev
        names = [name for name in os.listdir("/proc") if not name.isdigit() and not os.path.islink(f"/proc/{name}")]
        found = [name for name in names if name != "mounts" and os.lstat(f"/proc/{name}").st_dev == kernels]
        say(bool(found), ", ".join(sorted(found)[:6]) or "none")
        """,
    ),
)
