"""Many clients at once, and a large result: small versions of `make load`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.load import fill, load, read_result
from shoal.demo.site import LoopbackSite, generated_site
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service


@pytest.fixture
def shell() -> Iterator[Shell]:
    with tempfile.TemporaryDirectory() as folder, Shell(Path(folder)) as made:
        yield made


def memory(service: Service) -> int:
    """The most it ever had, in KiB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{service.running.pid}/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_twenty_clients_submit_and_poll(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=1), hosts=5) as site:
        allow = [word for url in site.urls for word in ("--allow-endpoint", url.split("/")[2])]
        service = Service(shell, "--workers", "1", "--quiet", *allow)
        wait_until(lambda: service.get("/health").json()["workers"] == 1, "the worker")
        figures = load(service.url, site.urls, clients=20, seconds=5.0)
    assert figures.errors == 0, figures
    assert figures.jobs >= 5
    assert figures.progress_calls >= 40
    assert figures.p99 < 2.0, "a quarter of a second on a quiet machine"


@pytest.mark.slow
def test_a_large_result_takes_the_memory_of_a_batch(shell: Shell) -> None:
    service = Service(shell, "--workers", "0", "--quiet")
    fill(shell.db, "large", 150_000, size=1_000)
    service.get("/scrape/large/result?format=jsonl&partial=true&cursor=149990")
    before = memory(service)
    lines, size = read_result(service.url, "large", "jsonl")
    assert lines >= 150_000
    assert size > 135_000_000
    # The frontier's own page cache is 64 MiB of it.
    assert memory(service) - before < 100 * 1024, "kibibytes"
