"""The command line. Each command is imported only when it runs, so `shoal --help` is instant."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import getdoc

from cyclopts import App, Group

from shoal import __version__
from shoal.cli.variables import from_environment

_CRAWL = Group("Crawl", sort_key=1)
_JOBS = Group("Jobs", sort_key=2)
_OPERATE = Group("Operate", sort_key=3)

app = App(
    name="shoal",
    help="Crawl and scrape websites, with one command on a laptop or with many workers on one queue.",
    version=__version__,
    help_format="plaintext",
    end_of_options_delimiter="--",
    config=from_environment,
)

for _group, _commands in {
    _CRAWL: {
        "crawl": ("crawl:crawl", "Crawl from one or more URLs to the end."),
        "scrape": ("crawl:scrape", "Fetch one page and print it."),
        "run": ("run:run_scraper", "Run one of your scrapers."),
        "scrapers": ("run:scrapers", "List your scrapers."),
        "discover": ("discover:discover", "List the URLs in a site's sitemaps and feeds."),
        "enqueue": ("work:enqueue", "Add URLs to a job."),
        "schedule": ("schedule:app", "Submit jobs on a schedule, by cron or interval."),
        "worker": ("work:worker", "Run a worker that fetches waiting URLs."),
        "serve": ("serve:serve", "Run the HTTP API, with worker processes beside it."),
        "up": ("up:up", "Run the HTTP API and workers, and restart them after a crash."),
        "init": ("init:init", "Create a project: a scraper, its test, settings, a README."),
        "shell": ("shell:shell", "Fetch one page and open a Python prompt on it."),
    },
    _JOBS: {
        "jobs": ("jobs:jobs", "List jobs, newest first."),
        "status": ("jobs:status", "Show the counters, workers and speed of one job."),
        "watch": ("jobs:watch", "Follow a job until it ends."),
        "cancel": ("jobs:cancel", "Stop a job for good."),
        "pause": ("jobs:pause", "Pause a job; pages that are being fetched are finished."),
        "resume": ("jobs:resume", "Resume a paused job."),
        "results": ("jobs:results", "Print the items of a job as JSON Lines."),
        "export": ("jobs:export", "Write the items of a job to a file."),
    },
    _OPERATE: {
        "workers": ("workers:workers", "List the workers of this frontier and what they do."),
        "dead": ("dead:app", "List, retry or purge dead letters: URLs that failed for good."),
        "lanes": ("lanes:app", "Show and change how fast each host is fetched."),
        "explain": ("explain:explain", "Explain why a URL has, or has not, been fetched."),
        "pump": ("pump:pump", "Send waiting URLs to the message broker."),
        "route": ("route:route", "Show which routing rule applies to a URL."),
        "doctor": ("doctor:doctor", "Check versions, settings, the frontier and the broker."),
        "migrate": ("migrate:migrate", "Upgrade the frontier's schema to this release."),
        "bench": ("bench:bench", "Measure the throughput of this machine."),
    },
}.items():
    for _name, (_where, _help) in _commands.items():
        app.command(f"shoal.cli.{_where}", name=_name, help=_help, group=_group)


def show_docstring(words: Sequence[str]) -> None:
    """Makes `shoal COMMAND --help` show the command's docstring. The texts above are only its first line,
    because the list of commands must not import them. Lines of a paragraph are joined, so that they fit any
    terminal."""
    command = app
    for word in words:
        if word.startswith("-") or word not in command:
            break
        command = command[word]
    if command is app or any(not name.startswith("-") for name in command):
        return
    story = (getdoc(command.default_command) or "").partition("\n\nParameters\n")[0]
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in story.split("\n\n"))
