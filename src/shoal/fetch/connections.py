"""The sockets behind libcurl's connections.

libcurl looks at a connection before it uses it again only if that lay idle for a second. What came earlier,
an answer that nobody asked for or the line break of a sloppy server, it takes for the answer to the next
request. And it counts bodies, not what the wire brings: a chunk's frame may take gigabytes. So both are
looked at here, by the socket.
"""

from __future__ import annotations

import ctypes
import fcntl
import select
import socket
import sys
import termios
from enum import Enum
from typing import Final

_INFO: Final = getattr(socket, "TCP_INFO", -1)  # Linux; elsewhere nothing is weighed
_RECEIVED: Final = 128  # where tcpi_bytes_received stands in it
_TOLD: Final = _RECEIVED + 8
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT
# libcurl's sockets are bare numbers, and every page asks. Through a socket object, or with a poll, it took
# 20 µs a page; so 3. Only the driver's thread asks, and none of these waits.
_libc: Final = ctypes.PyDLL(None)
_recv: Final = _libc.recv
_getsockopt: Final = _libc.getsockopt
_peeked: Final = ctypes.create_string_buffer(1)
_told: Final = ctypes.create_string_buffer(_TOLD)
_received: Final = ctypes.c_uint64.from_buffer(_told, _RECEIVED)
_size: Final = ctypes.c_uint(_TOLD)
_size_at: Final = ctypes.byref(_size)
_HANG_UP: Final = getattr(select, "POLLRDHUP", 0)
_MAX_DOUBTED: Final = 4096

Ends = tuple[object, ...]
"""Addresses and ports of both sides: all that libcurl tells of a connection that it uses again."""


class Idle(Enum):
    """How a connection is that waited for its next request."""

    QUIET = 0
    CLOSED = 1
    SPOKE = 2
    """Bytes that nobody asked for, and more may come."""


class Connection:
    """One socket of libcurl's, from the first request on it."""

    __slots__ = ("ends", "exclusive", "fd", "user")

    def __init__(self, fd: int, ends: Ends) -> None:
        self.fd = fd
        self.ends = ends
        self.exclusive = False
        """Whether it carries one request at a time, as its first answer tells. In HTTP/2 both sides may speak
        at any time, and every answer says whose it is."""
        self.user: object = None
        """The transfer that used it last."""

    def idle(self) -> Idle:
        there = _recv(self.fd, _peeked, 1, _PEEK)
        if there < 0:
            return Idle.QUIET  # or an error, which sending will meet again
        poll = select.poll()
        poll.register(self.fd, _HANG_UP)
        return Idle.CLOSED if not there or poll.poll(0) else Idle.SPOKE

    def received(self) -> int:
        """Bytes that the wire brought since the connection was opened, everything counted; 0 if the system
        does not tell."""
        _size.value = _TOLD
        if _getsockopt(self.fd, socket.IPPROTO_TCP, _INFO, _told, _size_at) or _size.value < _TOLD:
            return 0
        return _received.value

    def unread(self) -> int:
        """Bytes that wait in the socket."""
        return int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)


class Connections:
    """Every connection that carried a request, and the hosts that spoke out of turn. Belongs to the driver's
    thread. libcurl does not tell when it closes one: its entry goes when its number is used again."""

    __slots__ = ("_by_ends", "_by_fd", "_doubted")

    def __init__(self) -> None:
        self._by_ends: dict[Ends, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._doubted: set[tuple[str, int]] = set()

    def opened(self, fd: int, ends: Ends) -> Connection:
        self.forget(fd)
        made = Connection(fd, ends)
        self._by_fd[fd] = self._by_ends[ends] = made
        return made

    def between(self, ends: Ends) -> Connection | None:
        return self._by_ends.get(ends)

    def on(self, fd: int) -> Connection | None:
        return self._by_fd.get(fd)

    def forget(self, fd: int) -> None:
        gone = self._by_fd.pop(fd, None)
        if gone is not None and self._by_ends.get(gone.ends) is gone:
            del self._by_ends[gone.ends]

    def doubt(self, host: str, port: int) -> None:
        """Use no connection to it twice. What comes too early can be seen only while nothing is asked for:
        with a request on its way it would be taken for the answer."""
        if len(self._doubted) >= _MAX_DOUBTED:
            self._doubted.clear()
        self._doubted.add((host, port))

    def doubts(self, host: str, port: int) -> bool:
        return (host, port) in self._doubted
