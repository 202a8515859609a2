"""Cancelling a large job while several workers are busy with it.

python -m bench.cancel                       50,000 URLs, 8 workers
python -m bench.cancel --urls 2000 --workers 3

Pages of the large job take 20 s each, so that many are in flight when it is cancelled. Told is how long
it took until the frontier held no lease of it and its connections were closed, whether anything of it began
later than 2 s after the cancel, and whether another job that ran beside it noticed.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct, to_builtins

from shoal.demo.site import Call, LoopbackSite, Reply
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service

HOSTS = 8
LIMIT = 2.0


class Cancelled(Struct, frozen=True):
    in_flight: int
    """Visits of the large job under way when it was cancelled."""
    seconds: float
    """Until none of them was."""
    begun_later: int
    status: str
    counts: dict[str, int]
    other_pages: int
    problems: list[str]


def respond(call: Call) -> Reply:
    # The large job's pages would be in flight for long.
    return Reply(200, b"<title>a page</title>", delay=20.0 if call.path.startswith("/big") else 0.05)


def cancel_busy(folder: Path, *, urls: int, workers: int, others: int = 60) -> Cancelled:
    with LoopbackSite(respond, hosts=HOSTS) as site, Shell(folder) as shell:
        allow = [word for url in site.urls for word in ("--allow-endpoint", url.split("/")[2])]
        service = Service(shell, "--workers", str(workers), "--quiet", *allow)
        wait_until(lambda: service.get("/health").json()["workers"] == workers, "the workers")
        (folder / "big.txt").write_text("".join(f"{site.urls[n % HOSTS]}big/{n}\n" for n in range(urls)))
        # A file, because a request may hold ten thousand at most.
        flags = ("--rate", "none", "--per-host", "16", "--allow-private")
        shell.run("enqueue", "big", "--urls-file", "big.txt", *flags)
        busy = min(16 * workers, 16 * HOSTS) * 3 // 4
        wait_until(lambda: service.progress("big")["active"] >= busy, "busy workers")
        small = [f"{site.urls[n % HOSTS]}small/{n}" for n in range(others)]
        asked: dict[str, Any] = {
            "urls": small,
            "rate": "none",
            "per_host": 16,
            "scope": "page",
            "priority": 9,
        }
        other = service.post("/scrape", asked | {"priority": 9}).json()["job_id"]
        in_flight = service.progress("big")["active"]
        started = time.monotonic()
        service.ask("DELETE", "/scrape/big")
        wait_until(lambda: service.progress("big")["active"] == 0, "the end of what is in flight", 30)
        took = time.monotonic() - started
        pages = service.ended(other)["pages_done"]
        view = service.get("/jobs/big").json()
        # The log has a visit when it is over: given up ones end with the connection.
        wait_until(lambda: len(_visits(site, "/big")) >= in_flight, "the connections to close", 30)
        later = [start for start in _visits(site, "/big") if start > started + LIMIT]
        return Cancelled(in_flight, took, len(later), view["status"], view["counts"], pages, shell.check())


def _visits(site: LoopbackSite, path: str) -> list[float]:
    return [hit.start for hit in site.log() if hit.path.startswith(path)]


def main() -> int:
    options = ArgumentParser(description=__doc__)
    options.add_argument("--urls", type=int, default=50_000)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--json", action="store_true", help="figures for other programs")
    given = options.parse_args()
    with TemporaryDirectory() as folder:
        found = cancel_busy(Path(folder), urls=given.urls, workers=given.workers)
    if given.json:
        print(json.dumps(to_builtins(found) | {"urls": given.urls, "workers": given.workers}))
    else:
        print(
            f"{found.in_flight} visits in flight of {given.urls} URLs: over after {found.seconds:.2f} s (goal"
            f" {LIMIT:.0f}), {found.begun_later} begun later, {found.status}; the other job brought"
            f" {found.other_pages} pages; invariants broken: {found.problems}"
        )
    fine = found.seconds <= LIMIT and not found.begun_later and not found.problems
    print("met" if fine else "MISSED", file=sys.stderr)
    return 0 if fine or given.json else 1


if __name__ == "__main__":
    raise SystemExit(main())
