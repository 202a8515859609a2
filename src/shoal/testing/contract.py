"""The contract that every frontier must pass, chapter by chapter.

The test file of a backend subclasses it and provides a harness that opens the backend:

    class TestDuck(FrontierContract):
        @pytest.fixture
        async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
            harness = DuckHarness(tmp_path)
            yield harness
            await harness.close()

    TestDuckMachine = machine_for(DuckHarness)      # shoal.testing.machine

A chapter can be run alone (`pytest -k pacing`). It is a plain class in `chapters/`.
"""

from __future__ import annotations

from shoal.testing.chapters.adding import Adding
from shoal.testing.chapters.budgets import Budgets
from shoal.testing.chapters.cancel import Cancel
from shoal.testing.chapters.catalog import Catalog
from shoal.testing.chapters.jobs_apart import JobsApart
from shoal.testing.chapters.leases import Leases
from shoal.testing.chapters.notes import Notes
from shoal.testing.chapters.order import Order
from shoal.testing.chapters.pacing import Pacing
from shoal.testing.chapters.processes import Processes
from shoal.testing.chapters.restart import Restart
from shoal.testing.chapters.schedules import Schedules
from shoal.testing.chapters.settling import Settling
from shoal.testing.chapters.transit import Transit
from shoal.testing.chapters.waking import Waking

__all__ = ["FrontierContract", "VolatileContract"]


class VolatileContract(
    Adding,
    Order,
    Pacing,
    Leases,
    Transit,
    Settling,
    Waking,
    JobsApart,
    Cancel,
    Budgets,
    Catalog,
    Notes,
    Schedules,
):
    """The contract for a frontier that keeps nothing when its process ends."""


class FrontierContract(VolatileContract, Restart, Processes):
    """The whole contract."""
