"""`scripts/start-distributed.sh`: one command for Redis, workers and Flower, and one to end them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shoal.testing import redis_server as redis
from shoal.testing.command import Ended
from shoal.testing.fleet import Fleet
from shoal.testing.ports import free_ports
from shoal.testing.site import LoopbackSite, generated_site

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/start-distributed.sh"

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")


def script(fleet: Fleet, *words: str) -> Ended:
    # A narrow terminal: `ps` cuts command lines at its edge unless told not to.
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "40"}
    return fleet.start(str(SCRIPT), *words, program=("sh",), env=env).wait()


@pytest.mark.slow
def test_everything_starts_works_and_stops(tmp_path: Path) -> None:
    redis_port, flower_port = map(str, free_ports(2))
    broker = f"redis://127.0.0.1:{redis_port}/0"
    with (
        Fleet(tmp_path, broker, FLOWER_PORT=flower_port) as fleet,
        LoopbackSite(generated_site(pages=5)) as site,
    ):
        started = script(fleet, "1")
        assert started.code == 0, started.err
        assert f"http://127.0.0.1:{flower_port}" in started.err
        pids = {path.stem: path.read_text() for path in (tmp_path / ".shoal/run").glob("*.pid")}
        assert set(pids) == {"redis", "worker-1", "flower"}

        job = fleet.submit(sorted(site.expected_urls()))
        assert fleet.ended(job).counts.items == 5

        again = script(fleet, "1")
        assert again.code == 0, again.err
        assert pids["worker-1"] == (tmp_path / ".shoal/run/worker-1.pid").read_text()

        stopped = script(fleet, "--stop")
        assert stopped.code == 0, stopped.err
        assert fleet.alive() == []


def test_what_it_does_not_understand(tmp_path: Path) -> None:
    with Fleet(tmp_path, "redis://192.0.2.1:6379/0") as fleet:
        for word in ("many", "0", "-3"):
            said = script(fleet, word)
            assert (said.code, said.err.splitlines()[0]) == (
                1,
                f"error: a number of workers, or --stop; not '{word}'",
            )
