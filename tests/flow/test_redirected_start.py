"""A start URL that redirects to another host of its site: its links belong to the job, whichever process
visits them."""

from __future__ import annotations

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from tests.rig.command import Shell, wait_until

# Ports make hosts of their own here, and an address is the whole of a registrable domain.
WORDS = ["--allow-private", "--rate", "none", "--no-robots", "--concurrency", "2"]
LEASE = {"SHOAL_LEASE": "2"}
"""Seconds: what a killed worker held comes back soon."""
PAGES = 12


class Shop:
    """`/` of the old host redirects to the shop, half of whose pages are linked only from the old host."""

    def __init__(self) -> None:
        self.old = self.new = ""
        self.stall = False
        self.stalled: list[str] = []

    def answer_old(self, call: Call) -> Reply:
        if call.path == "/":
            return Reply(302, headers=(("Location", f"{self.new}0"),))
        return _page(f"{self.new}{int(call.path[1:]) + 1}")

    def answer_new(self, call: Call) -> Reply:
        number = int(call.path[1:])
        delay = 0.0
        if number == 3 and self.stall and not self.stalled:
            self.stalled.append(call.path)
            delay = 60.0
        if number >= PAGES:
            return _page()
        return _page(f"{self.old}{number}" if number % 2 else f"{self.new}{number + 1}", delay=delay)


def _page(*links: str, delay: float = 0.0) -> Reply:
    return Reply(200, "".join(f"<a href='{link}'>x</a>" for link in links).encode(), delay=delay)


def crawled(shell: Shell, shop: Shop, *, workers: int, killed: bool) -> set[str]:
    """The paths of the items, by host, of a crawl that is killed in the middle and resumed, or is not."""
    with LoopbackSite(shop.answer_old) as old, LoopbackSite(shop.answer_new) as new:
        shop.old, shop.new, shop.stall = old.url, new.url, killed
        command = ["crawl", old.url, *WORDS, "--workers", str(workers)]
        if killed:
            crawl = shell.start(*command, env=LEASE)
            wait_until(lambda: shop.stalled, "a visit of the shop")
            crawl.kill()
            command.append("--resume")
        ended = shell.run(*command, env=LEASE)
        assert ended.code == 0, ended.err
        [job] = shell.jobs()
        hosts = {old.url: "old/", new.url: "new/"}
        return {
            hosts[item["url"][: len(old.url)]] + item["url"][len(old.url) :] for item in shell.items(job.id)
        }


# The item of a page tells by which URL it was asked for.
EXPECTED = {"old/"} | {f"new/{n}" for n in range(1, PAGES + 1)} | {f"old/{n}" for n in range(1, PAGES, 2)}


@pytest.mark.parametrize(("workers", "killed"), [(1, False), (1, True), (2, False), (2, True)])
def test_its_links_are_followed_by_every_process(shell: Shell, workers: int, killed: bool) -> None:
    assert crawled(shell, Shop(), workers=workers, killed=killed) == EXPECTED
