"""Runs worker processes under one parent: starts them, restarts them with back-off, stops them together.

A worker that exits with 0 is finished, and so is one that was interrupted (130). One that crashed is started
again; its URLs come back when their leases end. One that ends because it cannot reach a server has waited for
it already: it is not started again for ever. If the parent dies, however it dies, the kernel tells the
children to stop; where the kernel cannot, they watch the parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from threading import Thread

from shoal.errors import INTERRUPTED, FrontierError, ServerAway, ShoalError, ungrouped
from shoal.politeness.pacing import backoff

PARENT = "SHOAL_PARENT_PID"
STABLE = 30.0
"""A worker that lived this long begins its count of crashes anew."""
MAX_CRASHES = 10
LAST_WORDS = 1.0
"""Seconds for which the stderr of a process that has ended is still read."""
WATCH_INTERVAL = 1.0
"""Seconds between two checks of the parent, on systems whose kernel does not report its end."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """In a supervised worker: stop gently when the supervisor has ended."""
    parent = os.environ.get(PARENT)
    if not parent:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        Thread(target=_watch_parent, args=(int(parent),), name="shoal-parent", daemon=True).start()
    if os.getppid() != int(parent):
        # It died before the kernel was asked to send the signal.
        os.kill(os.getpid(), signal.SIGTERM)


def _watch_parent(parent: int) -> None:
    """Stop gently when the parent has ended: for systems without such a signal, such as macOS."""
    while os.getppid() == parent:
        time.sleep(WATCH_INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Runs `command` in `count` processes until each of them has finished or, if `lasting`, until `stop`.

    `tell` gets messages for people, in which a process is called `name`. `on_line` gets each line that the
    processes write to stderr; without it they write to ours. `on_death` is called with the pid of each
    process that crashed.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        tell: Callable[[str], None],
        on_line: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
        lasting: bool = False,
        on_death: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        self._command = command
        self._count = count
        self._tell = tell
        self._on_line = on_line
        self._env = env or {}
        self._name = name
        self._lasting = lasting
        self._on_death = on_death
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def stop(self) -> None:
        """Pass a stop on to every process; each counts how often it was asked."""
        # Two equal signals become one in a process that has not yet handled the first.
        number = signal.SIGINT if self._stopping else signal.SIGTERM
        self._stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    async def run(self) -> None:
        """Run until all processes have finished. Raises ShoalError if one cannot be kept alive."""
        try:
            with ungrouped():
                async with asyncio.TaskGroup() as group:
                    for number in range(self._count):
                        group.create_task(self._keep(number))
        finally:
            await self._end_all()

    async def _keep(self, number: int) -> None:
        crashes = 0
        while not self._stopping:
            started = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE if self._on_line else None,
                env={**os.environ, **self._env, PARENT: str(os.getpid())},
                # A group of its own: Ctrl-C reaches the parent, which passes it on once.
                process_group=0,
            )
            self._add(number, process)
            async with self._read_stderr(process):
                code = await process.wait()
            if self._stopping or (code in (0, INTERRUPTED) and not self._lasting):
                return
            if code == 2:
                raise ShoalError(f"{self._name} {number} refused to start", hint="its own message is above")
            if self._on_death is not None:
                with suppress(FrontierError):  # its leases then end by themselves
                    await self._on_death(process.pid)
            away = code == ServerAway.exit_code
            if away and not self._lasting:
                raise ServerAway(
                    f"{self._name} {number} cannot reach a server that it needs",
                    hint="its own message is above; --resume continues when the server is back",
                )
            # Waiting for a server does not count as a stable run, however long it took.
            stable = not away and time.monotonic() - started > STABLE
            crashes = 1 if stable else crashes + 1
            if crashes > MAX_CRASHES:
                raise (ServerAway if away else ShoalError)(
                    f"{self._name} {number} ended {crashes} times in a row",
                    hint=f"run `shoal {self._name}` by itself to see why",
                )
            wait = backoff(crashes, base=0.5, cap=30.0, jitter=0.5)
            self._tell(
                f"{self._name} {number} ended with exit code {code}; starting it again in {wait:.1f} s"
            )
            await asyncio.sleep(wait)

    @asynccontextmanager
    async def _read_stderr(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """Read its stderr while the body runs, and what it wrote last."""
        if self._on_line is None or process.stderr is None:
            yield
            return
        reading = asyncio.create_task(_read_lines(process.stderr, self._on_line))
        try:
            yield
            # Not for ever: a process that it started and left behind may hold its stderr open.
            await asyncio.wait([reading], timeout=LAST_WORDS)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _add(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Keep track of the process. If a stop came while it was being started, pass that on now."""
        self._processes[number] = process
        if self._stopping:
            process.send_signal(signal.SIGTERM)

    async def _end_all(self) -> None:
        """End all processes: ask gently, ask to hand everything back at once, then kill."""
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGTERM, 8.0), (signal.SIGKILL, None)):
            alive = [process for process in self._processes.values() if process.returncode is None]
            for process in alive:
                process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await asyncio.gather(*(process.wait() for process in alive))


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    rest = b""
    while data := await stream.read(65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))
    if rest:
        on_line(rest.decode(errors="replace"))
