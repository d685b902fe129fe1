"""The agent's side of connections that programs of a guest make to a port of its own, and that its host joins to
something: each is a channel of the stream. For guests whose descriptors cannot be passed to the host.

Imports the standard library alone; the agent hands in its loop.
"""

from __future__ import annotations

import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CREDIT = 256 * 1024
_PIECE = 64 * 1024
_WORD = struct.Struct(">I")
_BACKLOG = 128
_MOST = 96
"""Connections at a time, fewer than wait for a server of the host unseen; further ones wait in the guest's kernel."""


class CarriedListener:
    """A port of the guest's loopback, from its order until it is ended. Its notes tell of connections by a number,
    which the host names when it takes one."""

    def __init__(self, loop: Any, number: int, order: dict[str, Any], data: bytes) -> None:
        self._loop = loop
        self._number = number
        self._watched = False
        self._waiting: dict[int, socket.socket] = {}
        self._open = 0
        self._last = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(("127.0.0.1", order["port"]))
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        loop.tell(b"N", number, {"listens": self._socket.getsockname()[1]})
        self._watch()

    def _watch(self) -> None:
        wants = len(self._waiting) + self._open < _MOST
        if wants and not self._watched:
            self._loop.watch(self._socket.fileno(), self._accept)
        elif self._watched and not wants:
            self._loop.forget(self._socket.fileno())
        self._watched = wants

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:
            return  # it left before it was taken, or there is no descriptor for it now
        accepted.setblocking(False)
        self._last += 1
        self._waiting[self._last] = accepted
        self._watch()
        self._loop.tell(b"N", self._number, {"connection": self._last})

    def taken(self, which: int) -> socket.socket:
        accepted = self._waiting.pop(which)
        self._open += 1
        return accepted

    def ended(self) -> None:
        self._open -= 1
        if self._socket.fileno() >= 0:
            self._watch()

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"X":
            if self._watched:
                self._loop.forget(self._socket.fileno())
            self._socket.close()
            for each in self._waiting.values():
                each.close()
            self._loop.over(self._number, {"status": 0})

    def go_on(self) -> None:
        """It has nothing to send that waits."""


class CarriedConnection:
    """One connection that the host has taken, until both its ends are done. What the program sends is output, and what
    it receives is input."""

    def __init__(self, loop: Any, number: int, order: dict[str, Any], data: bytes) -> None:
        self._loop = loop
        self._number = number
        self._listening: CarriedListener = loop.channels[order["of"]]
        self._reading = self._listening.taken(order["which"])
        self._writing = self._reading.dup()
        """The same socket: each descriptor is watched for one thing."""
        self._watched = {self._reading: False, self._writing: False}
        self._credit = _CREDIT
        self._to_write = bytearray()
        self._reads = self._writes = True
        self._last_input = False
        self._watch()

    def _watch(self) -> None:
        reads = self._reads and self._credit > 0 and not self._loop.behind
        self._want(self._reading, reads)
        self._want(self._writing, bool(self._to_write))

    def _want(self, which: socket.socket, wanted: bool) -> None:
        if wanted and not self._watched[which]:
            call = self._read if which is self._reading else self._write
            self._loop.watch(which.fileno(), call, write=which is self._writing)
        elif self._watched[which] and not wanted:
            self._loop.forget(which.fileno())
        self._watched[which] = wanted

    def _read(self) -> None:
        if not self._watched[self._reading]:
            return  # it was closed in the same turn
        try:
            data = self._reading.recv(min(_PIECE, self._credit))
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        if data:
            self._credit -= len(data)
            self._loop.send(b"1", self._number, data)
        else:
            self._reads = False
            self._loop.tell(b"N", self._number, {"sent": "all"})
        self._go_on()

    def _write(self) -> None:
        if not self._writes:
            return
        while self._to_write:
            try:
                sent = self._writing.send(memoryview(self._to_write)[:_PIECE])
            except BlockingIOError:
                break
            except OSError:
                self._close()
                return
            del self._to_write[:sent]
            self._loop.send(b"W", self._number, _WORD.pack(sent))
        if self._last_input and not self._to_write:
            self._writes = False
            try:
                self._writing.shutdown(socket.SHUT_WR)
            except OSError:
                self._close()
                return
        self._go_on()

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == b"X":
            self._close()
        elif kind == b"W":
            self._credit += _WORD.unpack(body)[0]
            self._watch()
        elif kind in (b"D", b"E"):
            self._to_write += body
            self._last_input = self._last_input or kind == b"E"
            self._write()

    def go_on(self) -> None:
        if self._reading.fileno() >= 0:
            self._watch()

    def _go_on(self) -> None:
        if self._reads or self._writes:
            self._watch()
        else:
            self._close()

    def _close(self) -> None:
        if self._reading.fileno() < 0:
            return
        self._reads = self._writes = False
        self._to_write.clear()
        self._watch()
        self._reading.close()
        self._writing.close()
        self._listening.ended()
        self._loop.over(self._number, {"status": 0})
