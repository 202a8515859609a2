"""Pages by Celery: a group of tasks, and one that puts together what they brought.

Needs workers: CELERY_TASK_RATE_LIMIT=none celery -A shoal.celery worker

python examples/celery_pages.py URL…
"""

from __future__ import annotations

import sys

from celery import chain, chord, group

from shoal.celery import process_results, scrape_url

PATIENCE = 120


def main() -> None:
    urls = sys.argv[1:] or ["https://example.com/", "https://example.org/"]

    # One task after another: the first one's item is what the second one is given.
    one = chain(scrape_url.s(urls[0], fields="url,title"), process_results.s())
    print(one.apply_async().get(timeout=PATIENCE)["results"][0]["title"])

    # Side by side, and wait for all.
    side_by_side = group(scrape_url.s(url, fields="url,status", fail=False) for url in urls)
    for page in side_by_side.apply_async().get(timeout=PATIENCE):
        print(page["url"], page.get("status", page.get("error")))

    # Side by side, and a last task when all are over. `fail=False`: a dead page is a result as well,
    # or Celery would not run the last task.
    header = [scrape_url.s(url, fail=False) for url in urls]
    told = chord(header, process_results.s(out="pages.jsonl")).apply_async().get(timeout=PATIENCE)
    print(f"{told['success']} pages, {told['failed']} failed, {told['items']} items in {told['out']}")


if __name__ == "__main__":
    main()
