"""P: programs that a box is not to have, where only named ones may run. The code that tries it is in the box already:
a program that can run anything can run this."""

from __future__ import annotations

from dataclasses import replace

from ringfence.core.box import Programs
from ringfence.doctor.case import Case, Trial, claimed

_RUN = """
import stat, subprocess
def run(*words, sign=b"uid="):
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=a_while(10))
    except subprocess.SubprocessError as exc:
        raise OSError(errno.EIO, str(exc))
    if sign not in done.stdout + done.stderr:
        raise OSError(errno.ENOEXEC, done.stderr.decode("utf-8", "replace")[-80:])
def loader():
    with open("/bin/sh", "rb") as file:
        data = file.read(8192)
    at = data.find(b"/ld-")
    start = data.rfind(b"\\0", 0, at) + 1
    return data[start:data.index(b"\\0", at)].decode()
def run_once(path, *before):
    # Outside of a box this is a place of the host's, and nothing is to be left there.
    try:
        run(*before, path)
    finally:
        os.unlink(path)
def copied(path, folder):
    target = f"{folder}/copy-{given['marker']}"
    with open(path, "rb") as old, open(target, "wb") as new:
        new.write(old.read())
    os.chmod(target, 0o755)
    return target
places = ("/workspace/tmp", "/workspace/output", "/workspace", "/dev/shm", "/tmp", "/var/tmp", ".")
here = [place for place in places if os.access(place, os.W_OK)]
"""
_WITHOUT_ID = Programs(("cat", "env", "xargs", "find", "timeout"))
_WITH_ID = Programs(("id", "cat"))


def _enforced(trial: Trial) -> str | None:
    reported = trial.report.commands
    return None if reported == "enforced" else f"the facts say commands={reported!r}"


_CASES = (
    Case(
        "P60",
        "run a program that is not among the allowed ones, by its name and its paths",
        "ENOENT or EACCES: it is not there",
        _RUN
        + "any_of({path: lambda path=path: run(path) for path in ('id', '/bin/id', '/usr/bin/id', '/usr/bin/../bin/id',"
        + " '/proc/self/root/usr/bin/id', '/proc/1/root/usr/bin/id')})",
        owed=(_enforced,),
        programs=_WITHOUT_ID,
    ),
    Case(
        "P61",
        "have programs that run others run it",
        "none of them finds it",
        _RUN
        + """
tries = {"env": ("env", "id"), "xargs": ("xargs", "id"), "timeout": ("timeout", "5", "id")}
tries |= {"sh": ("/bin/sh", "-c", "id")}
tries["find"] = ("find", "/", "-maxdepth", "0", "-exec", "id", ";")
any_of({name: lambda words=words: run(*words) for name, words in tries.items()})
""",
        owed=(_enforced,),
        programs=_WITHOUT_ID,
    ),
    Case(
        "P62",
        "run a denied program under another name of its file, in another version, or from a copy that the host has",
        "every one of them is gone",
        _RUN
        + """
names = {"perl", "/usr/bin/perl", "/bin/perl"}
for folder in ("/usr/bin", "/usr/local/bin", "/usr/lib", "/usr/libexec"):
    listed = os.listdir(folder) if os.path.isdir(folder) else ()
    names |= {f"{folder}/{name}" for name in listed if name.startswith("perl")}
script = "print qq(uid=perl)"
any_of({name: lambda name=name: run(name, "-e", script) for name in sorted(names)})
""",
        programs=Programs(None, ("perl",)),
    ),
    Case(
        "P63",
        "execute a copy of an allowed program from wherever one can write",
        "EACCES: what can be written cannot be executed",
        _RUN + "any_of({place: lambda place=place: run_once(copied('/usr/bin/id', place)) for place in here})",
        owed=(_enforced,),
        programs=_WITH_ID,
    ),
    Case(
        "P64",
        "execute a script of one's own",
        "EACCES",
        _RUN
        + """
def script(place):
    path = f"{place}/script-{given['marker']}"
    with open(path, "w") as file:
        file.write("#!/bin/sh\\necho uid=script\\n")
    os.chmod(path, 0o755)
    run_once(path)
any_of({place: lambda place=place: script(place) for place in here})
""",
        owed=(_enforced,),
        programs=_WITH_ID,
    ),
    Case(
        "P65",
        "have the loader run a copy from wherever one can write",
        "it cannot map it",
        _RUN
        + "any_of({place: lambda place=place: run_once(copied('/usr/bin/id', place), loader()) for place in here})",
        owed=(_enforced,),
        programs=_WITH_ID,
    ),
    Case(
        "P66",
        "have the loader run a program that is not among the allowed ones, from wherever the host has one",
        "there is nothing in its place",
        _RUN
        + """
def programs(top):
    found = []
    for folder, _, names in os.walk(top):
        for name in names:
            path = f"{folder}/{name}"
            try:
                with open(path, "rb") as file:
                    head = file.read(4096)
                    if ".so" not in name and head[:4] == b"\\x7fELF" and b"/ld-" in head:
                        found.append(path)
            except OSError:
                continue
    return found
def load(path):
    words, most = (loader(), "--verify", path), a_while(10)
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=most)
    if done.returncode not in (0, 2):
        raise OSError(errno.ENOEXEC, path)
found = ["/usr/bin/id", *programs("/usr/libexec"), *programs("/usr/lib")]
any_of({path: lambda path=path: load(path) for path in found[:40]})
""",
        owed=(_enforced,),
        programs=_WITHOUT_ID,
    ),
    Case(
        "P67",
        "execute a program from memory that has no file",
        "there is no such memory",
        _RUN
        + """
def execute():
    with open("/usr/bin/id", "rb") as file:
        program = file.read()
    descriptor = os.memfd_create("program", 0)
    os.write(descriptor, program)
    run(f"/proc/{os.getpid()}/fd/{descriptor}")
attempt(execute)
""",
        owed=(_enforced,),
        programs=_WITH_ID,
    ),
    Case(
        "P68",
        "execute what lies outside of the folders of programs: a library that is a program as well",
        "EACCES: only what is named may be executed",
        _RUN
        + """
def libraries():
    with open("/proc/self/maps") as file:
        return {line.split()[-1] for line in file if "/libc.so" in line or "/libc-2" in line}
any_of({path: lambda path=path: run(path, sign=b"C Library") for path in libraries()})
""",
        owed=(_enforced,),
        programs=_WITHOUT_ID,
    ),
    Case(
        "P69",
        "bring a denied program in as an input, or through the input of the command, and execute that",
        "EACCES: neither can be executed",
        _RUN
        + """
def given_file():
    os.chmod("/workspace/input/tool", 0o755) if os.access("/workspace/input/tool", os.W_OK) else None
    run("/workspace/input/tool" if os.path.exists("/workspace/input/tool") else "input/tool")
def standard_input():
    try:
        os.fchmod(0, 0o755)
    except OSError:
        pass
    run(f"/proc/{os.getpid()}/fd/0")
any_of({"input": given_file, "stdin": standard_input})
""",
        hit=claimed,
        owed=(_enforced,),
        inputs={"tool": b"#!/bin/sh\necho uid=input\n"},
        stdin=b"#!/bin/sh\necho uid=stdin\n",
        programs=_WITHOUT_ID,
    ),
    Case(
        "P70",
        "run a program of a tree that came with the box, such as a package's: by itself, and by the loader",
        "EACCES, and the loader cannot map it, whatever its name and mode",
        _RUN
        + """
names = ("id", "lib/id", "id.so.1")
tries = {name: lambda name=name: run(f"{given['code']}/{name}") for name in names}
tries |= {f"loader {name}": lambda name=name: run(loader(), f"{given['code']}/{name}") for name in names}
any_of(tries)
""",
        owed=(_enforced,),
        props=("code",),
        programs=_WITHOUT_ID,
    ),
    Case(
        "P71",
        "map code of such a tree into a program that is allowed, as LD_PRELOAD does",
        "EPERM, and EACCES where it is mapped first and made code later",
        """
import mmap
def mapped(protection):
    descriptor = os.open(f"{given['code']}/id.so.1", os.O_RDONLY)
    return mmap.mmap(descriptor, 4096, flags=mmap.MAP_PRIVATE, prot=protection)
def later():
    area = mapped(mmap.PROT_READ | mmap.PROT_WRITE)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
any_of({"mmap": lambda: mapped(mmap.PROT_READ | mmap.PROT_EXEC), "mprotect": later})
""",
        owed=(_enforced,),
        props=("code",),
        programs=_WITHOUT_ID,
    ),
)

# Without it, what is named is no more than advice, and the facts say so.
CASES = tuple(replace(case, rests_on="landlock") for case in _CASES)
