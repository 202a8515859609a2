"""Two worker processes against one, on durable SQLite: `python -m bench.scaling [--rounds N]`.

The documentation site on sixteen loopback hosts (27,152 pages), so that starting processes does
not count. One worker has core 1; two workers have both cores, which they share with nginx and
with the parent that exports. `--free` lets the single worker use both cores too (its fetch
thread then runs on the second).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

from bench import site

HERE = Path(__file__).parent
SHOAL = Path(sys.executable).with_name("shoal")
HOSTS = 16


def crawl(url: str, workers: int, cores: str, number: int) -> float:
    """Pages a second of one crawl over all hosts."""
    folder = HERE / ".work" / "runs" / f"scaling-{workers}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = url.rstrip("/").rpartition(":")[2]
    starts = [f"http://127.0.0.{n}:{port}/" for n in range(1, HOSTS + 1)]
    flags = "--allow-private --rate none --per-host 16 --concurrency 64 --no-robots --json --quiet"
    command = ["taskset", "-c", cores, str(SHOAL), "crawl", *starts, *flags.split()]
    command += ["--fields", "title,links", "--max-pages", "1000000", "--out", "pages.jsonl"]
    command += ["--workers", str(workers), "--frontier", f"sqlite:///{folder}/shoal.db"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    closing = json.loads(done.stdout.strip().splitlines()[-1])
    lines = (folder / "pages.jsonl").read_text().count("\n")
    if lines != closing["items"] or closing["status"] != "done":
        raise SystemExit(f"a run went wrong: {closing}, {lines} lines\n{done.stderr}")
    shutil.rmtree(folder)
    return float(closing["pages_per_second"])


def measure(rounds: int, *, free: bool = False) -> dict[str, float]:
    """Medians of the rates and of the ratio in each round."""
    ones, twos, ratios = [], [], []
    with site.serve(core=0, hosts=HOSTS) as url:
        for number in range(rounds):
            one = crawl(url, 1, "0,1" if free else "1", number)
            two = crawl(url, 2, "0,1", number)
            print(f"round {number + 1}: one {one:,.0f}, two {two:,.0f} pages/s", file=sys.stderr, flush=True)
            ones.append(one)
            twos.append(two)
            ratios.append(two / one)
    return {"one": median(ones), "two": median(twos), "ratio": median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--free", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.rounds, free=options.free)))


if __name__ == "__main__":
    main()
