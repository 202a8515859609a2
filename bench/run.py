"""Everything that is measured, in one command: `python -m bench.run [--rounds N] [--only cycle,queues]`.

Writes `bench/RESULTS.md`, unless it is told to do less than all of it. Takes about half an hour. The peers
are set up first by `sh bench/setup_peers.sh`. Ratios of one run are what counts: such machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from bench import scaling, servers

HERE = Path(__file__).parent
CYCLE_GOALS: dict[str, tuple[int, int | None]] = {
    "memory": (150_000, None),
    "sqlite-full": (30_000, 15_000),
    "sqlite-normal": (40_000, 18_000),
    "redis": (25_000, 13_000),
    "postgres": (20_000, 8_000),
    "postgres-fast": (20_000, 8_000),
}
PAIRS: dict[str, float | None] = {"redis": None, "postgres": 1.6}
"""Redis does one thing at a time, so two clients there have no goal."""
STORES = ("sqlite-full", "redis", "postgres")


class Failed(Exception):
    """A part that could not be measured. The others can."""


def part(module: str, *words: str) -> dict[str, Any]:
    """One measurement in a process of its own, so that its memory is its own too."""
    print(" ".join((module, *words)), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"bench.{module}", *words]
    done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Failed(f"`bench.{module} {' '.join(words)}` ended with code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def frontier(name: str, which: str, *flags: str) -> dict[str, Any]:
    result: dict[str, Any] = part("frontier", name, "--part", which, *flags)[which]
    return result


def section(module: str, rounds: int, flags: list[str]) -> str:
    """What a module that writes its own section found. Runs that do not count are named there."""
    command = [sys.executable, "-m", f"bench.{module}", "--rounds", str(rounds), *flags]
    kept = HERE / ".work" / f"{module}.json"
    kept.unlink(missing_ok=True)  # a run that fails must not tell the figures of the last one
    subprocess.run(command, cwd=HERE.parent, check=False, stdout=subprocess.DEVNULL)
    if not kept.exists():
        raise Failed(f"`bench.{module}` wrote nothing")
    return str(json.loads(kept.read_text())["markdown"]).strip()


def at_least(value: float, goal: float | None, form: str = ",.0f") -> str:
    """A figure, and whether it reaches its goal."""
    if goal is None:
        return f"{value:{form}}"
    return f"{value:{form}} (goal {goal:,}: {'met' if value >= goal else 'missed'})"


def at_most(value: float, goal: float, form: str) -> str:
    return f"{value:{form}} (goal {goal:g}: {'met' if value <= goal else 'missed'})"


def cycle_section(flags: list[str]) -> str:
    rows = []
    for name, goals in CYCLE_GOALS.items():
        cycle = frontier(name, "cycle", *flags)
        none, five = cycle["found_0"], cycle["found_5"]
        rows.append(
            f"| {name} | {at_least(none['per_second'], goals[0])} | {none['cpu_us']:.1f}"
            f" | {at_least(five['per_second'], goals[1])} | {five['cpu_us']:.1f}"
            f" | {none['claim_p50_ms']:.2f} / {none['settle_p50_ms']:.2f} |"
        )
    told = servers.versions()
    lines = [
        "## The frontier alone",
        "",
        (
            "Claim + settle with a 500-byte item, batches of 200, 1,000 lanes of width 8, one client process,"
            " medians of three rounds."
            " *Five found*: five links a page, one of them new. Rates are requests a second; a run counts"
            " only if the job's counters say that each request was done once. The CPU time is the client's."
            f" Redis {told.get('Redis', '?')} runs with appendonly everysec, PostgreSQL"
            f" {told.get('PostgreSQL', '?')} as installed (fsync on); `postgres-fast` has"
            " synchronous_commit=off. Servers and clients share the two cores."
        ),
        "",
        "| frontier | nothing found | CPU µs | five found | CPU µs | claim / settle p50, ms |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def pair_section(flags: list[str]) -> str:
    rows = []
    for name, goal in PAIRS.items():
        pair = frontier(name, "pair", *flags)
        for found, what in (("found_0", "nothing found"), ("found_5", "five found")):
            each = pair[found]
            ratio = at_least(each["ratio"], goal if found == "found_0" else None, ".2f")
            rows.append(f"| {name}, {what} | {each['one']:,.0f} | {each['two']:,.0f} | {ratio} |")
    lines = [
        "### Two client processes at once",
        "",
        (
            "The same requests done by one client process, and by two at once: requests a second from the"
            " first to begin to the last to end. The two, and the server, have two cores between them."
        ),
        "",
        "| frontier | one | two | ratio, median of the rounds |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def enqueue_section(flags: list[str]) -> str:
    rows = []
    for name in STORES:
        bulk = frontier(name, "enqueue", *flags)
        rows.append(
            f"| {name} | {bulk['urls']:,} | {at_most(bulk['seconds'], 30, '.1f')}"
            f" | {at_most(bulk['rss_peak_mb'], 200, '.0f')} |"
        )
    lines = [
        "### Enqueueing",
        "",
        "| frontier | URLs on 1,000 hosts | seconds | client's memory at the peak, MB |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def growth_section(flags: list[str]) -> str:
    rows = []
    for name in ("memory", *STORES):
        growth = frontier(name, "growth", *flags)
        rows.append(
            f"| {name} | {growth['small_ms']:.3f} | {growth['large_ms']:.3f}, {growth['big']:,} waiting on"
            f" {growth['lanes']:,} lanes | {at_most(growth['ratio'], 2, '.2f')} |"
        )
    lines = [
        "### Growth",
        "",
        "Claim of 10 with 99 % of the lanes not ready, median in ms:",
        "",
        "| frontier | 10,000 waiting on as many lanes | many | ratio |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def wide_section(flags: list[str]) -> str:
    rows = []
    for name in ("memory", *STORES):
        wide = frontier(name, "wide", *flags)
        rows.append(f"| {name} | {wide['small_ms']:.3f} | {wide['large_ms']:.3f} | {wide['ratio']:.2f} |")
    lines = [
        "### Many hosts that are ready",
        "",
        f"Claim of 10 where all lanes are ready, 100 of them or {wide['lanes']:,}, median in ms:",
        "",
        "| frontier | 100 | many | ratio |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def dispatch_section(rounds: int, flags: list[str]) -> str:
    found = part("dispatch", "--rounds", str(rounds), *flags)
    rows = [
        f"| {what} | {found[name]['rate']:,} | {found[name]['cpu_us']:.0f}"
        f" | {at_least(found[f'{name} to celery']['rate'], goal, '.1f')} |"
        for name, what, goal in (("20", "20 leases a message", 15), ("1", "one lease a message", 2))
    ]
    celery = found["celery"]
    lines = [
        "## Through RabbitMQ",
        "",
        (
            "Visits that do nothing: a pump and two consumers with confirms, late acknowledgement and a Redis"
            " frontier, against Celery's two processes on the same broker without confirms. The CPU time"
            " is that of clients and servers."
        ),
        "",
        "| how | visits/s | CPU µs | times Celery, median of the rounds |",
        "|---|---|---|---|",
        *rows,
        f"| celery | {celery['rate']:,} | {celery['cpu_us']:.0f} | |",
        "",
        (
            "A crawl of 15,000 pages by two workers over RabbitMQ, against the same workers on Redis alone:"
            f" {at_least(found['crawl to direct'], 0.6, '.2f')}."
        ),
    ]
    return "\n".join(lines)


def service_section(quick: bool) -> str:
    small = ["--clients", "20", "--seconds", "6", "--items", "50000"] if quick else []
    load = part("load", "--json", *small)
    cancel = part("cancel", "--json", *(["--urls", "2000", "--workers", "3"] if quick else []))
    jsonl = load["jsonl"]
    lines = [
        "## The job service",
        "",
        (
            f"{load['clients']} clients submit and poll for {load['seconds']:.0f} s on a SQLite frontier,"
            f" service and worker on the same two cores: {load['jobs']:,} jobs, {load['errors']} errors,"
            f" progress p50 {load['p50'] * 1000:.0f} ms, p99 {at_most(load['p99'] * 1000, 250, '.0f')};"
            f" the service had {load['memory'][0]} MiB after a sixth, {load['memory'][1]} MiB at the end."
            f" A result of {load['items']:,} items: {jsonl['mib']} MiB in {jsonl['seconds']:.1f} s, at"
            f" {jsonl['memory'][1]} MiB. {cancel['urls']:,} URLs cancelled under {cancel['workers']} busy"
            f" workers, {cancel['in_flight']} visits in flight: over after"
            f" {at_most(cancel['seconds'], 2, '.2f')} s."
        ),
    ]
    return "\n".join(lines)


def held_section(flags: list[str]) -> str:
    phases = part("held", *flags)
    before = mean(phases["before"]["rates"])
    rows = [
        f"| {name}, {phase['seconds']:.0f} s | {' → '.join(f'{rate:,.0f}' for rate in phase['rates'])}"
        f" | {mean(phase['rates']) / before:.2f} | {phase['dead_rows']:,} |"
        for name, phase in phases.items()
    ]
    lines = [
        "### A transaction held open on PostgreSQL",
        "",
        (
            "One client claims and settles (one new link a page) while another connection holds a snapshot"
            " and does nothing. As long as it does, the server cannot clean away rows deleted since."
            " Requests a second in each third of the time."
        ),
        "",
        "| the other connection | requests/s | against before | dead rows at the end |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def scaling_section(rounds: int) -> str:
    pinned = scaling.measure(rounds)
    return "\n".join(
        [
            "## Two workers against one",
            "",
            (
                "The same site on sixteen loopback hosts (27,152 pages), durable SQLite. One worker process"
                " on core 1; two on both cores, which they share with nginx and the exporting parent."
            ),
            "",
            "| one, pages/s | two, pages/s | ratio, median of the rounds |",
            "|---|---|---|",
            (f"| {pinned['one']:,.0f} | {pinned['two']:,.0f} | {at_least(pinned['ratio'], 1.7, '.2f')} |"),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--millions", type=float, default=1.0, help="waiting URLs when the frontier has grown"
    )
    parser.add_argument("--only", default="", help="names of sections, with commas: they are printed")
    parser.add_argument("--quick", action="store_true", help="small sizes, for trying: printed only")
    options = parser.parse_args()
    started = time.monotonic()
    quick = ["--quick"] if options.quick else []
    rounds = 1 if options.quick else options.rounds
    sections: dict[str, Callable[[], str]] = {
        "cycle": lambda: cycle_section(quick),
        "pair": lambda: pair_section(quick),
        "enqueue": lambda: enqueue_section(quick),
        "growth": lambda: growth_section([*quick, "--millions", str(options.millions)]),
        "wide": lambda: wide_section(quick),
        "held": lambda: held_section(quick),
        "queues": lambda: section("queues", rounds, quick),
        "dispatch": lambda: dispatch_section(rounds, ["--total", "5000"] if quick else []),
        "service": lambda: service_section(options.quick),
        "scaling": lambda: scaling_section(rounds),
        "crawl": lambda: section("crawl", rounds, []),
    }
    wanted = [name for name in options.only.split(",") if name] or list(sections)
    if unknown := set(wanted) - set(sections):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    written, failed = [], 0
    for name in wanted:
        try:
            written.append(sections[name]())
        except Failed as failure:
            failed += 1
            written.append(f"### {name.capitalize()}\n\nNot measured: {failure}.")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = [
        "# What was measured",
        "",
        (
            f"Written by `make bench` on {when}: {platform.machine()}, {os.cpu_count()} cores, Linux"
            f" {platform.release()}, Python {platform.python_version()},"
            f" {(time.monotonic() - started) / 60:.0f} minutes."
        ),
        "The machine is shared and its speed moves by a third within minutes, so read ratios, not rates.",
    ]
    notes = (HERE / "NOTES.md").read_text().strip()
    text = "\n\n".join(["\n".join(head), *written, notes]) + "\n"
    if not options.quick and len(wanted) == len(sections):
        (HERE / "RESULTS.md").write_text(text)
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
