"""The thread that owns libcurl: its own selector, results handed back once a turn.

Nothing here is of one system only: what waits for sockets is whatever `selectors` has (epoll, kqueue), and
a pipe wakes the thread.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pycurl

from shoal.errors import FetchError
from shoal.fetch.connections import Connections
from shoal.fetch.port import NotSent
from shoal.fetch.slot import Job, Setup, Slot
from shoal.model import Response

SWEEP: Final = 0.25
"""Seconds between two checks of every running transfer: how late a deadline can be."""
_IDLE_SLOTS: Final = 256
_EITHER: Final = pycurl.POLL_IN | pycurl.POLL_OUT
"""What libcurl waits for, what a selector waits for and what it tells libcurl have the same numbers."""
assert (pycurl.POLL_IN, pycurl.POLL_OUT) == (selectors.EVENT_READ, selectors.EVENT_WRITE)
assert (pycurl.POLL_IN, pycurl.POLL_OUT) == (pycurl.CSELECT_IN, pycurl.CSELECT_OUT)
_WRITE_ERROR: Final = 23
_WEIGHED: Final = 2
"""After so many reads, and again after as many, a transfer is weighed: a read may bring megabytes. Nearly all
pages come in one."""

Outcome = tuple[Job, Response | None, FetchError | None]


class Driver(threading.Thread):
    """The thread that owns libcurl."""

    def __init__(
        self,
        setup: Setup,
        deliver: Callable[[list[Outcome]], None],
        *,
        concurrency: int,
        keep_alive: int,
    ) -> None:
        super().__init__(name="shoal-http", daemon=True)
        self._setup = setup
        self._deliver = deliver
        self._concurrency = concurrency
        self._keep_alive = keep_alive
        self._inbox: deque[Job] = deque()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rope, False)
        self._sleeping = False
        self._stopping = False
        self._multi: Any = None
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, int] = {}  # by descriptor: reads since it was registered
        self._connections = Connections()
        self._waiting: deque[Job] = deque()
        self._active: dict[Any, Slot] = {}
        self._free: list[Slot] = []
        self._full: list[Slot] = []
        """Transfers that are finished, and wait for room to be decoded."""
        self._outcomes: list[Outcome] = []
        self._timer: float | None = None
        self._notified = False
        self._next_sweep = 0.0

    # Called by other threads.

    def post(self, job: Job) -> None:
        """Start `job`, or look at it again because it was cancelled."""
        self._inbox.append(job)
        # The order matters: append, then look. The thread says "sleeping", then looks again.
        if self._sleeping:
            self._sleeping = False
            self._ring()

    @property
    def stopped(self) -> bool:
        """No job that is posted from now on will end."""
        return self._stopping

    def stop(self) -> None:
        self._stopping = True
        self._ring()

    def dispose(self) -> None:
        """Give the bell back, once the thread has ended."""
        if self._rope >= 0 and not self.is_alive():
            os.close(self._rope)
            os.close(self._bell)
            self._rope = -1

    def _ring(self) -> None:
        if self._rope >= 0:
            with suppress(BlockingIOError):  # it rings already
                os.write(self._rope, b"!")

    # The thread.

    def run(self) -> None:
        failure = FetchError("internal", "the fetcher was closed")
        try:
            self._open()
            while not self._stopping:
                self._turn()
        except Exception as crash:
            failure = FetchError("internal", f"the fetcher's thread ended: {crash!r}")
        finally:
            self._stopping = True
            self._shut(failure)

    def _open(self) -> None:
        self._multi = multi = pycurl.CurlMulti()
        multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_interest)
        multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        multi.setopt(pycurl.M_NOTIFYFUNCTION, self._on_notify)
        multi.notify_enable(pycurl.M_NOTIFY_INFO_READ)
        multi.setopt(pycurl.M_MAXCONNECTS, self._keep_alive)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._next_sweep = time.monotonic() + SWEEP

    def _turn(self) -> None:
        """Wait for something, do it, hand back everything that ended."""
        ready = self._selector.select(self._patience())
        self._sleeping = False
        multi = self._multi
        for key, mask in ready:
            fd = key.fd
            if fd == self._bell:
                os.read(fd, 4096)
            elif fd in self._watched:
                multi.socket_action(fd, mask)
                if mask & pycurl.CSELECT_IN:
                    self._count(fd)
        if self._notified:
            self._collect()
        self._take_in()
        if self._timer is not None and time.monotonic() >= self._timer:
            self._timer = None
            multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        if self._notified:
            self._collect()
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP
            self._sweep(now)
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._deliver(outcomes)

    def _count(self, fd: int) -> None:
        """Libcurl has read from `fd`."""
        reads = self._watched.get(fd)
        if reads is None:
            return  # that was the end
        self._watched[fd] = reads = reads + 1
        if reads % _WEIGHED:
            return
        connection = self._connections.on(fd)
        if connection is None or (self._setup.http2 and not connection.exclusive):
            return
        slot = connection.user
        if isinstance(slot, Slot) and slot.connection is connection:
            error = slot.weigh(connection)
            if error is not None:
                self._break_off(slot, error)

    def _break_off(self, slot: Slot, error: FetchError) -> None:
        """End a running transfer because of what we saw ourselves."""
        self._conclude(slot, None, error, time.monotonic())

    def _conclude(self, slot: Slot, response: Response | None, error: FetchError | None, now: float) -> None:
        job = slot.job
        if error is not None:
            response = slot.without_body(now)
        self._end(slot)
        self._outcomes.append((job, response, None if response is not None else error))

    def _patience(self) -> float:
        """Seconds to wait for events; also announces that we sleep."""
        self._sleeping = True
        if self._inbox or self._stopping or self._notified:
            return 0.0
        now = time.monotonic()
        until = self._next_sweep if self._active else now + 60.0
        if self._timer is not None and self._timer < until:
            until = self._timer
        return max(0.0, until - now)

    def _on_interest(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        events = what & _EITHER if what != pycurl.POLL_REMOVE else 0
        if not events:
            if self._watched.pop(fd, None) is not None:
                self._selector.unregister(fd)
        elif fd in self._watched:
            self._selector.modify(fd, events)
        else:
            self._selector.register(fd, events)
            self._watched[fd] = 0

    def _on_timer(self, milliseconds: int) -> None:
        self._timer = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000

    def _on_notify(self, _what: int, _curl: Any) -> None:
        self._notified = True

    def _take_in(self) -> None:
        inbox, waiting = self._inbox, self._waiting
        while inbox:
            job = inbox.popleft()
            if not job.cancelled:
                waiting.append(job)
            elif job.slot is not None:
                self._end(job.slot)
        while waiting and len(self._active) < self._concurrency:
            job = waiting.popleft()
            if job.cancelled:
                continue
            if job.ask.gate is not None and not job.ask.gate.may_connect():
                self._outcomes.append((job, None, NotSent()))
                continue
            self._start(self._free.pop() if self._free else Slot(self._setup, self._connections), job)

    def _start(self, slot: Slot, job: Job, *, again: bool = False) -> None:
        job.slot = slot
        try:
            slot.begin(job, time.monotonic(), again=again)
            self._multi.add_handle(slot.curl)
        except FetchError as error:
            self._drop(slot)
            self._outcomes.append((job, None, error))
            return
        except (pycurl.error, UnicodeError, ValueError) as failure:
            # An option that libcurl does not take: the handle may be half set up.
            self._drop(slot)
            self._outcomes.append((job, None, FetchError("internal", f"cannot start: {failure!r}")))
            return
        self._active[slot.curl] = slot

    def _drop(self, slot: Slot) -> None:
        slot.job.slot = None
        slot.curl.close()

    def _end(self, slot: Slot) -> None:
        """Take the handle out of libcurl and keep it for later."""
        self._active.pop(slot.curl, None)
        self._multi.remove_handle(slot.curl)
        if slot in self._full:
            self._full.remove(slot)
        slot.job.slot = None
        slot.release()
        if slot.poolable and len(self._free) < _IDLE_SLOTS:
            self._free.append(slot)
        else:
            slot.curl.close()

    def _collect(self) -> None:
        self._notified = False
        more = 1
        now = time.monotonic()
        while more:
            more, good, bad = self._multi.info_read()
            for curl in good:
                self._settle(self._active[curl], 0, "", now)
            for curl, code, text in bad:
                self._settle(self._active[curl], code, text, now)

    def _settle(self, slot: Slot, code: int, text: str, now: float) -> None:
        if not code and slot.coding and not slot.has_room(slot.needs()):
            if slot not in self._full:
                self._full.append(slot)  # its decoded body may be large
            return
        response: Response | None = None
        error: FetchError | None = None
        if code and not (slot.early and code == _WRITE_ERROR):
            if slot.spoiled(code):
                self._restart(slot, again=True)
                return
            error = slot.failure(code, text)
            if not slot.head_bytes and self._try_next(slot, error, now):
                return
        else:
            try:
                response = slot.result(now)
            except FetchError as failure:
                # Without its traceback, which holds this frame and the body until the collector comes.
                error = failure.with_traceback(None)
            except Exception as failure:
                error = FetchError("internal", f"result: {failure!r}")
        if slot.no_reuse:
            self._poison(slot)
        self._conclude(slot, response, error, now)

    def _try_next(self, slot: Slot, error: FetchError, now: float) -> bool:
        """Use the next address when this one does not take connections."""
        job = slot.job
        if slot.next_address >= len(job.addresses) or job.cancelled:
            return False
        if error.error not in ("connect_refused", "connect_failed", "connect_timeout"):
            return False
        if now >= min(job.deadline, slot.since + slot.limits.connect):
            return False
        self._restart(slot)
        return True

    def _restart(self, slot: Slot, *, again: bool = False) -> None:
        self._active.pop(slot.curl)
        self._multi.remove_handle(slot.curl)
        self._start(slot, slot.job, again=again)

    def _poison(self, slot: Slot) -> None:
        """Make sure that no transfer uses this connection again.

        libcurl decides on reuse before we may change an option, so the socket is shut under it: the
        next transfer that picks it sees a dead connection and opens another.
        """
        fd = slot.curl.getinfo(pycurl.ACTIVESOCKET)
        if fd < 0:
            return
        try:
            with socket.socket(fileno=os.dup(fd)) as twin:
                twin.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the server closed it first

    def _sweep(self, now: float) -> None:
        while self._waiting and (self._waiting[0].cancelled or self._waiting[0].deadline <= now):
            job = self._waiting.popleft()
            self._outcomes.append((job, None, FetchError("deadline", "no free slot in time")))
        for slot in tuple(self._full):
            self._settle(slot, 0, "", now)
        for slot in list(self._active.values()):
            if slot.paused:
                if slot not in self._full and slot.has_room(slot.wanted):
                    self._go_on(slot, now)
                continue
            error = slot.late(now)
            if error is None or self._try_next(slot, error, now):
                continue
            self._break_off(slot, error)

    def _go_on(self, slot: Slot, now: float) -> None:
        slot.go_on(now)
        try:
            slot.curl.pause(pycurl.PAUSE_CONT)
        except pycurl.error as failure:  # bytes that arrived in the meantime were refused
            code, text = failure.args
            self._settle(slot, code, text, now)

    def _shut(self, failure: FetchError) -> None:
        # From here on no thread may ring: the descriptor may soon belong to another file.
        self._sleeping = False
        jobs = [slot.job for slot in self._active.values()]
        jobs += (*self._waiting, *self._inbox)
        outcomes = self._outcomes
        outcomes.extend((job, None, FetchError(failure.error, failure.message)) for job in jobs)
        for slot in list(self._active.values()):
            self._quietly(self._multi.remove_handle, slot.curl)
            self._quietly(slot.curl.close)
        for slot in self._free:
            self._quietly(slot.curl.close)
        if self._multi is not None:
            self._quietly(self._multi.close)
        self._active.clear()
        self._free.clear()
        self._selector.close()
        if outcomes:
            self._deliver(outcomes)

    def _quietly(self, action: Callable[..., Any], *details: Any) -> None:
        try:
            action(*details)
        except Exception:  # closing continues, whatever one handle raises
            return
