"""Runs in a guest, as root: does what comes down the line from outside, one order at a time, and says what came of it.

An order and an answer are each a line of JSON. Bytes are in base64, so that a line that was cut off by a lost
connection spoils nothing but itself.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time

_BEAT = 10.0


def find_port():
    base = "/sys/class/virtio-ports"
    while True:
        for port in sorted(os.listdir(base)) if os.path.isdir(base) else []:
            with open(f"{base}/{port}/name") as file:
                if file.read().strip() == "ringfence.hosts":
                    return f"/dev/{port}"
        time.sleep(1)


def busy():
    """How much the machine has worked since its start, in ticks; waiting does not count."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:]]
    return sum(fields[:3]) + sum(fields[5:8])


class Line:
    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDWR)
        self.pending = b""

    def answer(self, **said):
        data = json.dumps(said).encode() + b"\n"
        while data:
            data = data[os.write(self.fd, data) :]

    def order(self, wait=None):
        """The next order; None where none came in time. EOFError where nobody is on the other side."""
        while b"\n" not in self.pending:
            if not select.select([self.fd], [], [], wait)[0]:
                return None
            more = os.read(self.fd, 1 << 16)
            if not more:
                self.pending = b""
                raise EOFError
            self.pending += more
        line, _, self.pending = self.pending.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            return {}


def put(line, order):
    with open(order["path"], "ab" if order.get("more") else "wb") as file:
        file.write(base64.b64decode(order["data"]))
    line.answer(done=True)


def start(line, order):
    process = subprocess.Popen(
        order["argv"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ, **order.get("env", {})),
        cwd=order.get("cwd", "/"),
        start_new_session=True,
    )
    assert process.stdout and process.stderr
    streams = {process.stdout: "out", process.stderr: "err"}
    beat, worked = time.monotonic(), busy()
    try:
        while streams or process.poll() is None:
            # A child that was left behind may hold the streams open for ever.
            ready = select.select([*streams, line.fd], [], [], 1)[0]
            if line.fd in ready and line.order() is not None:
                process.send_signal(signal.SIGTERM)
            for stream in [one for one in streams if one in ready]:
                data = os.read(stream.fileno(), 1 << 15)
                if data:
                    line.answer(stream=streams[stream], data=base64.b64encode(data).decode())
                else:
                    del streams[stream]
            if process.poll() is not None and not ready:
                break
            if time.monotonic() - beat > _BEAT:
                line.answer(busy=busy() - worked)
                beat, worked = time.monotonic(), busy()
    except EOFError:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        process.stdout.close()
        process.stderr.close()
    line.answer(exit=process.wait())


def serve(line):
    order = line.order()
    do = order.get("do")
    if do == "ping":
        line.answer(pong=order["nonce"])
    elif do == "put":
        put(line, order)
    elif do == "exec":
        start(line, order)


def main():
    line = Line(find_port())
    while True:
        try:
            serve(line)
        except EOFError:
            time.sleep(0.5)
        except Exception as problem:  # whatever an order ran into is for the one who gave it
            line.answer(problem=f"{type(problem).__name__}: {problem}")


if __name__ == "__main__":
    sys.exit(main())
