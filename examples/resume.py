"""What a crash costs: a crawl is killed with `kill -9` half-way, and goes on.

    python examples/resume.py

Afterwards every page of the demo site is in the file exactly once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from shoal.demo.books import DemoSite, pages

OUT = Path("resumed.jsonl")


def command(url: str, *more: str) -> list[str]:
    flags = ("--out", str(OUT), "--rate", "10/s", "--allow-private", "--cache", "0", "--quiet")
    return [sys.executable, "-m", "shoal", "crawl", url, *flags, *more]


def main() -> None:
    # What the killed worker held is given to others when its lease ends: here soon, 60 s otherwise.
    environment = {**os.environ, "SHOAL_LEASE": "2"}
    with DemoSite() as demo:
        first = subprocess.Popen(command(demo.url), env=environment)
        while len(demo.log()) < 10:
            time.sleep(0.01)
        first.kill()
        first.wait()
        print(f"killed after {len(demo.log())} visits")
        subprocess.run(command(demo.url, "--resume"), env=environment, check=False)
        visits = len(demo.log())
        wanted = {demo.url.rstrip("/") + path for path in pages()}
    stored = [json.loads(line)["url"] for line in OUT.read_text().splitlines()]
    print(f"finished after {visits} visits")
    print(f"{len(stored)} items, {len(set(stored))} different, {len(wanted - set(stored))} missing")


if __name__ == "__main__":
    main()
