"""A ceiling for the memory that one page may cost.

A page of a few kilobytes can ask for gigabytes: four hundred open `<font>` are opened again in each `<p>`,
quotes within quotes repeat their marks on each line that they hold. The parser works in C, keeps the
interpreter for itself and cannot be stopped, but it gives up cleanly when it gets no memory. So it gets no
more than a page is worth, and that bounds its time as well: it writes what it computes.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shoal.errors import FetchError

MOST = 160 << 20
"""Bytes that reading a page, or one answer about it, may take. A table of 50,000 rows needs half of it."""
LEAST = 48 << 20
FOR_EACH = 50
"""Bytes for each byte of the page. `<b><p>`, the dearest markup that is nothing special, needs 80 in all."""
FRESH = 0.1
"""Seconds for which a measure of the process's memory holds. Too high a measure lets a page have more."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_mutex = threading.Lock()

_Answer = TypeVar("_Answer")


def under_ceiling(what: Callable[[], str], size: int, work: Callable[[], _Answer]) -> _Answer:
    """What `work` returns, if it takes no more memory than a page of `size` bytes is worth.

    `what` names the page for people. Raises FetchError `page_too_complex` otherwise. Costs 2 µs.
    The limit is the process's own, so what other threads ask for in that moment counts as well; `work`
    should hold the interpreter, as the parser does, and may be called twice. Where there is no /proc there
    is no ceiling.
    """
    most = min(MOST, LEAST + FOR_EACH * size)
    with _mutex:
        used = _used.lately()
        try:
            return _limited(used + most, work)
        except MemoryError:
            pass  # left first: what the parser had is free before anything else is asked for
        if (grown := _used.now()) > used:  # then the page may not be to blame
            with suppress(MemoryError):
                return _limited(grown + most, work)
    raise FetchError(
        "page_too_complex", f"more than {most >> 20} MB of memory are needed to make sense of {what()}"
    )


def _limited(limit: int, work: Callable[[], _Answer]) -> _Answer:
    soft, hard = _used.limits
    if not _used.known or (soft != resource.RLIM_INFINITY and soft <= limit):
        return work()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Used:
    """Bytes of private memory that this process may write to; 0 where that cannot be known."""

    def __init__(self) -> None:
        self._file = -1
        self._measured = 0
        self._until = 0.0
        self.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        """The process's own ceiling, soft and hard."""
        self.reopen()
        # A fork waits: the child must not live under the ceiling of a page.
        os.register_at_fork(
            before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=self._forked
        )

    @property
    def known(self) -> bool:
        return self._file >= 0

    def lately(self) -> int:
        """As measured within the last `FRESH` seconds. Measuring takes ten times as long as all else here."""
        return self._measured if time.monotonic() < self._until else self.now()

    def now(self) -> int:
        if self.known:
            self._measured = int(os.pread(self._file, 128, 0).split()[5]) * _PAGE
            self._until = time.monotonic() + FRESH
            self.limits = resource.getrlimit(resource.RLIMIT_DATA)
        return self._measured

    def reopen(self) -> None:
        # Kept open, because opening costs ten times what reading does.
        self._until = 0.0
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def _forked(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # it goes on telling of the parent
        self.reopen()
        _mutex.release()


_used = _Used()
