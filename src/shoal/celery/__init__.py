"""shoal as a Celery application.

    celery -A shoal.celery worker -Q scraping,business,rag
    celery -A shoal.celery flower

The state of URLs stays in the frontier. A pump in one of the workers claims URLs that may be visited now and
sends them as `shoal.visit` tasks. The public tasks are `shoal.scrape_url`, `shoal.scrape_site` and
`shoal.process_results`, which compose with chain, group and chord.
"""

from __future__ import annotations

from shoal.errors import MissingExtra

try:
    import celery  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "celery":
        raise
    raise MissingExtra("Celery", "celery") from None

from shoal.celery.application import app, process_results, scrape_site, scrape_url, visit
from shoal.celery.failure import ScrapeFailed

__all__ = ["ScrapeFailed", "app", "process_results", "scrape_site", "scrape_url", "visit"]
