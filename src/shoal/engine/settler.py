"""Brings verdicts to the frontier, in batches, and loses none.

A batch is one transaction whatever its size, so grouping for a few milliseconds turns hundreds of commits
into dozens. While the frontier cannot store them (locked, disk full, server unreachable) the verdicts are
kept and tried again, and the keeper extends their leases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from shoal.engine.context import JobContext
from shoal.engine.retry_reporter import RetryReporter
from shoal.errors import FrontierCorrupt, FrontierError
from shoal.events import Settled, Watcher
from shoal.frontier.port import Frontier
from shoal.model import Done, Lease, Settlement, Verdict

MAX_BATCH = 500


class Settler:
    def __init__(
        self,
        frontier: Frontier,
        *,
        watch: Watcher,
        reporter: RetryReporter,
        context: Callable[[str], JobContext | None],
        on_settled: Callable[[Lease], None],
    ) -> None:
        self._frontier = frontier
        self._watch = watch
        self._reporter = reporter
        self._context = context
        self._on_settled = on_settled
        self._verdicts: list[Verdict] = []
        self._hurried = asyncio.Event()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._verdicts)

    def put(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)

    def hurry(self) -> None:
        """From now on try once only: requests whose verdicts cannot be stored come back when their leases
        end."""
        self._hurried.set()

    async def flush(self) -> None:
        """Store every verdict put so far. Returns when the frontier has acknowledged them.

        Raises FrontierCorrupt, and any FrontierError after `hurry` or when `reporter` gives up. Until then it
        tries again.
        """
        while self._verdicts:
            batch = self._verdicts[:MAX_BATCH]
            started = time.perf_counter()
            answer = await self._settle(batch)
            del self._verdicts[: len(batch)]
            self._acknowledge(batch, answer)
            self.lost += len(answer.lost)
            self._watch(Settled(len(batch), len(answer.lost), time.perf_counter() - started))

    async def _settle(self, batch: list[Verdict]) -> Settlement:
        while True:
            try:
                # Shielded: a cancelled worker still learns whether its verdicts are stored.
                settlement = await asyncio.shield(self._frontier.settle(batch))
            except FrontierCorrupt:
                raise
            except FrontierError as error:
                if self._hurried.is_set():
                    raise
                wait = self._reporter.failed(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._hurried.wait()
            else:
                self._reporter.succeeded()
                return settlement

    def _acknowledge(self, batch: list[Verdict], answer: Settlement) -> None:
        gone = {lease.token for lease in answer.lost}
        # Refused because the page budget is used up: when some of it is refunded they are wanted again.
        refused = set(answer.refused)
        for verdict in batch:
            self._on_settled(verdict.lease)
            if isinstance(verdict, Done) and verdict.found and verdict.lease.token not in gone:
                context = self._context(verdict.lease.request.job)
                if context is not None:
                    found = [request.url for request in verdict.found if request.url not in refused]
                    context.known.acknowledge(found)
