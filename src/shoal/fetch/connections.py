"""Checks the sockets behind libcurl's connections.

libcurl checks a connection before it reuses it only if that was idle for a second. Bytes that arrived
earlier, such as an unsolicited response or the line break of a sloppy server, it takes for the response to
the next request. And it counts body bytes, not bytes on the wire: the framing of chunks may take gigabytes.
So both are checked here, on the socket.
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
_RECEIVED: Final = 128  # the offset of tcpi_bytes_received
_INFO_BYTES: Final = _RECEIVED + 8
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT
# libcurl's sockets are file descriptors, and these calls are made for every page. With a socket object, or a
# poll, they took 20 µs for each page; like this, 3. Only the driver's thread calls them, and none blocks.
_libc: Final = ctypes.PyDLL(None)
_recv: Final = _libc.recv
_getsockopt: Final = _libc.getsockopt
_peeked: Final = ctypes.create_string_buffer(1)
_info: Final = ctypes.create_string_buffer(_INFO_BYTES)
_received: Final = ctypes.c_uint64.from_buffer(_info, _RECEIVED)
_size: Final = ctypes.c_uint(_INFO_BYTES)
_size_at: Final = ctypes.byref(_size)
_HANG_UP: Final = getattr(select, "POLLRDHUP", 0)
_MAX_DOUBTED: Final = 4096

Ends = tuple[object, ...]
"""Addresses and ports of both sides: all that libcurl reports about a connection that it reuses."""


class Idle(Enum):
    """The state of a connection that was idle before its next request."""

    QUIET = 0
    CLOSED = 1
    SPOKE = 2
    """It received bytes that were not asked for, and more may come."""


class Connection:
    """One of libcurl's sockets, from its first request on."""

    __slots__ = ("ends", "exclusive", "fd", "user")

    def __init__(self, fd: int, ends: Ends) -> None:
        self.fd = fd
        self.ends = ends
        self.exclusive = False
        """It carries one request at a time, by the HTTP version of its first response. In HTTP/2 both sides
        may send at any time, and every response says which request it belongs to."""
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
        """Returns all bytes that were received since the connection was opened; 0 if the system does not
        say."""
        _size.value = _INFO_BYTES
        if _getsockopt(self.fd, socket.IPPROTO_TCP, _INFO, _info, _size_at) or _size.value < _INFO_BYTES:
            return 0
        return _received.value

    def unread(self) -> int:
        """Returns how many received bytes wait in the socket."""
        return int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)


class Connections:
    """All connections that carried a request, and the hosts that sent unsolicited bytes.

    Belongs to the driver's thread. libcurl does not report that it closes a connection: its entry is removed
    when its file descriptor is used again.
    """

    __slots__ = ("_by_ends", "_by_fd", "_doubted")

    def __init__(self) -> None:
        self._by_ends: dict[Ends, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._doubted: set[tuple[str, int]] = set()

    def add(self, fd: int, ends: Ends) -> Connection:
        self.forget(fd)
        connection = Connection(fd, ends)
        self._by_fd[fd] = self._by_ends[ends] = connection
        return connection

    def between(self, ends: Ends) -> Connection | None:
        return self._by_ends.get(ends)

    def on(self, fd: int) -> Connection | None:
        return self._by_fd.get(fd)

    def forget(self, fd: int) -> None:
        gone = self._by_fd.pop(fd, None)
        if gone is not None and self._by_ends.get(gone.ends) is gone:
            del self._by_ends[gone.ends]

    def doubt(self, host: str, port: int) -> None:
        """From now on, use each connection to this host once. Unsolicited bytes can be recognised only on an
        idle connection: while a request is in flight they would be taken for its response."""
        if len(self._doubted) >= _MAX_DOUBTED:
            self._doubted.clear()
        self._doubted.add((host, port))

    def doubts(self, host: str, port: int) -> bool:
        return (host, port) in self._doubted
