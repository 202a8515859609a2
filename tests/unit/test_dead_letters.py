"""What the frontier itself ends dead is told to the broker: once, and none is left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.dispatch import dead_letters
from shoal.dispatch.dead_letters import DAY, LATE, DeadLetterReporter
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import Routes, Rule
from shoal.errors import DispatchError
from shoal.events import ignore
from shoal.frontier.memory import MemoryFrontier
from shoal.model import CRASH_LIMIT, EXPIRED, Dead, DeadLetter, Failure, JobSpec, Request, Retry, Selection
from shoal.testing.clock import FakeClock
from tests.rig.local_dispatch import Exchange, LocalDispatch

URL = "http://h.example/"


class Bench:
    """A frontier, a broker that may refuse, and who tells it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.frontier = MemoryFrontier(clock=self.clock)
        self.exchange = Exchange()
        self.dispatch = Refusing(self.exchange)
        self.reporter = self.another()

    def another(self) -> DeadLetterReporter:
        return DeadLetterReporter(
            self.frontier,
            self.frontier.notes,
            self.dispatch,
            name="n",
            job=None,
            ours=lambda queue: queue != "theirs",
        )

    async def tell(self) -> list[str]:
        """What is told now."""
        self.clock.advance(LATE)
        await self.reporter.report(self.clock())
        told, self.exchange.letters = self.exchange.letters, []
        return sorted(f"{letter.request.url.removeprefix(URL)} {letter.failure.error}" for letter in told)

    async def crash(self, limit: int = 9) -> None:
        """Workers die on what waits, until it is dead."""
        for n in range(CRASH_LIMIT):
            self.clock.advance(100.0)
            claim = await self.frontier.claim(limit, worker=f"w{n}", lease_seconds=50.0)
            assert claim.leases
            await self.frontier.evict([f"w{n}"])


class Refusing(LocalDispatch):
    after: int | None = None

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        if self.after is not None:
            if not self.after:
                raise DispatchError("not now")
            self.after -= 1
        await super().report_dead(letters)


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await bench.frontier.open_job("job", JobSpec(gap=0.0, width=100))
    return bench


async def add(bench: Bench, *names: str, ttl: float | None = None, queue: str = "q") -> None:
    await bench.frontier.add([Request(URL + name, "job", queue=queue, ttl=ttl) for name in names])


async def test_dead_letters_that_no_worker_reported_are_reported(bench: Bench) -> None:
    await add(bench, "late", ttl=5.0)
    await add(bench, "foreign", ttl=5.0, queue="theirs")
    await bench.frontier.bury(Request("bad", "job"), "url_invalid", "no URL")
    bench.clock.advance(6.0)
    assert not (await bench.frontier.claim(9, worker="w", lease_seconds=9.0)).leases
    await add(bench, "crashes")
    await bench.crash()
    # Told by the worker that failed, and by the broker in which it waited too long.
    await add(bench, "fails", "waits")
    leases = {
        lease.request.url: lease
        for lease in (await bench.frontier.claim(9, worker="w", lease_seconds=9.0)).leases
    }
    waited = Failure(EXPIRED, "waited in q until its time ran out")
    await bench.frontier.settle(
        [Dead(leases[URL + "fails"], Failure("http_404")), Dead(leases[URL + "waits"], waited)]
    )
    assert await bench.tell() == ["bad url_invalid", "crashes worker_crashed", "late expired"]
    assert await bench.tell() == []
    bench.reporter = bench.another()
    assert await bench.tell() == []


async def test_a_request_that_failed_before_it_crashed_its_workers_is_reported(bench: Bench) -> None:
    await add(bench, "x")
    [lease] = (await bench.frontier.claim(9, worker="w", lease_seconds=9.0)).leases
    await bench.frontier.settle([Retry(lease, 0.0, Failure("reset"))])
    await bench.crash()
    assert await bench.tell() == ["x worker_crashed"]


async def test_a_revived_request_that_dies_again_is_reported_again(bench: Bench) -> None:
    await add(bench, "x")
    for _ in range(2):
        await bench.crash()
        assert await bench.tell() == ["x worker_crashed"]
        assert await bench.frontier.revive(Selection()) == 1


async def test_the_latest_letters_wait_for_the_next_report(bench: Bench) -> None:
    await bench.frontier.bury(Request("bad", "job"), "url_invalid", "no URL")
    await bench.reporter.report(bench.clock() + LATE / 2)
    assert bench.exchange.letters == []
    await bench.reporter.report_all(bench.clock())
    assert len(bench.exchange.letters) == 1


async def test_letters_that_the_broker_refused_are_reported_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PAGE", 4)
    monkeypatch.setattr(dead_letters, "BATCH", 2)
    for n in range(10):
        await bench.frontier.bury(Request(f"{n}", "job"), "url_invalid", "no URL")
    bench.dispatch.after = 3
    with pytest.raises(DispatchError):
        await bench.tell()
    assert len(bench.exchange.letters) == 6
    bench.dispatch.after = None
    assert await bench.tell() == [f"{n} url_invalid" for n in range(10)]


async def test_a_pump_that_dies_during_a_report_leaves_no_letter_out(bench: Bench) -> None:
    await bench.frontier.bury(Request("bad", "job"), "url_invalid", "no URL")
    bench.dispatch.after = 0
    with pytest.raises(DispatchError):
        await bench.tell()
    bench.reporter, bench.dispatch.after = bench.another(), None
    assert await bench.tell() == ["bad url_invalid"]


async def test_old_letters_are_not_reported(bench: Bench) -> None:
    await bench.frontier.bury(Request("old", "job"), "url_invalid", "no URL")
    bench.clock.advance(DAY)
    await bench.frontier.bury(Request("new", "job"), "url_invalid", "no URL")
    assert await bench.tell() == ["new url_invalid"]
    bench.clock.advance(2 * DAY)
    assert await bench.tell() == []


async def test_a_message_waits_no_longer_than_its_requests_may(bench: Bench) -> None:
    await add(bench, "short", ttl=100.0)
    await add(bench, "long")
    bench.clock.advance(70.0)
    claim = await bench.frontier.claim(9, worker="transit:p", lease_seconds=9.0)
    routes = Routes([Rule("*", "q", ttl=60.0)])
    pump = Pump(bench.frontier, bench.dispatch, name="p", routes=routes, watch=ignore)
    assert {
        message.leases[0].request.url.removeprefix(URL): message.ttl for message in pump._messages("q", claim)
    } == {"short": 30.0, "long": 60.0}
