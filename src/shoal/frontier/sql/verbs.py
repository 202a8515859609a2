"""The verbs of the worker, except `claim` and `wait`: those depend on how a database finds ready lanes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.errors import UsageError
from shoal.frontier import decisions
from shoal.frontier.decisions import Candidate, Refund, admit, adopt, candidate, refused_urls, wake
from shoal.frontier.rows import LaneRow, extra_of
from shoal.frontier.rules import US, microseconds
from shoal.frontier.sql import statements as sql
from shoal.frontier.sql.tx import Place, Store, Tx
from shoal.model import (
    TRANSIT,
    TTL_OVER,
    Added,
    Claim,
    Done,
    Lease,
    Pace,
    Request,
    Settlement,
    Verdict,
)
from shoal.queues import validate

_replace = msgspec.structs.replace


class Verbs:
    """Add, take, settle, extend and pace over any `Store`."""

    _store: Store

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        if not requests:
            return []
        for request in requests:
            validate(request)
        batch = [candidate(request) for request in requests]
        return await self._store.write(lambda tx: _add(tx, batch), durable=True, wakes=True, together=True)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        if not verdicts:
            return Settlement([], [])
        return await self._store.write(
            lambda tx: _settle(tx, verdicts), durable=True, wakes=True, together=True
        )

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        return await self._store.write(
            lambda tx: _take(tx, leases, worker, microseconds(lease_seconds)), together=True
        )

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        if not leases:
            return []
        return await self._store.write(lambda tx: _extend(tx, leases, microseconds(seconds)), together=True)

    async def pace(self, lane: str, pace: Pace) -> None:
        await self._store.write(lambda tx: _pace(tx, lane, pace), durable=True, wakes=True)


async def _add(tx: Tx, batch: Sequence[Candidate]) -> list[Added]:
    answers, new = await _admit(tx, batch)
    await _wait(tx, new)
    await tx.finish()
    return answers


async def _take(tx: Tx, leases: Sequence[Lease], worker: str, lease: int) -> Claim:
    until = tx.now + lease
    tokens = [each.token for each in leases]
    rows = await tx.run(sql.TAKE, until, worker, tokens, not worker.startswith(TRANSIT))
    ours = {token for (token,) in rows}
    others = [token for token in tokens if token not in ours]
    if others and await tx.value(sql.TRAVELLING, others):
        # Their job is paused or cancelled: give their slots back to the lanes.
        await tx.recall(sql.END_TRAVELLING, others)
        tx.wakes = True
    tx.lasting = bool(ours)  # otherwise a crash would let a second message take it too
    now = tx.now / US
    return Claim([_replace(each, expires_at=until / US) for each in leases if each.token in ours], now, now)


async def _extend(tx: Tx, leases: Sequence[Lease], seconds: int) -> list[Lease]:
    rows = await tx.run(sql.EXTEND, tx.now + seconds, [lease.token for lease in leases])
    kept = {token for (token,) in rows}
    return [lease for lease in leases if lease.token not in kept]


async def _pace(tx: Tx, lane: str, pace: Pace) -> None:
    id = (await tx.lane_ids([lane]))[lane]
    await tx.load_lanes([id])
    row = tx.lanes[id]
    row.apply(pace, tx.now)
    await tx.place_anew([row])
    await tx.finish()


# -- adding ---------------------------------------------------------------------------------


async def _admit(
    tx: Tx, batch: Sequence[Candidate], refunds: Sequence[Refund] = ()
) -> tuple[list[Added], list[tuple[int, Candidate]]]:
    """Returns a result for each request, and the new requests with their ids, for `_wait`."""
    if not batch and not refunds:
        return [], []
    await tx.load_jobs({each.request.job for each in batch})
    if not tx.alone:
        await _survey(tx, batch)
    fresh = await tx.learn_keys(sorted({each.key for each in batch})) if batch else set()
    if any(job.spec.max_per_host is not None for job in tx.jobs.values()):
        await tx.load_spread((tx.jobs_named[each.request.job], each.lane) for each in batch)
    admitted = admit(batch, fresh, tx.jobs_named, refunds, tx.spread, tx.count_lane)
    if admitted.refused:
        await tx.run(sql.FORGET_KEYS, admitted.refused)
    if not admitted.new:
        return admitted.answers, []
    ids = await tx.request_ids(len(admitted.new))
    return admitted.answers, list(zip(ids, admitted.new, strict=False))


async def _survey(tx: Tx, batch: Sequence[Candidate]) -> None:
    """Check, before anything is written, that these can be added beside other transactions."""
    jobs = {tx.jobs_named[each.request.job] for each in batch}
    if any(job.spec.max_pages is not None or job.spec.max_per_host is not None for job in jobs):
        tx.need_all()  # two transactions could both take the last page of a budget
    lanes = await tx.lane_ids(each.lane for each in batch)
    await tx.load_streams((each.request.queue, tx.jobs_named[each.request.job]) for each in batch)
    await tx.make_lines(_places(tx, batch, lanes))


def _places(tx: Tx, batch: Iterable[Candidate], lanes: Mapping[str, int]) -> list[Place]:
    """Returns the place of the line in which each request waits."""
    jobs, stream = tx.jobs_named, tx.stream
    places: list[Place] = []
    for request, _, lane in batch:
        job = jobs[request.job]
        places.append((lanes[lane], stream(request.queue, job), job.id, request.priority))
    return places


async def _wait(tx: Tx, new: Sequence[tuple[int, Candidate]]) -> None:
    """Put new requests in line. Changes lanes; the caller calls `finish`."""
    if not new:
        return
    lanes = await tx.lane_ids([each.lane for _, each in new])
    await tx.load_lanes([lanes[each.lane] for _, each in new])
    await tx.load_streams([(each.request.queue, tx.jobs_named[each.request.job]) for _, each in new])
    places = _places(tx, [each for _, each in new], lanes)
    lines = await tx.make_lines(places)
    tops: dict[int, int] = {}
    if any(row.sole is None for row in tx.lanes.values()):
        coming_now = [lines[p] for p, (_, each) in zip(places, new, strict=True) if each.request.delay <= 0]
        shared = {line.id: line for line in coming_now if tx.lanes[line.lane].sole is None}
        tops = await tx.top_priorities({line.lane for line in shared.values()})
        await tx.activate(shared.values())
    rows: list[tuple[Any, ...]] = []
    later: list[tuple[Any, ...]] = []
    woken: set[int] = set()
    rows_of, jobs = tx.lanes, tx.jobs
    for place, (id, (request, _, _)) in zip(places, new, strict=True):
        line = lines[place]
        row = rows_of[line.lane]
        job = jobs[line.job]
        adopt(row, job)
        expires = None if request.ttl is None else tx.now + microseconds(request.ttl)
        extra = extra_of(request, expires)
        if request.delay > 0:
            at = tx.now + microseconds(request.delay)
            later.append((at, id, line.id, request.url, request.depth, 0, expires, extra))
            continue
        if line.id not in woken:
            woken.add(line.id)
            if wake(row, line, job):
                row.place(tx.now, max(line.priority, tops.get(row.id, 0)))
        rows.append((line.id, id, request.url, request.depth, 0, expires, extra))
    if len(rows) > 64:  # the order of the table; a few rows are not worth it
        rows.sort(key=lambda row: row[:2])
    await tx.wait_in_line(rows)
    if later:
        await tx.delay(later)


# -- settling -------------------------------------------------------------------------------


async def _settle(tx: Tx, verdicts: Sequence[Verdict]) -> Settlement:
    tokens = sorted({verdict.lease.token for verdict in verdicts})
    ended, entries = await tx.end_leases_of(
        tokens, [verdict.lease.token for verdict in verdicts if not isinstance(verdict, Done)]
    )
    lines = await tx.load_lines(ended.values())
    held = {token: lines[line] for token, line in ended.items()}
    # A verdict whose lease is lost is counted for the job that it names.
    lost = len(held) < len(verdicts)
    names = {verdict.lease.request.job for verdict in verdicts} if lost else ()
    await tx.load_jobs(names, {line.job for line in held.values()})
    settled = decisions.settle(verdicts, held, entries, tx.jobs, tx.jobs_named, tx.now)
    tx.bodies = settled.items
    for job, error in settled.tallies:
        tx.tally(job, error)
    if settled.delayed:
        await tx.delay(settled.delayed)
    if settled.dead:
        await tx.end_rows(settled.dead, "dead", refund=False)
    if settled.expired:
        await tx.end_rows(settled.expired, "expired", refund=False)
    answers: list[Added] = []
    new: list[tuple[int, Candidate]] = []
    lanes = list(settled.freed)
    if settled.found or settled.refunds:
        answers, new = await _admit(tx, [candidate(request) for request in settled.found], settled.refunds)
        ids = await tx.lane_ids(each.lane for _, each in new)
        lanes += [ids[each.lane] for _, each in new]
    # All lanes in one call, so that two concurrent transactions never wait for each other in a circle.
    await tx.load_lanes(lanes)
    for lane, n in settled.freed.items():
        tx.lanes[lane].busy -= n
    if new:
        await _wait(tx, new)
    if settled.back:
        await tx.back_in_line(settled.back)
    await _place_freed(tx, settled)
    await tx.finish()
    return Settlement(settled.lost, refused_urls(settled.found, answers))


async def _place_freed(tx: Tx, settled: decisions.Settled) -> None:
    """Give the lanes that got a free slot a place in the turns."""
    returned = {line.lane for line, _ in settled.back}
    unsure: list[LaneRow] = []
    freed = [tx.lanes[lane] for lane in settled.freed]
    soles = await tx.load_lines([row.sole for row in freed if row.sole is not None])
    for row in freed:
        if row.sole is not None and row.id not in returned:
            row.place(tx.now, soles[row.sole].priority)
        else:
            unsure.append(row)
    if unsure:
        await tx.place_anew(unsure)


# -- claiming -------------------------------------------------------------------------------


async def upkeep(tx: Tx) -> None:
    """End expired requests, take back expired leases, promote requests that are due.

    Lanes are placed afterwards, all at once: a request that ended must not lend its lane its priority.
    """
    late = [*await tx.run(sql.EXPIRE_WAITING, tx.now), *await tx.run(sql.EXPIRE_DELAYED, tx.now)]
    lines = await tx.load_lines(row[0] for row in late)
    ends = [(lines[row[0]], tuple(row[1:]), TTL_OVER) for row in late]
    await tx.load_lanes(line.lane for line, _, _ in ends)
    await tx.end_rows(ends, "expired")
    back, _ = await tx.end_leases(sql.END_EXPIRED, tx.now)
    due = await tx.run(sql.PROMOTE, tx.now)
    lines = await tx.load_lines(row[1] for row in due)
    back += [(lines[row[1]], tuple(row[2:])) for row in sorted(due, key=lambda row: (row[0], row[2]))]
    await tx.back_in_line(back)
    await tx.place_anew(tx.lanes.values())
    await tx.finish()
    tx.begin_again()


async def wanted(tx: Tx, queues: Collection[str] | None, job: str | None) -> list[int]:
    """Return the requested streams that have something to claim, or once had."""
    if job is not None:
        row = await tx.job(job)
        if not row.spec.dedicated:
            raise UsageError(
                f"job {job!r} is not dedicated: a worker cannot claim from it alone",
                hint="serve its queue with `shoal worker --queues`",
            )
        rows = await tx.run(sql.STREAMS_OF_JOB, row.id)
    else:
        rows = await tx.run(sql.BUSY_STREAMS)
    tx.memory.queue_names.update(rows)
    return [id for id, queue in rows if queues is None or queue in queues]
