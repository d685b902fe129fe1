"""F: reading and changing files of the host."""

from __future__ import annotations

from ringfence.doctor.case import Case
from ringfence.doctor.judging import answered, changed, claimed_after, revealed

_ABSENT = "ENOENT: of the host only the interpreter and system libraries are there"
_READ_ONLY = "EROFS: what the host lends is read-only"

READING = (
    Case(
        "F01",
        "read a file of the host by its absolute path",
        _ABSENT,
        "attempt(lambda: open(given['canary']).read())",
        revealed,
        owed=(answered("ENOENT", "EACCES"),),
    ),
    Case(
        "F02",
        "read an SSH key and cloud credentials from the user's home",
        _ABSENT,
        """
        any_of({name: lambda name=name: open(given["home"] + "/" + name).read()
                for name in (".ssh/id_ed25519", ".aws/credentials")})
        """,
        revealed,
    ),
    Case(
        "F03",
        "find anything in the folders where people keep things",
        "nothing there but the way to the interpreter, and the box's own folders",
        """
        found = []
        own = os.stat(".").st_dev
        leads = [os.path.realpath(path) + "/" for path in (sys.base_prefix, sys.prefix, sys.executable or "/usr")]
        for top in ("/root", "/home", "/var", "/opt", "/srv", "/mnt", "/boot", "/media", "/run", "/sys", "/work"):
            try:
                inside = [f"{top}/{name}" for name in os.listdir(top)]
            except OSError:
                continue
            # Of /sys, a box has the number of its processors: P48.
            found += [path for path in inside if path not in ("/run/guest.py", "/sys/devices")
                      and not any(lead.startswith(path + "/") for lead in leads)
                      and not (os.path.exists(path) and os.stat(path).st_dev == own)]
        say(bool(found), f"{len(found)} entries, among them {found[0]}" if found else "nothing")
        """,
    ),
    Case(
        "F04",
        "go out through the root folder of process 1",
        "the box's own root, or none",
        "attempt(lambda: open('/proc/1/root' + given['canary']).read())",
        revealed,
    ),
    Case(
        "F05",
        "go out through one's own root, working folder and an open folder, as /proc shows them",
        "they lead nowhere else",
        """
        here = os.open(".", os.O_RDONLY)
        up = "../" * 40
        any_of({name: lambda name=name: open(f"/proc/self/{name}/{up}{given['canary']}").read()
                for name in ("root", "cwd", f"fd/{here}")})
        """,
        revealed,
    ),
    Case(
        "F06",
        "follow a link in the workspace that points to a file of the host",
        "ENOENT: its target does not exist in the box",
        """
        os.symlink(given["canary"], "link")
        attempt(lambda: open("link").read())
        """,
        revealed,
    ),
    Case(
        "F07",
        "climb above the root with dots",
        _ABSENT,
        "attempt(lambda: open('../' * 64 + given['canary'].lstrip('/')).read())",
        revealed,
    ),
    Case(
        "F08",
        "read who has an account on the host",
        "a list of accounts made for the box",
        """
        text = open("/etc/passwd").read()
        names = [line.split(":")[0] for line in text.splitlines()]
        say(len(names) > 3, f"{len(names)} accounts" if len(names) > 3 else ", ".join(names))
        """,
    ),
    Case(
        "F09",
        "look for password hashes, host keys, cloud and service configuration in /etc",
        _ABSENT,
        """
        there("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/fstab", "/etc/crontab", "/etc/cron.d",
              "/etc/machine-id", "/etc/docker", "/etc/kubernetes", "/etc/environment", "/etc/ssl/private")
        """,
    ),
    Case(
        "F10",
        "see the sandbox's own source and its dependencies",
        _ABSENT,
        "there(given['package'])",
    ),
    Case(
        "F11",
        "find what an earlier box left in the workspace, /tmp, /dev/shm and the home folder",
        "all of them are new and empty",
        """
        token = given["marker"]
        left = []
        for folder in (os.getcwd(), "output", "tmp", "/dev/shm", os.environ.get("HOME") or "."):
            try:
                open(f"{folder}/left-{token}", "w").write(token)
                left.append(folder)
            except OSError:
                pass
        say(False, f"left in {len(left)} places")
        """,
        claimed_after,
        then="""
        token = given["marker"]
        found = [folder for folder in (os.getcwd(), "output", "tmp", "/dev/shm", "/tmp", os.environ.get("HOME") or ".")
                 if os.path.exists(f"{folder}/left-{token}")]
        say(bool(found), ", ".join(found) or "nothing left")
        """,
    ),
)

CHANGING = (
    Case(
        "F20",
        "write into a file of a folder that the host lends",
        _READ_ONLY,
        "attempt(lambda: open(given['tree'], 'a').write('changed') and None)",
        changed,
        owed=(answered("EROFS"),),
        props=("tree",),
    ),
    Case(
        "F21",
        "plant files in a lent folder that the host would run later: a git hook, a shell start-up file, a server list",
        _READ_ONLY,
        """
        def plant(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
            open(name, "w").write("planted")
        any_of({name: lambda name=name: plant(given["tree_folder"] + "/" + name)
                for name in (".git/hooks/pre-commit", ".bashrc", ".mcp.json", "sitecustomize.py")})
        """,
        changed,
        owed=(answered("EROFS"),),
        props=("tree",),
    ),
    Case(
        "F22",
        "replace a lent file by renaming another over it",
        _READ_ONLY,
        """
        folder = given["tree_folder"]
        attempt(lambda: os.rename(folder + "/tool", folder + "/canary.txt"))
        """,
        changed,
        owed=(answered("EROFS"),),
        props=("tree",),
    ),
    Case(
        "F23",
        "delete a lent file",
        _READ_ONLY,
        "attempt(lambda: os.unlink(given['tree']))",
        changed,
        owed=(answered("EROFS"),),
        props=("tree",),
    ),
    Case(
        "F24",
        "change mode, times and attributes of a lent file",
        _READ_ONLY,
        """
        path = given["tree"]
        any_of({
            "chmod": lambda: os.chmod(path, 0o600),
            "utime": lambda: os.utime(path),
            "setxattr": lambda: os.setxattr(path, "user.mark", b"1"),
            "truncate": lambda: os.truncate(path, 3),
        })
        """,
        changed,
        props=("tree",),
    ),
    Case(
        "F25",
        "open a lent file harmlessly and open it again for writing through /proc/self/fd",
        _READ_ONLY,
        """
        held = os.open(given["tree_folder"] + "/tool", os.O_PATH)
        def again():
            os.write(os.open(f"/proc/self/fd/{held}", os.O_WRONLY), b"changed")
        attempt(again)
        """,
        changed,
        owed=(answered("EROFS", "EACCES"),),
        props=("tree",),
    ),
    Case(
        "F26",
        "give a lent file a second name on the host",
        "EROFS or EXDEV",
        """
        folder = given["tree_folder"]
        any_of({"beside it": lambda: os.link(folder + "/tool", folder + "/second"),
                "in the workspace": lambda: os.link(folder + "/tool", "second")})
        """,
        changed,
        props=("tree",),
    ),
    Case(
        "F27",
        "change a file of the host that was not lent, by its absolute path",
        _ABSENT,
        """
        path = given["canary"]
        any_of({"write": lambda: open(path, "a").write("changed"), "chmod": lambda: os.chmod(path, 0o600),
                "unlink": lambda: os.unlink(path), "utime": lambda: os.utime(path)})
        """,
        changed,
    ),
    Case(
        "F30",
        "write over an input file",
        "EROFS: inputs are read-only",
        """
        def change():
            open("input/data.txt", "w").write("changed")
            return open("input/data.txt").read()
        attempt(change)
        """,
        owed=(answered("EROFS", "EACCES"),),
        inputs={"data.txt": b"as given"},
    ),
    Case(
        "F31",
        "add, rename and delete in the input folder",
        "EROFS: inputs are read-only",
        """
        any_of({
            "add": lambda: open("input/new", "w").close(),
            "rename": lambda: os.rename("input/data.txt", "input/other.txt"),
            "delete": lambda: os.unlink("input/deep/more.txt"),
            "chmod": lambda: os.chmod("input/deep", 0o777),
        })
        """,
        inputs={"data.txt": b"as given", "deep/more.txt": b"as given"},
    ),
    Case(
        "F32",
        "put another folder in the place of the input folder",
        "EBUSY: it is a mount",
        """
        def swap():
            os.rename("input", "tmp/moved")
            os.mkdir("input")
        attempt(swap)
        """,
        inputs={"data.txt": b"as given"},
    ),
)

_MOUNTED = """
# What lies beneath another mount cannot be reached by any path.
inside = [m for m in mounts() if m["at"] not in ALLOWED and os.path.lexists(m["at"])]
wrong = [m["at"] for m in inside if FLAG not in m["flags"].split(",")]
say(bool(wrong), f"{len(wrong)} mounts, among them {wrong[0]}" if wrong else f"none of {len(inside)}")
"""
MOUNTS = (
    Case(
        "F40",
        "find a mount beside the workspace that is not read-only",
        "none but /proc, and the box's own terminals",
        "ALLOWED, FLAG = ('/workspace', '/workspace/tmp', '/workspace/output', '/dev/shm', '/tmp', '/var/tmp',"
        + " '/home/user', '/proc', '/proc/mounts', '/dev/pts'), 'ro'"
        + _MOUNTED,
    ),
    Case(
        "F41",
        "find a mount on which setuid files count",
        "none: all are nosuid",
        "ALLOWED, FLAG = (), 'nosuid'" + _MOUNTED,
    ),
    Case(
        "F42",
        "find a mount on which device nodes work, beside the few devices themselves",
        "none: all are nodev",
        "ALLOWED = tuple(f'/dev/{n}' for n in ('null', 'zero', 'full', 'random', 'urandom', 'tty', 'pts'))\n"
        + "FLAG = 'nodev'"
        + _MOUNTED,
    ),
    Case(
        "F43",
        "find a second /proc beside one's own, or the host's root",
        "exactly one, at /proc, with its own file of mounts, and a root made for the box",
        """
        found = [m["at"] for m in mounts() if m["kind"] == "proc" and m["at"] != "/proc/mounts"]
        root = [m["kind"] for m in mounts() if m["at"] == "/"]
        say(found != ["/proc"] or root not in (["tmpfs"], ["overlay"], ["9p"]), ", ".join(found + root))
        """,
    ),
    Case(
        "F44",
        "give a file capabilities",
        "EPERM",
        """
        open("tool", "w").close()
        value = struct.pack("IIIII", 0x02000001, 1 << 21, 0, 0, 0)
        attempt(lambda: os.setxattr("tool", "security.capability", value))
        """,
        owed=(answered("EPERM", "EOPNOTSUPP", "ENOTSUP", "EACCES"),),
    ),
    Case(
        "F45",
        "make an overlay's deletion mark in the output folder",
        "EPERM and EINVAL: no device node of any kind, not even an empty one",
        """
        open("output/there", "w").close()
        any_of({"mknod": lambda: os.mknod("output/gone", 0o020000, os.makedev(0, 0)),
                "rename": lambda: call("renameat2", -100, b"output/there", -100, b"output/moved", 4)})
        """,
        owed=(answered("EACCES", "EPERM"),),
    ),
    Case(
        "F46",
        "keep a way out: an open folder whose path is gone",
        "its dots end at the box's root",
        """
        os.makedirs("a/b")
        held = os.open("a/b", os.O_RDONLY)
        os.rename("a/b", "c")
        os.fchdir(held)
        attempt(lambda: open("../" * 64 + given["canary"].lstrip("/")).read())
        """,
        revealed,
    ),
    Case(
        "F47",
        "write to what /proc shows of oneself: one's name, one's place in the queue when memory runs out",
        "EACCES: nothing is written outside of the workspace, by Landlock",
        """
        any_of({name: lambda name=name: os.close(os.open(f"/proc/self/{name}", os.O_WRONLY))
                for name in ("comm", "oom_score_adj", "coredump_filter", "timerslack_ns")})
        """,
        owed=(answered("EACCES"),),
        rests_on="landlock",
    ),
)

CASES = READING + CHANGING + MOUNTS
