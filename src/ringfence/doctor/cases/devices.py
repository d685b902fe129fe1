"""D: devices and terminals."""

from __future__ import annotations

from ringfence.doctor.case import Case, Control
from ringfence.doctor.judging import answered

CASES = (
    Case(
        "D01",
        "find devices that lead into the kernel or the hypervisor",
        "absent",
        """
        there("/dev/kvm", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/fuse", "/dev/vhost-net", "/dev/vhost-vsock",
              "/dev/vsock", "/dev/net/tun", "/dev/loop-control", "/dev/kmsg", "/dev/userfaultfd", "/dev/snapshot",
              "/dev/mapper/control", "/dev/uinput", "/dev/cpu", "/dev/rtc0", "/dev/hwrng", "/dev/dri", "/dev/nvme0")
        """,
    ),
    Case(
        "D02",
        "find the raw disk",
        "no block device at all",
        """
        import stat
        found = [name for name in os.listdir("/dev") if stat.S_ISBLK(os.lstat(f"/dev/{name}").st_mode)]
        say(bool(found), ", ".join(found[:6]) or "none")
        """,
    ),
    Case(
        "D03",
        "find any other character device",
        "null, zero, full, random, urandom and no more",
        """
        import stat
        known = ("null", "zero", "full", "random", "urandom")
        found = [name for name in os.listdir("/dev")
                 if name not in known and stat.S_ISCHR(os.lstat(f"/dev/{name}").st_mode)]
        say(bool(found), ", ".join(found[:6]) or "none")
        """,
    ),
    Case(
        "D04",
        "talk to a device driver through a device that is there",
        "EPERM or EACCES",
        """
        import fcntl
        def ask():
            with open("/dev/urandom") as device:
                fcntl.ioctl(device, 0x80045200, buffer(4))
        attempt(ask)
        """,
        owed=(answered("EPERM", "EACCES", "ENOTTY", "ENOSYS"),),
    ),
    Case(
        "D05",
        "find a terminal",
        "absent",
        "there('/dev/tty', '/dev/console', '/dev/ptmx', '/dev/pts', '/dev/tty0', '/dev/ttyS0')",
    ),
    Case(
        "D06",
        "make a terminal",
        "no terminal can be made",
        "attempt(lambda: os.close(os.openpty()[0]))",
    ),
    Case(
        "D07",
        "type into the terminal that the box was started from",
        "EPERM or ENOTTY",
        """
        import fcntl, termios
        attempt(lambda: fcntl.ioctl(0, termios.TIOCSTI, b"#") and None)
        """,
        owed=(answered("EPERM", "ENOTTY", "EACCES"),),
        control=Control(features=frozenset({"terminal"})),
    ),
    Case(
        "D08",
        "paste into a virtual console",
        "EPERM or ENOTTY",
        """
        import fcntl
        def ask():
            if os.isatty(0):
                return "has a terminal to ask"
            fcntl.ioctl(0, 0x541C, b"\\x06")
        attempt(ask)
        """,
        control=Control(features=frozenset({"terminal"})),
    ),
    Case(
        "D09",
        "be on the terminal of the process that started it",
        "no stream is a terminal, and there is no controlling one",
        """
        def open_own():
            if any(os.isatty(number) for number in range(3)):
                return "a stream is a terminal"
            os.close(os.open("/dev/tty", os.O_RDWR))
        attempt(open_own)
        """,
        control=Control(features=frozenset({"terminal"})),
    ),
)
