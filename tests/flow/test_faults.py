"""What goes wrong between a worker and its frontier: lost answers, sleepers, clocks, two at once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.errors import FrontierUnreachable
from shoal.frontier.notes import Presence, lease_counts
from shoal.frontier.port import Backend
from shoal.model import Added, Done, Job, JobSpec, JobState, Lease, Request, WorkerStatus
from shoal.registry import open_frontier
from tests.rig import redis_server
from tests.rig.checker import Evidence, violations
from tests.rig.command import Held, Shell, wait_until
from tests.rig.cut import Cable
from tests.rig.postgres_server import binaries
from tests.rig.storm import (
    Ground,
    all_dead,
    all_items,
    asked,
    postgres_ground,
    redis_ground,
    sqlite_ground,
)

JOB = "faults"
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

needs_redis = pytest.mark.skipif(not redis_server.available(), reason="redis-server is not installed")
needs_postgres = pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
SERVERS = [
    pytest.param("redis", marks=needs_redis),
    pytest.param("postgresql", marks=needs_postgres),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ground]]:
    """One server of each kind for all tests here; each test has a prefix or schema of its own."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        started: dict[str, Ground] = {}
        if redis_server.available():
            # With `everysec` a killed Redis forgets its last moments while a slow disk syncs.
            started["redis"] = stack.enter_context(redis_ground(folder, "--appendfsync", "always"))
        if binaries() is not None:
            started["postgresql"] = stack.enter_context(postgres_ground(folder, fsync=False))
        yield started


def ground_for(kind: str, servers: dict[str, Ground], shell: Shell) -> Ground:
    """A ground of this kind that nobody else stands on."""
    if kind == "sqlite":
        with sqlite_ground(shell.root) as ground:
            return ground
    ground = servers[kind]
    name = f"t{random.getrandbits(40):x}"
    ground.address = f"{ground.address.partition('?')[0]}?{'prefix' if kind == 'redis' else 'schema'}={name}"
    return ground


def behind(cable: Cable, address: str) -> str:
    """The same frontier, by way of the cable."""
    return address.replace(f":{urlsplit(address).port}/", f":{cable.port}/")


# -- answers that are lost --------------------------------------------------------------------

LEASE = 1.0
URLS = [f"http://host{number % 4}.example/{number}" for number in range(8)]


class Line:
    """A frontier behind a cable, another beside it, and how to hit a verb of this backend."""

    def __init__(self, kind: str, cable: Cable, behind: Backend, beside: Backend) -> None:
        self._kind = kind
        self._cable = cable
        self.behind = behind
        self.beside = beside

    async def lose(self, verb: str) -> None:
        """The answer that makes a verb final is lost, the next time it is used."""
        if self._kind == "redis":
            self._cable.lose_next_answer(verb.encode())
        elif verb in ("claim", "settle"):
            # One statement is the whole verb: its arguments travel in a Bind message. The news that the
            # verb before sends after itself must not be taken for it.
            await asyncio.sleep(0.1)
            self._cable.lose_next_answer(begins=b"B")
        else:
            self._cable.lose_next_answer(b"COMMIT")

    @property
    def cuts(self) -> int:
        return self._cable.cuts


@asynccontextmanager
async def cut_line(kind: str, ground: Ground) -> AsyncIterator[Line]:
    port = urlsplit(ground.address).port
    assert port is not None
    with Cable(port) as cable:
        one = await open_frontier(behind(cable, ground.address))
        other = await open_frontier(ground.address)
        try:
            await other.open_job(JOB, JobSpec(gap=0.0, width=8, dedicated=True))
            yield Line(kind, cable, one, other)
        finally:
            await one.close()
            await other.close()


async def claim(frontier: Backend, limit: int = 8, worker: str = "w") -> list[Lease]:
    return list((await frontier.claim(limit, worker=worker, lease_seconds=LEASE, job=JOB)).leases)


def done(leases: list[Lease]) -> list[Done]:
    return [Done(lease, items=[msgspec.json.encode({"url": lease.request.url})]) for lease in leases]


async def stored(frontier: Backend) -> Counter[str]:
    return Counter(msgspec.json.decode(item.body)["url"] for item in await all_items(frontier, JOB))


@pytest.mark.parametrize("kind", SERVERS)
async def test_the_answer_to_add_is_lost(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    async with cut_line(kind, ground_for(kind, servers, shell)) as line:
        requests = [Request(url, JOB) for url in URLS]
        await line.behind.add(requests[:1])  # what is asked only the first time has been asked
        await line.lose("add")
        with pytest.raises(FrontierUnreachable):
            await line.behind.add(requests)
        assert line.cuts == 1
        assert (await line.beside.job(JOB)).counts.added == len(URLS), "the server had taken them"
        assert await line.behind.add(requests) == [Added.KNOWN] * len(URLS)
        assert (await line.beside.job(JOB)).counts.added == len(URLS)
        assert await line.beside.check() == []


@pytest.mark.parametrize("kind", SERVERS)
async def test_the_answer_to_claim_is_lost(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    async with cut_line(kind, ground_for(kind, servers, shell)) as line:
        await line.beside.add([Request(url, JOB) for url in URLS])
        first = await claim(line.behind, 1)
        assert not (await line.behind.settle(done(first))).lost
        await line.lose("claim")
        began = time.monotonic()
        # It says that it does not know, or asks again by itself; either way nothing is left to hand out.
        with suppress(FrontierUnreachable):
            assert await claim(line.behind) == []
        assert line.cuts == 1
        assert lease_counts(await line.beside.leases(job=JOB)) == {"w": len(URLS) - 1}, (
            "the server had handed them out"
        )
        again: list[Lease] = []
        while len(again) < len(URLS) - 1:
            assert time.monotonic() - began < LEASE + 10, "nobody has them for longer than a lease"
            again += await claim(line.behind, worker="v")
            await asyncio.sleep(0.05)
        assert time.monotonic() - began >= LEASE * 0.9, "and not before it is over"
        assert all(lease.request.attempt == 0 for lease in again), "no attempt is charged"
        assert not (await line.behind.settle(done(again))).lost
        assert await stored(line.beside) == Counter(URLS)
        assert await line.beside.check() == []


@pytest.mark.parametrize("kind", SERVERS)
async def test_the_answer_to_settle_is_lost(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    async with cut_line(kind, ground_for(kind, servers, shell)) as line:
        await line.beside.add([Request(url, JOB) for url in URLS])
        first = await claim(line.behind, 1)
        assert not (await line.behind.settle(done(first))).lost
        leases = await claim(line.behind)
        await line.lose("settle")
        try:
            lost = (await line.behind.settle(done(leases))).lost  # said again by itself
        except FrontierUnreachable:
            assert await stored(line.beside) == Counter(URLS), "the server had taken them"
            lost = (await line.behind.settle(done(leases))).lost  # said again, as a worker does
        assert line.cuts == 1
        # Refused, counted, without harm.
        assert {lease.token for lease in lost} == {lease.token for lease in leases}
        job = await line.beside.job(JOB)
        assert (job.state, job.counts.done, job.counts.stale) == (JobState.DONE, len(URLS), len(leases))
        assert await stored(line.beside) == Counter(URLS)
        assert await line.beside.check() == []


@pytest.mark.parametrize("kind", SERVERS)
async def test_the_answer_to_extend_is_lost(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    async with cut_line(kind, ground_for(kind, servers, shell)) as line:
        await line.beside.add([Request(url, JOB) for url in URLS])
        leases = await claim(line.behind)
        assert await line.behind.extend(leases, LEASE) == []
        await line.lose("extend")
        with pytest.raises(FrontierUnreachable):
            await line.behind.extend(leases, 30.0)
        assert line.cuts == 1
        await asyncio.sleep(LEASE + 0.2)
        # The longer time was taken, although nobody heard it.
        assert await claim(line.beside, worker="v") == []
        assert await line.behind.extend(leases, LEASE) == []
        assert not (await line.behind.settle(done(leases))).lost
        assert await stored(line.beside) == Counter(URLS)


@pytest.mark.parametrize("kind", SERVERS)
def test_a_claim_survives_a_killed_server(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    """Whoever holds a lease when the server dies still holds it, and nobody else has its token."""
    ground = ground_for(kind, servers, shell)

    async def hand_out(frontier: Backend) -> list[Lease]:
        await _open(frontier, URLS, JobSpec(gap=0.0, width=1, dedicated=True))
        return list((await frontier.claim(8, worker="w", lease_seconds=30, job=JOB)).leases)

    async def go_on(frontier: Backend) -> tuple[list[Lease], list[Lease]]:
        late = list((await frontier.claim(8, worker="v", lease_seconds=30, job=JOB)).leases)
        return late, list((await frontier.settle(done(first))).lost)

    for _ in range(3):
        first = asked(shell, ground.address, hand_out)
        ground.crash()
        late, lost = asked(shell, ground.address, go_on)
        assert len(first) == 4
        assert not {lease.token for lease in late} & {lease.token for lease in first}
        assert late == [], "hosts at their full width were visited again"
        assert lost == []
        ground = ground_for(kind, servers, shell)


class Quick:
    """Every page is fine and quick, and there are no links."""

    def __call__(self, call: Call) -> Reply:
        return Reply(200, f"<title>{call.path}</title>".encode(), delay=0.02)


async def _open(frontier: Backend, urls: list[str], spec: JobSpec) -> None:
    await frontier.open_job(JOB, spec)
    await frontier.add([Request(url, JOB) for url in urls])


async def _workers(frontier: Backend) -> list[WorkerStatus]:
    return await Presence(frontier.notes).workers()


async def _job(frontier: Backend) -> Job:
    return await frontier.job(JOB)


async def _rest(frontier: Backend) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    urls = [msgspec.json.decode(item.body)["url"] for item in await all_items(frontier, JOB)]
    dead = [(letter.request.url, letter.failure.error) for letter in await all_dead(frontier, JOB)]
    return urls, dead, await frontier.check()


def evidence(
    shell: Shell, ground: Ground, site: LoopbackSite, urls: list[str], spec: JobSpec, held: Held
) -> Evidence:
    items, dead, recount = asked(shell, ground.address, _rest)
    return Evidence(
        wanted=dict.fromkeys(urls, "done"),
        stored=items,
        dead=dead,
        counts=asked(shell, ground.address, _job).counts,
        hits=site.log(),
        recount=recount,
        gap=spec.gap,
        width=spec.width,
        lease=spec.lease,
        stall=held.between,
    )


def paced_spec(lease: float = 3.0) -> JobSpec:
    return JobSpec(
        gap=0.1,
        width=2,
        robots=False,
        allow_private=True,
        dedicated=True,
        lease=lease,
        scope="page",
        fields=("url",),
        cache=0.0,
    )


def pages_of(site: LoopbackSite, each: int) -> list[str]:
    return [f"{host}page/{number}" for host in site.urls for number in range(each)]


@pytest.mark.parametrize("kind", SERVERS)
def test_workers_lose_answers_all_the_time(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    """Whole workers behind the cable. Their own words decide nothing: log and items are counted."""
    ground = ground_for(kind, servers, shell)
    spec = paced_spec()
    port = urlsplit(ground.address).port
    assert port is not None
    with LoopbackSite(Quick(), hosts=8) as site, Cable(port) as cable, Held(shell, ground.pids) as held:
        urls = pages_of(site, 25)
        asked(shell, ground.address, lambda frontier: _open(frontier, urls, spec))
        words = ["worker", "--job", JOB, "--drain", "--lease", str(spec.lease)]
        workers = [shell.start(*words, "--frontier", behind(cable, ground.address)) for _ in range(2)]
        wait_until(lambda: len(site.log()) > 20, "some pages")
        verbs = [b"COMMIT", b"", b""] if kind == "postgresql" else [b"settle", b"claim", b"extend"]
        for number in range(12):
            cuts = cable.cuts
            cable.lose_next_answer(verbs[number % len(verbs)])
            until = time.monotonic() + 0.5
            while cable.cuts == cuts and time.monotonic() < until:
                time.sleep(0.002)
        cable.lose_next_answer(b"\0 never \0")
        for worker in workers:
            ended = worker.wait()
            assert ended.code == 0, ended.err
        assert cable.cuts >= 5, "too few answers were lost to prove anything"
        found = violations(evidence(shell, ground, site, urls, spec, held))
        assert not found, found


# -- two at once ------------------------------------------------------------------------------

SETTLE = """
import asyncio, sys, time
from pathlib import Path
import msgspec
from shoal.model import Done, Lease
from shoal.registry import open_frontier

async def main(address, leases, go):
    frontier = await open_frontier(address)
    held = msgspec.json.decode(Path(leases).read_bytes(), type=list[Lease])
    verdicts = [Done(lease, items=[b'"%d"' % lease.token]) for lease in held]
    print("ready", flush=True)
    while not Path(go).exists():
        time.sleep(0.0005)
    lost = 0
    for at in range(0, len(verdicts), 5):
        lost += len((await frontier.settle(verdicts[at:at + 5])).lost)
    print(lost)
    await frontier.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["sqlite", *SERVERS])
def test_the_same_verdicts_from_two_processes(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    ground = ground_for(kind, servers, shell)
    urls = [f"http://host{number % 10}.example/{number}" for number in range(200)]

    async def hand_out(frontier: Backend) -> list[Lease]:
        await _open(frontier, urls, JobSpec(gap=0.0, width=100, dedicated=True))
        return list((await frontier.claim(500, worker="w", lease_seconds=60, job=JOB)).leases)

    leases = asked(shell, ground.address, hand_out)
    assert len(leases) == len(urls)
    (shell.root / "leases.json").write_bytes(msgspec.json.encode(leases))
    (shell.root / "settle.py").write_text(SETTLE)
    go = shell.root / "go"
    program = (sys.executable, str(shell.root / "settle.py"))
    both = [shell.start(ground.address, "leases.json", str(go), program=program) for _ in range(2)]
    outs = [shell.root / f"command-{number}.out" for number in range(2)]
    wait_until(lambda: all("ready" in out.read_text() for out in outs), "both to be ready")
    go.touch()
    ends = [each.wait() for each in both]
    assert [end.code for end in ends] == [0, 0], ends
    refused = [int(end.out.split()[-1]) for end in ends]
    assert sum(refused) == len(urls), "each verdict was refused to one of the two"

    async def look(frontier: Backend) -> tuple[Job, Counter[bytes], list[str]]:
        items = await all_items(frontier, JOB)
        return await frontier.job(JOB), Counter(item.body for item in items), await frontier.check()

    job, items, recount = asked(shell, ground.address, look)
    assert items == Counter(b'"%d"' % lease.token for lease in leases)
    assert (job.counts.done, job.counts.items, job.counts.stale) == (len(urls), len(urls), len(urls))
    assert recount == []


# -- cancelled at any moment ------------------------------------------------------------------


@pytest.mark.parametrize("kind", SERVERS)
async def test_answers_belong_to_their_questions(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    """Callers give up at random moments on one shared connection. Nobody gets another's answer.

    SQLite is left out: its verbs do not wait in between, so they cannot be cancelled there."""
    address = ground_for(kind, servers, shell).address
    dice = random.Random(5)
    frontier = await open_frontier(address)
    names = [f"job-{number}" for number in range(20)]
    for name in names:
        await frontier.open_job(name, JobSpec(gap=0.0, width=100, dedicated=True))
        await frontier.notes.put("shelf", name, name.encode(), 600)
        await frontier.add([Request(f"http://{name}.example/{number}", name) for number in range(200)])
    answers: Counter[str] = Counter()

    async def ask(name: str) -> None:
        match dice.randrange(5):
            case 0:
                assert await frontier.notes.get("shelf", name) == name.encode()
                answers["noted"] += 1
            case 1:
                assert (await frontier.job(name)).id == name
                answers["job"] += 1
            case 2:
                claim = await frontier.claim(3, worker="w", lease_seconds=60, job=name)
                assert {lease.request.job for lease in claim.leases} <= {name}
                answers["claim"] += 1
                settled = await frontier.settle([Done(lease) for lease in claim.leases])
                assert not settled.lost
                answers["settle"] += 1
            case 3:
                url = f"http://{name}.example/0"
                assert await frontier.add([Request(url, name)]) == [Added.KNOWN]
                answers["add"] += 1
            case _:
                [found] = await frontier.find(f"http://{name}.example/0", name)
                assert found.job == name
                answers["find"] += 1

    async def caller() -> None:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            task = asyncio.ensure_future(ask(dice.choice(names)))
            if dice.random() < 0.5:
                await asyncio.sleep(dice.choice((0.0, 0.0002, 0.001, 0.004)))
                if task.cancel():
                    answers["cancelled"] += 1
            with suppress(asyncio.CancelledError):
                await task

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(caller())
    assert all(answers[verb] > 5 for verb in ("noted", "job", "claim", "settle", "add", "find")), answers
    assert answers["cancelled"] > 50, answers
    for name in names:
        assert (await frontier.job(name)).id == name
        assert await frontier.notes.get("shelf", name) == name.encode()
    assert await frontier.check() == []
    await frontier.close()


# -- sleepers and clocks ----------------------------------------------------------------------


class SlowAtFirst:
    """The first two visits take long, every later one is quick."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Call) -> Reply:
        self.calls += 1
        return Reply(200, f"<title>{call.path}</title>".encode(), delay=3.0 if self.calls <= 2 else 0.0)


@pytest.mark.parametrize("kind", SERVERS)
def test_a_worker_that_slept_past_its_leases(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    """SQLite's is in test_zombie.py."""
    ground = ground_for(kind, servers, shell)
    respond = SlowAtFirst()
    spec = JobSpec(gap=0.0, width=2, robots=False, allow_private=True, dedicated=True, scope="page")
    with LoopbackSite(respond) as site:
        urls = pages_of(site, 40)
        asked(shell, ground.address, lambda frontier: _open(frontier, urls, spec))
        words = ["worker", "--job", JOB, "--lease", "1", "--concurrency", "2", "--frontier", ground.address]
        sleeper = shell.start(*words)
        wait_until(lambda: respond.calls == 2, "two slow fetches")
        assert ground.freeze(sleeper)
        other = shell.start(*words, "--drain")
        assert other.wait().code == 0
        job = asked(shell, ground.address, _job)
        assert (job.state, job.counts.done, job.counts.stale) == (JobState.DONE, len(urls), 0)
        sleeper.signal(signal.SIGCONT)
        wait_until(lambda: asked(shell, ground.address, _job).counts.stale >= 2, "late verdicts")
        sleeper.signal(signal.SIGTERM)
        ended = sleeper.wait()
        assert (ended.code, "2 came too late" in ended.err) == (0, True), ended.err
    items, dead, recount = asked(shell, ground.address, _rest)
    assert Counter(items) == Counter(urls)
    assert (dead, recount) == ([], [])


needs_faketime = pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")


class FakeClock:
    """The environment of a process whose clock somebody else sets. Its monotonic clock stays true,
    as it does on a machine whose time is set."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.jump(0)
        self.env = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: int) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        os.replace(fresh, self._file)


@needs_faketime
@pytest.mark.parametrize("kind", SERVERS)
def test_a_worker_whose_clock_jumps(kind: str, servers: dict[str, Ground], shell: Shell) -> None:
    """Time is the server's: one that lives an hour ahead, then an hour behind, disturbs nobody."""
    ground = ground_for(kind, servers, shell)
    spec = msgspec.structs.replace(paced_spec(), dedicated=False)
    clock = FakeClock(shell.root)
    clock.jump(3600)
    with LoopbackSite(Quick(), hosts=8) as site, Held(shell, ground.pids) as held:
        urls = pages_of(site, 30)
        words = ["worker", "--lease", str(spec.lease), "--frontier", ground.address]
        agents = {"ahead": clock.env, "right": {}}
        workers = [shell.start(*words, env={"SHOAL_USER_AGENT": name} | env) for name, env in agents.items()]
        # There is work when both are there: the first could do all of it alone.
        wait_until(lambda: len(asked(shell, ground.address, _workers)) == len(agents), "both")
        asked(shell, ground.address, lambda frontier: _open(frontier, urls, spec))
        wait_until(lambda: len(site.log()) > len(urls) // 3, "a third of the pages")
        clock.jump(-3600)
        before = len([hit for hit in site.log() if hit.agent == "ahead"])
        wait_until(lambda: asked(shell, ground.address, _job).state is JobState.DONE, "the end of the job")
        for worker in workers:
            worker.signal(signal.SIGTERM)
            ended = worker.wait()
            assert ended.code == 0, ended.err
        assert {hit.agent for hit in site.log()} == agents.keys()
        proof = evidence(shell, ground, site, urls, spec, held)
        assert not violations(proof), violations(proof)
        assert (proof.counts.stale, proof.counts.retried, proof.dead) == (0, 0, [])
        assert len([hit for hit in site.log() if hit.agent == "ahead"]) > before, "it went on with its work"


@needs_faketime
def test_the_clock_of_a_sqlite_frontier_jumps(shell: Shell) -> None:
    """Here the machine's clock is the frontier's. Ahead: leases end early, what was in flight is visited
    again, and its first verdict is refused. Back: hosts rest until it is that late again. Nothing is lost,
    and no gap is cut short."""
    with sqlite_ground(shell.root) as made:
        ground = made
    spec = paced_spec()
    clock = FakeClock(shell.root)
    with LoopbackSite(Quick(), hosts=8) as site, Held(shell) as held:
        urls = pages_of(site, 30)
        asked(shell, ground.address, lambda frontier: _open(frontier, urls, spec))
        words = ["worker", "--job", JOB, "--drain", "--lease", str(spec.lease), "--frontier", ground.address]
        worker = shell.start(*words, env=clock.env)
        wait_until(lambda: len(site.log()) > len(urls) // 4, "a quarter of the pages")
        clock.jump(-3600)
        quiet = _silence(site)
        clock.jump(0)
        wait_until(lambda: len(site.log()) > max(quiet, len(urls) // 2), "half of the pages")
        clock.jump(3600)
        ended = worker.wait()
        assert ended.code == 0, ended.err
        proof = evidence(shell, ground, site, urls, spec, held)
        # Leases end early when it jumps ahead, so more may be under way than the width.
        found = violations(msgspec.structs.replace(proof, width=1000))
        assert not found, found


def _silence(site: LoopbackSite) -> int:
    """Wait until nobody has come for a second; how many had."""
    last, since = -1, time.monotonic()
    end = since + 30
    while time.monotonic() - since < 1.0:
        assert time.monotonic() < end, "visits go on although every host rests"
        if (now := len(site.log())) != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)
    return last
