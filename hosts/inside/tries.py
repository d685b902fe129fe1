"""Runs in a guest, as whoever is to be served: some parts of what is tried. Each ends with a line of JSON, its result.

Imports are most of what an emulated machine would do here. So the first command of all is a program of its own, as a
user would start it; those after it, and pieces of Python, are forks of this process, which by then has imported what
they need and done nothing else.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

PROJECT = Path("/opt/project")
RINGFENCE = "/opt/ringfence/bin/ringfence"
PYTHON = "/opt/ringfence/bin/python3"
# A program has so long where its time is not what is tried: no result may depend on how fast the machine is.
LONG = 3000

checks: list[dict[str, object]] = []
data: dict[str, object] = {}


def check(name, ok, note=""):
    checks.append({"name": name, "ok": bool(ok), "note": "" if ok else str(note)[-1500:]})
    print(f"{'ok' if ok else 'FAILED'}: {name}" + ("" if ok else f": {str(note)[-1500:]}"), flush=True)


started = False


def ringfence(*words, stdin="", progress=False):
    """`progress`: what it says on stderr is ours to say, at once."""
    global started
    if not started:
        started = True
        err = None if progress else subprocess.PIPE
        whole = [RINGFENCE, *words]
        return subprocess.run(whole, input=stdin, stdout=subprocess.PIPE, stderr=err, text=True, check=False)

    def command():
        from ringfence.cli.main import main  # noqa: PLC0415, RUF100

        sys.argv = ["ringfence", *words]
        main()

    return forked(command, words, stdin, progress)


def python(code):
    return forked(lambda: exec(compile(code, "<code>", "exec"), {"__name__": "__main__"}), ["python", "-c", code])


def forked(work, words, stdin="", progress=False):
    """Do `work` in a child, as if that were a program of its own."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        with tempfile.TemporaryFile() as imported:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                given.seek(0)
                for number, file in enumerate((given, out) if progress else (given, out, err)):
                    os.dup2(file.fileno(), number)
                os._exit(alone(work, imported))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            imported.seek(0)
            learn(imported.read().decode().split())
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(words), code, *texts)


def alone(work, imported):
    """The whole life of a child, up to its exit code."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    imported.write(" ".join(name for name in sys.modules if name != "__main__").encode())
    imported.flush()
    return code


def learn(names):
    """Import what a child had to, so that the next one has it."""
    for name in names:
        if name.startswith("ringfence") and name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)


def shown(ended):
    return f"exit {ended.returncode}; stdout {ended.stdout[-300:]!r}; stderr {(ended.stderr or '')[-900:]!r}"


# ── Parts ─────────────────────────────────────────────────────────────────────────────────────────


def part_run():
    ended = ringfence("run", "-c", "print(6 * 7)", "--facts", "facts.json", "--timeout", str(LONG))
    check("a program runs", (ended.returncode, ended.stdout) == (0, "42\n"), shown(ended))
    if Path("facts.json").exists():
        facts = json.loads(Path("facts.json").read_text())
        data["limits"] = {name: limit["by"] for name, limit in facts["isolation"]["limits"].items()}
        check("the facts say how it ended", facts["ended"] == "exited", facts["ended"])
        off = [name for name, told in facts["isolation"]["protections"].items() if not told["on"]]
        check("every protection is on", not off, off)
    else:
        check("there are facts", False, "no facts.json")
    ended = ringfence("run", "-c", "import sys; sys.exit(3)", "--timeout", str(LONG))
    check("its exit code is ours", ended.returncode == 3, shown(ended))
    ended = ringfence("run", "-c", "import time; time.sleep(100000)", "--timeout", "1")
    check("124 after a timeout", ended.returncode == 124, shown(ended))
    ended = ringfence("run", "--shell", "kill -9 $$", "--timeout", str(LONG))
    check("128+n after a signal", ended.returncode == 137, shown(ended))


def blocks(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", (PROJECT / page).read_text(), re.MULTILINE | re.DOTALL)


def part_readme():
    Path("untrusted.py").write_text(
        "from pathlib import Path\n"
        "Path('output/n.txt').write_text(str(len(Path('input/data.csv').read_text().split())))\n"
    )
    Path("data.csv").write_text("1\n2\n3\n")
    words = ("untrusted.py", "--input", "data.csv", "--output", "results/", "--timeout", str(LONG))
    ended = ringfence("run", *words)
    made = Path("results/n.txt")
    check("input and output", ended.returncode == 0 and made.exists() and made.read_text() == "3", shown(ended))
    first, second = blocks("README.md", "python")
    # The block is taken as it stands, but for its five seconds.
    ended = python(first.replace("timeout=5", f"timeout={LONG}"))
    lines = ended.stdout.splitlines()
    good = ended.returncode == 0 and lines[:1] == ["42"] and "10" in lines
    check("run_code and Sandbox", good, shown(ended))
    Path("server.py").write_text(
        "from mcp.server import MCPServer\nserver = MCPServer('echo')\n@server.tool()\n"
        "def echo(text: str) -> str:\n    return text\nserver.run('stdio')\n"
    )
    second = second.replace('"python", "server.py"', f'"{PYTHON}", "{Path("server.py").absolute()}"')
    start = "from ringfence import Gateway"
    body = textwrap.indent(second.replace(start, ""), "    ")
    ended = python(f"{start}\nimport asyncio\nasync def main():\n{body}\nasyncio.run(main())\n")
    # The standard policy lets a tool through that says of itself that it only reads; this one says nothing.
    check("Gateway", ended.returncode == 0 and ended.stdout.strip(), shown(ended))
    data["gateway"] = ended.stdout.strip()


def part_sessions():
    page = "docs/tutorial-sessions.md"
    code, expected = "".join(blocks(page, "python")), "".join(blocks(page, "text"))
    ended = python(code)
    check("the tutorial prints what stands there", (ended.stdout, ended.returncode) == (expected, 0), shown(ended))
    made = ringfence("box", "list")
    check("box list", made.returncode == 0, shown(made))


def part_wrap():
    script = textwrap.dedent(f"""
        import asyncio
        from mcp import Client, StdioServerParameters
        async def main():
            words = ["wrap", "--", {PYTHON!r}, "/opt/project/examples/weather_server.py"]
            async with Client(StdioServerParameters(command={RINGFENCE!r}, args=words), mode="legacy") as client:
                result = await client.call_tool("forecast", {{"city": "Bergen"}})
                print(result.content[0].text)
        asyncio.run(main())
    """)
    ended = python(script)
    check("a tool of a wrapped server", (ended.returncode, ended.stdout) == (0, "Bergen: sunny\n"), shown(ended))


BOMBS = {
    "memory": """
held = []
for _ in range(400):
    held.append(b"x" * (1 << 20))
print("held", len(held))
""",
    "fork": """
import os, time
made = 0
try:
    for _ in range(2000):
        if os.fork() == 0:
            time.sleep(100000)
            os._exit(0)
        made += 1
except OSError as exc:
    print("stopped", made, exc.errno, flush=True)
    time.sleep(10)  # where no control group counts, what is over at once is not seen
""",
    "shared mapping": """
import mmap
# Not reserved: a guest with less memory than that refuses it otherwise, and nothing is tried.
area = mmap.mmap(-1, 3 << 30, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000)
for at in range(0, 1 << 30, 1 << 24):
    for page in range(at, at + (1 << 24), 4096):
        area[page] = 1
    area.madvise(mmap.MADV_DONTNEED, at, 1 << 24)
print("held 1024")
""",
    "UDP buffers": """
import os, socket
total = 0
go, gone = os.pipe()
for _ in range(12):
    if os.fork() == 0:
        held, mine = [], 0
        for _ in range(300):
            one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            one.bind(("127.0.0.1", 0))
            one.setblocking(False)
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sender.setblocking(False)
            held += [one, sender]
            for _ in range(12):
                try:
                    mine += sender.sendto(b"x" * 60000, one.getsockname())
                except OSError:
                    break
        os.write(gone, b"%d " % (mine >> 20))
        os.close(gone)
        import time
        time.sleep(100000)
os.close(gone)
told = b""
while told.count(b" ") < 12:
    more = os.read(go, 100)
    if not more:
        break
    told += more
print("held", sum(map(int, told.split())))
""",
    "page tables": """
import mmap
held = []
for _ in range(40):
    area = mmap.mmap(-1, 2048 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    area.madvise(15)
    for at in range(0, 2048 << 21, 1 << 21):
        area[at]
    held.append(area)
print("held", len(held) * 8)
""",
    "pipes": """
import fcntl, os, time
go, gone = os.pipe()
for _ in range(16):
    if os.fork() == 0:
        held, mine = [], 0
        try:
            for _ in range(480):
                read, write = os.pipe()
                os.set_blocking(write, False)
                held.append((read, write))
                try:
                    while True:
                        mine += os.write(write, b"x" * 65536)
                except BlockingIOError:
                    pass
        except OSError:
            pass
        os.write(gone, b"%d " % (mine >> 20))
        os.close(gone)
        time.sleep(100000)
os.close(gone)
told = b""
while told.count(b" ") < 16:
    more = os.read(go, 100)
    if not more:
        break
    told += more
print("held", sum(map(int, told.split())))
""",
}


def bomb(name, most_processes=64, **more):
    def work():
        import ringfence  # noqa: PLC0415, RUF100

        limits = ringfence.Limits(memory_bytes=128 << 20, processes=most_processes, wall_seconds=LONG)
        execution = ringfence.run_code(BOMBS[name], limits=limits, **more)
        facts = execution.facts
        told = {key: facts.get(key) for key in ("ended", "limit", "exit_status", "signal")}
        told["peak"] = facts["usage"]["peak_memory_bytes"]
        told["said"] = execution.text or "".join(execution.logs.stdout)
        told["error"] = str(execution.error or "")[-300:]
        print(json.dumps(told))

    ended = forked(work, ["bomb", name])
    if ended.returncode:
        raise RuntimeError(shown(ended))
    data[name] = told = json.loads(ended.stdout)
    return told


def met_memory(told):
    """Ended for it, or refused more and told so; a means that cannot hold more than the limit needs no end."""
    held = re.match(r"held (\d+)", str(told["said"] or ""))
    return told["limit"] == "memory" or told["ended"] == "oom" or (held is not None and int(held[1]) <= 128)


def part_bombs():
    told = bomb("memory")
    check("a memory bomb meets its limit", told["ended"] == "oom" and told["limit"] == "memory", told)
    told = bomb("fork", 32)
    stopped = re.match(r"stopped (\d+) 11", str(told["said"] or ""))
    check("a fork bomb meets its limit", told["limit"] == "pids" and (told["ended"] == "pids" or stopped), told)


def part_charges():
    for name in ("shared mapping", "UDP buffers", "page tables", "pipes"):
        more = {"listen": True} if name == "UDP buffers" else {}
        try:
            told = bomb(name, **more)
            check(f"{name} meet a limit of 128 MB", met_memory(told), told)
        except Exception as problem:  # the others are tried all the same
            check(f"{name} meet a limit of 128 MB", False, f"{type(problem).__name__}: {problem}")


def part_doctor(*words):
    ended = ringfence("doctor", "--json", *words, progress=True)
    try:
        told = json.loads(ended.stdout)
    except ValueError:
        check("doctor answers", False, shown(ended))
        return
    data.update({name: told[name] for name in ("kept", "broken", "not_counted")})
    data["tried"] = len(told["cases"])
    data["broken_cases"] = {one["id"]: str(one["got"])[:300] for one in told["cases"] if one["kept"] is False}
    data["not_counted_cases"] = {
        one["id"]: str(one.get("reason"))[:160] for one in told["cases"] if one["kept"] is None
    }
    check("no promise is broken", told["broken"] == 0, data["broken_cases"])


def family(pid):
    """A process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def wakes(pids):
    """How often their threads went to sleep by themselves, so far: each time something had woken them."""
    total = {}
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
            if found:
                total[f"{pid}/{status.parent.name}"] = int(found[1])
    return total


def part_idle():
    server = subprocess.Popen(
        [RINGFENCE, "serve", "--demo", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print(line.rstrip(), flush=True)
            if "Ringfence serves" in line:
                break
        # What a start leaves to do is done when nothing was for a while.
        quiet = 0
        while quiet < 3:
            before = sum(os.times()[:4])
            marks = wakes(family(server.pid))
            time.sleep(10)
            after = wakes(family(server.pid))
            moved = sum(after.values()) - sum(marks.get(one, 0) for one in after)
            quiet = quiet + 1 if moved < 100 else 0
            print(f"{moved} wakes in 10 s of {len(family(server.pid))} processes", before, flush=True)
            if server.poll() is not None:
                break
        pids = family(server.pid)
        marks, began = wakes(pids), time.monotonic()
        time.sleep(30)
        after, seconds = wakes(family(server.pid)), time.monotonic() - began
        each = {one: count - marks.get(one, 0) for one, count in after.items() if count != marks.get(one, 0)}
        rate = sum(each.values()) / seconds
        names = {one: Path(f"/proc/{one.split('/')[0]}/comm").read_text().strip() for one in each}
        data["wakes_per_second"] = round(rate, 2)
        data["processes"] = len(pids)
        data["each"] = {f"{names[one]} {one}": count for one, count in each.items()}
        check("an idle gateway wakes at most twice a second", rate <= 2, data["each"])
    finally:
        server.terminate()
        server.wait()


def part_refused():
    ended = ringfence("run", "-c", "print(1)", "--timeout", str(LONG))
    check("refused with 125", ended.returncode == 125, shown(ended))
    check("with a command to run", "ringfence host" in ended.stderr or "sysctl" in ended.stderr, shown(ended))
    ended = ringfence("host")
    data["host"] = ended.stdout[-1500:]
    check("`host` says that it is missing", ended.returncode == 1, shown(ended))


def part_refused_container():
    ended = ringfence("run", "-c", "print(1)", "--timeout", str(LONG))
    check("refused with 125", ended.returncode == 125, shown(ended))
    ended = ringfence("host")
    data["host"] = ended.stdout[-1500:]
    check("`host` names the options that are missing", "--security-opt" in ended.stdout, shown(ended))


def part_mend():
    ended = ringfence("host", "--fix", "--yes", "--user", "ada")
    data["host"] = ended.stdout[-1500:]
    check("`host --fix` mends it", ended.returncode == 0, shown(ended))


def part_host():
    ended = ringfence("host", "--json")
    try:
        data["host"] = json.loads(ended.stdout)
    except ValueError:
        data["host"] = ended.stdout[-1500:]
    check("boxes can be made", ended.returncode == 0, shown(ended))


def main():
    good = True
    for part in sys.argv[1:]:
        name, *words = shlex.split(part)
        checks.clear()
        data.clear()
        folder = tempfile.mkdtemp()  # not one that removes itself: children would do that at their end
        os.chdir(folder)
        try:
            globals()[f"part_{name}"](*words)
        except Exception:  # whatever went wrong is the result
            check("nothing unexpected happens", False, traceback.format_exc())
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({"part": name, "checks": checks, "data": data}), flush=True)
        good = good and all(one["ok"] for one in checks)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
