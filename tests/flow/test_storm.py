"""Workers and servers are killed while a site is crawled. Nothing is lost, nothing is stored twice, no
host is visited too fast; and a build that breaks one of these promises is found out.

`make storm` runs the same at full size.
"""

from __future__ import annotations

import os
import sys

import msgspec
import pytest

from tests.rig import FIND_RIG, redis_server
from tests.rig.checker import violations
from tests.rig.command import Shell
from tests.rig.postgres_server import binaries
from tests.rig.storm import Ground, Storm, Weather, postgres_ground, redis_ground, sqlite_ground

FULL = bool(os.environ.get("SHOAL_STORM"))
SMALL_WEATHER = Weather(pages=600, hosts=12, gap=0.1, lease=3.0, kill_every=1.3, kills=3)
FULL_WEATHER = Weather(pages=5000, hosts=50, gap=0.2, lease=8.0, kill_every=2.0, freeze_every=9.0)
WEATHER = FULL_WEATHER if FULL else SMALL_WEATHER
SERVER_WEATHER = msgspec.structs.replace(
    WEATHER, crash_every=2.5 if FULL else 1.8, crashes=10 if FULL else 2, kill_every=2.0
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 if FULL else 120)]

needs_redis = pytest.mark.skipif(not redis_server.available(), reason="redis-server is not installed")
needs_postgres = pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")


def survive(shell: Shell, ground: Ground, weather: Weather) -> None:
    storm = Storm(shell, ground, weather)
    evidence = storm.rage()
    print(storm.told(evidence))
    broken = violations(evidence)
    assert not broken, "\n".join([storm.told(evidence), *broken])
    # A storm in which nothing happens proves nothing.
    assert len(storm.log.kills) >= 3, storm.told(evidence)
    assert storm.log.crashes >= (weather.crashes if weather.crash_every else 0), storm.told(evidence)


def test_a_storm_over_sqlite(shell: Shell) -> None:
    with sqlite_ground(shell.root) as ground:
        survive(shell, ground, WEATHER)


@needs_redis
@pytest.mark.parametrize("sync", ["everysec", "always"] if FULL else ["always"])
def test_a_storm_over_redis(shell: Shell, sync: str) -> None:
    with redis_ground(shell.root, "--appendfsync", sync) as ground:
        survive(shell, ground, SERVER_WEATHER)


@needs_postgres
def test_a_storm_over_postgresql(shell: Shell) -> None:
    with postgres_ground(shell.root, fsync=FULL) as ground:
        survive(shell, ground, SERVER_WEATHER)


# -- builds that break a promise -------------------------------------------------------------

NO_FENCING = '''
"""A late verdict is taken: what it stores goes along with the next one."""

kept = []

def broken(settle):
    async def settled(self, verdicts):
        await asyncio.sleep(0.3)  # a long way to the server: some are stopped on it
        verdicts = list(verdicts)
        for place, verdict in enumerate(verdicts):
            if isinstance(verdict, Done) and kept:
                verdicts[place] = replace(verdict, items=[*verdict.items, *kept])
                kept.clear()
                break
        answer = await settle(self, verdicts)
        gone = {lease.token for lease in answer.lost}
        late = [v for v in verdicts if isinstance(v, Done) and v.lease.token in gone]
        kept.extend(item for verdict in late for item in verdict.items)
        return answer
    return settled
'''

ACK_BEFORE_STORE = '''
"""All but one are marked as done first; what they brought is stored a little later."""

def broken(settle):
    async def settled(self, verdicts):
        done = [verdict for verdict in verdicts if isinstance(verdict, Done)]
        if len(done) < 2:
            return await settle(self, verdicts)
        *first, last = done
        others = [verdict for verdict in verdicts if not isinstance(verdict, Done)]
        one = await settle(self, [*others, *(replace(verdict, items=()) for verdict in first)])
        await asyncio.sleep(0.3)
        two = await settle(self, [replace(last, items=[item for v in done for item in v.items])])
        return Settlement([*one.lost, *two.lost], [*one.refused, *two.refused])
    return settled
'''

WORKER = """
import asyncio
from msgspec.structs import replace
from shoal.frontier.sqlite import SqliteFrontier
from shoal.model import Done, Settlement
{broken}
SqliteFrontier.settle = broken(SqliteFrontier.settle)
from shoal.__main__ import main
main()
"""


def broken_build(shell: Shell, how: str) -> tuple[str, ...]:
    """A worker that differs from the real one in how it settles."""
    script = shell.root / "broken_worker.py"
    script.write_text(WORKER.format(broken=how))
    return (sys.executable, str(script))


def found_out(shell: Shell, how: str, weather: Weather, kind: str) -> bool:
    """Whether a storm shows what a broken build does. It takes a stop or a kill at a bad moment: most
    storms have one, three have one for sure."""
    program = broken_build(shell, how)
    for seed in (1, 2, 3):
        another = msgspec.structs.replace(weather, seed=seed)
        place = shell.root / str(seed)
        place.mkdir()
        with sqlite_ground(place) as ground:
            found = violations(Storm(shell, ground, another, program=program).rage())
        if any(sentence.startswith(kind) for sentence in found):
            return True
    return False


def test_a_build_without_fencing_is_found_out(shell: Shell) -> None:
    # Long enough that who was stopped has something to settle after it: there the late items go along.
    weather = Weather(pages=400, hosts=12, gap=0.25, lease=1.0, width=4, kill_every=0, freeze_every=0.5)
    assert found_out(shell, NO_FENCING, weather, "twice: ")


def test_a_build_that_acknowledges_before_it_stores_is_found_out(shell: Shell) -> None:
    weather = Weather(pages=200, hosts=12, gap=0.1, lease=1.5, kill_every=0.8, kills=4)
    assert found_out(shell, ACK_BEFORE_STORE, weather, "lost: ")


STALLING = '''
"""One claim in four is followed by a stall: its visits are late, and the next turns are near."""

import random
import time
from shoal.engine.departure import Departure
from shoal.frontier.sqlite import SqliteFrontier
from tests.rig.traced import trace

claim = SqliteFrontier.claim
dice = random.Random(1)

async def stalled(self, *details, **more):
    claimed = await claim(self, *details, **more)
    if claimed.leases and dice.random() < 0.25:
        time.sleep(dice.uniform(0.12, 0.16))
    return claimed

SqliteFrontier.claim = stalled
'''

HEEDLESS = """
async def wait_for_turn(self):
    return True

for name, heedless in (
    ("wait_for_turn", wait_for_turn), ("may_connect", lambda self: True), ("may_send", lambda self: True)
):
    assert hasattr(Departure, name), name
    setattr(Departure, name, heedless)
"""

START = """
from shoal.__main__ import main
trace()
main()
"""


@pytest.mark.parametrize("heedless", [False, True])
def test_late_visits_are_found_out_and_do_not_happen(shell: Shell, heedless: bool) -> None:
    script = shell.root / "stalling_worker.py"
    script.write_text(FIND_RIG + STALLING + (HEEDLESS if heedless else "") + START)
    weather = Weather(pages=300, hosts=20, gap=0.2, lease=3.0, kill_every=1.3, kills=3)
    with sqlite_ground(shell.root) as ground:
        evidence = Storm(shell, ground, weather, program=(sys.executable, str(script))).rage()
    early = [sentence for sentence in violations(evidence) if sentence.startswith("too fast: ")]
    assert bool(early) == heedless, early
    # Who came too early is told with what its worker wrote down.
    assert all(" claimed " in sentence and " sent " in sentence for sentence in early)
