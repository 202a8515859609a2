"""Worker processes under one parent: started, restarted with back-off, stopped together.

A worker that exits with 0 is finished, and so is one that somebody interrupted (130). One that crashed
is started again; what it held comes back by lease expiry. One that ends since it cannot reach a server
has waited for it already: nobody starts it again for ever. If the parent dies, however it dies, the kernel
tells the children to stop; where it cannot, they look.
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
"""Seconds for which a process that is gone is still listened to."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at the parent, where the kernel does not tell of its end."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """In a supervised worker: stop gently when the supervisor is gone."""
    parent = os.environ.get(PARENT)
    if not parent:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        Thread(target=_watch, args=(int(parent),), name="shoal-parent", daemon=True).start()
    if os.getppid() != int(parent):
        # It died before we asked to be told.
        os.kill(os.getpid(), signal.SIGTERM)


def _watch(parent: int) -> None:
    """For systems that do not tell, macOS for one: look once a second."""
    while os.getppid() == parent:
        time.sleep(LOOK_AGAIN)
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Runs `command` in `count` processes until each of them has finished, or, if they are meant to be
    `lasting`, until it is stopped. `died` learns the pid of each one that crashed, `name` is what
    people read. `hear` gets each line that they say on stderr, which else is ours."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        tell: Callable[[str], None],
        hear: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
        lasting: bool = False,
        died: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        self._command = command
        self._count = count
        self._tell = tell
        self._hear = hear
        self._env = env or {}
        self._name = name
        self._lasting = lasting
        self._died = died
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def stop(self) -> None:
        """Pass a stop on to every worker; they count how often they were asked."""
        # Two signals of one kind become one in a process that has not come to look at the first.
        number = signal.SIGINT if self._stopping else signal.SIGTERM
        self._stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    async def run(self) -> None:
        """Until all have finished. Raises when a worker cannot be kept alive."""
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
                stderr=asyncio.subprocess.PIPE if self._hear else None,
                env={**os.environ, **self._env, PARENT: str(os.getpid())},
                # A group of its own: Ctrl-C reaches the parent, which passes it on once.
                process_group=0,
            )
            self._note(number, process)
            async with self._heard(process):
                code = await process.wait()
            if self._stopping or (code in (0, INTERRUPTED) and not self._lasting):
                return
            if code == 2:
                raise ShoalError(f"{self._name} {number} refused to start", hint="its own message is above")
            if self._died is not None:
                with suppress(FrontierError):  # then its leases end by themselves
                    await self._died(process.pid)
            away = code == ServerAway.exit_code
            if away and not self._lasting:
                raise ServerAway(
                    f"{self._name} {number} cannot reach a server that it needs",
                    hint="its own message is above; --resume goes on when the server is back",
                )
            # Waiting for a server is no work, however long it took.
            stable = not away and time.monotonic() - started > STABLE
            crashes = 1 if stable else crashes + 1
            if crashes > MAX_CRASHES:
                raise (ServerAway if away else ShoalError)(
                    f"{self._name} {number} ended {crashes} times in a row",
                    hint=f"run `shoal {self._name}` by itself to see why",
                )
            wait = backoff(crashes, base=0.5, cap=30.0, jitter=0.5)
            self._tell(f"{self._name} {number} ended with {code}; starting it again in {wait:.1f} s")
            await asyncio.sleep(wait)

    @asynccontextmanager
    async def _heard(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """Listen to it while the body runs, and to its last words."""
        if self._hear is None or process.stderr is None:
            yield
            return
        listening = asyncio.create_task(_each_line(process.stderr, self._hear))
        try:
            yield
            # Not for ever: whatever it started and left behind may hold its stderr open.
            await asyncio.wait([listening], timeout=LAST_WORDS)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    def _note(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Remember it. A stop may have come while it was being started: then it learns that now."""
        self._processes[number] = process
        if self._stopping:
            process.send_signal(signal.SIGTERM)

    async def _end_all(self) -> None:
        """Ask gently, ask to hand everything back at once, then do not ask any more."""
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGTERM, 8.0), (signal.SIGKILL, None)):
            alive = [process for process in self._processes.values() if process.returncode is None]
            for process in alive:
                process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await asyncio.gather(*(process.wait() for process in alive))


async def _each_line(stream: asyncio.StreamReader, hear: Callable[[str], None]) -> None:
    rest = b""
    while data := await stream.read(65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            hear(line.decode(errors="replace"))
    if rest:
        hear(rest.decode(errors="replace"))
