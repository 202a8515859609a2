"""Everything that is measured, in one command: `python -m bench.run [--rounds N]`.

Writes `bench/RESULTS.md`. Takes about a quarter of an hour. The peers are set up first by
`sh bench/setup_peers.sh`. Ratios of one run are what counts: this kind of machine is noisy.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import scaling

HERE = Path(__file__).parent
FRONTIERS = ("memory", "sqlite-full", "sqlite-normal")
GOALS = {"memory": (150_000, None), "sqlite-full": (30_000, 15_000), "sqlite-normal": (40_000, 18_000)}


def frontier(name: str, part: str) -> dict[str, Any]:
    """One part for one frontier, in a process of its own, so that memory is its own too."""
    print(f"{name}: {part}", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / "frontier.py"), name, "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def verdict(value: float, goal: float | None) -> str:
    if goal is None:
        return f"{value:,.0f}"
    return f"{value:,.0f} (goal {goal:,}: {'met' if value >= goal else 'missed'})"


def frontier_section() -> str:
    rows = []
    for name in FRONTIERS:
        cycle = frontier(name, "cycle")
        none, five = cycle["found_0"], cycle["found_5"]
        goals = GOALS[name]
        rows.append(
            f"| {name} | {verdict(none['per_second'], goals[0])} | {none['cpu_us']:.1f}"
            f" | {verdict(five['per_second'], goals[1])} | {five['cpu_us']:.1f}"
            f" | {none['claim_p50_ms']:.2f} / {none['settle_p50_ms']:.2f} |"
        )
    bulk = frontier("sqlite-full", "enqueue")["enqueue"]
    growth = {name: frontier(name, "growth")["growth"] for name in ("memory", "sqlite-full")}
    lines = [
        "## The frontier alone",
        "",
        (
            "Claim + settle with a 500-byte item, batches of 200, 1,000 lanes of width 8, one process."
            " *Five found*: five links a page, one of them new. Rates are requests a second."
        ),
        "",
        "| frontier | nothing found | CPU µs | five found | CPU µs | claim / settle p50, ms |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        (
            f"1,000,000 URLs on 1,000 hosts enqueued in {bulk['seconds']:.1f} s (goal 30 s) with"
            f" {bulk['rss_peak_mb']:.0f} MB at the peak (goal 200 MB), SQLite with `synchronous=FULL`."
        ),
        "",
        "Claim of 10 with 99 % of the lanes not ready, median in ms:",
        "",
        "| frontier | 10,000 waiting | 1,000,000 waiting on 100,000 lanes | ratio (goal ≤ 2) |",
        "|---|---|---|---|",
        *[
            f"| {name} | {g['10000']:.3f} | {g['1000000']:.3f} | {g['ratio']:.2f} |"
            for name, g in growth.items()
        ],
    ]
    return "\n".join(lines)


def crawl_section(rounds: int) -> str:
    subprocess.run(
        [sys.executable, "-m", "bench.crawl", "--rounds", str(rounds)],
        cwd=HERE.parent,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return str(json.loads((HERE / ".work" / "crawl.json").read_text())["markdown"]).strip()


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
            "| one, pages/s | two, pages/s | ratio, median of the rounds (goal ≥ 1.7) |",
            "|---|---|---|",
            f"| {pinned['one']:,.0f} | {pinned['two']:,.0f} | {pinned['ratio']:.2f} |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    started = time.monotonic()
    sections = [frontier_section(), scaling_section(options.rounds), crawl_section(options.rounds)]
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = [
        "# What was measured",
        "",
        (
            f"Written by `make bench` on {when}: {platform.machine()}, 2 cores, Linux {platform.release()},"
            f" Python {platform.python_version()}, {(time.monotonic() - started) / 60:.0f} minutes."
        ),
        "The machine is shared and its speed moves by a third within minutes, so read ratios, not rates.",
    ]
    notes = HERE / "NOTES.md"
    tail = [notes.read_text().strip()] if notes.exists() else []
    (HERE / "RESULTS.md").write_text("\n\n".join(["\n".join(head), *sections, *tail]) + "\n")
    print((HERE / "RESULTS.md").read_text())


if __name__ == "__main__":
    main()
