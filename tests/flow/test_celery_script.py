"""`scripts/start-distributed.sh`: one command for Redis, workers and Flower, and one to end them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from tests.rig import redis_server as redis
from tests.rig.command import Ended
from tests.rig.fleet import Fleet
from tests.rig.ports import free_port, free_ports

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/start-distributed.sh"

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")


def script(fleet: Fleet, *words: str) -> Ended:
    # A narrow terminal: `ps` cuts command lines at its edge unless told not to.
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "40"}
    return fleet.start(str(SCRIPT), *words, program=("sh",), env=env).wait()


@contextmanager
def ended(fleet: Fleet) -> Iterator[None]:
    """Whatever fails in between, the script ends what it started."""
    try:
        yield
    finally:
        stopped = script(fleet, "--stop")
    assert stopped.code == 0, stopped.err
    assert fleet.alive() == []


def pids(fleet: Fleet) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (fleet.root / ".shoal/run").glob("*.pid")}


@pytest.mark.slow
def test_everything_starts_works_and_stops(tmp_path: Path) -> None:
    redis_port, flower_port = map(str, free_ports(2))
    broker = f"redis://127.0.0.1:{redis_port}/0"
    with (
        Fleet(tmp_path, broker, FLOWER_PORT=flower_port, CELERY_WORKER_CONCURRENCY="1") as fleet,
        LoopbackSite(generated_site(pages=5)) as site,
        ended(fleet),
    ):
        started = script(fleet, "2")
        assert started.code == 0, started.err
        assert f"2 workers are running; Flower: http://127.0.0.1:{flower_port}\n" in started.err
        first = pids(fleet)
        assert set(first) == {"redis", "worker-1", "worker-2", "flower"}

        job = fleet.submit(sorted(site.expected_urls()))
        assert fleet.ended(job).counts.items == 5

        # Fewer than there are: nobody is ended, and it says how many there are.
        again = script(fleet, "1")
        assert again.code == 0, again.err
        assert "\n2 workers are running; " in again.err
        assert "more than the 1 asked for" in again.err
        assert pids(fleet) == first
    assert pids(fleet) == {}


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    redis_port, flower_port = map(str, free_ports(2))
    env = {"FLOWER_PORT": flower_port, "CELERY_TASK_RATE_LIMIT": "ten a minute"}
    with Fleet(tmp_path, f"redis://127.0.0.1:{redis_port}/0", **env) as fleet, ended(fleet):
        failed = script(fleet, "2")
        assert failed.code == 1
        assert "started Redis" in failed.err
        assert "celery_task_rate_limit = 'ten a minute'" in failed.err
        assert "error: worker-1 ended\n" in failed.err
        assert fleet.alive() == []
        assert pids(fleet) == {}


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    redis_port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Fleet(tmp_path, f"redis://127.0.0.1:{redis_port}/0", FLOWER_PORT=port) as fleet, ended(fleet):
            failed = script(fleet, "1")
            assert (failed.code, failed.err) == (
                1,
                f"error: port {port} is taken\n hint: set FLOWER_PORT\n",
            )
            assert fleet.alive() == []


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_it_tells_how_it_is_used(tmp_path: Path, word: str) -> None:
    with Fleet(tmp_path, "redis://192.0.2.1:6379/0") as fleet:
        said = script(fleet, word)
    assert (said.code, said.err) == (0, "")
    for told in ("[N]", "--stop", "CELERY_BROKER_URL", "FLOWER_PORT"):
        assert told in said.out
    assert "set -eu" not in said.out


def test_what_it_does_not_understand(tmp_path: Path) -> None:
    with Fleet(tmp_path, "redis://192.0.2.1:6379/0") as fleet:
        for word in ("many", "0", "-3"):
            said = script(fleet, word)
            assert (said.code, said.err.splitlines()[0]) == (
                1,
                f"error: a number of workers, or --stop; not '{word}'",
            )
