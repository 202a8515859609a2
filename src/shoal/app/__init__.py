"""The application: joins scrapers, settings, frontier, fetcher and worker. Only this package knows them all.

`Shoal` is the object that users hold. `Session` is an open frontier with everything a worker needs around it;
the faces (command line, API) work through it.

application.py   Shoal, Crawl
session.py       Session: scrapers, specs, submit, fetcher, worker
jobs.py          unfinished and paused jobs, their items and export
runs.py          runs of named scrapers: open, resume, one at a time; their counts and rate
slowdown.py      jobs that another job slows down on a host
schedules.py     schedules: add, change, fire
outcome.py       why a job fetched no page
local_run.py     Run: works on a job to its end in this process; Summary
brokers.py       the broker's queues and state, its consumer and its pump
discovery.py     the URLs in a site's sitemaps and feeds
errands.py       the built-in scraper that reads them
scrapers.py      the built-in scraper and named ones, as the engine calls them
processes.py     names of processes, and leases of dead ones
loading.py       loads an application: file.py or module:app
parts.py         objects in the place of addresses
views.py         jobs, workers, lanes, dead letters and schedules as JSON
"""

from shoal.app.application import Crawl, Shoal
from shoal.app.brokers import (
    broker,
    broker_queues,
    broker_state,
    celery_broker_away,
    consumer_frontier,
    running_pump,
    wait_for_broker,
)
from shoal.app.discovery import discovery, enqueue_entries, feeds_of
from shoal.app.jobs import export_job, find_unfinished, items_as_they_come, resume_job
from shoal.app.loading import Application, load_app
from shoal.app.local_run import GIVE_UP_AFTER, Run, Summary, summarise
from shoal.app.processes import evict_dead_workers, holder_name, process_died, process_gone, process_name
from shoal.app.runs import Started, exclusive_run, is_serving, open_run, run_rate
from shoal.app.schedules import (
    Fired,
    Scheduler,
    Timing,
    add_schedule,
    change_schedule,
    new_schedule,
    remove_schedule,
    run_schedule,
)
from shoal.app.scrapers import SITE
from shoal.app.session import Session
from shoal.app.slowdown import Slowdown, slowdowns
from shoal.errors import NoSuchJob

__all__ = [
    "GIVE_UP_AFTER",
    "SITE",
    "Application",
    "Crawl",
    "Fired",
    "NoSuchJob",
    "Run",
    "Scheduler",
    "Session",
    "Shoal",
    "Slowdown",
    "Started",
    "Summary",
    "Timing",
    "add_schedule",
    "broker",
    "broker_queues",
    "broker_state",
    "celery_broker_away",
    "change_schedule",
    "consumer_frontier",
    "discovery",
    "enqueue_entries",
    "evict_dead_workers",
    "exclusive_run",
    "export_job",
    "feeds_of",
    "find_unfinished",
    "holder_name",
    "is_serving",
    "items_as_they_come",
    "load_app",
    "new_schedule",
    "open_run",
    "process_died",
    "process_gone",
    "process_name",
    "remove_schedule",
    "resume_job",
    "run_rate",
    "run_schedule",
    "running_pump",
    "slowdowns",
    "summarise",
    "wait_for_broker",
]
