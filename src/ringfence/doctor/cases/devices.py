"""D: devices and terminals."""

from __future__ import annotations

from ringfence.doctor.case import Case, Control
from ringfence.doctor.judging import answered, refused

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
        "null, zero, full, random, urandom, tty and no more",
        """
        import stat
        known = ("null", "zero", "full", "random", "urandom", "tty")
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
        "find a console, or a terminal of the host",
        "absent: the box's terminals are its own, and it has none yet",
        """
        names = ["/dev/console", "/dev/tty0", "/dev/tty1", "/dev/ttyS0", "/dev/hvc0"]
        names += [f"/dev/pts/{number}" for number in range(16)]
        there(*names)
        """,
        control=Control(features=frozenset({"terminal"})),
    ),
    Case(
        "D06",
        "see a terminal of another box, and open it",
        "ENOENT: each box has terminals of its own",
        """
        def reach():
            name = given["neighbour"]["name"]
            try:
                os.close(os.open(name, os.O_RDWR | os.O_NOCTTY))
            except PermissionError:
                return f"sees {name}"
        attempt(reach)
        """,
        beside="held = os.openpty()\nready(name=os.ttyname(held[1]))",
    ),
    Case(
        "D10",
        "take all terminals of the machine, of which the kernel has only so many",
        "ENOSPC after 32",
        """
        held = []
        try:
            while len(held) < 200:
                held.append(os.openpty())
        except OSError as exc:
            say(len(held) > 64, f"{word(exc)} after {len(held)}")
        else:
            say(True, f"{len(held)} terminals")
        """,
        owed=(answered("ENOSPC after 32"),),
    ),
    Case(
        "D11",
        "have another driver of the kernel serve a terminal of one's own",
        "EPERM",
        """
        import fcntl
        own = os.openpty()[1]
        attempt(lambda: fcntl.ioctl(own, 0x5423, struct.pack("i", 27)) and None)  # TIOCSETD: to N_NULL
        """,
        owed=(answered("EPERM"), refused("ioctl")),
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
