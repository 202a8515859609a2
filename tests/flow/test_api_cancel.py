"""A large job is cancelled while several workers are busy with it: it is over, others go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shoal.testing.command import Shell, wait_until
from shoal.testing.service import Service
from shoal.testing.site import Call, LoopbackSite, Reply

URLS, WORKERS, HOSTS = 2_000, 3, 8


def respond(call: Call) -> Reply:
    # Long enough that visits are in flight at any moment, and would be for long.
    return Reply(200, b"<title>a page</title>", delay=20.0 if call.path.startswith("/big") else 0.05)


@pytest.mark.slow
def test_nothing_of_a_cancelled_job_is_in_flight_two_seconds_later(tmp_path: Path) -> None:
    with LoopbackSite(respond, hosts=HOSTS) as site, Shell(tmp_path) as shell:
        allow = [word for url in site.urls for word in ("--allow-endpoint", url.split("/")[2])]
        service = Service(shell, "--workers", str(WORKERS), *allow)
        wait_until(lambda: service.get("/health").json()["workers"] == WORKERS, "the workers")
        fast = {"rate": "none", "per_host": 8, "scope": "page"}
        urls = [f"{site.urls[n % HOSTS]}big/{n}" for n in range(URLS)]
        big = service.post("/scrape", {"urls": urls, "expected_pages": URLS, **fast}).json()["job_id"]
        wait_until(lambda: service.progress(big)["active"] >= 16 * (WORKERS - 1), "busy workers")
        small = [f"{site.urls[n % HOSTS]}small/{n}" for n in range(60)]
        # Half of it before the cancel, half after: the others do not notice.
        other = service.post("/scrape", {"urls": small, **fast, "priority": 9}).json()["job_id"]
        cancelled = time.monotonic()
        assert service.ask("DELETE", f"/scrape/{big}").json()["status"] == "REVOKED"
        wait_until(lambda: service.progress(big)["active"] == 0, "the end of what is in flight", 20)
        took = time.monotonic() - cancelled
        assert service.ended(other)["pages_done"] == len(small)
        wait_until(lambda: not _open_visits(site, "/big"), "the connections to close", 20)
        begun = [hit for hit in site.log() if hit.path.startswith("/big") and hit.start > cancelled + 2.0]
        assert begun == [], "nothing new starts"
        view = service.get(f"/jobs/{big}").json()
        assert view["status"] == "REVOKED"
        counts = view["counts"]
        assert counts["added"] == URLS == counts["done"] + counts["dead"] + counts["cancelled"]
        assert took < 2.0 + 3.0, "two seconds, and what a crowded machine adds"
        assert shell.check() == []


def _open_visits(site: LoopbackSite, path: str) -> bool:
    """Whether somebody still waits for a page: the log has a line for each that ended."""
    return any(hit.path.startswith(path) and hit.status == 0 and hit.end == 0 for hit in site.log())
