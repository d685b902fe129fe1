"""What a hostile cell begins with that speaks in its interpreter's name."""

from __future__ import annotations

CHANNEL = """
import os, stat, _socket
def _is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
channel = _socket.socket(fileno=next(filter(_is_socket, range(3, 1024))))
"""
"""`channel`, by its number: before Python 3.13 the garbage collector does not know of sockets."""
