"""The clock and the closing line that every peer shares."""

from __future__ import annotations

import json
import resource
import sys
import time


def arguments() -> tuple[str, str]:
    """URL and OUT of the command line."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} URL OUT")
    return sys.argv[1], sys.argv[2]


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Meter:
    """Counts from its making to `report`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._cpu = _cpu()
        self._start = time.perf_counter()

    def report(self, out: str) -> None:
        """Print the closing line; a page is a line of `out`."""
        seconds, cpu = time.perf_counter() - self._start, _cpu() - self._cpu
        with open(out, "rb") as lines:
            pages = sum(1 for _ in lines)
        said = {"peer": self.peer, "pages": pages, "seconds": round(seconds, 4), "cpu_seconds": round(cpu, 4)}
        print(json.dumps(said), flush=True)
