"""One real documentation site crawled by shoal and its peers: the same work, in turn, on one core.

Every contender follows each link within the host, visits a page once and writes its title and links as
JSON Lines. What it wrote is compared with a walk over the files before its time counts.

    bench/setup_peers.sh && python -m bench.crawl [--rounds 3] [--only scrapy,bare] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from bench import compare, servers
from bench.site import HERE, WORK, Truth, local_path, serve, truth

PEERS = HERE / "peers"
PEERS_PYTHON = WORK / "peers-venv/bin/python"
SHOAL = Path(sys.executable).with_name("shoal")
RUNS = WORK / "runs"
SERVER_CORE, CLIENT_CORE = 0, 1

# Contender, then what it is measured against, then at least how many times as fast (None: only told).
GOALS: list[tuple[str, str, float | None]] = [
    ("shoal-sqlite", "scrapy-tuned", 6),
    ("shoal-sqlite", "scrapy-documented", 25),
    ("shoal-sqlite", "crawlee-parsel", 12),
    ("shoal-sqlite", "bare-loop", 0.7),
    ("shoal-sqlite", "shoal-memory", 0.8),
    ("shoal-redis", "shoal-memory", 0.8),
    ("shoal-postgres", "shoal-memory", 0.8),
    ("shoal-memory", "bare-loop", None),
]


@dataclass(frozen=True)
class Place:
    """Where one crawl happens: the site, the file to write, a fresh folder, the address of its server."""

    url: str
    out: Path
    folder: Path
    server: str


@dataclass(frozen=True)
class Contender:
    """A crawler: its command, the server it needs, and whether it is held on one core."""

    name: str
    command: Callable[[Place], list[str]]
    version: str
    server: str = ""
    pinned: bool = True
    codes: tuple[int, ...] = (0,)


@dataclass
class Run:
    """One crawl: what it said, what it cost, and what was wrong with its output."""

    contender: str
    round: int
    pages: int = 0
    seconds: float = 0.0
    whole_seconds: float = 0.0
    cpu_seconds: float = 0.0
    extras: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Pages a second while crawling: start-up of the process is not in it."""
        return self.pages / self.seconds if self.seconds else 0.0


def peer(name: str, package: str) -> Contender:
    """A script of bench/peers."""
    script = PEERS / f"{name.replace('-', '_')}.py"
    return Contender(name, lambda place: [str(PEERS_PYTHON), str(script), place.url, str(place.out)], package)


def shoal(name: str, frontier: str, server: str = "") -> Contender:
    """`shoal crawl` on a frontier."""

    def command(place: Place) -> list[str]:
        flags = "--allow-private --rate none --per-host 64 --concurrency 64 --no-robots --json"
        line = [str(SHOAL), "crawl", place.url, *flags.split()]
        line += ["--fields", "title,links", "--max-pages", "100000", "--out", str(place.out)]
        fresh = place.folder.name.replace("-", "_")
        return [*line, "--frontier", frontier.format(folder=place.folder, server=place.server, fresh=fresh)]

    # Three links of the site lead nowhere, and a crawl with dead URLs ends with code 1.
    return Contender(name, command, "shoal", server, codes=(0, 1))


SQLITE = "sqlite:///{folder}/shoal.db?synchronous=full"
CONTENDERS = [
    peer("bare-loop", "pycurl"),
    peer("scrapy-tuned", "Scrapy"),
    peer("scrapy-documented", "Scrapy"),
    peer("crawlee-parsel", "crawlee"),
    shoal("shoal-memory", "memory:"),
    shoal("shoal-sqlite", SQLITE),
    shoal("shoal-redis", "{server}?prefix={fresh}", "redis"),
    shoal("shoal-postgres", "{server}?schema={fresh}", "postgres"),
]


def run(
    contender: Contender, number: int, url: str, server: str, expected: Truth, *, limit: float, keep: bool
) -> Run:
    """One crawl by one contender in a fresh folder, checked."""
    folder = RUNS / f"{contender.name}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out = folder / "pages.jsonl"
    command = contender.command(Place(url, out, folder, server))
    if contender.pinned:
        command = ["taskset", "-c", str(CLIENT_CORE), *command]
    result = Run(contender.name, number)
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        code, result.cpu_seconds = wait(process, limit)
        result.whole_seconds = time.perf_counter() - started
    if code not in contender.codes:
        result.faults.append(f"ended with code {code}, see {(folder / 'stderr').relative_to(HERE.parent)}")
    try:
        closing = json.loads((folder / "stdout").read_text().strip().splitlines()[-1])
        result.seconds = float(closing["seconds"])
    except (IndexError, KeyError, ValueError) as problem:
        result.faults.append(f"no closing JSON line: {problem!r}")
    else:
        check(result, out, url, expected)
    if result.seconds > result.whole_seconds:
        result.faults.append(f"claims {result.seconds:.2f} s, the process lived {result.whole_seconds:.2f} s")
    if not keep and not result.faults:
        shutil.rmtree(folder)
    return result


def wait(process: subprocess.Popen[bytes], limit: float) -> tuple[int, float]:
    """Exit code and CPU seconds, children included; past `limit` seconds its whole group is ended."""
    deadline = time.monotonic() + limit
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, usage.ru_utime + usage.ru_stime
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.005)
    except BaseException:  # Ctrl-C: the contender leads a session of its own and would go on
        os.killpg(process.pid, signal.SIGKILL)
        raise


def check(result: Run, out: Path, url: str, expected: Truth) -> None:
    """Compare the lines written with the truth: each page once, with its title and its links on this site."""
    origin = url.rstrip("/")
    pages, others = expected["pages"], expected["others"]
    files = {path for path, reason in others.items() if reason == "not HTML"}  # to follow or not is taste
    written: dict[str, int] = {}
    wrong_titles, wrong_links = [], []
    lines = out.read_text().splitlines() if out.exists() else []
    for line in lines:
        item = json.loads(line)
        path = local_path(item["url"], origin)
        written[path] = written.get(path, 0) + 1
        if path not in pages:
            continue
        if " ".join((item["title"] or "").split()) != pages[path]["title"]:
            wrong_titles.append(path)
        links = {local_path(link, origin) for link in item["links"]} - {path, ""}
        if links - files != set(pages[path]["links"]) - files:
            wrong_links.append(path)
    result.pages = len(written.keys() & pages.keys())
    for path in written.keys() - pages.keys():
        reason = others.get(path, "unknown")
        result.extras[reason] = result.extras.get(reason, 0) + 1
        if path not in others:
            result.faults.append(f"no page of the site: {path}")
    groups = {
        "missing": sorted(pages.keys() - written.keys()),
        "written twice": sorted(path for path, count in written.items() if count > 1),
        "with a wrong title": wrong_titles,
        "with wrong links": wrong_links,
    }
    result.faults += [f"{len(paths)} pages {what}, as {paths[0]}" for what, paths in groups.items() if paths]


def versions() -> dict[str, str]:
    """What was compared."""
    listing = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    known: dict[str, str] = {"Python": platform.python_version()}
    for python in (PEERS_PYTHON, Path(sys.executable)):
        if python.exists():
            text = subprocess.run([python, "-c", listing], capture_output=True, text=True, check=True).stdout
            known |= dict(pair.split("==", 1) for pair in text.split() if pair)
    return known


def markdown(runs: list[Run], expected: Truth, known: dict[str, str]) -> str:
    """The section for RESULTS.md."""
    pages, others = expected["pages"], expected["others"]
    hrefs = sum(page["hrefs"] for page in pages.values()) / len(pages)
    links = sum(len(page["links"]) + page["elsewhere"] for page in pages.values()) / len(pages)
    rounds = len({each.round for each in runs})
    intro = (
        f"{len(pages):,} HTML pages of Debian's Python 3.11 and PostgreSQL 15 manuals, {hrefs:.0f} links "
        f"a page ({links:.0f} distinct), from nginx on core {SERVER_CORE}; each contender "
        f"on core {CLIENT_CORE} unless it says *both cores*, Redis and PostgreSQL (both durable) beside "
        f"nginx. Medians of {rounds} rounds in rotated order. "
        "A run counts only if its pages, titles and links agree with a walk over the files. "
        "Pages/s is while crawling; *whole* adds the start of the process; CPU is that of the whole process."
    )
    text = [
        "## Crawl of a documentation site",
        "",
        intro,
        "",
        "| crawler | pages/s | lowest–highest | whole, s | CPU-s per 1,000 pages | pages | also written |",
        "|---|---|---|---|---|---|---|",
    ]
    notes = []
    for contender in CONTENDERS:
        mine = [each for each in runs if each.contender == contender.name]
        good = [each for each in mine if not each.faults]
        label = f"{contender.name} ({contender.version} {known.get(contender.version, '?')})"
        label += "" if contender.pinned else ", both cores"
        notes += [
            f"- {contender.name}, round {each.round}: {fault}" for each in mine for fault in each.faults
        ]
        if not good:
            text += [f"| {label} | failed | | | | | |"] if mine else []
            continue
        rates = [each.rate for each in good]
        extra = ", ".join(f"{count} {reason}" for reason, count in good[-1].extras.items()) or "–"
        text.append(
            f"| {label} | {median(rates):,.0f} | {min(rates):,.0f}–{max(rates):,.0f} "
            f"| {median(each.whole_seconds for each in good):.2f} "
            f"| {median(1000 * each.cpu_seconds / each.pages for each in good):.2f} "
            f"| {good[-1].pages:,} | {extra} |"
        )
    reasons = sorted(others.values())
    told = " and ".join(f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons)))
    text += [
        "",
        (
            f"{len(others)} more linked URLs are no pages ({told}). All fetch those that are not found; "
            "the other is left out by Scrapy's LinkExtractor and written as a page by some."
        ),
    ]
    text += compare.table(runs, GOALS, digits=2)
    return "\n".join(text + (["", "Runs that do not count:", "", *notes] if notes else []))


def main() -> int:
    """Run the rounds, print the section, keep the figures in .work/crawl.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.crawl", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="names or parts of names, with commas")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one crawl")
    parser.add_argument("--keep", action="store_true", help="keep what the contenders wrote")
    options = parser.parse_args()
    wanted = [word for word in options.only.split(",") if word]
    chosen = [each for each in CONTENDERS if not wanted or any(word in each.name for word in wanted)]
    if not chosen:
        parser.error(f"no contender is called that: {', '.join(each.name for each in CONTENDERS)}")
    if not PEERS_PYTHON.exists() and any(each.version != "shoal" for each in chosen):
        sys.exit("the peers are not installed: bench/setup_peers.sh")
    expected = truth()
    runs: list[Run] = []
    with serve(SERVER_CORE) as url, ExitStack() as stack:
        with servers.on_core(SERVER_CORE):
            addresses = {name: servers.start(name, stack) for name in {each.server for each in chosen} - {""}}
        for number in range(options.rounds):
            turn = number % len(chosen)
            for contender in chosen[turn:] + chosen[:turn]:
                server = addresses.get(contender.server, "")
                each = run(
                    contender,
                    number + 1,
                    url,
                    server,
                    expected,
                    limit=options.timeout,
                    keep=options.keep,
                )
                runs.append(each)
                outcome = "; ".join(each.faults) or f"{each.pages:,} pages, {each.rate:,.0f} pages/s"
                print(f"round {each.round} {each.contender}: {outcome}", file=sys.stderr, flush=True)
        host = urlsplit(url).netloc
    known = versions()
    section = markdown(runs, expected, known)
    shown = {each.version: known.get(each.version, "?") for each in chosen} | {"Python": known["Python"]}
    report = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": host,
        "versions": shown,
        "pages": len(expected["pages"]),
        "runs": [asdict(each) | {"pages_per_second": each.rate} for each in runs],
        "markdown": section,
    }
    (WORK / "crawl.json").write_text(json.dumps(report, indent=1))
    print(section)
    return 1 if any(each.faults for each in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
