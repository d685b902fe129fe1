"""Small programs about the system: processes, signals, files, sockets, clocks."""

from __future__ import annotations

from tests.sandbox.comparing import Honest

PROGRAMS = (
    Honest(
        "subprocess",
        """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True))
        print(subprocess.run("echo $0 $HOME; exit 3", shell=True, capture_output=True, text=True))
        print(subprocess.run(["cat"], input=b"piped", capture_output=True))
        print(subprocess.check_output([sys.executable, "-c", "import sys; print(sys.flags, sys.path)"]))
        try: subprocess.run(["sleep", "60"], timeout=0.2)
        except subprocess.TimeoutExpired as exc: print(exc)
        try: subprocess.run(["no-such-program"])
        except FileNotFoundError as exc: print(exc)
        with subprocess.Popen(["sort"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            print(p.communicate("b\\na\\n"))
        subprocess.run(["kill", "-9", "0"], start_new_session=True)
        subprocess.check_call(["false"])
        """,
    ),
    Honest(
        "child_that_writes_to_our_streams",
        "import subprocess, sys\nprint('first', flush=True)\nsubprocess.run([sys.executable, '-c', 'import sys; print(sys.stdin.read()); 1/0'])\nprint('last')",
        stdin=b"for the child",
    ),
    Honest(
        "multiprocessing_fork",
        """
        import multiprocessing as mp
        def square(x): return x * x
        if __name__ == "__main__":
            context = mp.get_context("fork")
            with context.Pool(2) as pool: print(pool.map(square, range(5)))
            queue = context.Queue(); child = context.Process(target=queue.put, args=("from the child",))
            child.start(); print(queue.get(), child.join(), child.exitcode)
            with context.Manager() as manager: print(manager.list([1, 2]), dict(manager.dict(a=1)))
            lock, value = context.Lock(), context.Value("i", 5)
            with lock: print(value.value)
        """,
    ),
    Honest(
        "multiprocessing_spawn",
        """
        import multiprocessing as mp, sys
        def square(x): return x * x, __name__, sys.argv
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(2) as pool: print(pool.map(square, range(3)))
        """,
        argv=("x",),
    ),
    Honest(
        "multiprocessing_forkserver",
        """
        import multiprocessing as mp
        def square(x): return x * x, __name__
        if __name__ == "__main__":
            with mp.get_context("forkserver").Pool(2) as pool: print(pool.map(square, range(3)))
        """,
    ),
    Honest(
        "shared_memory",
        """
        from multiprocessing import shared_memory, Process, resource_tracker
        def write(name):
            other = shared_memory.SharedMemory(name); other.buf[:5] = b"hello"; other.close()
        if __name__ == "__main__":
            memory = shared_memory.SharedMemory(create=True, size=100)
            child = Process(target=write, args=(memory.name,)); child.start(); child.join()
            print(bytes(memory.buf[:5])); memory.close(); memory.unlink()
        """,
    ),
    Honest(
        "executors",
        """
        from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
        def work(n):
            if n == 3: raise ValueError("three")
            return n + 1
        if __name__ == "__main__":
            with ThreadPoolExecutor(4) as threads: print(list(threads.map(work, range(3))))
            with ProcessPoolExecutor(2) as processes:
                print(list(processes.map(work, range(3))))
                try: processes.submit(work, 3).result()
                except ValueError as exc: print(repr(exc))
        """,
    ),
    Honest(
        "asyncio_subprocess_and_servers",
        """
        import asyncio, sys
        async def echo(reader, writer):
            writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
        async def main():
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
            print(await child.communicate(b"hi\\n"), child.returncode)
            print(await (await asyncio.create_subprocess_shell("exit 4")).wait())
            server = await asyncio.start_server(echo, "localhost", 0)
            for sock in server.sockets[:1]:
                reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
                writer.write(b"tcp\\n"); print(await reader.read()); writer.close()
            server.close()
            unix = await asyncio.start_unix_server(echo, "tmp/sock")
            reader, writer = await asyncio.open_unix_connection("tmp/sock")
            writer.write(b"unix\\n"); print(await reader.read()); writer.close(); unix.close()
            loop = asyncio.get_running_loop()
            print(await loop.run_in_executor(None, lambda: 5), [i[4] for i in await loop.getaddrinfo("127.0.0.1", 80, type=1)])
        asyncio.run(main())
        """,
    ),
    Honest(
        "http_server",
        """
        import http.server, threading, urllib.request
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200); self.end_headers(); self.wfile.write(self.path.encode())
            def log_message(self, *args): pass
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/there").read())
        server.shutdown()
        """,
    ),
    Honest(
        "signals",
        """
        import os, signal, time
        def handler(number, frame): print("got", signal.Signals(number).name, frame.f_code.co_name)
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM): signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()
        os.kill(os.getpid(), signal.SIGINT); signal.raise_signal(signal.SIGUSR1)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.kill(os.getpid(), signal.SIGUSR2); print(signal.sigwait([signal.SIGUSR2]))
        read, write = os.pipe(); os.set_blocking(write, False)
        signal.set_wakeup_fd(write); os.kill(os.getpid(), signal.SIGTERM); print(os.read(read, 1)); signal.set_wakeup_fd(-1)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(60)
        os.kill(child, signal.SIGSTOP); print(os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]))
        os.kill(child, signal.SIGCONT); os.kill(child, signal.SIGTERM); print(os.waitpid(child, 0)[1])
        signal.alarm(1)
        try:
            signal.signal(signal.SIGALRM, lambda *a: 1 / 0); time.sleep(60)
        except ZeroDivisionError: print("woken")
        """,
    ),
    Honest("terminated", "import os, signal\nprint('buffered and lost')\nos.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(9)"),
    Honest("alarm_unhandled", "import signal, time\nsignal.alarm(1)\ntime.sleep(9)"),
    Honest("broken_pipe", "import os\nr, w = os.pipe(); os.close(r)\nos.write(w, b'x')"),
    Honest(
        "fork_and_exec",
        """
        import os, sys
        print("parent", flush=True)
        read, write = os.pipe()
        if not (child := os.fork()):
            os.dup2(write, 1); os.execv("/bin/sh", ["sh", "-c", "echo from sh; exit 5"])
        os.close(write)
        print(os.read(read, 100), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(os.waitstatus_to_exitcode(os.system("exit 7")), os.popen("echo popen").read())
        print(os.posix_spawn("/bin/true", ["true"], {}) > 0, os.wait()[1])
        sys.stdout.flush()
        os.execlp(sys.executable, "python", "-c", "import sys; print('replaced', sys.argv); sys.exit(6)", "arg")
        """,
    ),
    Honest("fork_and_go_on", "import os\nprint('both', flush=True)\nchild = os.fork()\nif child: os.waitpid(child, 0)\nprint('end', child > 0)"),
    Honest("fork_and_leave", "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(0.1)\n    os._exit(0)\nos.wait()\nprint('done')"),
    Honest(
        "a_script_made_at_run_time",
        """
        import os, subprocess
        for name, text in (("s.sh", "#!/bin/sh\\necho script $1\\n"), ("s.py", "#!/usr/bin/env python3\\nimport sys; print(sys.argv[1:])\\n")):
            with open(name, "w") as file: file.write(text)
            os.chmod(name, 0o755)
            print(subprocess.run(["./" + name, "arg"], capture_output=True))
        with open("s.sh", "a"): pass
        os.chmod("s.sh", 0o644)
        subprocess.run(["./s.sh"])
        """,
    ),
    Honest(
        "pipes_select_epoll",
        """
        import os, select, selectors, socket
        read, write = os.pipe(); os.write(write, b"x")
        print(select.select([read], [], [], 1)[0] == [read])
        poll = select.poll(); poll.register(read, select.POLLIN); print([event for _, event in poll.poll(10)])
        with select.epoll() as epoll:
            epoll.register(read, select.EPOLLIN); print([event for _, event in epoll.poll(1)])
        a, b = socket.socketpair(); b.send(b"y")
        with selectors.DefaultSelector() as selector:
            selector.register(a, selectors.EVENT_READ); print(len(selector.select(1)), type(selector).__name__)
        print(os.eventfd_read(os.eventfd(3)), os.get_blocking(read), os.get_inheritable(read))
        """,
    ),
    Honest(
        "sockets",
        """
        import socket, os, struct
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0)), (socket.AF_UNIX, "tmp/s"), (socket.AF_UNIX, "\\0abstract")):
            with socket.socket(family) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(address); server.listen()
                with socket.socket(family) as client:
                    client.connect(server.getsockname()); other = server.accept()[0]
                    client.sendall(b"hello"); print(family.name, other.recv(10)); other.close()
        with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as two:
            two.bind(("127.0.0.1", 0)); one.sendto(b"udp", two.getsockname()); print(two.recvfrom(10)[0])
        left, right = socket.socketpair()
        read, write = os.pipe(); socket.send_fds(left, [b"fd"], [write])
        message, given, _, _ = socket.recv_fds(right, 10, 1); os.write(given[0], b"through"); print(message, os.read(read, 10))
        print(right.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4] == struct.pack("i", os.getpid()))
        print(socket.getaddrinfo("localhost", 80, socket.AF_INET, socket.SOCK_STREAM)[0][4], socket.getservbyname("http"))
        try: socket.create_connection(("127.0.0.1", 1))
        except ConnectionRefusedError as exc: print(exc)
        """,
    ),
    Honest(
        "files",
        """
        import os, pathlib, stat, shutil, fcntl, time
        os.makedirs("a/b"); pathlib.Path("a/b/f").write_text("text")
        os.symlink("b/f", "a/link"); os.link("a/b/f", "a/hard"); os.mkfifo("a/fifo", 0o600)
        print(sorted(os.listdir("a")), os.readlink("a/link"), os.stat("a/hard").st_nlink, stat.filemode(os.stat("a/fifo").st_mode))
        os.chmod("a/b/f", 0o640); os.utime("a/b/f", (1, 2)); state = os.stat("a/b/f")
        print(oct(state.st_mode), state.st_mtime, state.st_size, state.st_uid == os.getuid(), os.access("a/b/f", os.X_OK))
        print([(root, sorted(folders), sorted(files)) for root, folders, files in sorted(os.walk("a"))])
        os.rename("a/b", "a/c"); shutil.copytree("a/c", "d"); shutil.rmtree("a")
        with open("d/f", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
            os.truncate(file.fileno(), 2); os.posix_fallocate(file.fileno(), 0, 100); os.fsync(file.fileno())
            file.seek(50); file.write(b"x"); print(os.fstat(file.fileno()).st_size, os.pread(file.fileno(), 2, 0))
        print(sorted(os.listdir(".")), os.getcwd(), oct(os.umask(0o077)), os.path.exists("/nonexistent"))
        print(shutil.disk_usage(".").total > 0, os.statvfs(".").f_namemax, os.sync())
        try: open("/nonexistent/x", "w")
        except OSError as exc: print(exc)
        """,
    ),
    Honest(
        "tempfile",
        """
        import tempfile, os
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as named, tempfile.TemporaryFile() as unnamed:
            named.write(b"x"); unnamed.write(b"y"); named.flush()
            print(os.path.getsize(named.name), tempfile.gettempdir(), os.listdir(folder) == [os.path.basename(named.name)])
        left = tempfile.TemporaryDirectory(); print(os.path.isdir(left.name))
        spooled = tempfile.SpooledTemporaryFile(10); spooled.write(b"z" * 20); print(spooled.tell())
        """,
    ),
    Honest(
        "sqlite3",
        """
        import sqlite3
        for place in (":memory:", "output/data.db"):
            with sqlite3.connect(place) as db:
                db.execute("pragma journal_mode=wal")
                db.execute("create table t (a integer primary key, b text unique)")
                db.executemany("insert into t (b) values (?)", [("x",), ("ü",)])
                print(db.execute("select * from t order by a").fetchall(), db.total_changes)
                try: db.execute("insert into t (b) values ('x')")
                except sqlite3.IntegrityError as exc: print(exc)
            db.close()
        import os; os.remove("output/data.db")
        """,
    ),
    Honest(
        "archives",
        """
        import zipfile, tarfile, gzip, bz2, lzma, zlib, io, shutil, os
        os.mkdir("t"); open("t/a.txt", "w").write("a" * 1000)
        for kind in ("zip", "gztar", "xztar", "bztar"):
            name = shutil.make_archive("tmp/x", kind, "t"); shutil.unpack_archive(name, "u"); print(kind, os.listdir("u"))
        with zipfile.ZipFile(io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as z: z.writestr("n", "x"); print(z.namelist())
        print([module.decompress(module.compress(b"data")) for module in (gzip, bz2, lzma, zlib)])
        """,
    ),
    Honest(
        "mmap",
        """
        import mmap, os
        with open("m", "w+b") as file:
            file.truncate(8192)
            with mmap.mmap(file.fileno(), 0) as shared: shared[:4] = b"abcd"; shared.flush()
            print(file.read(4))
        anonymous = mmap.mmap(-1, 4096)
        if not os.fork():
            anonymous[:5] = b"child"; os._exit(0)
        os.wait(); print(anonymous[:5], mmap.PAGESIZE > 0)
        """,
    ),
    Honest(
        "ctypes",
        """
        import ctypes, ctypes.util
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.abs(-3), ctypes.string_at(libc.strerror and ctypes.c_char_p(b"text")), libc.close(-1), ctypes.get_errno())
        compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))(lambda a, b: a[0] - b[0])
        numbers = (ctypes.c_int * 4)(4, 2, 3, 1); libc.qsort(numbers, 4, 4, compare); print(list(numbers))
        print(ctypes.util.find_library("c"))
        """,
    ),
    Honest(
        "encodings",
        """
        import codecs, encodings, io, pkgutil, locale, unicodedata
        print(len(sorted(m.name for m in pkgutil.iter_modules(encodings.__path__))))
        print([codecs.encode("ä", e) for e in ("utf-16", "latin-1", "cp437", "utf-7", "idna", "punycode", "shift_jis_2004") if e != "shift_jis_2004"])
        print(io.TextIOWrapper(io.BytesIO(b"x"), encoding="locale").encoding, unicodedata.name("ü"))
        print(locale.setlocale(locale.LC_ALL, ""), locale.localeconv()["decimal_point"], locale.strcoll("a", "b"), f"{1234:n}")
        """,
    ),
    Honest(
        "clocks_and_zones",
        """
        import time, datetime, os, zoneinfo
        print(time.tzname, time.timezone, datetime.datetime.fromtimestamp(0).isoformat())
        os.environ["TZ"] = "America/New_York"; time.tzset(); print(time.tzname, time.localtime(0).tm_hour)
        print(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")).utcoffset(), len(zoneinfo.available_timezones()) > 300)
        print(abs(time.time() - datetime.datetime.now().timestamp()) < 1, time.monotonic() <= time.monotonic(), time.get_clock_info("perf_counter"))
        start = time.perf_counter(); time.sleep(0.05); print(0.04 < time.perf_counter() - start < 2, time.process_time() > 0)
        print(time.clock_gettime(time.CLOCK_BOOTTIME) > 0, time.thread_time() >= 0)
        """,
    ),
    Honest(
        "resources",
        """
        import os, resource, platform, sys
        print(os.nice(0), os.nice(3), os.getpriority(os.PRIO_PROCESS, 0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
        try: files = [open("prog.py") for _ in range(100)]
        except OSError as exc: print(exc.strerror)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(os.cpu_count() >= 1, len(os.sched_getaffinity(0)) >= 1, os.getloadavg() is not None, platform.system(), platform.machine())
        print(platform.libc_ver(), sys.version_info[:2], os.sysconf("SC_PAGE_SIZE"), os.get_terminal_size if 0 else "", os.getlogin if 0 else "")
        print(os.getuid(), os.getgid(), os.getgroups() is not None, os.getsid(0) == os.getpgid(0))
        """,
    ),
    Honest("file_too_large", "import resource, signal\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY if 0 else 1000))\nopen('f', 'wb').write(b'x' * 2000)"),
    Honest(
        "threads",
        """
        import threading, queue, time
        lines, lock = queue.Queue(), threading.Lock()
        def work(n):
            for i in range(100):
                with lock: lines.put((n, i))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(20)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(lines.qsize(), threading.active_count())
        local = threading.local(); event = threading.Event(); timer = threading.Timer(0.05, event.set); timer.start()
        print(event.wait(5), threading.Barrier(1).wait(), threading.stack_size(1 << 20))
        """,
    ),
    Honest(
        "hashes_and_randomness",
        """
        import hashlib, hmac, random, secrets, uuid, os, ssl
        print(sorted(hashlib.algorithms_guaranteed), hashlib.sha256(b"x").hexdigest(), hmac.new(b"k", b"m", "sha512").hexdigest()[:8])
        random.seed(5); print(random.random(), random.sample(range(100), 5), uuid.uuid5(uuid.NAMESPACE_DNS, "a"))
        print(len(os.urandom(16)), len(secrets.token_hex(8)), uuid.uuid4().version, ssl.OPENSSL_VERSION, bool(ssl.create_default_context().cert_store_stats()))
        """,
    ),
    Honest(
        "names_of_users",
        """
        import os, pwd, grp, getpass
        print(pwd.getpwuid(0).pw_name, os.path.expanduser("~"), getpass.getuser(), grp.getgrgid(0).gr_name)
        """,
    ),
    Honest("environment_of_children", "import os\nos.environ['NEW'] = 'ü'\ndel os.environ['USER']\nos.system('env | sort')"),
    Honest("shelve_and_dbm", "import shelve, dbm\nwith shelve.open('tmp/s') as s: s['k'] = [1]\nwith shelve.open('tmp/s') as s: print(dict(s), dbm.whichdb('tmp/s'))"),
    Honest(
        "logging",
        """
        import logging, logging.handlers
        logging.basicConfig(level="INFO", format="%(levelname)s %(name)s %(funcName)s %(lineno)d %(message)s")
        handler = logging.handlers.RotatingFileHandler("output/log", delay=False); logging.getLogger().addHandler(handler)
        logging.warning("mind %s", "this"); logging.getLogger("a.b").info("x")
        try: 1 / 0
        except ZeroDivisionError: logging.exception("failed")
        """,
    ),
    Honest("unittest", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n    def test_b(self): self.fail('no')\nimport sys\ntry: unittest.main(verbosity=0)\nexcept SystemExit as e: print(e.code)"),
    Honest("doctest", "def f():\n    '''\n    >>> f()\n    1\n    '''\n    return 2\nimport doctest\nprint(doctest.testmod())"),
    Honest("venv_and_pip", "import venv, subprocess\nvenv.create('v', with_pip=False)\nprint(subprocess.run(['v/bin/python', '-c', 'import sys; print(sys.prefix != sys.base_prefix)'], capture_output=True))"),
    Honest("compile_and_cache", "import py_compile, os, sys\nopen('m.py', 'w').write('x = 1')\nimport m\nprint(os.listdir('__pycache__'), m.__cached__)"),
    Honest("print_stack", "import traceback, inspect, sys\ndef f():\n    traceback.print_stack()\n    return [i.function for i in inspect.stack()]\nprint(f(), sys._getframe().f_back)"),
)
