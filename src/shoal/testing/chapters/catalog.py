"""Catalog: what people can read and change."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import NoSuchJob
from shoal.frontier.port import Backend
from shoal.model import (
    TRANSIT,
    Added,
    Dead,
    DeadGroup,
    Done,
    Failure,
    JobSpec,
    JobState,
    Pace,
    Release,
    Request,
    Retry,
    Selection,
)
from shoal.testing.chapters.chapter import Chapter, add_all, claim, claim_one, page, pages, requests
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
OTHER = "http://b.example"


async def make_letters(frontier: Backend) -> None:
    """Four dead letters: two of `a.example` (404, reset) and two of `b.example` (both 404)."""
    await frontier.open_job("job", FREE)
    await add_all(frontier, requests([page(0), page(1), page(0, host=OTHER), page(1, host=OTHER)]))
    for lease in sorted(await claim(frontier, 100), key=lambda lease: lease.request.url):
        error = "reset" if lease.request.url == page(1) else "http_404"
        await frontier.settle([Dead(lease, Failure(error, "why"))])


class Catalog(Chapter):
    async def test_a_job_starts_with_its_first_claim(self, frontier: Backend, harness: Harness) -> None:
        for name in ("job", "other", "idle"):
            await frontier.open_job(name, FREE)
            assert (await frontier.job(name)).started_at is None
        harness.advance(5.0)
        await add_all(frontier, requests([page(0), page(1)]))
        harness.advance(5.0)
        assert (await frontier.job("job")).started_at is None, "it waits"
        begun = harness.now()
        await frontier.settle([Release(lease) for lease in await claim(frontier, 1)])
        harness.advance(5.0)
        for lease in await claim(frontier, 2):
            await frontier.settle([Done(lease)])
        harness.advance(5.0)
        # Two lines on one lane: some backends claim from such lanes in another way.
        await frontier.add([Request(page(n), "other", priority=n) for n in (3, 4)])
        later = harness.now()
        assert len(await claim(frontier, 2)) == 2
        started = [(await frontier.job(name)).started_at for name in ("job", "other", "idle")]
        assert started == [begun, later, None]
        listed = {job.id: job.started_at for job in await frontier.jobs()}
        assert listed == {"job": begun, "other": later, "idle": None}

    async def test_a_dead_letter_names_the_last_worker(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests([page(n) for n in range(3)]))
        await frontier.add([Request(page(3), "job", ttl=5.0, delay=60.0)])
        await frontier.bury(Request("nonsense", "job"), "bad_url", "no URL")
        first = await frontier.claim(3, worker="first", lease_seconds=60.0)
        by_url = {lease.request.url: lease for lease in first.leases}
        await frontier.settle(
            [
                Retry(by_url[page(0)], 0.0, Failure("reset")),
                Dead(by_url[page(1)], Failure("http_404", worker="somebody else")),
                Release(by_url[page(2)]),
            ]
        )
        harness.advance(10.0)
        second = await frontier.claim(3, worker="second", lease_seconds=60.0)
        await frontier.settle([Dead(lease, Failure("http_500", "why")) for lease in second.leases])
        letters = {letter.request.url: letter for letter in await frontier.dead(Selection())}
        assert {url: letter.failure.worker for url, letter in letters.items()} == {
            page(0): "second",
            page(1): "first",
            page(2): "second",
            page(3): "",
            "nonsense": "",
        }
        (finding,) = await frontier.find(page(0), "job")
        assert finding.failure == letters[page(0)].failure == Failure("http_500", "why", "second")

    async def test_a_dead_letter_names_the_worker_that_crashed_last(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests([page(0)]))
        for worker in ("first", "second", "third"):
            harness.advance(10.0)
            assert (await frontier.claim(1, worker=worker, lease_seconds=60.0)).leases
            await frontier.evict([worker])
        (letter,) = await frontier.dead(Selection())
        assert (letter.failure.error, letter.failure.worker) == ("worker_crashed", "third")

    async def test_a_dead_letter_from_transit_names_no_worker(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests([page(0), page(1)]))
        claimed = await frontier.claim(2, worker=f"{TRANSIT}pump", lease_seconds=60.0)
        lost, came = claimed.leases
        taken = await frontier.take([came], worker="w", lease_seconds=60.0)
        await frontier.settle([Dead(lost, Failure("reset")), Dead(taken.leases[0], Failure("reset"))])
        found = {letter.request.url: letter.failure.worker for letter in await frontier.dead(Selection())}
        assert found == {lost.request.url: "", came.request.url: "w"}

    async def test_a_job_is_opened_once(self, frontier: Backend, harness: Harness) -> None:
        spec = JobSpec(scraper="x", start=(page(0),), gap=3.0, headers={"a": "b"}, fields=("t",), max_pages=7)
        job = await frontier.open_job("job", spec)
        assert (job.id, job.spec, job.state, job.created_at) == ("job", spec, JobState.RUNNING, harness.now())
        again = await frontier.open_job("job", JobSpec(scraper="other"))
        assert again.spec == spec
        assert await frontier.job("job") == job

    async def test_an_unknown_job_is_an_error(self, frontier: Backend) -> None:
        with pytest.raises(NoSuchJob):
            await frontier.job("nobody")
        with pytest.raises(NoSuchJob):
            await frontier.update_job("nobody", spec=JobSpec())

    async def test_jobs_are_listed_newest_first(self, frontier: Backend, harness: Harness) -> None:
        for name in ("one", "two", "three"):
            await frontier.open_job(name, JobSpec())
            harness.advance(1.0)
        listed = await frontier.jobs()
        assert [job.id for job in listed] == ["three", "two", "one"]
        assert [job.id for job in await frontier.jobs(limit=2)] == ["three", "two"]
        assert [job.id for job in await frontier.jobs(before=listed[0].created_at)] == ["two", "one"]

    async def test_a_job_is_done_when_nothing_is_left_and_runs_again_when_added_to(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        assert (await frontier.job("job")).state is JobState.RUNNING
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier))])
        job = await frontier.job("job")
        assert (job.state, job.finished_at) == (JobState.DONE, harness.now())
        await add_all(frontier, requests(pages(1, start=1)))
        job = await frontier.job("job")
        assert (job.state, job.finished_at) == (JobState.RUNNING, None)

    async def test_a_respec_keeps_requests_and_counters(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        job = await frontier.update_job("job", spec=JobSpec(scraper="new"))
        assert job.spec.scraper == "new"
        assert (await frontier.job("job")).spec.scraper == "new"
        assert job.counts.waiting == 2

    async def test_items_are_read_from_a_position(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        bodies = [str(number).encode() for number in range(7)]
        await frontier.settle([Done(await claim_one(frontier), items=bodies)])
        read, after = [], 0
        while batch := await frontier.items("job", after=after, limit=3):
            assert len(batch) <= 3
            read += [item.body for item in batch]
            after = batch[-1].seq
        assert read == bodies

    async def test_dead_letters_are_selected_by_every_field(self, frontier: Backend) -> None:
        await make_letters(frontier)
        letters = await frontier.dead(Selection())
        assert len(letters) == 4
        assert [letter.id for letter in letters] == sorted({letter.id for letter in letters})
        for which, expected in (
            (Selection(job="job"), 4),
            (Selection(job="nobody"), 0),
            (Selection(lane="b.example"), 2),
            (Selection(error="http_404"), 3),
            (Selection(lane="a.example", error="http_404"), 1),
            (Selection(ids=(letters[0].id, letters[3].id)), 2),
            (Selection(ids=()), 0),
            (Selection(ids=(letters[0].id,), lane="nowhere"), 0),
        ):
            assert len(await frontier.dead(which)) == expected, which

    async def test_dead_letters_are_read_in_pages(self, frontier: Backend) -> None:
        await make_letters(frontier)
        everything = await frontier.dead(Selection())
        first = await frontier.dead(Selection(), limit=3)
        assert first == everything[:3]
        assert await frontier.dead(Selection(), after=first[-1].id) == everything[3:]

    async def test_dead_letters_are_grouped_largest_first(self, frontier: Backend) -> None:
        await make_letters(frontier)
        groups = await frontier.dead_groups(Selection(job="job"))
        assert (groups[0].lane, groups[0].error, groups[0].count) == ("b.example", "http_404", 2)
        assert {(group.lane, group.error, group.count) for group in groups[1:]} == {
            ("a.example", "http_404", 1),
            ("a.example", "reset", 1),
        }
        assert groups[0].example.startswith(OTHER)
        assert await frontier.dead_groups(Selection(error="reset")) == [
            DeadGroup(lane="a.example", error="reset", count=1, example=page(1))
        ]

    async def test_an_expired_request_is_listed_with_the_dead(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        harness.advance(6.0)
        await claim(frontier, 100)
        [letter] = await frontier.dead(Selection(job="job"))
        assert (letter.state, letter.failure.error, letter.request.url) == ("expired", "expired", page(0))

    async def test_dead_letters_are_selected_by_the_time_of_their_end(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(4)))
        leases = {lease.request.url: lease for lease in await claim(frontier, 100)}
        # The last request that was added is the first to end.
        for n in (3, 1, 0):
            harness.advance(1.0)
            await frontier.settle([Dead(leases[page(n)], Failure("reset"))])
        ends = {letter.request.url: letter.ended_at for letter in await frontier.dead(Selection())}

        async def since(n: int, **more: Any) -> list[str]:
            which = Selection(since=ends[page(n)], **more)
            return [letter.request.url for letter in await frontier.dead(which)]

        assert await since(3) == [page(0), page(1)]
        assert await since(3, job="other") == []
        assert await since(0) == []
        [first] = await frontier.dead(Selection(since=ends[page(3)]), limit=1)
        rest = await frontier.dead(Selection(since=ends[page(3)]), after=first.id)
        assert [first.request.url, *(letter.request.url for letter in rest)] == [page(0), page(1)]
        assert await frontier.revive(Selection(since=ends[page(1)])) == 1
        harness.advance(1.0)
        await frontier.bury(Request(url="http://[", job="job"), "url_invalid", "what is that")
        assert await since(3) == [page(1), "http://["]
        assert await frontier.purge(Selection(since=ends[page(1)])) == 1
        assert await since(3) == [page(1)]

    async def test_reviving_puts_selected_requests_back_in_line(self, frontier: Backend) -> None:
        await make_letters(frontier)
        assert (await frontier.job("job")).state is JobState.DONE
        assert await frontier.revive(Selection(lane="b.example")) == 2
        job = await frontier.job("job")
        assert (job.counts.dead, job.counts.waiting, job.state) == (2, 2, JobState.RUNNING)
        assert {lease.lane for lease in await claim(frontier, 100)} == {"b.example"}
        assert await frontier.revive(Selection(lane="b.example")) == 0

    async def test_reviving_keeps_or_resets_the_attempts(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Retry(await claim_one(frontier), 0.0, Failure("reset"))])
        lease = await claim_one(frontier)
        assert lease.request.attempt == 1
        await frontier.settle([Dead(lease, Failure("reset"))])
        await frontier.revive(Selection(job="job"))
        lease = await claim_one(frontier)
        kept = lease.request.attempt
        assert kept >= 1
        await frontier.settle([Dead(lease, Failure("reset"))])
        await frontier.revive(Selection(job="job"), reset_attempts=True)
        assert (await claim_one(frontier)).request.attempt == 0

    async def test_a_revived_poison_request_has_its_chances_again(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for _ in range(3):
            await claim_one(frontier, lease_seconds=5.0)
            harness.advance(7.0)
        assert await claim(frontier, 100) == []
        assert await frontier.revive(Selection(error="worker_crashed"), reset_attempts=True) == 1
        await claim_one(frontier, lease_seconds=5.0)
        harness.advance(7.0)
        await claim_one(frontier)

    async def test_an_expired_request_can_be_revived(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        harness.advance(6.0)
        await claim(frontier, 100)
        assert await frontier.revive(Selection(job="job")) == 1
        # It would be useless if its old deadline applied again.
        await claim_one(frontier)
        counts = (await frontier.job("job")).counts
        assert (counts.expired, counts.leased) == (0, 1)

    async def test_purging_forgets_the_letter_but_not_the_count(self, frontier: Backend) -> None:
        await make_letters(frontier)
        assert await frontier.purge(Selection(error="http_404")) == 3
        assert len(await frontier.dead(Selection())) == 1
        assert (await frontier.job("job")).counts.dead == 4
        assert await frontier.add(requests([page(0)])) == [Added.KNOWN]
        assert await frontier.revive(Selection()) == 1

    async def test_a_url_that_could_not_be_accepted_is_buried(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        bad = Request(url=page("x"), job="job")
        await frontier.bury(bad, "url_invalid", "no good")
        await frontier.bury(bad, "url_invalid", "no good")
        job = await frontier.job("job")
        assert (job.counts.added, job.counts.dead) == (1, 1)
        [letter] = await frontier.dead(Selection(job="job"))
        assert letter.failure == Failure("url_invalid", "no good")
        assert await frontier.add([bad]) == [Added.KNOWN]

    @pytest.mark.parametrize(
        "text", ["not a url", "", "ftp://x", "http//a.example/", "http://[::1", "://", "ü"]
    )
    async def test_anything_can_be_buried(self, frontier: Backend, text: str) -> None:
        await frontier.open_job("job", FREE)
        await frontier.bury(Request(url=text, job="job"), "url_invalid", "it does not parse")
        [letter] = await frontier.dead(Selection(job="job"))
        assert letter.request.url == text

    @pytest.mark.parametrize(
        "text",
        ["http://a.example/\0", "http://a.example/\ud800?\udcff", "http://\ud800/", "\0\ud800"],
        ids=ascii,
    )
    async def test_text_that_a_server_cannot_store_breaks_nothing(self, frontier: Backend, text: str) -> None:
        """PostgreSQL cannot store NUL characters or lone surrogates: they are replaced."""
        await frontier.open_job("job", FREE)
        await frontier.bury(Request(url=text, job="job"), "url_invalid", f"bad: {text}")
        [letter] = await frontier.dead(Selection(job="job"))
        assert len(letter.request.url) == len(text)
        assert letter.failure.error == "url_invalid"
        assert await frontier.dead(Selection(lane=text, error=text)) == []
        assert await frontier.lanes(names=[text]) == []
        assert await frontier.leases(lane=text) == []
        assert [group.count for group in await frontier.dead_groups(Selection(job="job"))] == [1]
        if "://" in text:
            assert [found.state for found in await frontier.find(text, "job")] == ["dead"]
            assert [found.state for found in await frontier.find(f"{text}x", "job")] == ["unknown"]

    async def test_burying_a_known_url_changes_nothing(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.bury(requests(pages(1))[0], "url_invalid", "no good")
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.dead, counts.waiting) == (1, 0, 1)

    async def test_lanes_show_their_work(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=4.0, width=2))
        await add_all(frontier, requests(pages(5)))
        await add_all(frontier, requests(pages(1, host=OTHER)))
        lease = next(lease for lease in await claim(frontier, 100) if lease.lane == "a.example")
        [lane] = await frontier.lanes(names=["a.example"])
        assert (lane.gap, lane.width, lane.busy, lane.waiting) == (4.0, 2, 1, 4)
        assert {lane.name for lane in await frontier.lanes()} == {"a.example", "b.example"}
        assert len(await frontier.lanes(limit=1)) == 1
        await frontier.settle([Done(lease)])
        [lane] = await frontier.lanes(names=["a.example"])
        assert lane.busy == 0

    async def test_a_lane_shows_when_it_is_ready(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=4.0, width=2))
        await add_all(frontier, requests(pages(5)))
        await claim_one(frontier)
        [lane] = await frontier.lanes(names=["a.example"])
        assert lane.ready_at == harness.now() + 4.0
        await frontier.pace("a.example", Pace(paused=True))
        [lane] = await frontier.lanes(names=["a.example"])
        assert (lane.paused, lane.ready_at) == (True, None)

    async def test_find_returns_the_state_of_a_url(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(
            frontier,
            [
                Request(url=page("leased"), job="job"),
                Request(url=page("done"), job="job"),
                Request(url=page("dead"), job="job"),
                Request(url=page("delayed"), job="job", delay=99.0),
                Request(url=page("expired"), job="job", delay=50.0, ttl=2.0),
            ],
        )
        leases = {lease.request.url: lease for lease in await claim(frontier, 100)}
        failure = Failure("http_404", "gone")
        await frontier.settle([Done(leases[page("done")]), Dead(leases[page("dead")], failure)])
        harness.advance(3.0)
        await claim(frontier, 1)
        await add_all(frontier, requests([page("waiting"), page("second")]))
        for state in ("leased", "done", "dead", "delayed", "expired", "waiting"):
            [finding] = await frontier.find(page(state), "job")
            assert (finding.state, finding.job) == (state, "job")
        [dead] = await frontier.find(page("dead"), "job")
        assert dead.failure == Failure(failure.error, failure.message, "w")
        [second] = await frontier.find(page("second"), "job")
        assert second.ahead == 1
        [leased] = await frontier.find(page("leased"), "job")
        assert (leased.worker, leased.until) == ("w", leases[page("leased")].expires_at)

    async def test_find_searches_every_job_if_none_is_named(self, frontier: Backend) -> None:
        for name in ("one", "two", "three"):
            await frontier.open_job(name, FREE)
        for name in ("one", "two"):
            await add_all(frontier, requests(pages(1), job=name))
        findings = await frontier.find(page(0))
        assert {f.job for f in findings if f.state == "waiting"} == {"one", "two"}

    async def test_find_reports_an_unknown_url(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        assert [f.state for f in await frontier.find(page("never"), "job")] in ([], ["unknown"])

    async def test_queues_are_counted(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(3), queue="rag"))
        await add_all(frontier, [Request(url=page("late"), job="job", queue="business", delay=5.0)])
        await claim(frontier, 1)
        queues = await frontier.queues()
        assert queues["rag"] == {"waiting": 2, "delayed": 0, "leased": 1}
        assert queues["business"] == {"waiting": 0, "delayed": 1, "leased": 0}

    async def test_spec_and_state_are_updated_together(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=4.0, width=1))
        await add_all(frontier, requests(pages(3)))
        job = await frontier.update_job("job", spec=FREE, state=JobState.PAUSED)
        assert (job.spec, job.state, job.counts.waiting) == (FREE, JobState.PAUSED, 3)
        assert await claim(frontier, 9) == []
        job = await frontier.update_job("job", state=JobState.RUNNING)
        assert (job.spec, job.state) == (FREE, JobState.RUNNING)
        assert len(await claim(frontier, 9)) == 3, "without a gap, as it was asked"

    async def test_an_update_without_arguments_changes_nothing(self, frontier: Backend) -> None:
        made = await frontier.open_job("job", FREE)
        assert await frontier.update_job("job") == made
        with pytest.raises(NoSuchJob):
            await frontier.update_job("nobody")
        with pytest.raises(NoSuchJob):
            await frontier.update_job("nobody", spec=FREE)
        with pytest.raises(NoSuchJob):
            await frontier.update_job("nobody", state=JobState.PAUSED)

    @pytest.mark.parametrize("end", [JobState.DONE, JobState.CANCELLED])
    async def test_a_state_that_does_not_apply_changes_nothing(
        self, frontier: Backend, end: JobState
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        for state in (JobState.RUNNING, JobState.DONE):
            assert (await frontier.update_job("job", state=state)).state is JobState.RUNNING
        if end is JobState.CANCELLED:
            await frontier.update_job("job", state=end)
        await frontier.settle([Done(lease)])
        ended = await frontier.job("job")
        assert ended.state is end
        for state in JobState:
            if state is not end:
                assert await frontier.update_job("job", state=state) == ended

    async def test_a_frontier_describes_its_storage(self, frontier: Backend) -> None:
        info = await frontier.info()
        assert bool(info.server) == bool(info.schema)
        assert info.schema == info.newest
        assert all(warning.text and warning.hint for warning in info.warnings)
        assert info.durable.text
