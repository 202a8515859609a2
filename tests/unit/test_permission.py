"""What is remembered of robots.txt, and for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.errors import FetchError
from shoal.fetch.http import HttpFetcher
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.port import Notes
from shoal.politeness import permission as module
from shoal.politeness.permission import Permission

RULES = b"User-agent: acmebot\nDisallow: /acme\nUser-agent: *\nDisallow: /private\n"


async def noted(notes: Notes) -> dict[str, bytes]:
    """What is noted of hosts."""
    return {note.name: note.value for note in await notes.scan("robots")}


@pytest.fixture
def answers() -> dict[str, Reply]:
    """What the site answers, by path."""
    return {"/robots.txt": Reply(200, RULES, "text/plain")}


@pytest.fixture
def site(answers: dict[str, Reply]) -> Iterator[LoopbackSite]:
    def respond(call: Call) -> Reply:
        return answers.get(call.bare, Reply(404))

    with LoopbackSite(respond, hosts=3) as made:
        yield made


@pytest.fixture
async def fetcher() -> AsyncIterator[HttpFetcher]:
    made = HttpFetcher()
    yield made
    await made.close()


@pytest.fixture
def notes() -> Notes:
    return MemoryFrontier().notes


@pytest.fixture
def permission(fetcher: HttpFetcher, notes: Notes) -> Permission:
    return Permission(fetcher, notes)


async def test_a_refusal_of_our_own_is_no_answer_to_anybody(
    site: LoopbackSite, permission: Permission, notes: Notes
) -> None:
    asked = await asyncio.gather(
        permission.ask(site.url, allow_private=False),
        permission.ask(site.url, allow_private=True),
        return_exceptions=True,
    )
    assert isinstance(asked[0], FetchError) and asked[0].error == "egress_blocked" and asked[0].hint
    assert not isinstance(asked[1], BaseException) and not asked[1].allowed(f"{site.url}private")
    assert await permission.rules(site.url, allow_private=False) is None
    assert await permission.rules(site.url, allow_private=True) is asked[1]
    assert list(await noted(notes)) == [f"private {site.url.rstrip('/')}"]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(0), "empty_reply"),
        (Reply(200, b"no gzip", headers=(("content-encoding", "gzip"),)), "decode_error"),
        (Reply(302, headers=(("location", "http://127.0.0.1:1/robots.txt"),)), "connect_refused"),
    ],
)
async def test_without_an_answer_nothing_is_known(
    site: LoopbackSite,
    permission: Permission,
    notes: Notes,
    answers: dict[str, Reply],
    reply: Reply,
    error: str,
) -> None:
    answers["/robots.txt"], whole = reply, answers["/robots.txt"]
    with pytest.raises(FetchError, match=r"robots\.txt: ") as caught:
        await permission.ask(site.url, allow_private=True)
    assert caught.value.error == error
    assert not await noted(notes) and await permission.rules(site.url, allow_private=True) is None
    answers["/robots.txt"] = whole
    assert not (await permission.ask(site.url, allow_private=True)).allowed(f"{site.url}private")


@pytest.mark.parametrize("to", ["/robots.txt", "ftp://h.test/robots.txt", ""])
async def test_redirects_to_nowhere_mean_that_there_is_none(
    site: LoopbackSite, permission: Permission, answers: dict[str, Reply], to: str
) -> None:
    answers["/robots.txt"] = Reply(301, headers=(("location", to),) if to else ())
    assert (await permission.ask(site.url, allow_private=True)).status == 404


async def test_five_redirects_are_followed(
    site: LoopbackSite, permission: Permission, answers: dict[str, Reply]
) -> None:
    answers["/5"] = answers["/robots.txt"]
    for number in range(5):
        name = f"/{number}" if number else "/robots.txt"
        answers[name] = Reply(302, headers=(("location", f"/{number + 1}"),))
    assert not (await permission.ask(site.url, allow_private=True)).allowed(f"{site.url}private")


async def test_who_may_go_to_one_endpoint_learns_nothing_of_the_others(
    site: LoopbackSite, permission: Permission
) -> None:
    here, there = (url.split("/")[2] for url in site.urls[:2])
    await permission.ask(site.url, allow_private=True)
    assert await permission.rules(site.url, allow_private=(there,)) is None
    with pytest.raises(FetchError):
        await permission.ask(site.url, allow_private=(there,))
    robots = await permission.ask(site.url, allow_private=(there, here))
    assert await permission.rules(site.url, allow_private=(here, there)) is robots


async def test_each_agent_has_its_rules(site: LoopbackSite, permission: Permission) -> None:
    robots = await permission.ask(site.url, allow_private=True)
    again = await permission.rules(site.url, allow_private=True, agent="acmebot")
    assert again is robots
    assert await permission.allows(robots, f"{site.url}acme")
    assert not await permission.allows(robots, f"{site.url}acme", "acmebot")
    assert await permission.allows(robots, f"{site.url}private", "acmebot")


async def test_a_large_file_is_parsed_and_asked_off_the_loop(
    site: LoopbackSite, permission: Permission, answers: dict[str, Reply]
) -> None:
    lines = b"".join(b"Disallow: /*z%d\n" % n for n in range(50_000))
    answers["/robots.txt"] = Reply(200, b"User-agent: *\n" + lines, "text/plain")
    loop = asyncio.get_running_loop()
    late: list[float] = []

    async def look() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            late.append(loop.time() - before)

    watch = asyncio.create_task(look())
    robots = await permission.ask(site.url, allow_private=True)
    for _ in range(5):
        assert await permission.allows(robots, f"{site.url}{'ab' * 1000}")
    watch.cancel()
    # On the loop it would be looked at once before and once after each step.
    assert len(late) > 20, late


async def test_memory_has_a_bound_and_the_notes_know_the_rest(
    site: LoopbackSite, permission: Permission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SIZE", 2 * len(RULES))
    for url in site.urls:
        await permission.ask(url, allow_private=True)
    assert len(permission._rules) == 2
    site.clear()
    for url in site.urls:
        robots = await permission.rules(url, allow_private=True)
        assert robots is not None and not robots.allowed(f"{url}private")
    assert site.log() == []
