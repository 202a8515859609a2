"""Tasks that do nothing, through shoal and through task queues on the same server, in turn.

    bench/setup_peers.sh && python -m bench.queues [--rounds 3] [--only redis,pgqueuer] [--quick] [--keep]

All tasks are in the queue before the first is done. Each notes its one argument, a URL, in a file; the rate
is from the first note to the last. A run counts only if every task is noted exactly once and the queue's own
books say that nothing is left. Every run has a fresh server (`bench/servers.py`) and both cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench import compare, servers
from bench.crawl import PEERS, PEERS_PYTHON, RUNS, versions, wait
from bench.peers.ledger import url
from bench.site import HERE, WORK

# Contender, then what it is measured against, then at least how many times as fast (None: only told).
GOALS: list[tuple[str, str, float | None]] = [
    ("shoal-redis", "celery", 20),
    ("shoal-redis-worker", "celery", None),
    ("shoal-postgres", "procrastinate", 20),
    ("shoal-postgres", "pgqueuer", 1.5),
    ("shoal-postgres", "pgqueuer-100", 1.5),
    ("shoal-postgres-worker", "pgqueuer-100", None),
]


@dataclass(frozen=True)
class Contender:
    """A queue: its server, what is put after ADDRESS COUNT LEDGER, and how many tasks it gets."""

    name: str
    server: str
    script: str
    tasks: int
    how: str
    package: str
    words: tuple[str, ...] = ()

    def command(self, address: str, tasks: int, ledger: Path) -> list[str]:
        program = [sys.executable, "-m", "bench.noop"]
        if self.script:
            program = [str(PEERS_PYTHON), str(PEERS / self.script)]
        else:
            address += "?prefix=bench" if self.server == "redis" else "?schema=bench"
        return [*program, address, str(tasks), str(ledger), *self.words]


def shoal(server: str, way: str, tasks: int) -> Contender:
    name = f"shoal-{server}" if way == "loop" else f"shoal-{server}-worker"
    how = "claim and settle, 200 at a time" if way == "loop" else "the whole worker, 200 visits at a time"
    return Contender(name, server, "", tasks, how, "shoal", (way, "200"))


def pgqueuer(name: str, managers: int, batch: int, tasks: int) -> Contender:
    how = f"{managers} managers, batches of {batch}"
    words = (str(managers), str(batch))
    return Contender(name, "postgres", "queue_pgqueuer.py", tasks, how, "pgqueuer", words)


# As many tasks as take five to ten seconds.
CONTENDERS = [
    Contender(
        "celery", "redis", "queue_celery.py", 4_000, "prefork, 2 processes, prefetch 64 each", "celery"
    ),
    shoal("redis", "loop", 120_000),
    shoal("redis", "worker", 100_000),
    Contender(
        "procrastinate", "postgres", "queue_procrastinate.py", 2_000, "async, 40 at a time", "procrastinate"
    ),
    pgqueuer("pgqueuer", 5, 10, 30_000),
    pgqueuer("pgqueuer-100", 5, 100, 60_000),
    shoal("postgres", "loop", 60_000),
    shoal("postgres", "worker", 60_000),
]


@dataclass
class Run:
    contender: str
    round: int
    tasks: int
    rate: float = 0.0
    enqueue_rate: float = 0.0
    cpu_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def run(contender: Contender, number: int, tasks: int, *, limit: float, keep: bool) -> Run:
    """All tasks through one queue in a fresh folder and a fresh server, checked."""
    folder = RUNS / f"queue-{contender.name}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ledger = folder / "ledger"
    result = Run(contender.name, number, tasks)
    with ExitStack() as stack:
        command = contender.command(servers.start(contender.server, stack), tasks, ledger)
        stdout = stack.enter_context((folder / "stdout").open("wb"))
        stderr = stack.enter_context((folder / "stderr").open("wb"))
        process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        code, result.cpu_seconds = wait(process, limit)
    if code:
        result.faults.append(f"ended with code {code}, see {(folder / 'stderr').relative_to(HERE.parent)}")
    try:
        closing = json.loads((folder / "stdout").read_text().strip().splitlines()[-1])
        result.enqueue_rate = tasks / closing["enqueue_seconds"]
        if closing["left"]:
            result.faults.append(f"{closing['left']} tasks are left by its own books")
    except (IndexError, KeyError, ValueError) as problem:
        result.faults.append(f"no closing JSON line: {problem!r}")
    check(result, ledger)
    if not keep and not result.faults:
        shutil.rmtree(folder)
    return result


def check(result: Run, ledger: Path) -> None:
    """Every task noted, and noted once; the rate from the first note to the last."""
    lines = [line.split(" ", 1) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    noted = [task for _, task in lines]
    missing = {url(number) for number in range(result.tasks)} - set(noted)
    if missing or len(noted) != result.tasks:
        result.faults.append(f"{len(missing)} tasks missing, {len(noted) - len(set(noted))} done again")
    times = [int(at) for at, _ in lines]
    if times and max(times) > min(times):
        result.rate = len(times) / (max(times) - min(times)) * 1e9


def markdown(runs: list[Run], known: dict[str, str]) -> str:
    """The section for RESULTS.md."""
    told = servers.versions()
    rounds = len({each.round for each in runs})
    intro = (
        "Tasks that do nothing, all enqueued before the first is done, from the first done to the last. "
        f"Redis {told.get('Redis', '?')} with appendonly everysec, PostgreSQL {told.get('PostgreSQL', '?')} "
        "with fsync and synchronous_commit on, a fresh server for each run; server and client share both "
        f"cores. Medians of {rounds} rounds in rotated order. A run counts only if every task was done "
        "exactly once. Tasks of the peers count when their function ran, those of shoal when they are "
        "acknowledged (*worker*: when the handler ran). The client's CPU time has its start and the "
        "enqueueing in it."
    )
    text = [
        "## Task queues",
        "",
        intro,
        "",
        "| queue | how | tasks/s | lowest–highest | enqueued/s | client CPU µs a task |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for contender in CONTENDERS:
        mine = [each for each in runs if each.contender == contender.name]
        good = [each for each in mine if not each.faults]
        label = f"{contender.name} ({contender.package} {known.get(contender.package, '?')})"
        notes += [
            f"- {contender.name}, round {each.round}: {fault}" for each in mine for fault in each.faults
        ]
        if not good:
            text += [f"| {label} | failed | | | | |"] if mine else []
            continue
        rates = [each.rate for each in good]
        text.append(
            f"| {label} | {contender.how} | {median(rates):,.0f} | {min(rates):,.0f}–{max(rates):,.0f} "
            f"| {median(each.enqueue_rate for each in good):,.0f} "
            f"| {median(1e6 * each.cpu_seconds / each.tasks for each in good):,.0f} |"
        )
    text += compare.table(runs, GOALS, digits=1)
    return "\n".join(text + (["", "Runs that do not count:", "", *notes] if notes else []))


def main() -> int:
    """Run the rounds, print the section, keep the figures in .work/queues.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.queues", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="names or parts of names, with commas")
    parser.add_argument("--quick", action="store_true", help="a tenth of the tasks")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--keep", action="store_true", help="keep what the contenders wrote")
    options = parser.parse_args()
    wanted = [word for word in options.only.split(",") if word]
    chosen = [each for each in CONTENDERS if not wanted or any(word in each.name for word in wanted)]
    if not chosen:
        parser.error(f"no contender is called that: {', '.join(each.name for each in CONTENDERS)}")
    if not PEERS_PYTHON.exists() and any(each.script for each in chosen):
        sys.exit("the peers are not installed: bench/setup_peers.sh")
    runs: list[Run] = []
    for number in range(options.rounds):
        turn = number % len(chosen)
        for contender in chosen[turn:] + chosen[:turn]:
            tasks = contender.tasks // 10 if options.quick else contender.tasks
            each = run(contender, number + 1, tasks, limit=options.timeout, keep=options.keep)
            runs.append(each)
            outcome = "; ".join(each.faults) or f"{each.rate:,.0f} tasks/s"
            print(f"round {each.round} {each.contender}: {outcome}", file=sys.stderr, flush=True)
    section = markdown(runs, versions())
    report = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "runs": [asdict(each) for each in runs],
        "markdown": section,
    }
    WORK.mkdir(exist_ok=True)
    (WORK / "queues.json").write_text(json.dumps(report, indent=1))
    print(section)
    return 1 if any(each.faults for each in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
