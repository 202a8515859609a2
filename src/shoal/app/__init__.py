"""The joiner: scrapers, settings, frontier, fetcher and worker become one thing here only.

`Shoal` is what users hold. `Session` is an open frontier with everything a worker needs around
it; the faces (command line, API) work through it.

application.py   Shoal, Crawl
session.py       Session: scrapers, specs, submit, fetcher, worker
jobs.py          unfinished and paused jobs, their items, export and move
runs.py          runs of named scrapers: open, resume, one at a time; their counts and rate
held.py          jobs that go slower than they were asked to, because of another job
schedules.py     schedules: add, change, and who fires them
outcome.py       why a job brought no page
working.py       Run: a job worked on to its end here; Summary
brokers.py       the broker's queues and state, received, pumped
discovering.py   what sitemaps and feeds tell of
errands.py       the built-in scraper that reads them
scrapers.py      the built-in scraper and named ones, as the engine calls them
processes.py     names of processes, and what dead ones held
loading.py       an application by its name: file.py or module:app
parts.py         objects in the place of addresses
views.py         jobs, workers, lanes, dead letters and schedules as JSON
"""

from shoal.app.application import Crawl, Shoal
from shoal.app.brokers import (
    broker,
    broker_queues,
    broker_reached,
    broker_state,
    celery_broker_away,
    pumped,
    received,
)
from shoal.app.discovery import discovery, enqueue_entries, feeds_of
from shoal.app.jobs import export_job, items_as_they_come, resume_job, unfinished
from shoal.app.loading import Application, load_app
from shoal.app.local_run import GIVE_UP_AFTER, Run, Summary, summarise
from shoal.app.processes import evict_dead_workers, holder_name, process_died, process_gone, process_name
from shoal.app.runs import Started, only, open_run, run_rate, serves
from shoal.app.schedules import (
    Fired,
    Scheduler,
    Timing,
    add_schedule,
    change_schedule,
    remove_schedule,
    run_schedule,
    scheduled,
)
from shoal.app.scrapers import SITE
from shoal.app.session import Session
from shoal.app.slowdown import Held, held_back
from shoal.errors import NoSuchJob

__all__ = [
    "GIVE_UP_AFTER",
    "SITE",
    "Application",
    "Crawl",
    "Fired",
    "Held",
    "NoSuchJob",
    "Run",
    "Scheduler",
    "Session",
    "Shoal",
    "Started",
    "Summary",
    "Timing",
    "add_schedule",
    "broker",
    "broker_queues",
    "broker_reached",
    "broker_state",
    "celery_broker_away",
    "change_schedule",
    "discovery",
    "enqueue_entries",
    "evict_dead_workers",
    "export_job",
    "feeds_of",
    "held_back",
    "holder_name",
    "items_as_they_come",
    "load_app",
    "only",
    "open_run",
    "process_died",
    "process_gone",
    "process_name",
    "pumped",
    "received",
    "remove_schedule",
    "resume_job",
    "run_rate",
    "run_schedule",
    "scheduled",
    "serves",
    "summarise",
    "unfinished",
]
