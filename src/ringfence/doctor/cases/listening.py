"""N: waiting for connections, which a program of a box may do only where its contract says so."""

from __future__ import annotations

from ringfence.doctor.case import Case
from ringfence.doctor.judging import refused

_REFUSED = "EACCES, and counted in the facts"
_OWED = (refused("listen"),)

_LISTEN = """
import socket
def listen(family, address=None):
    with socket.socket(family) as way:
        if address is not None:
            way.bind(address)
        way.listen()
"""

CASES = (
    Case(
        "N70",
        "wait for connections on the box's own loopback",
        _REFUSED,
        _LISTEN + "attempt(lambda: listen(socket.AF_INET, ('127.0.0.1', 0)))",
        owed=_OWED,
    ),
    Case(
        "N71",
        "wait for connections on every address",
        _REFUSED,
        _LISTEN + "attempt(lambda: listen(socket.AF_INET, ('0.0.0.0', 8080)))",
        owed=_OWED,
    ),
    Case(
        "N72",
        "wait for connections without ever naming a port",
        _REFUSED,
        _LISTEN + "attempt(lambda: listen(socket.AF_INET))",
        owed=_OWED,
    ),
    Case(
        "N73",
        "wait for connections over IPv6, for IPv4 as well",
        _REFUSED,
        _LISTEN
        + "any_of({name: lambda name=name: listen(socket.AF_INET6, (name, 0)) for name in ('::', '::1')} |"
        + " {'unnamed': lambda: listen(socket.AF_INET6)})",
        owed=_OWED,
    ),
    Case(
        "N74",
        "wait for connections in a process whose parents have ended",
        _REFUSED,
        _LISTEN
        + """
way, back = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        try:
            listen(socket.AF_INET, ("127.0.0.1", 0))
            os.write(back, b"listens")
        except OSError as exc:
            os.write(back, word(exc).encode())
    os._exit(0)
os.close(back)
said = os.read(way, 64).decode()
say(said == "listens", said)
""",
        owed=_OWED,
    ),
    Case(
        "N75",
        "put a TCP socket in the place of one that is a file while the supervisor looks which of them it is",
        "whichever is looked at is the one that listens",
        _LISTEN
        + """
import threading
wanted, decoy = socket.socket(), socket.socket(socket.AF_UNIX)
wanted.bind(("127.0.0.1", 0))
decoy.bind("\\0rf-decoy-" + given["marker"])
slot, over = os.dup(decoy.fileno()), []
def swap():
    while not over:
        os.dup2(wanted.fileno(), slot)
        os.dup2(decoy.fileno(), slot)
threads = [threading.Thread(target=swap) for _ in range(2)]
for thread in threads:
    thread.start()
libc, until, tries = ctypes.CDLL(None), time.monotonic() + 1.5, 0
while time.monotonic() < until and tries < 6000 and not wanted.getsockopt(socket.SOL_SOCKET, 30):  # SO_ACCEPTCONN
    libc.listen(slot, 1)
    tries += 1
over.append(True)
for thread in threads:
    thread.join()
say(wanted.getsockopt(socket.SOL_SOCKET, 30), f"after {tries} tries")
""",
    ),
    Case(
        "N76",
        "have a handle of the process that listened on a socket in one's place",
        "ENOPROTOOPT: there is no such handle",
        _LISTEN
        + """
with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
    server.bind("\\0rf-peer-" + given["marker"])
    server.listen()
    client.connect(server.getsockname())
    def handle():
        try:
            client.setsockopt(socket.SOL_SOCKET, 76, 1)  # SO_PASSPIDFD: one with each message
        except OSError:
            client.getsockopt(socket.SOL_SOCKET, 77, 4)  # SO_PEERPIDFD
    attempt(handle)
""",
    ),
    Case(
        "N77",
        "make the process that closes a socket last wait for its peer; it may be the supervisor with its copy",
        "it is reported as done, and no close waits",
        """
import socket, struct
with socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
    on = struct.unpack("ii", held.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0]
    say(on, "it would wait" if on else "it would not wait")
""",
    ),
)
