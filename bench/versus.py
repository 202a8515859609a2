"""This checkout against another one, in turns: what claim + settle and add cost in both.

    python -m bench.versus OTHER_CHECKOUT [sqlite-full] [sqlite-normal] [redis] [postgres]
                           [--batch 1,10,200] [--rounds 40]

Each checkout has a process of its own that works for a moment and then waits, so both see the same machine.
A figure is the median of the ratios of neighbouring slices, other : this; above 1 this checkout is faster.
`a/a` is this checkout against itself: what the noise is worth. CPU is the client's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

LANES = 1000
ITEM = b'{"url":"https://example.org/","text":"' + b"x" * 460 + b'"}'
SLICE = {1: 100, 10: 1000, 200: 4000}
"""Requests of a slice, by the size of a batch."""


class Child:
    """A process that works with one checkout."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            env={"PYTHONPATH": str(checkout / "src"), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def child() -> None:
    from shoal.model import Done, JobSpec, Request
    from shoal.registry import open_frontier

    def url(number: int) -> str:
        return f"https://host-{number % LANES:06d}.example/section-{number % 97}/page-{number:08d}.html"

    loop = asyncio.get_running_loop()
    frontier: Any = None
    filled = 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = json.loads(line)
        if task["do"] == "open":
            if frontier is not None:
                await frontier.close()
            frontier, filled = await open_frontier(task["address"]), 0
            await frontier.open_job("j", JobSpec(gap=0.0, width=8))
        batch, n = task.get("batch", 1), task.get("n", 0)
        requests = [Request(url(filled + k), "j") for k in range(n)] if task["do"] == "add" else []
        cpu, clock = time.thread_time(), time.perf_counter()
        away = 0.0
        if task["do"] == "add":
            for k in range(0, n, batch):
                await frontier.add(requests[k : k + batch])
            filled += n
        done = 0
        while task["do"] == "cycle" and done < n:
            claim = await frontier.claim(min(batch, n - done), worker="bench", lease_seconds=60)
            between = time.thread_time()
            found = task["found"]
            verdicts = []
            for lease in claim.leases:
                new = Request(f"{lease.request.url.rpartition('/')[0]}/new-{lease.token}.html", "j")
                again = [Request(lease.request.url, "j")] * (found - 1) if found else []
                verdicts.append(Done(lease, (ITEM,), [*again, new] if found else []))
            away += time.thread_time() - between
            await frontier.settle(verdicts)
            done += len(verdicts)
        cpu, clock = time.thread_time() - cpu - away, time.perf_counter() - clock
        sys.stdout.write(json.dumps({"cpu": cpu, "clock": clock}) + "\n")
        sys.stdout.flush()
    if frontier is not None:
        await frontier.close()


def measure(children: dict[str, Child], rounds: int, **task: Any) -> dict[str, dict[str, float]]:
    """Medians of the ratios to `this`."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in children if name != "this"}
    for _ in range(rounds):
        order = list(children)
        random.shuffle(order)
        told = {name: children[name].ask(**task) for name in order}
        for name, ratios in pairs.items():
            ratios.append(
                (told[name]["cpu"] / told["this"]["cpu"], told[name]["clock"] / told["this"]["clock"])
            )
    return {
        name: {"cpu": median(r[0] for r in ratios), "clock": median(r[1] for r in ratios)}
        for name, ratios in pairs.items()
    }


def main() -> None:
    from bench import servers

    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("frontiers", nargs="*", default=["sqlite-full", "postgres", "redis"])
    parser.add_argument("--batch", default="1,10,200")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    here = Path(__file__).parent.parent
    for name in args.frontiers:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=here))
            address = servers.frontier(name, stack, folder)
            children = {"this": Child(here), "a/a": Child(here), "other": Child(args.other)}
            for one in children.values():
                stack.callback(one.end)
            for batch in map(int, args.batch.split(",")):
                for which, one in children.items():
                    place = f"{which.replace('/', '_')}_{batch}"
                    one.ask(do="open", address=servers.fresh(address, place))
                n = SLICE.get(batch, 1000)
                added = measure(children, args.rounds, do="add", n=n, batch=max(batch, 10))
                report(name, f"add, batches of {max(batch, 10)}", added)
                for found in (0, 5):
                    for one in children.values():
                        one.ask(do="add", n=n * args.rounds // 2, batch=2000)
                    told = measure(children, args.rounds // 2, do="cycle", n=n, batch=batch, found=found)
                    report(name, f"claim + settle, batches of {batch}, {found} found", told)


def report(name: str, what: str, told: dict[str, dict[str, float]]) -> None:
    other, noise = told["other"], told["a/a"]
    print(
        f"{name:14} {what:45} other : this  cpu {other['cpu']:.3f}  clock {other['clock']:.3f}"
        f"   a/a  cpu {noise['cpu']:.3f}  clock {noise['clock']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    if "--child" in sys.argv:
        asyncio.run(child())
    else:
        main()
