"""A storm: workers and servers die while a site is crawled, and afterwards somebody counts.

    with sqlite_ground(folder) as ground, Shell(folder) as shell:
        storm = Storm(shell, ground, Weather(pages=600, hosts=12))
        evidence = storm.rage()
    assert not violations(evidence)

Workers are killed with SIGKILL and replaced, some are stopped beyond their leases and continued, and the
server behind the frontier is killed and started again. The site keeps its own log. What all this must lead
to is known beforehand: see `checker`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from shoal.demo.site import TEXT, Call, GeneratedSite, LoopbackSite, Reply, generated_site
from shoal.errors import FrontierError
from shoal.frontier.port import Backend
from shoal.model import Counts, DeadLetter, Item, Job, JobSpec, JobState, Request, Selection
from tests.rig.checker import End, Evidence, Kill, longest_silence
from tests.rig.command import Held, Running, Shell, wait_until
from tests.rig.postgres_server import UNSYNCED, PostgresServer, postgres_process
from tests.rig.redis_server import RedisServer, redis_server
from tests.rig.traced import traces

T = TypeVar("T")

JOB = "storm"
TRACED = (sys.executable, "-P", str(Path(__file__).with_name("traced.py")))
"""A worker that writes down when it sent what."""
UNREACHABLE = 4
"""The exit code of a command whose server does not answer."""
MEET_AGAIN = 1.5
"""Seconds beyond a lease for which a worker stays stopped: by then others have its URLs."""


class Ground(Protocol):
    """What a storm rages over: a frontier, and the server that may be behind it."""

    address: str

    def pids(self) -> Iterable[int]:
        """The server's processes; none if there is no server."""
        ...

    def crash(self) -> None:
        """`kill -9` of the server, then start it again. It answers when this returns."""
        ...

    def freeze(self, worker: Running) -> bool:
        """Stop a worker at a moment when it does not hold everybody. False if it would not do."""
        ...


class SqliteGround:
    """A file; nobody serves it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = str(path)

    def pids(self) -> Iterable[int]:
        return ()

    def crash(self) -> None:
        raise NotImplementedError("there is no server to kill")

    def freeze(self, worker: Running) -> bool:
        import fcntl

        lock = os.open(f"{self.path}-lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # now nobody else has it
            return _stopped(worker)
        finally:
            os.close(lock)


class RedisGround:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.address = f"{server.url}?prefix=storm"

    def pids(self) -> Iterable[int]:
        return (self._server.pid,)

    def crash(self) -> None:
        self._server.kill()
        self._server.start()

    def freeze(self, worker: Running) -> bool:
        return _stopped(worker)  # a script runs whole or not at all: nobody waits for who sent it


class PostgresGround:
    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.address = f"{server.address}?schema=storm"

    def pids(self) -> Iterable[int]:
        return self._server.children()

    def crash(self) -> None:
        self._server.kill()
        self._server.start()

    def freeze(self, worker: Running) -> bool:
        """Not inside a transaction: that holds its lanes until the server ends it."""
        import asyncio

        import asyncpg

        async def open_for_long() -> int:
            connection = await asyncpg.connect(self._server.address)
            try:
                found: int = await connection.fetchval(
                    "SELECT count(*) FROM pg_stat_activity WHERE xact_start < clock_timestamp() - interval"
                    " '0.1 s' AND state <> 'active'"
                )
                return found
            finally:
                await connection.close()

        for _ in range(10):
            if not _stopped(worker):
                return False
            time.sleep(0.15)
            if not asyncio.run(open_for_long()):
                return True
            worker.signal(signal.SIGCONT)
            time.sleep(0.05)
        return False


@contextmanager
def sqlite_ground(folder: Path) -> Iterator[Ground]:
    yield SqliteGround(folder / "storm.db")


@contextmanager
def redis_ground(_folder: Path, *settings: str) -> Iterator[Ground]:
    """Over a Redis with an append-only file, synced once a second unless `settings` say otherwise."""
    with redis_server(*settings) as server:
        yield RedisGround(server)


@contextmanager
def postgres_ground(_folder: Path, *, fsync: bool = True) -> Iterator[Ground]:
    with postgres_process(durable=True, options=() if fsync else UNSYNCED) as server:
        yield PostgresGround(server)


class FlakySite:
    """A generated site where some pages answer 500 once or twice, and some for ever.

    The first page of a host is always fine, so that the site can be entered.
    """

    def __init__(self, graph: GeneratedSite, *, shaky: float, broken: float) -> None:
        self.graph = graph
        self.hosts = graph.hosts
        self._shaky = shaky
        self._broken = broken
        self._refused: dict[int, int] = {}

    def __call__(self, call: Call) -> Reply:
        number = self.graph.number_of(call.bare)
        if number is not None and self._refused.get(number, 0) < self.refusals(number):
            self._refused[number] = self._refused.get(number, 0) + 1
            return Reply(500, b"out of order", TEXT, delay=self.graph.latency)
        return self.graph(call)

    def refusals(self, number: int) -> float:
        """How often this page fails before it works."""
        if number < self.hosts:
            return 0
        share = random.Random(number * 7919 + self.graph.seed).random()
        if share < self._broken:
            return float("inf")
        return 0 if share >= self._shaky + self._broken else 1 + number % 2

    def start_urls(self, port: int) -> list[str]:
        return [self.graph.url_of(number, port) for number in range(self.hosts)]

    def wanted(self, port: int, gone: Collection[str] = ()) -> dict[str, End]:
        """Every URL that can be come to from the start pages, and its end. Nobody learns what the
        pages of `gone` link to: they took their workers down."""
        found: dict[int, End] = dict.fromkeys(range(self.hosts), "done")
        waiting = [number for number in found if self.graph.url_of(number, port) not in gone]
        while waiting:
            for other in self.graph.links_of(waiting.pop()):
                if other not in found:
                    found[other] = "dead" if self.refusals(other) == float("inf") else "done"
                    if found[other] == "done" and self.graph.url_of(other, port) not in gone:
                        waiting.append(other)
        return {self.graph.url_of(number, port): end for number, end in found.items()}


class Weather(Struct, frozen=True):
    """How large the site is, how it must be visited, and what goes wrong how often."""

    pages: int
    hosts: int
    gap: float
    width: int = 2
    workers: int = 3
    lease: float = 5.0
    latency: float = 0.03
    kill_every: float = 2.0
    """Seconds between two kills of a worker; 0 = never."""
    kills: int = 1000
    """Kills of workers, at most."""
    crash_every: float = 0.0
    """Seconds between two kills of the server; 0 = never."""
    crashes: int = 10
    """Kills of the server, at most."""
    freeze_every: float = 0.0
    """Seconds between two stops of a worker beyond its lease; 0 = never."""
    patience: float = 600.0
    seed: int = 1


class Log(Struct):
    """What a storm did."""

    kills: list[Kill] = []
    frozen: list[Kill] = []
    """Who was stopped until its leases had ended: to the frontier that is a death."""
    crashes: int = 0
    seconds: float = 0.0
    crash_seconds: list[float] = []


class Storm:
    """One job in a storm. `program` starts a worker; a deliberately broken one can be examined too."""

    def __init__(
        self, shell: Shell, ground: Ground, weather: Weather, *, program: Sequence[str] = TRACED
    ) -> None:
        self._shell = shell
        self._ground = ground
        self._weather = weather
        self._program = program
        self._dice = random.Random(weather.seed)
        self._workers: dict[str, Running] = {}
        self._asleep: dict[str, float] = {}
        """Agents of stopped workers, and when they go on."""
        self._number = 0
        self._site: LoopbackSite
        self.log = Log()

    def rage(self) -> Evidence:
        """Crawl through it to the end, and tell what is known then."""
        weather = self._weather
        graph = generated_site(
            pages=weather.pages, links=5, hosts=weather.hosts, seed=weather.seed, latency=weather.latency
        )
        site = FlakySite(graph, shaky=0.04, broken=0.01)
        with ExitStack() as stack:
            served = stack.enter_context(LoopbackSite(site, robots="User-agent: *\nDisallow: /private\n"))
            held = stack.enter_context(Held(self._shell, self._ground.pids))
            self._site = served
            self._ask(lambda frontier: _open(frontier, weather, site.start_urls(served.port)))
            for _ in range(weather.workers):
                self._start()
            began = time.monotonic()
            self._until_done()
            self.log.seconds = time.monotonic() - began
            self._end_workers()
            hits = served.log()
            items, dead, counts, recount = self._ask(_evidence)
            crashed = {x.request.url for x in dead if x.failure.error == "worker_crashed"}
            wanted = site.wanted(served.port, crashed)
        return Evidence(
            wanted=wanted,
            stored=[msgspec.json.decode(item.body)["url"] for item in items],
            dead=[(letter.request.url, letter.failure.error) for letter in dead],
            counts=counts,
            hits=hits,
            recount=recount,
            gap=weather.gap,
            width=weather.width,
            lease=weather.lease,
            kills=[*self.log.kills, *self.log.frozen],
            outages=self.log.crashes,
            stall=held.between,
            sent=traces(self._shell.root),
        )

    def told(self, evidence: Evidence) -> str:
        """The storm in one line of figures."""
        crashed = sum(error == "worker_crashed" for _, error in evidence.dead)
        refetched = len(evidence.hits) - len({hit.url for hit in evidence.hits})
        return (
            f"{len(evidence.wanted)} URLs on {self._weather.hosts} hosts in {self.log.seconds:.1f} s:"
            f" {len(self.log.kills)} workers killed, {self.log.crashes} server kills,"
            f" {len(self.log.frozen)} stopped beyond their leases; stored {len(evidence.stored)}, dead"
            f" {len(evidence.dead)} ({crashed} worker_crashed), {len(evidence.hits)} visits"
            f" ({refetched} repeated), {evidence.counts.stale} late settles refused, longest silence"
            f" {longest_silence(evidence.hits):.1f} s"
        )

    def _until_done(self) -> None:
        weather = self._weather
        now = time.monotonic()
        end = now + weather.patience
        kill, crash, freeze = (
            now + every if every else float("inf")
            for every in (weather.kill_every, weather.crash_every, weather.freeze_every)
        )
        look, crashed = now, now
        while time.monotonic() < end:
            now = time.monotonic()
            self._wake(now)
            self._replace_turned_away()
            if now >= kill and len(self.log.kills) < weather.kills and self._kill():
                kill = time.monotonic() + weather.kill_every
            if now >= crash and self.log.crashes < weather.crashes and self._at_work(crashed):
                began = time.monotonic()
                self._ground.crash()
                self.log.crashes += 1
                self.log.crash_seconds.append(time.monotonic() - began)
                crashed = time.monotonic()
                crash = crashed + weather.crash_every
            if now >= freeze:
                self._freeze(now)
                freeze = time.monotonic() + weather.freeze_every
            if now >= look:
                if self._ask(_job).state is JobState.DONE:
                    self._wake(float("inf"))  # who still sleeps has the last word, and it must not count
                    return
                look = time.monotonic() + 0.5
            time.sleep(0.02)
        job = self._ask(_job)
        said = "\n".join(worker.err[-500:] for worker in self._workers.values())
        raise AssertionError(f"not done after {weather.patience} s: {job.counts}\n{said}")

    def _start(self) -> None:
        self._number += 1
        agent = f"storm-{self._number}"
        self._workers[agent] = self._shell.start(
            *(
                "worker",
                "--job",
                JOB,
                "--lease",
                str(self._weather.lease),
                "--frontier",
                self._ground.address,
            ),
            env={"SHOAL_USER_AGENT": agent},
            program=self._program,
        )

    def _at_work(self, since: float = 0.0) -> set[str]:
        """Who has visited, and is neither dead nor asleep."""
        awake = self._workers.keys() - self._asleep.keys()
        return awake & {hit.agent for hit in self._site.log() if hit.start >= since}

    def _kill(self) -> bool:
        """Kill and replace one that was at work: to kill those who are just starting proves nothing, and
        where starting takes long nobody would ever work. False if there is none."""
        busy = self._at_work()
        if not busy:
            return False
        agent = self._dice.choice(sorted(busy))
        self._workers.pop(agent).kill()
        self.log.kills.append(Kill(time.monotonic(), agent))
        self._start()
        return True

    def _replace_turned_away(self) -> None:
        """Who was started while the server was down has said so and ended. Any other end is a fault."""
        for agent, worker in list(self._workers.items()):
            if worker.over:
                assert worker.wait().code == UNREACHABLE, f"a worker ended by itself: {worker.err}"
                del self._workers[agent]
                self._start()

    def _freeze(self, now: float) -> None:
        """Stop one that was at work, one at a time."""
        busy = sorted(self._at_work())
        if busy and not self._asleep and self._ground.freeze(self._workers[agent := self._dice.choice(busy)]):
            self._asleep[agent] = now + self._weather.lease + MEET_AGAIN
            self.log.frozen.append(Kill(now, agent))

    def _wake(self, now: float) -> None:
        for agent in [agent for agent, until in self._asleep.items() if now >= until]:
            del self._asleep[agent]
            self._workers[agent].signal(signal.SIGCONT)

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)
        for worker in self._workers.values():
            ended = worker.wait()
            # One that was just started dies of the signal before it can listen to it.
            assert ended.code in (0, -signal.SIGTERM, UNREACHABLE), ended.err
        for running in self._shell.started:
            assert "Traceback" not in running.err, running.err

    def _ask(self, question: Callable[[Backend], Awaitable[T]]) -> T:
        """The answer of the frontier, even if it is just coming back."""
        return asked(self._shell, self._ground.address, question)


async def _open(frontier: Backend, weather: Weather, start: Sequence[str]) -> None:
    spec = JobSpec(
        gap=weather.gap,
        width=weather.width,
        scope="any",
        depth=1000,
        allow_private=True,
        dedicated=True,
        lease=weather.lease,
        fields=("url", "title"),
        cache=0.0,
    )
    await frontier.open_job(JOB, spec)
    await frontier.add([Request(url, JOB) for url in start])


async def _job(frontier: Backend) -> Job:
    return await frontier.job(JOB)


async def _evidence(frontier: Backend) -> tuple[list[Item], list[DeadLetter], Counts, list[str]]:
    return (
        await all_items(frontier, JOB),
        await all_dead(frontier, JOB),
        (await frontier.job(JOB)).counts,
        await frontier.check(),
    )


async def all_items(frontier: Backend, job: str) -> list[Item]:
    found: list[Item] = []
    while some := await frontier.items(job, after=found[-1].seq if found else 0):
        found += some
    return found


async def all_dead(frontier: Backend, job: str) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    while some := await frontier.dead(Selection(job=job), after=found[-1].id if found else 0, limit=1000):
        found += some
    return found


def asked(
    shell: Shell, address: str, question: Callable[[Backend], Awaitable[T]], patience: float = 60.0
) -> T:
    """The answer of a frontier, even if its server is just coming back."""
    end = time.monotonic() + patience
    while True:
        try:
            return shell.ask(question, address)
        except FrontierError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _stopped(worker: Running) -> bool:
    """SIGSTOP, and wait until it stands still. False if it is over."""
    worker.signal(signal.SIGSTOP)
    wait_until(lambda: worker.over or state_of(worker.pid) in "TZ", "the stop")
    return not worker.over


def state_of(pid: int) -> str:
    """The letter of a process in /proc; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
