"""Notes, and what is built on them: locks, cursors, the list of workers."""

from __future__ import annotations

import asyncio

import pytest

from shoal.frontier.notes import FORGET, LOCKS, Cursor, Lock, Presence
from shoal.frontier.port import Backend
from shoal.model import FOREVER, HEARTBEAT_TIMEOUT, STUCK, Heartbeat, JobSpec
from shoal.testing.chapters.chapter import Chapter, add_all, claim, page, pages, requests
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
STRANGE = ("with\0zero", "half \ud800", "\udcff", "a:b", "a%3Ab", "%", "ü 漢 \N{GRINNING FACE}", " ", "")
"""Names that some servers cannot store: PostgreSQL refuses NUL characters and lone surrogates."""


class Notes(Chapter):
    async def test_a_note_is_kept_until_its_end(self, frontier: Backend, harness: Harness) -> None:
        notes, other = frontier.notes, (await harness.open()).notes
        assert await notes.get("robots", "a.example") is None
        await notes.put("robots", "a.example", b"\x00one", 10.0)
        assert await other.get("robots", "a.example") == b"\x00one"
        await other.put("robots", "a.example", b"two", 10.0)
        assert await notes.get("robots", "a.example") == b"two"
        harness.advance(9.75)
        assert await notes.get("robots", "a.example") == b"two"
        harness.advance(0.5)
        assert await notes.get("robots", "a.example") is None

    async def test_a_note_belongs_to_one_shelf(self, frontier: Backend) -> None:
        notes = frontier.notes
        await notes.put("robots", "same", b"one", 10.0)
        await notes.put("pages", "same", b"two", 10.0)
        assert [await notes.get(shelf, "same") for shelf in ("robots", "pages", "held")] == [
            *(b"one", b"two"),
            None,
        ]
        await notes.put("robots", "same", None, 0.0)
        assert await notes.get("robots", "same") is None
        assert await notes.get("pages", "same") == b"two"

    async def test_a_note_can_be_removed(self, frontier: Backend, harness: Harness) -> None:
        notes, other = frontier.notes, (await harness.open()).notes
        await notes.put("held", "job", b"", 10.0)
        assert await other.get("held", "job") == b"", "an empty note is not none"
        await other.put("held", "job", None, 10.0)
        await other.put("held", "never there", None, 10.0)
        assert await notes.get("held", "job") is None
        assert await notes.scan("held") == []
        await notes.put("held", "job", b"again", 10.0)
        assert await notes.get("held", "job") == b"again"

    async def test_compare_and_set_needs_the_known_value(self, frontier: Backend, harness: Harness) -> None:
        notes, other = frontier.notes, (await harness.open()).notes
        assert not await notes.compare_and_set("book", "all", b"one", b"two", 10.0), "there is none"
        assert not await notes.compare_and_set("book", "all", b"", b"two", 10.0), "an empty one is not none"
        assert not await notes.compare_and_set("book", "all", b"one", None, 10.0), "nothing to remove"
        assert await notes.compare_and_set("book", "all", None, b"\x00one", 10.0)
        assert not await other.compare_and_set("book", "all", None, b"two", 10.0)
        assert not await other.compare_and_set("book", "all", None, None, 10.0), "it is there"
        assert not await other.compare_and_set("book", "all", b"other", b"two", 10.0)
        assert not await other.compare_and_set("book", "all", b"other", None, 10.0)
        assert await other.get("book", "all") == b"\x00one"
        assert await other.compare_and_set("book", "all", b"\x00one", b"two", 10.0)
        assert await notes.get("book", "all") == b"two"
        harness.advance(10.5)
        assert not await notes.compare_and_set("book", "all", b"two", b"three", 10.0), "it has ended"
        assert not await notes.compare_and_set("book", "all", b"two", None, 10.0), "it has ended"
        assert await notes.compare_and_set("book", "all", None, None, 10.0), "nothing is there, as was known"
        assert await notes.compare_and_set("book", "all", None, b"", 10.0)
        assert await notes.compare_and_set("book", "all", b"", b"three", 10.0)
        assert await other.get("book", "all") == b"three"
        assert await other.compare_and_set("book", "all", b"three", None, 10.0)
        assert await notes.get("book", "all") is None
        assert await notes.scan("book") == []

    async def test_one_of_two_concurrent_changes_of_a_note_succeeds(
        self, frontier: Backend, harness: Harness
    ) -> None:
        handles = [frontier, await harness.open(), await harness.open()]

        async def count_up(handle: Backend) -> None:
            notes, done = handle.notes, 0
            while done < 10:
                known = await notes.get("count", "all")
                value = str(int(known or b"0") + 1).encode()
                done += await notes.compare_and_set("count", "all", known, value, 10.0)

        await asyncio.gather(*map(count_up, handles))
        assert await frontier.notes.get("count", "all") == b"30"

    async def test_one_of_many_that_create_or_remove_a_note_succeeds(
        self, frontier: Backend, harness: Harness
    ) -> None:
        handles = [frontier, await harness.open(), await harness.open()]
        for _ in range(5):
            made = [each.notes.compare_and_set("one", "x", None, b"there", 10.0) for each in handles * 2]
            assert sum(await asyncio.gather(*made)) == 1
            removed = [each.notes.compare_and_set("one", "x", b"there", None, 10.0) for each in handles * 2]
            assert sum(await asyncio.gather(*removed)) == 1

    async def test_a_note_may_last_for_years_and_be_large(self, frontier: Backend, harness: Harness) -> None:
        notes, large = frontier.notes, b"x" * 4 * 1024 * 1024
        assert await notes.compare_and_set("book", "all", None, large, FOREVER)
        await notes.put("book", "small", b"1", 1.0)
        harness.advance(9 * 365 * 24 * 3600.0)
        await notes.put("book", "other", b"1", 1.0)  # this removes expired notes
        assert await notes.get("book", "small") is None
        assert await notes.get("book", "all") == large

    async def test_a_scan_is_sorted_by_name_and_omits_expired_notes(
        self, frontier: Backend, harness: Harness
    ) -> None:
        notes, other = frontier.notes, (await harness.open()).notes
        assert await notes.scan("workers") == []
        begun = harness.now()
        for name, ttl in (("b", 10.0), ("ü", 10.0), ("a", 3.0), ("B", 10.0), ("a b", 10.0)):
            await notes.put("workers", name, name.encode(), ttl)
        await notes.put("elsewhere", "c", b"", 10.0)
        assert [note.name for note in await other.scan("workers")] == ["B", "a", "a b", "b", "ü"]
        harness.advance(4.0)
        await other.put("workers", "b", b"\x00later", 10.0)
        found = await notes.scan("workers")
        assert [(note.name, note.value) for note in found] == [
            ("B", b"B"),
            ("a b", b"a b"),
            ("b", b"\x00later"),
            ("ü", "ü".encode()),
        ]
        assert [note.at for note in found] == pytest.approx([begun, begun, begun + 4.0, begun], abs=0.001), (
            "the time at which each was written"
        )
        harness.advance(7.0)
        assert [note.name for note in await other.scan("workers")] == ["b"]
        harness.advance(4.0)
        assert await other.scan("workers") == []

    async def test_a_note_has_the_time_of_its_last_change(self, frontier: Backend, harness: Harness) -> None:
        notes = frontier.notes
        assert await notes.compare_and_set("book", "all", None, b"one", 60.0)
        harness.advance(5.0)
        assert await notes.compare_and_set("book", "all", b"one", b"two", 60.0)
        [found] = await notes.scan("book")
        assert found.value == b"two"
        assert found.at == pytest.approx(harness.now(), abs=0.001)

    @pytest.mark.parametrize("name", STRANGE, ids=ascii)
    async def test_any_text_is_a_name(self, frontier: Backend, name: str) -> None:
        notes = frontier.notes
        assert await notes.get(name, name) is None
        await notes.put(name, name, b"one", 10.0)
        await notes.put("plain", name, b"other", 10.0)
        assert await notes.get(name, name) == b"one"
        assert await notes.compare_and_set(name, name, b"one", b"two", 10.0)
        assert [note.value for note in await notes.scan(name)] == [b"two"]
        [found] = await notes.scan("plain")
        assert found.value == b"other"
        assert found.name == name or "\0" in name or name != name.encode("utf-8", "replace").decode()
        await notes.put(name, name, None, 0.0)
        assert await notes.get(name, name) is None
        assert await notes.scan(name) == []

    async def test_a_colon_makes_no_other_shelf(self, frontier: Backend) -> None:
        notes = frontier.notes
        await notes.put("a:b", "c", b"one", 10.0)
        assert await notes.get("a", "b:c") is None
        await notes.put("a", "b:c", b"two", 10.0)
        assert await notes.get("a:b", "c") == b"one"

    async def test_notes_return_the_frontiers_time(self, frontier: Backend, harness: Harness) -> None:
        assert await frontier.notes.now() == pytest.approx(harness.now(), abs=0.001)
        harness.advance(5.0)
        assert await (await harness.open()).notes.now() == pytest.approx(harness.now(), abs=0.001)

    # -- locks --------------------------------------------------------------------------

    async def test_a_lock_has_one_owner_until_it_expires(self, frontier: Backend, harness: Harness) -> None:
        other = (await harness.open()).notes
        one = Lock(frontier.notes, "run books", "one", 10.0)
        two = Lock(other, "run books", "two", 10.0)
        assert await one.take()
        assert not await two.take()
        assert (one.holder, two.holder) == ("one", "one")
        assert await Lock(other, "run films", "two", 10.0).take(), "another lock is another"
        harness.advance(6.0)
        assert await one.take()
        harness.advance(6.0)
        assert not await two.take(), "kept by taking it again"
        harness.advance(5.0)
        assert await two.take()
        await one.release()
        assert not await one.take(), "only its owner can give it back"
        assert one.holder == "two"
        await two.release()
        assert await one.take()

    async def test_the_lock_of_a_dead_owner_is_taken_at_once(self, frontier: Backend) -> None:
        dead = Lock(frontier.notes, "pump", "dead", 10.0)
        assert await dead.take()
        assert not await Lock(frontier.notes, "pump", "one", 10.0).take()
        heir = Lock(frontier.notes, "pump", "one", 10.0, is_dead=lambda name: name == "dead")
        assert await heir.take()
        assert not await dead.take()
        assert dead.holder == "one"

    async def test_one_of_many_that_take_a_lock_gets_it(self, frontier: Backend, harness: Harness) -> None:
        handles = [frontier, await harness.open(), await harness.open()]
        assert await Lock(frontier.notes, "x", "dead", 10.0).take()
        locks = [
            Lock(handle.notes, "x", f"o{number}", 10.0, is_dead=lambda name: name == "dead")
            for number, handle in enumerate(handles * 3)
        ]
        got = await asyncio.gather(*(lock.take() for lock in locks))
        assert sum(got) == 1
        [winner] = [lock.holder for lock, mine in zip(locks, got, strict=True) if mine]
        assert {lock.holder for lock in locks} == {winner}

    async def test_a_lock_is_kept_while_the_body_runs(self, frontier: Backend, harness: Harness) -> None:
        lock, other = Lock(frontier.notes, "x", "one", 0.3), Lock(frontier.notes, "x", "two", 0.3)
        assert await lock.take()
        async with lock.keep():
            for _ in range(3):
                harness.advance(0.2)
                while (await frontier.notes.scan(LOCKS))[0].at < harness.now() - 0.001:
                    await asyncio.sleep(0.02)
                assert not await other.take()
        assert await other.take(), "it was given back"

    # -- cursors ------------------------------------------------------------------------

    async def test_a_cursor_remembers_how_far_it_came(self, frontier: Backend, harness: Harness) -> None:
        other = (await harness.open()).notes
        assert await Cursor(frontier.notes, "job", "file:a.csv").get() == 0
        await Cursor(frontier.notes, "job", "file:a.csv").save(7)
        await Cursor(frontier.notes, "job", "file:b.csv").save(1 << 40)
        assert await Cursor(other, "job", "file:a.csv").get() == 7
        assert await Cursor(other, "job", "file:b.csv").get() == 1 << 40
        assert await Cursor(other, "jo", "b file:a.csv").get() == 0
        assert await Cursor(other, "other", "file:a.csv").get() == 0
        harness.advance(365 * 24 * 3600.0)
        await Cursor(other, "job", "file:a.csv").save(9)
        assert await Cursor(frontier.notes, "job", "file:a.csv").get() == 9
        assert await Cursor(frontier.notes, "job", "file:b.csv").get() == 1 << 40

    # -- workers ------------------------------------------------------------------------

    async def test_workers_are_listed_while_they_send_heartbeats(
        self, frontier: Backend, harness: Harness
    ) -> None:
        here, there = Presence(frontier.notes), Presence((await harness.open()).notes)
        assert await here.workers() == []
        begun = harness.now()
        await here.heartbeat(Heartbeat("b_2", queues=("rag",), slots=4, version="1"))
        await here.heartbeat(Heartbeat("a_1", current={"job": page(0)}))
        harness.advance(5.0)
        again = Heartbeat(
            "b_2", queues=("rag",), slots=4, running=2, visits=7, failed=1, rate=1.5, version="1"
        )
        await there.heartbeat(again)
        quiet, busy = await there.workers()
        assert (quiet.heartbeat.worker, quiet.heartbeat.current) == ("a_1", {"job": page(0)})
        assert busy.heartbeat == again
        assert (busy.since, busy.seen, busy.now) == pytest.approx((begun, begun + 5, begun + 5), abs=0.001)
        assert quiet.seen == pytest.approx(begun, abs=0.001)
        assert (quiet.state, busy.state) == ("idle", "working")
        harness.advance(HEARTBEAT_TIMEOUT - 1)
        assert [worker.state for worker in await here.workers()] == ["silent", "working"]
        await here.leave("b_2")
        await here.leave("nobody")
        assert [worker.heartbeat.worker for worker in await there.workers()] == ["a_1"]
        await there.heartbeat(Heartbeat("a_1"))
        [stayed] = await here.workers()
        assert stayed.since == pytest.approx(begun, abs=0.001)
        await here.leave("a_1")
        await here.heartbeat(Heartbeat("a_1"))
        [came_back] = await there.workers()
        assert came_back.since == pytest.approx(harness.now(), abs=0.001), "it starts anew"

    async def test_a_worker_is_listed_with_its_leases(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(5)))
        presence = Presence(frontier.notes)
        await presence.heartbeat(Heartbeat("w", running=3, stalled_for=STUCK + 1))
        await claim(frontier, 3, worker="w")
        await claim(frontier, 1, worker="unheard")
        [worker] = await presence.workers(frontier)
        assert (worker.leases, worker.state) == (3, "stuck")

    async def test_a_worker_without_heartbeats_for_a_day_is_forgotten(
        self, frontier: Backend, harness: Harness
    ) -> None:
        presence = Presence(frontier.notes)
        await presence.heartbeat(Heartbeat("old"))
        harness.advance(FORGET - 1)
        assert [worker.state for worker in await presence.workers()] == ["silent"]
        harness.advance(2)
        await presence.heartbeat(Heartbeat("new"))
        assert [worker.heartbeat.worker for worker in await presence.workers()] == ["new"]
