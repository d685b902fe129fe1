"""Small programs about what a machine offers: sockets, files, clocks, libraries."""

from __future__ import annotations

from tests.sandbox.comparing import Honest

NETWORK = (
    Honest(
        "asyncio",
        """
        import asyncio, sys
        async def echo(reader, writer):
            writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
        async def main():
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
            print(await child.communicate(b"hi\\n"), child.returncode)
            print(await (await asyncio.create_subprocess_shell("exit 4")).wait())
            server = await asyncio.start_server(echo, "localhost", 0)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            writer.write(b"tcp\\n"); print(await reader.read()); writer.close(); server.close()
            unix = await asyncio.start_unix_server(echo, "tmp/sock")
            reader, writer = await asyncio.open_unix_connection("tmp/sock")
            writer.write(b"unix\\n"); print(await reader.read()); writer.close(); unix.close()
            loop = asyncio.get_running_loop()
            print(await loop.run_in_executor(None, lambda: 5))
            print([found[4] for found in await loop.getaddrinfo("127.0.0.1", 80, type=1)])
        asyncio.run(main())
        """,
    ),
    Honest(
        "http",
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
        "sockets",
        """
        import os, socket, struct
        unix = socket.AF_UNIX
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (unix, "tmp/s"), (unix, "\\0ringfence-honest")):
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
        message, given, _, _ = socket.recv_fds(right, 10, 1)
        os.write(given[0], b"through"); print(message, os.read(read, 10))
        print(right.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4] == struct.pack("i", os.getpid()))
        print(socket.getaddrinfo("localhost", 80, socket.AF_INET, socket.SOCK_STREAM)[0][4])
        try: socket.create_connection(("127.0.0.1", 1))
        except ConnectionRefusedError as exc: print(exc)
        """,
    ),
    Honest(
        "waiting",
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
)

FILES = (
    Honest(
        "files",
        """
        import fcntl, os, pathlib, shutil, stat
        os.makedirs("a/b"); pathlib.Path("a/b/f").write_text("text")
        os.symlink("b/f", "a/link"); os.link("a/b/f", "a/hard"); os.mkfifo("a/fifo", 0o600)
        print(sorted(os.listdir("a")), os.readlink("a/link"), os.stat("a/hard").st_nlink)
        os.chmod("a/b/f", 0o640); os.utime("a/b/f", (1, 2)); state = os.stat("a/b/f")
        print(stat.filemode(os.stat("a/fifo").st_mode), oct(state.st_mode), state.st_mtime, state.st_size)
        print(state.st_uid == os.getuid(), os.access("a/b/f", os.X_OK))
        print([(root, sorted(folders), sorted(files)) for root, folders, files in sorted(os.walk("a"))])
        os.rename("a/b", "a/c"); shutil.copytree("a/c", "d"); shutil.rmtree("a")
        with open("d/f", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
            os.truncate(file.fileno(), 2); os.posix_fallocate(file.fileno(), 0, 100); os.fsync(file.fileno())
            file.seek(50); file.write(b"x"); print(os.fstat(file.fileno()).st_size, os.pread(file.fileno(), 2, 0))
        print(sorted(os.listdir(".")), os.getcwd(), oct(os.umask(0o077)), os.path.exists("/nonexistent"))
        print(shutil.disk_usage(".").total > 0, os.statvfs(".").f_namemax)
        try: open("/nonexistent/x", "w")
        except OSError as exc: print(exc)
        """,
    ),
    Honest(
        "tempfile",
        """
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as named:
            named.write(b"x"); named.flush()
            print(os.path.getsize(named.name), tempfile.gettempdir(), len(os.listdir(folder)))
        with tempfile.TemporaryFile() as unnamed: unnamed.write(b"y"); print(unnamed.tell())
        left = tempfile.TemporaryDirectory(); print(os.path.isdir(left.name))
        spooled = tempfile.SpooledTemporaryFile(10); spooled.write(b"z" * 20); print(spooled.tell())
        """,
    ),
    Honest(
        "sqlite3",
        """
        import os, sqlite3
        for place in (":memory:", "output/data.db"):
            with sqlite3.connect(place) as db:
                db.execute("pragma journal_mode=wal")
                db.execute("create table t (a integer primary key, b text unique)")
                db.executemany("insert into t (b) values (?)", [("x",), ("ü",)])
                print(db.execute("select * from t order by a").fetchall(), db.total_changes)
                try: db.execute("insert into t (b) values ('x')")
                except sqlite3.IntegrityError as exc: print(exc)
            db.close()
        os.remove("output/data.db")
        """,
    ),
    Honest(
        "archives",
        """
        import bz2, gzip, io, lzma, os, shutil, zipfile, zlib
        os.mkdir("t"); open("t/a.txt", "w").write("a" * 1000)
        for kind in ("zip", "gztar", "xztar", "bztar"):
            name = shutil.make_archive("tmp/x", kind, "t")
            shutil.unpack_archive(name, "u"); print(kind, os.listdir("u"))
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
        "dbm",
        """
        import dbm, shelve
        with shelve.open("tmp/s") as s: s["k"] = [1]
        with shelve.open("tmp/s") as s: print(dict(s), dbm.whichdb("tmp/s"))
        """,
    ),
    Honest(
        "logging",
        """
        import logging, logging.handlers
        logging.basicConfig(level="INFO", format="%(levelname)s %(name)s %(funcName)s %(lineno)d %(message)s")
        logging.getLogger().addHandler(logging.handlers.RotatingFileHandler("output/log"))
        logging.warning("mind %s", "this"); logging.getLogger("a.b").info("x")
        try: 1 / 0
        except ZeroDivisionError: logging.exception("failed")
        """,
    ),
)

MACHINE = (
    Honest(
        "ctypes",
        """
        import ctypes, ctypes.util
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.abs(-3), ctypes.string_at(b"text"), libc.close(-1), ctypes.get_errno())
        print(ctypes.util.find_library("c"))
        pointer = ctypes.POINTER(ctypes.c_int)
        compare = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(lambda a, b: a[0] - b[0])
        numbers = (ctypes.c_int * 4)(4, 2, 3, 1); libc.qsort(numbers, 4, 4, compare); print(list(numbers))
        """,
    ),
    Honest(
        "encodings",
        """
        import codecs, io, locale, unicodedata
        print([codecs.encode("ä", name) for name in ("utf-16", "latin-1", "cp437", "utf-7", "idna", "punycode")])
        print(io.TextIOWrapper(io.BytesIO(b"x"), encoding="locale").encoding, unicodedata.name("ü"))
        print(locale.setlocale(locale.LC_ALL, ""), locale.localeconv()["decimal_point"], locale.strcoll("a", "b"))
        """,
    ),
    Honest(
        "clocks_and_zones",
        """
        import datetime, os, time, zoneinfo
        print(time.tzname, time.timezone, datetime.datetime.fromtimestamp(0).isoformat())
        os.environ["TZ"] = "EST5EDT"; time.tzset(); print(time.tzname, time.localtime(0).tm_hour)
        try: print(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")).utcoffset())
        except zoneinfo.ZoneInfoNotFoundError as exc: print(exc)
        print(abs(time.time() - datetime.datetime.now().timestamp()) < 1, time.get_clock_info("perf_counter"))
        start = time.perf_counter(); time.sleep(0.05); print(time.perf_counter() - start > 0.04)
        print(time.process_time() > 0, time.clock_gettime(time.CLOCK_BOOTTIME) > 0, time.thread_time() >= 0)
        """,
    ),
    Honest(
        "resources",
        """
        import os, platform, resource, sys
        print(os.nice(0), os.nice(3), os.getpriority(os.PRIO_PROCESS, 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
        try: files = [open("prog.py") for _ in range(100)]
        except OSError as exc: print(exc.strerror)
        print(os.cpu_count() >= 1, len(os.sched_getaffinity(0)) >= 1, platform.system(), platform.machine())
        print(platform.libc_ver(), sys.version_info[:2], os.sysconf("SC_PAGE_SIZE"), os.getuid(), os.getgid())
        """,
    ),
    Honest(
        "hashes_and_randomness",
        """
        import hashlib, hmac, os, random, secrets, ssl, uuid
        print(sorted(hashlib.algorithms_guaranteed), hashlib.sha256(b"x").hexdigest())
        print(hmac.new(b"k", b"m", "sha512").hexdigest(), ssl.OPENSSL_VERSION)
        random.seed(5); print(random.random(), random.sample(range(100), 5), uuid.uuid5(uuid.NAMESPACE_DNS, "a"))
        print(len(os.urandom(16)), len(secrets.token_hex(8)), uuid.uuid4().version)
        print(ssl.create_default_context().cert_store_stats())
        """,
    ),
    Honest(
        "users", "import getpass, os, pwd\nprint(pwd.getpwuid(0).pw_name, os.path.expanduser('~'), getpass.getuser())"
    ),
)
