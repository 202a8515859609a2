"""A job through the service: start `shoal serve`, submit, watch, read, all over HTTP.

Runs as it is: the site that is crawled comes with shoal and is served on loopback. In real life the service
runs elsewhere and this script is the last part only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import shoal
from shoal.demo.books import DemoSite


def main() -> None:
    with DemoSite() as site:
        # Private addresses are refused by default; this one endpoint is ours.
        command = [sys.executable, "-m", "shoal", "serve", "--port", "0", "--json", "--quiet"]
        env = {**os.environ, "SHOAL_ALLOW_PRIVATE": site.url.split("/")[2]}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as service:
            try:
                assert service.stdout is not None
                use(json.loads(service.stdout.readline())["url"], site.url)
            finally:
                service.terminate()


def use(service: str, site: str) -> None:
    with shoal.Client(service) as client:
        job = client.scrape(site, expected_pages=50, rate="none", per_host=4)
        ended = client.wait(job, timeout=60, poll=0.1)
        print(f"{ended['status']}: {ended['pages_done']} pages, {ended['failed']} failed")

        titles = sorted(item["title"] for item in client.items(job))
        print(f"{len(titles)} items, the first is {titles[0]!r}")

        answer = client.batch([site, f"{site}about", f"{site}missing"], rate="none")
        for result in answer["results"]:
            print(f"{result['status']:8}{result['url'].removeprefix(site) or '/'}")


if __name__ == "__main__":
    main()
