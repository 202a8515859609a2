"""The port of exporters, which write items from the item log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.model import Item


class Exporter(Protocol):
    """Writes the items of one job. Its methods block: they are called in threads."""

    def open(self, seq: int) -> int:
        """Prepare for the items after `seq`, which is the cursor in the frontier. Repairs the damage of a
        crash.

        Returns the position to read from: `seq`, or less if earlier output was lost (the file was deleted),
        or more if the output already has later items."""
        ...

    def write(self, items: Sequence[Item]) -> None:
        """Write items. They are durable when it returns. Writing the same items again is harmless."""
        ...

    def finish(self) -> bool:
        """The job is over: move the output to its final place, atomically. Returns False if there is no item
        and the output of an earlier job stays."""
        ...

    def close(self) -> None:
        """Stop without finishing; a later `open` continues."""
        ...
