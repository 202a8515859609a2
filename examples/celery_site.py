"""Whole sites by Celery: each site is one task; the last one writes a file with all their pages.

Needs workers: celery -A shoal.celery worker

python examples/celery_site.py URL…
"""

from __future__ import annotations

import sys

from celery import chord

from shoal.celery import process_results, scrape_site

PATIENCE = 600


def main() -> None:
    sites = sys.argv[1:] or ["https://example.com/"]
    crawls = [scrape_site.s(site, max_pages=50, timeout=300) for site in sites]
    told = chord(crawls, process_results.s(out="sites.csv")).apply_async().get(timeout=PATIENCE)
    print(f"{told['success']} pages of {len(told['jobs'])} sites, {told['failed']} failed")
    print(f"{told['items']} items in {told['out']}")


if __name__ == "__main__":
    main()
