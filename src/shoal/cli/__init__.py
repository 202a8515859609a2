"""The command line. Each command is imported only when it is run, so `--help` is instant."""

from __future__ import annotations

from cyclopts import App, Group

from shoal import __version__
from shoal.cli.variables import from_environment

_CRAWL = Group("Crawl", sort_key=1)
_JOBS = Group("Jobs", sort_key=2)
_OPERATE = Group("Operate", sort_key=3)

app = App(
    name="shoal",
    help="Crawl and scrape: one command on a laptop, many workers on one frontier, nothing lost.",
    version=__version__,
    help_format="plaintext",
    end_of_options_delimiter="--",
    config=from_environment,
)

for _group, _commands in {
    _CRAWL: {
        "crawl": ("crawl:crawl", "Crawl from these URLs to the end."),
        "scrape": ("crawl:scrape", "Fetch one page and print it."),
        "run": ("run:run_scraper", "Run a registered scraper."),
        "scrapers": ("run:scrapers", "List the registered scrapers."),
        "discover": ("discover:discover", "URLs from a site's sitemaps and feeds."),
        "enqueue": ("work:enqueue", "Add URLs to a job."),
        "schedule": ("schedule:app", "Jobs again and again: add, list, remove, run, pause, resume."),
        "worker": ("work:worker", "Work on what waits in the frontier."),
        "serve": ("serve:serve", "Serve the API, with workers beside it."),
        "up": ("up:up", "Keep worker processes running on this machine."),
        "init": ("init:init", "Begin a project: scrapers, settings, tests."),
        "shell": ("shell:shell", "Fetch one page and try things on it."),
    },
    _JOBS: {
        "jobs": ("jobs:jobs", "List the jobs."),
        "status": ("jobs:status", "Counters of one job."),
        "watch": ("jobs:watch", "Follow a job until it ends."),
        "cancel": ("jobs:cancel", "Stop a job for good."),
        "pause": ("jobs:pause", "Let nothing of a job start."),
        "resume": ("jobs:resume", "Let a paused job go on."),
        "results": ("jobs:results", "Items of a job as JSON Lines."),
        "export": ("jobs:export", "Write the items of a job to a file."),
    },
    _OPERATE: {
        "workers": ("workers:workers", "Who works on this frontier, and how they fare."),
        "dead": ("dead:app", "Dead letters: list, show, retry, purge."),
        "lanes": ("lanes:app", "Per-host pace: list, set, pause, resume."),
        "explain": ("explain:explain", "Why a URL is, or is not yet, fetched."),
        "pump": ("pump:pump", "Send what waits to a broker, for workers that receive."),
        "route": ("route:route", "Which rule a URL falls under, and where it sends it."),
        "doctor": ("doctor:doctor", "Check every configured part."),
        "migrate": ("migrate:migrate", "Bring the frontier's store up to this release."),
        "bench": ("bench:bench", "Throughput of this machine."),
    },
}.items():
    for _name, (_where, _help) in _commands.items():
        app.command(f"shoal.cli.{_where}", name=_name, help=_help, group=_group)
