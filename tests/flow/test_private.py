"""What a job may visit belongs to the job: every worker that gets its URLs may visit them, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.demo.books import DemoSite, pages
from shoal.demo.site import Call, LoopbackSite, Reply
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "client.py"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_demo_is_whole_while_a_worker_runs_in_the_same_folder(shell: Shell, workers: str) -> None:
    shell.start("worker")
    wait_until(lambda: shell.db.exists() and shell.run("workers", "--json").json(), "the worker")
    for _ in range(3):  # which of them gets a URL is chance
        told = shell.run("crawl", "--demo", "--json", "--workers", workers).json()
        assert (told["status"], told["pages"], told["dead"]) == ("done", len(pages()), 1)


def test_the_example_of_the_client_works_while_a_service_runs_in_the_same_folder(shell: Shell) -> None:
    service = Service(shell, "--workers", "2")
    wait_until(lambda: service.get("/health").json()["workers"] == 2, "the workers")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=shell.root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"SUCCESS: {len(pages())} pages, 1 failed\n")


def test_one_endpoint_does_not_open_the_others(shell: Shell) -> None:
    with DemoSite() as secret:

        def leads_on(call: Call) -> Reply:
            if call.path == "/jump":
                return Reply(302, headers=(("Location", f"{secret.url}about"),))
            return Reply(body=f'<a href="{secret.url}">in</a> <a href="/jump">over</a>'.encode())

        with LoopbackSite(leads_on) as site:
            env = {"SHOAL_ALLOW_PRIVATE": site.url.split("/")[2]}
            ended = shell.run("crawl", site.url, "--scope", "any", "--rate", "none", "--json", env=env)
    (job,) = shell.jobs()
    assert (ended.json()["pages"], job.errors) == (1, {"egress_blocked": 2})
