"""The `Catalog` port over any `Store`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from shoal import urls
from shoal.errors import NoSuchJob
from shoal.frontier.decisions import Entry, adopt, check_lane, lane_view, letter_of
from shoal.frontier.rows import JobRow, LaneRow, Line, extra_of, request_of, spec_bytes, spec_of
from shoal.frontier.rules import US, microseconds
from shoal.frontier.sql import statements as sql
from shoal.frontier.sql.tx import Place, Store, Tx
from shoal.model import (
    Counts,
    DeadGroup,
    DeadLetter,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    LeaseRow,
    Request,
    RequestStatus,
    Selection,
)


class Catalog:
    """Jobs, items, dead letters, lanes and the status of URLs."""

    _store: Store

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        async def work(tx: Tx) -> Job:
            await tx.run(sql.NEW_JOB, job, spec_bytes(spec), tx.now)
            return await _job(tx, job)

        return await self._store.write(work, durable=True)

    async def job(self, job: str) -> Job:
        return await self._store.read(lambda tx: _job(tx, job))

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        top = microseconds(before) if before is not None else 1 << 62

        async def work(tx: Tx) -> list[Job]:
            rows = await tx.run(sql.JOBS_BEFORE, top, limit)
            return await _jobs(tx, [name for (name,) in rows])

        return await self._store.read(work)

    async def update_job(
        self, job: str, *, spec: JobSpec | None = None, state: JobState | None = None
    ) -> Job:
        async def work(tx: Tx) -> Job:
            if spec is not None:
                await _respec(tx, job, spec)
            if state in (JobState.RUNNING, JobState.PAUSED):
                await _switch(tx, job, off=state is JobState.PAUSED)
            elif state is JobState.CANCELLED:
                await _cancel(tx, job)
            return await _job(tx, job)

        wakes = spec is not None or state is not JobState.PAUSED
        return await self._store.write(work, durable=True, wakes=wakes)

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        async def work(tx: Tx) -> list[Item]:
            base = await tx.job_id(job) << 40
            rows = await tx.run(sql.ITEM_LOG, base + after, base + (1 << 40), limit)
            return [Item(seq - base, body) for seq, body in rows]

        return await self._store.read(work)

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        where, values = _selected(which)
        n = len(values)
        # Adding 0 keeps the planner from walking through all letters by id.
        by = "e.id" if which.since is None else "(e.id + 0)"
        text = f"{sql.LETTERS} {where} AND {by}>${n + 1} ORDER BY {by} LIMIT ${n + 2}"

        async def work(tx: Tx) -> list[DeadLetter]:
            rows = await tx.run(sql.conditional(text), *values, after, limit)
            return [letter_of(row) for row in rows]

        return await self._store.read(work)

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        where, values = _selected(which)
        text = (
            "SELECT g.lane, g.error, g.n, e.url FROM (SELECT e.lane, e.error, count(*) AS n,"
            f" min(e.id) AS first FROM ended e JOIN job ON job.id=e.job WHERE {where}"
            " GROUP BY e.lane, e.error) g JOIN ended e ON e.id=g.first ORDER BY g.n DESC, g.lane, g.error"
        )

        async def work(tx: Tx) -> list[DeadGroup]:
            return [DeadGroup(*row) for row in await tx.run(sql.conditional(text), *values)]

        return await self._store.read(work)

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        where, values = _selected(which)
        text = f"{sql.LETTERS} job.state<>'cancelled' AND {where} ORDER BY e.id"

        async def work(tx: Tx) -> int:
            letters = [letter_of(row) for row in await tx.run(sql.conditional(text), *values)]
            if letters:
                await _revive(tx, letters, reset_attempts)
            return len(letters)

        return await self._store.write(work, durable=True, wakes=True)

    async def purge(self, which: Selection) -> int:
        where, values = _selected(which)
        text = (
            f"DELETE FROM ended WHERE id IN (SELECT e.id FROM ended e JOIN job ON job.id=e.job WHERE {where})"
        )

        async def work(tx: Tx) -> int:
            return await tx.change(sql.conditional(text), *values)

        return await self._store.write(work, durable=True)

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        async def work(tx: Tx) -> None:
            job = await tx.job(request.job)
            key = urls.key(request.job, request.url, request.method, request.body)
            if not await tx.learn_keys([key]):
                return
            (id,) = await tx.request_ids(1)
            job.count("added")
            job.count("dead")
            lane = urls.lane_of(request.url) if "://" in request.url else ""
            row = (
                *(id, "dead", tx.now, job.id, lane, request.queue, request.priority, request.url),
                *(request.depth, 0, extra_of(request), failure_class, message, ""),
            )
            await tx.many(sql.BURY, [row])
            tx.tally(job.id, failure_class)
            await tx.finish()

        await self._store.write(work, durable=True)

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        async def work(tx: Tx) -> list[Lane]:
            if names is not None:
                rows = await tx.run(sql.LANE_VIEWS, list(names))
            else:
                rows = await tx.run(sql.BUSIEST_LANES, limit)
            found = [lane_view(row[0], LaneRow(row[2:]), row[1]) for row in rows]
            return sorted(found, key=lambda lane: (-lane.busy, -lane.waiting, lane.name))[:limit]

        return await self._store.read(work)

    async def find(self, url: str, job: str | None = None) -> list[RequestStatus]:
        async def work(tx: Tx) -> list[RequestStatus]:
            names = [job] if job is not None else [name for (name,) in await tx.run(sql.ALL_JOBS)]
            await tx.load_jobs(names)
            keys = [urls.key(name, url) for name in names]
            known = {key for (key,) in await tx.run(sql.KNOWN_KEYS, keys)}
            return [
                await _find(tx, url, tx.jobs_named[name])
                if key in known
                else RequestStatus(name, "unknown", job_state=JobState(tx.jobs_named[name].state))
                for name, key in zip(names, keys, strict=True)
            ]

        return await self._store.read(work)

    async def queues(self) -> dict[str, dict[str, int]]:
        async def work(tx: Tx) -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            for state, statement in sql.BY_QUEUE.items():
                for name, n in await tx.run(statement):
                    found.setdefault(name, dict.fromkeys(sql.BY_QUEUE, 0))[state] = n
            return found

        return await self._store.read(work)

    async def leases(
        self, *, job: str | None = None, lane: str | None = None, limit: int | None = None
    ) -> list[LeaseRow]:
        async def work(tx: Tx) -> list[LeaseRow]:
            rows = await tx.run(sql.LEASES, job, lane, 1 << 62 if limit is None else limit)
            return [LeaseRow(*row) for row in rows]

        return await self._store.read(work)

    async def evict(self, workers: Collection[str]) -> int:
        if not workers:
            return 0
        return await self._store.write(
            lambda tx: tx.recall(sql.END_OF_WORKERS, list(workers)), durable=True, wakes=True
        )

    async def check(self) -> list[str]:
        return await self._store.read(_check)


# -- jobs -----------------------------------------------------------------------------------


async def _job(tx: Tx, name: str) -> Job:
    views = await _jobs(tx, [name])
    if not views:
        raise NoSuchJob(name)
    return views[0]


async def _jobs(tx: Tx, names: Sequence[str]) -> list[Job]:
    """Returns these jobs in this order; those that do not exist are left out."""
    rows = await tx.run(sql.JOB_VIEWS, list(names))
    ids = [row[0] for row in rows]
    leased = dict(await tx.run(sql.HELD_BY_JOB["lease"], ids))
    delayed = dict(await tx.run(sql.HELD_BY_JOB["delayed"], ids))
    errors: dict[int, dict[str, int]] = {}
    for job, error, n in await tx.run(sql.TALLIES, ids):
        errors.setdefault(job, {})[error] = n
    views: dict[str, Job] = {}
    for id, name, spec, state, created, finished, started, *values in rows:
        counts = Counts(**dict(zip(sql.COUNTS, values, strict=True)))
        out, later = leased.get(id, 0), delayed.get(id, 0)
        waiting = counts.live - out - later
        views[name] = Job(
            name,
            spec_of(spec),
            JobState(state),
            msgspec.structs.replace(counts, waiting=waiting, delayed=later, leased=out),
            errors.get(id, {}),
            created / US,
            None if finished is None else finished / US,
            None if started is None else started / US,
        )
    return [views[name] for name in names if name in views]


async def _respec(tx: Tx, job: str, spec: JobSpec) -> None:
    await tx.run(sql.SET_SPEC, spec_bytes(spec), await tx.job_id(job))
    await tx.run(sql.NEXT_EPOCH)  # other processes must not keep using the old spec
    await _repace(tx, await tx.job(job))
    tx.begin_again()


async def _switch(tx: Tx, job: str, *, off: bool) -> None:
    """Pause a running job, or resume a paused one."""
    row = await tx.job(job)
    if row.state != ("running" if off else "paused"):
        return
    await tx.run(sql.SWITCH_LINES, int(off), row.id)
    if not off:
        await tx.run(sql.CATCH_UP_LINES, row.id)
    await tx.run(sql.SET_STATE, "paused" if off else "running", row.id)
    await _place_lanes_of(tx, row.id)


async def _cancel(tx: Tx, job: str) -> None:
    row = await tx.job(job)
    if row.state in ("cancelled", "done"):
        return
    gone = 0
    for statement in sql.CANCEL_REQUESTS.values():
        gone += await tx.change(statement, row.id)
    await tx.run(sql.SET_CANCELLED, tx.now, gone, row.id)
    await _place_lanes_of(tx, row.id)
    tx.begin_again()  # the state of the job has changed
    await tx.recall(sql.END_TRAVELLING_OF_JOB, row.id)


async def _place_lanes_of(tx: Tx, job: int) -> None:
    """Recompute the place of every lane that a job has a line on."""
    rows = await tx.run(sql.LANES_OF_JOB, job)
    await tx.load_lanes(id for (id,) in rows)
    await tx.place_anew(tx.lanes.values())
    await tx.finish()


async def _repace(tx: Tx, job: JobRow) -> None:
    """Apply a job's new pace to its lanes. Lanes that other jobs use keep the slower pace."""
    rows = await tx.run(sql.LANES_OF_JOB, job.id)
    shared = {id for (id,) in await tx.run(sql.LANES_SHARED, job.id)}
    await tx.load_lanes(id for (id,) in rows)
    changed = [row for row in tx.lanes.values() if not row.pinned]
    for row in changed:
        row.gap = max(row.gap, job.gap) if row.id in shared else job.gap
        row.width = min(row.width, job.width) if row.id in shared else job.width
    await tx.place_anew(changed)
    await tx.finish()


# -- dead letters ---------------------------------------------------------------------------


def _selected(which: Selection) -> tuple[str, list[Any]]:
    """Return the condition on `ended e` and its values, from $1 on."""
    # Adding 0 again: few letters are newer than `since`, while many may belong to this job.
    job = "e.job" if which.since is None else "(e.job + 0)"
    conditions = ["true"]
    values: list[Any] = []
    for value, condition in (
        (which.job, f"{job}=(SELECT id FROM job WHERE name=${{}})"),
        (which.lane, "e.lane=${}"),
        (which.error, "e.error=${}"),
        (None if which.ids is None else list(which.ids), "e.id=ANY(${}::bigint[])"),
        (None if which.since is None else microseconds(which.since), "e.at>${}"),
    ):
        if value is not None:
            values.append(value)
            conditions.append(condition.format(len(values)))
    return " AND ".join(conditions), values


async def _revive(tx: Tx, letters: Sequence[DeadLetter], reset_attempts: bool) -> None:
    await tx.run(sql.FORGET_LETTERS, [letter.id for letter in letters])
    await tx.load_jobs(letter.request.job for letter in letters)
    lanes = await tx.lane_ids(letter.lane for letter in letters)
    await tx.load_lanes(lanes[letter.lane] for letter in letters)
    await tx.load_streams((letter.request.queue, tx.jobs_named[letter.request.job]) for letter in letters)
    places: list[Place] = []
    for letter in letters:
        request = letter.request
        job = tx.jobs_named[request.job]
        lane = lanes[letter.lane]
        job.count(letter.state, -1)
        tx.count_lane(job, letter.lane, 1)
        adopt(tx.lanes[lane], job)
        places.append((lane, tx.stream(request.queue, job), job.id, request.priority))
    lines = await tx.make_lines(places)
    back: list[tuple[Line, Entry]] = []
    for place, letter in zip(places, letters, strict=True):
        request = letter.request
        attempt = 0 if reset_attempts else request.attempt
        back.append((lines[place], (letter.id, request.url, request.depth, attempt, None, extra_of(request))))
    await tx.back_in_line(back)
    await tx.place_anew([tx.lanes[lane] for lane in {lanes[letter.lane] for letter in letters}])
    await tx.finish()


# -- finding and checking -------------------------------------------------------------------


async def _find(tx: Tx, url: str, job: JobRow) -> RequestStatus:
    """Return the status of a URL that was accepted for this job."""
    name, state = job.name, JobState(job.state)
    host = urls.lane_of(url)
    rows = await tx.run(sql.LANE_VIEWS, [host])
    lane = lane_view(rows[0][0], LaneRow(rows[0][2:]), rows[0][1]) if rows else None
    values = (url, host, job.id)
    for line, id, queue, *rest in await tx.run(sql.FIND_WAITING, *values):
        ahead = await tx.value(sql.AHEAD, line, id)
        request = request_of(url, name, queue, *rest)
        return RequestStatus(name, "waiting", request, lane, state, ahead, lane.ready_at if lane else None)
    for at, queue, *rest in await tx.run(sql.FIND_DELAYED, *values):
        request = request_of(url, name, queue, *rest)
        return RequestStatus(name, "delayed", request, lane, state, ready_at=at / US)
    for until, worker, queue, *rest in await tx.run(sql.FIND_LEASE, *values):
        request = request_of(url, name, queue, *rest)
        return RequestStatus(name, "leased", request, lane, state, worker=worker, until=until / US)
    for row in await tx.run(sql.LETTER_OF, job.id, url):
        letter = letter_of(row)
        return RequestStatus(name, letter.state, letter.request, lane, state, failure=letter.failure)
    return RequestStatus(name, "done", None, lane, state)


async def _check(tx: Tx) -> list[str]:
    wrong = [f"request {id} is in {n} states" for id, n in await tx.run(sql.TWICE)]
    held = dict(await tx.run(sql.LEASES_BY_LANE))
    turns: dict[int, set[tuple[int, int]]] = {}
    for stream, at, lane in await tx.run(sql.TURNS):
        turns.setdefault(lane, set()).add((stream, at))
    live: dict[int, set[int]] = {}
    for lane, stream in await tx.run(sql.ALL_LIVE_STREAMS):
        live.setdefault(lane, set()).add(stream)
    lines: dict[int, list[int]] = {}
    for id, lane in await tx.run(sql.ALL_LINES):
        lines.setdefault(lane, []).append(id)
    for row in await tx.run(sql.ALL_LANES):
        state = LaneRow(row[1:])
        own = lines.get(state.id, [])
        wrong += check_lane(
            *(row[0], state, held.get(state.id, 0), live.get(state.id, set())),
            *(turns.pop(state.id, set()), own[0] if len(own) == 1 else None, tx.now),
        )
    wrong += [f"turns of lane {lane}, which does not exist" for lane in turns]
    for table, statement in sql.STRAY.items():
        if stray := await tx.value(statement):
            wrong.append(f"{stray} requests are {table} in lines that do not exist")
    for name, live_count, waits, items, logged in await tx.run(sql.JOB_SUMS):
        if live_count != waits:
            wrong.append(f"job {name}: live {live_count}, but {waits} wait, are delayed or leased")
        if items != logged:
            wrong.append(f"job {name} counts {items} items, its log has {logged}")
    return wrong
