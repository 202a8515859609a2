"""Comparisons with other crawlers and queues: run as `python -m bench.crawl`."""
