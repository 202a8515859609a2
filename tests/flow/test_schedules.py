"""Schedules that really fire: every second, by services that live and die."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.frontier.port import Backend
from shoal.model import Job
from shoal.schedule.book import Book, Schedule
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service

DIES = """
import os, signal, sys
from shoal.app.session import Session

async def dies(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

Session.submit = dies
from shoal.__main__ import main
main(sys.argv[1:])
"""
"""`shoal` that is killed between the moment a job is opened and the moment it is filled."""


def every_second(site: LoopbackSite, **more: Any) -> dict[str, Any]:
    # Not from the cache: each job is a visit that the site sees.
    return {"name": "tick", "url": site.url, "every": "1s", "scope": "page", "rate": "none"} | more


def ticks(shell: Shell, frontier: str | None = None) -> tuple[Schedule, list[Job]]:
    """The schedule and its jobs, as one look at the frontier tells."""

    async def look(backend: Backend) -> tuple[Schedule, list[Job]]:
        return await Book(backend.notes).one("tick"), await backend.jobs(limit=1000)

    return shell.ask(look, frontier)


def each_once(schedule: Schedule, jobs: list[Job]) -> None:
    assert schedule.fired == len(jobs)
    assert {job.id.rpartition("-")[0] for job in jobs} == {"tick"}
    assert Counter(job.counts.added for job in jobs) == {1: len(jobs)}


def test_a_service_fires_every_second_and_its_worker_visits(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, LoopbackSite(generated_site(pages=1)) as site:
        service = Service(shell, "--workers", "1", "--allow-endpoint", site.url.split("/")[2])
        assert service.post("/schedules", every_second(site)).status == 201
        wait_until(lambda: service.get("/schedules/tick").json()["fired"] >= 3, "three firings")
        service.ask("PATCH", "/schedules/tick", {"paused": True})
        wait_until(
            lambda: {job["state"] for job in service.get("/jobs").json()["jobs"]} == {"done"}, "their end"
        )
        schedule, jobs = ticks(shell)
        each_once(schedule, jobs)
        assert all(job.counts.done == 1 for job in jobs)
        assert (schedule.last_job, schedule.next_at) == (jobs[0].id, None)
        # What another process changes is seen as well.
        assert shell.run("schedule", "resume", "tick").code == 0
        wait_until(lambda: service.get("/schedules/tick").json()["fired"] > schedule.fired, "another firing")
        service.running.signal(signal.SIGTERM)
        assert service.running.wait().code == 0


def test_it_is_not_fired_while_its_last_job_runs(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, LoopbackSite(generated_site(pages=1)) as site:
        service = Service(shell, "--workers", "0")
        service.post("/schedules", every_second(site))
        wait_until(lambda: service.get("/schedules/tick").json()["skipped"] >= 2, "two that are skipped")
        told = service.get("/schedules/tick").json()
        assert (told["fired"], len(service.get("/jobs").json()["jobs"])) == (1, 1)
        service.ask("DELETE", f"/scrape/{told['last_job']}")
        wait_until(lambda: service.get("/schedules/tick").json()["fired"] == 2, "the next one")


@pytest.mark.slow
def test_two_services_on_one_redis_fire_once_and_one_of_them_dies(tmp_path: Path, redis_url: str) -> None:
    with Shell(tmp_path) as shell, LoopbackSite(generated_site(1)) as site:
        env = {"SHOAL_FRONTIER": redis_url}
        services = [Service(shell, "--workers", "0", env=env) for _ in range(2)]
        services[0].post("/schedules", every_second(site, overlap="allow"))

        def fired() -> int:
            return int(services[1].get("/schedules/tick").json()["fired"])

        wait_until(lambda: fired() >= 4, "four firings")
        services[0].running.kill()
        before = fired()
        wait_until(lambda: fired() >= before + 3, "three more, by the other")
        services[1].ask("PATCH", "/schedules/tick", {"paused": True})
        schedule, jobs = ticks(shell, redis_url)
        each_once(schedule, jobs)
        assert not any(job.counts.known for job in jobs), "each was filled once"


def test_who_is_killed_between_opening_a_job_and_filling_it_is_made_good_for(shell: Shell) -> None:
    (shell.root / "dies.py").write_text(DIES)
    assert shell.run("schedule", "add", "tick", "http://example.com/", "--every", "1s").code == 0
    victim = shell.start("schedule", "run", program=(sys.executable, "dies.py"))
    assert victim.wait().code == -signal.SIGKILL
    schedule, [job] = ticks(shell)
    assert (job.counts.added, schedule.fired) == (0, 0), "opened, not filled"
    ended = shell.run("schedule", "run", "--once")
    assert (ended.code, ended.out) == (0, f"{job.id}\n"), ended
    each_once(*ticks(shell))
