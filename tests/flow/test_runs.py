"""Runs of named scrapers, through the real command: single ones here, distributed ones by workers."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from tests.rig.command import Shell, wait_until

APP = """
from shoal import Page, Shoal

app = Shoal()


@app.scraper("near", start=["{url}"], rate="none", per_host=8)
async def near(page: Page):
    yield {{"url": page.url, "title": page.title}}
    for link in page.links():
        yield page.follow(link)


@app.scraper("far", start=["{url}"], rate="none", per_host=8, execution="distributed", lease=3)
def far(page: Page):
    yield {{"url": page.url}}


@app.scraper("slow", start=["{url}slow/30"], rate="none")
async def slow(page: Page):
    yield {{"url": page.url}}
"""


@pytest.fixture
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(generated_site(pages=40, links=3)) as served:
        yield served


@pytest.fixture
def app(shell: Shell, site: LoopbackSite) -> Path:
    path = shell.root / "scrapers.py"
    path.write_text(APP.format(url=site.url))
    return path


FLAGS = ("--allow-private", "--no-robots")


def test_a_single_run_is_crawled_here(shell: Shell, site: LoopbackSite, app: Path) -> None:
    ended = shell.run("run", "near", "--app", str(app), *FLAGS, "--out", "near.jsonl", "--json")
    assert ended.code == 0, ended
    lines = (shell.root / "near.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["url"] for line in lines) == sorted(site.expected_urls())
    assert ended.json()["items"] == len(lines)


def test_two_single_runs_do_not_overlap(shell: Shell, site: LoopbackSite, app: Path) -> None:
    def holders() -> list[str]:
        leases = shell.ask(lambda frontier: frontier.leases()) if shell.jobs() else []
        return [lease.worker for lease in leases]

    first = shell.start("run", "slow", "--app", str(app), *FLAGS)
    wait_until(holders, "the first run to begin")
    [holder] = holders()
    second = shell.run("run", "slow", "--app", str(app), *FLAGS)
    assert (second.code, "already running" in second.err) == (2, True), second
    first.kill()
    # Its holder is dead: the lock does not have to run out first.
    third = shell.start("run", "slow", "--app", str(app), *FLAGS, "--resume")
    wait_until(lambda: holders() not in ([], [holder]), "the next run to begin")
    third.kill()


def test_a_distributed_run_is_enqueued_and_worked_on(shell: Shell, site: LoopbackSite, app: Path) -> None:
    urls = sorted(site.expected_urls())
    (shell.root / "urls.txt").write_text("\n".join([*urls, urls[0], "not a url"]) + "\n")
    ended = shell.run("run", "far", "--app", str(app), *FLAGS, "--urls-file", "urls.txt")
    answer = ended.json()
    run_id = answer["run_id"]
    assert answer == {
        "status": "queued",
        "run_id": run_id,
        "enqueued": len(urls),
        "worker_command": f"shoal worker --scraper far --run-id {run_id} --batch-size 50",
    }
    status = shell.run("status", run_id, "--json").json()
    counts = {name: status[name] for name in ("pending", "claimed", "completed", "failed", "remaining")}
    assert counts == {
        "pending": len(urls),
        "claimed": 0,
        "completed": 0,
        "failed": 1,
        "remaining": len(urls),
    }
    again = shell.run("run", "far", "--app", str(app), *FLAGS, "--urls-file", "urls.txt", "--run-id", run_id)
    assert again.json()["enqueued"] == 0, "adding the same twice changes nothing"
    command = shlex.split(answer["worker_command"])[1:]
    workers = [shell.start(*command, "--app", str(app)) for _ in range(2)]
    assert [worker.wait().code for worker in workers] == [0, 0]
    assert sorted(item["url"] for item in shell.items(run_id)) == urls
    assert shell.run("status", run_id, "--json").json()["remaining"] == 0
    assert shell.check() == []


def test_a_node_keeps_its_scrapers_where_it_likes(shell: Shell, site: LoopbackSite, app: Path) -> None:
    (shell.root / "node" / "my").mkdir(parents=True)
    (shell.root / "node" / "my" / "scrapers.py").write_text(app.read_text())
    urls = sorted(site.expected_urls())
    (shell.root / "urls.txt").write_text("\n".join(urls))
    begun = shell.run("run", "far", "--app", app.name, *FLAGS, "--urls-file", "urls.txt", "--run-id", "N")
    assert begun.code == 0, begun
    place = ("--frontier", f"sqlite:///{shell.db}")
    words = ("worker", "--scraper", "far", "--run-id", "N", *place)
    with Shell(shell.root / "node") as node:
        wrong = node.run(*words)
        assert wrong.code == 2, wrong
        assert "cannot load scraper 'far' of job 'N': no file 'scrapers.py'" in wrong.err
        assert "hint: give the path of your scrapers with --app" in wrong.err
        # It serves everybody, and does not know this one: told once, and left to those who do.
        general = node.start("worker", *place)
        wait_until(lambda: "left to other workers" in general.err, "a word about it")
        right = node.run(*words, "--app", "my/scrapers.py")
        assert right.code == 0, right
        general.signal(signal.SIGTERM)
        assert general.wait().code == 0
        assert general.err.count("left to other workers") == 1
    assert sorted(item["url"] for item in shell.items("N")) == urls
    assert shell.run("status", "N", "--json").json()["failed"] == 0
    assert shell.check() == []


def test_a_limit_and_a_wrong_scraper(shell: Shell, site: LoopbackSite, app: Path) -> None:
    (shell.root / "urls.txt").write_text("\n".join(sorted(site.expected_urls())))
    ended = shell.run("run", "far", "--app", str(app), "--urls-file", "urls.txt", "--limit", "5")
    assert ended.json()["enqueued"] == 5
    wrong = shell.run("worker", "--scraper", "near", "--run-id", ended.json()["run_id"], "--app", str(app))
    assert (wrong.code, "belongs to scraper 'far'" in wrong.err) == (2, True), wrong


def test_scrapers_are_listed(shell: Shell, app: Path) -> None:
    ended = shell.run("scrapers", "--app", str(app), "--json")
    assert [(each["name"], each["execution"]) for each in ended.json()] == [
        ("near", "single"),
        ("far", "distributed"),
        ("slow", "single"),
    ]
    assert "far" in shell.run("scrapers", "--app", str(app)).out
    assert shell.run("run", "nobody", "--app", str(app)).code == 2
