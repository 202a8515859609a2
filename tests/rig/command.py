"""The real command in processes of its own, for tests of whole crawls.

    with Shell(tmp_path) as shell:
        crawl = shell.start("crawl", site.url, "--allow-private")
        wait_until(lambda: len(site.log()) > 10, "ten pages")
        crawl.kill()
        assert shell.run("crawl", site.url, "--allow-private", "--resume").code == 0

What is started here, and whatever that starts, ends with the shell at the latest.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Struct

from shoal.frontier.port import Backend
from shoal.model import Item, Job
from shoal.registry import open_frontier

T = TypeVar("T")

_MARK = "SHOAL_TEST_SHELL"
"""In the environment of every process of a shell, so that grandchildren are found too."""
SHOAL = (sys.executable, "-m", "shoal")
PATIENCE = 60.0
"""Seconds that anything may take on a busy machine before it counts as stuck."""


class Ended(Struct, frozen=True):
    """A command that is over. `code` is minus the signal if one ended it."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The last line of stdout, decoded."""
        return msgspec.json.decode(self.out.splitlines()[-1])


class Ran(NamedTuple):
    """A command that ran in this very process, without the start of another one."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout, decoded."""
        return msgspec.json.decode(self.out)


class Running:
    """A command under way. Its output goes to files, so a full pipe never holds it up."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], place: Path, out: int | None
    ) -> None:
        self._out, self._err = place.with_suffix(".out"), place.with_suffix(".err")
        with self._out.open("wb") as stdout, self._err.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout if out is None else out,
                stderr=stderr,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    @property
    def out(self) -> str:
        """What it wrote to stdout so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it said on stderr so far."""
        return self._err.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """To this process alone, as `kill` and a supervisor do it. Harmless when it is over."""
        if not self.over:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and to everything it started, all of them stopped first: nobody learns
        of another's death before its own."""
        victims = [self.pid, *_descendants(self.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.wait()

    def wait(self, timeout: float = PATIENCE) -> Ended:
        """Its end. Raises AssertionError with what it said if it takes longer."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s; it said:\n{self.err}") from None
        return Ended(code, self._out.read_text(errors="replace"), self.err)


class Shell:
    """A directory, and commands that run in it. The frontier is `.shoal/shoal.db` there."""

    def __init__(self, root: Path, **env: str) -> None:
        self.root = root
        self.db = root / ".shoal" / "shoal.db"
        self._mark = secrets.token_hex(8)
        ours = ("SHOAL_", "PYTHONUNBUFFERED")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._env = {**kept, "NO_COLOR": "1", **env, _MARK: self._mark}
        self.started: list[Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for running in self.started:
            running.process.wait(PATIENCE)
        wait_until(lambda: not self.alive(), "the end of every process")

    def start(
        self,
        *arguments: str,
        out: int | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = SHOAL,
    ) -> Running:
        """Start `shoal` with these arguments. `out` is a file descriptor for its stdout, `program` what
        is started instead: a variant of it, or it in another place."""
        place = self.root / f"command-{len(self.started)}"
        running = Running([*program, *arguments], self.root, {**self._env, **(env or {})}, place, out)
        self.started.append(running)
        return running

    def run(self, *arguments: str, timeout: float = PATIENCE, env: Mapping[str, str] | None = None) -> Ended:
        """Run `shoal` with these arguments to its end."""
        return self.start(*arguments, env=env).wait(timeout)

    def alive(self) -> list[int]:
        """The processes of this shell that are still there, whoever their parent is now."""
        wanted = f"{_MARK}={self._mark}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def ask(self, question: Callable[[Backend], Awaitable[T]], db: Path | str | None = None) -> T:
        """What the frontier (or another one, by path or address) answers, on a connection of our own."""

        async def answer() -> T:
            frontier = await open_frontier(str(db or self.db))
            try:
                return await question(frontier)
            finally:
                await frontier.close()

        return asyncio.run(answer())

    def jobs(self) -> list[Job]:
        """The jobs, newest first; none while there is no frontier yet."""
        return self.ask(lambda frontier: frontier.jobs()) if self.db.exists() else []

    def job(self, name: str) -> Job:
        return self.ask(lambda frontier: frontier.job(name))

    def items(self, job: str) -> list[dict[str, Any]]:
        """Everything in the item log of a job, decoded."""

        async def all_items(frontier: Backend) -> list[Item]:
            found: list[Item] = []
            while page := await frontier.items(job, after=found[-1].seq if found else 0):
                found += page
            return found

        return [msgspec.json.decode(item.body) for item in self.ask(all_items)]

    def check(self) -> list[str]:
        """The invariants of the frontier that do not hold."""
        return self.ask(lambda frontier: frontier.check())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The items in a JSON Lines file."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def wait_until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """Return as soon as the condition holds. Raises AssertionError about `what` if it never does.

    Sleeps three times as long as a check takes, so that slow checks do not starve the process they wait for.
    """
    end = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        if condition():
            return
        looked = time.monotonic()
        if looked > end:
            raise AssertionError(f"waited {timeout} s in vain for {what}")
        time.sleep(min(max(0.003, 3 * (looked - began)), 0.2))


class Held:
    """How long processes were ready to run and had no processor, moment by moment, while the
    body runs. A test of pace allows for it: a visit that the machine held up comes late, and then
    the next one seems to come early. How busy the visited site is does not matter: its log tells when
    the kernel got a request.
    """

    def __init__(self, shell: Shell, more: Callable[[], Iterable[int]] = tuple) -> None:
        """`more` tells further processes to look at: those of a server."""
        self._shell = shell
        self._more = more
        self._samples: list[tuple[float, dict[int, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="held", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> float:
        """Seconds that any one of them was held up between two moments (monotonic), at most."""
        first = bisect_right(self._samples, begin, key=itemgetter(0)) - 1
        last = min(bisect_left(self._samples, end, key=itemgetter(0)), len(self._samples) - 1)
        earlier = self._samples[first][1] if first >= 0 else {}
        latest: dict[int, float] = {}
        for _, held in self._samples[max(first, 0) : last + 1]:
            latest |= held  # who died in between counts with what it had waited until then
        return max(seconds - earlier.get(pid, 0.0) for pid, seconds in latest.items())

    def _measure(self) -> None:
        ours, late = 0, 0.0
        while not self._over.is_set():
            before = time.monotonic()
            time.sleep(0.01)
            # What a hypervisor takes away shows nowhere but here.
            late += time.monotonic() - before - 0.01
            pids = [*(each.pid for each in self._shell.started if not each.over), *self._more()]
            held = {pid: seconds for pid in pids if (seconds := _waited(pid)) is not None}
            self._samples.append((time.monotonic(), {**held, ours: late}))


def _waited(pid: int) -> float | None:
    """Seconds that the threads of a process waited for a processor; None when it is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return None
    total = 0
    for thread in threads:
        with suppress(OSError, IndexError):
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
