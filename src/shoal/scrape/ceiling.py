"""A ceiling for the memory that one page may take.

A page of a few kilobytes can ask for gigabytes: four hundred open `<font>` are opened again in each `<p>`,
and nested quotes repeat their marks on each of their lines. The parser works in C, keeps the interpreter for
itself and cannot be stopped, but it gives up cleanly when it gets no memory. So it gets no more than a page
of that size is allowed. That bounds its time as well, because it writes down all that it computes.
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
"""The most bytes that parsing a page, or one query of it, may take. A table of 50,000 rows needs half of
it."""
LEAST = 48 << 20
FOR_EACH = 50
"""A page may take `LEAST` bytes, and this many for each byte of its own. `<b><p>`, the costliest markup that
is still normal, needs 80 for each byte, all included."""
FRESH = 0.1
"""Seconds for which a measurement of the process's memory is used. If it is too high, a page may take
more."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_mutex = threading.Lock()

_Answer = TypeVar("_Answer")


def under_ceiling(what: Callable[[], str], size: int, work: Callable[[], _Answer]) -> _Answer:
    """Returns what `work` returns, if it takes no more memory than a page of `size` bytes may.

    Raises FetchError `page_too_complex` otherwise; `what` names the page for people. Costs 2 µs. The limit is
    the process's own, so memory that other threads allocate in that moment counts as well. `work` should hold
    the interpreter, as the parser does, and may be called twice. Without /proc there is no ceiling.
    """
    most = min(MOST, LEAST + FOR_EACH * size)
    with _mutex:
        used = _used.lately()
        try:
            return _run_limited(used + most, work)
        except MemoryError:
            pass  # the handler ends here, so that the parser's memory is freed before more is allocated
        if (grown := _used.now()) > used:  # other threads took memory: the page may not be to blame
            with suppress(MemoryError):
                return _run_limited(grown + most, work)
    raise FetchError("page_too_complex", f"{what()} cannot be read within {most >> 20} MB of memory")


def _run_limited(limit: int, work: Callable[[], _Answer]) -> _Answer:
    soft, hard = _used.limits
    if not _used.known or (soft != resource.RLIM_INFINITY and soft <= limit):
        return work()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Used:
    """Measures the private writable memory of this process, in bytes; 0 if it cannot be measured."""

    def __init__(self) -> None:
        self._file = -1
        self._measured = 0
        self._until = 0.0
        self.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        """The process's own ceiling, soft and hard."""
        self.reopen()
        # A fork waits for the mutex: the child must not inherit the ceiling of a page.
        os.register_at_fork(
            before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=self._after_fork
        )

    @property
    def known(self) -> bool:
        return self._file >= 0

    def lately(self) -> int:
        """Returns a measurement that is at most `FRESH` seconds old. Measuring takes ten times as long as all
        else here."""
        return self._measured if time.monotonic() < self._until else self.now()

    def now(self) -> int:
        if self.known:
            self._measured = int(os.pread(self._file, 128, 0).split()[5]) * _PAGE
            self._until = time.monotonic() + FRESH
            self.limits = resource.getrlimit(resource.RLIMIT_DATA)
        return self._measured

    def reopen(self) -> None:
        # Kept open, because opening costs ten times as much as reading.
        self._until = 0.0
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def _after_fork(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # it still reads the parent's memory
        self.reopen()
        _mutex.release()


_used = _Used()
