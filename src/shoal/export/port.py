"""Exporting: items leave through followers of the item log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.model import Item


class Exporter(Protocol):
    """A sink for the items of one job. Blocking: it is called off the loop."""

    def open(self, seq: int) -> int:
        """Get ready to write what comes after `seq`, the cursor the frontier remembers.

        Heals what a crash tore. Answers the position from which to read: `seq`, or less when
        the sink lost what the cursor claims (somebody deleted the file), or more when the
        sink knows that it already holds later items.
        """
        ...

    def write(self, items: Sequence[Item]) -> None:
        """Durable when it returns. The same items twice are harmless."""
        ...

    def finish(self) -> bool:
        """The job is over: put the result in its final place, atomically. Answers False when there is
        no item and what an earlier job left there stays as it was."""
        ...

    def close(self) -> None:
        """Stop without finishing; a later `open` continues."""
        ...
