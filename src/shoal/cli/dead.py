"""`shoal dead`: URLs that failed for good, and how to retry them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from shoal.cli.common import OK, open_session, run
from shoal.cli.options import Flag, Frontier, Json, Limit, OfJob
from shoal.cli.output import at_clock, emit, print_facts, print_table, say
from shoal.errors import CLASSES, BadUrl, UsageError
from shoal.model import DeadLetter, Selection

if TYPE_CHECKING:
    from shoal.frontier.port import Backend

app = App(
    name="dead", help="List, retry or purge dead letters: URLs that failed for good.", help_format="plaintext"
)

OfHost = Annotated[str | None, Parameter(name="--host", help='Limit to this host; "" for invalid URLs.')]
OfError = Annotated[str | None, Parameter(name="--error", help="Limit to this error class: http_404.")]
OfIds = Annotated[
    list[int] | None, Parameter(name="--id", negative=(), help="Limit to these numbers; can be repeated.")
]
Everything = Annotated[bool, Parameter(name="--all", negative=(), help="All dead letters.")]
PAGE = 1000


@app.default
@app.command(name="list")
def list_(
    *,
    job: OfJob = None,
    host: OfHost = None,
    error: OfError = None,
    urls: Flag = False,
    after: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    limit: Limit = 100,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """List dead letters by host and error class, most frequent first.

    Parameters
    ----------
    urls
        List each URL instead of groups.
    after
        With --urls, list only dead letters with a higher number.
    """
    which = selected(job, host, error)
    if urls:
        return run(lambda: _letters(which, after, limit, frontier, json=json))
    return run(lambda: _groups(which, limit, frontier, json=json))


async def _groups(which: Selection, limit: int, frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import dead_group_view

    async with open_session(create=False, frontier=frontier) as session:
        await _check_job(session.frontier, which.job)
        groups = await session.frontier.dead_groups(which)
    if json:
        emit([dead_group_view(group) for group in groups[:limit]])
        return OK
    if not groups:
        say("no dead letters" if which == Selection() else "no dead letter matches")
        return OK
    print_table(
        ("host", "error", "count", "example"),
        [(group.lane or "-", group.error, f"{group.count:,}", group.example) for group in groups[:limit]],
        right=(2,),
    )
    total = sum(group.count for group in groups)
    rest = f" in {len(groups):,} groups; show more with --limit" if len(groups) > limit else ""
    say(f"{total:,} dead letters{rest}")
    return OK


async def _letters(which: Selection, after: int, limit: int, frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import dead_view

    async with open_session(create=False, frontier=frontier) as session:
        await _check_job(session.frontier, which.job)
        letters = await session.frontier.dead(which, after=after, limit=limit)
    if json:
        emit([dead_view(letter) for letter in letters])
        return OK
    if not letters:
        say("no dead letter matches")
        return OK
    print_table(
        ("id", "job", "error", "attempts", "ended", "url"),
        [
            (
                *(str(letter.id), letter.request.job, letter.failure.error, str(letter.request.attempt)),
                *(at_clock(letter.ended_at), letter.request.url),
            )
            for letter in letters
        ],
        right=(0, 3),
    )
    if len(letters) == limit:
        say(f"there may be more: --after {letters[-1].id} shows the next ones")
    return OK


@app.command
def show(id_or_url: str, *, job: OfJob = None, json: Json = False, frontier: Frontier = None) -> int:
    """Show one dead letter in full.

    Parameters
    ----------
    id_or_url
        Its number (see `shoal dead list --urls`), or its URL.
    """
    return run(lambda: _show(id_or_url, job, frontier, json=json))


async def _show(what: str, job: str | None, frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import dead_view

    async with open_session(create=False, frontier=frontier) as session:
        await _check_job(session.frontier, job)
        letters = await _find(session.frontier, what, job)
    if not letters:
        raise UsageError(
            f"no dead letter {what!r}",
            hint="`shoal dead list --urls` lists them, `shoal explain URL` shows the state of a URL",
        )
    if json:
        emit([dead_view(letter) for letter in letters])
        return OK
    for number, letter in enumerate(letters):
        print_facts([("", ""), *_facts(letter)] if number else _facts(letter))
    return OK


async def _find(frontier: Backend, what: str, job: str | None) -> list[DeadLetter]:
    """Returns the letters with this number or URL; a URL may be dead in several jobs."""
    from shoal import urls

    if what.isdecimal():
        number = int(what)
        return await frontier.dead(Selection(job=job, ids=(number,))) if number < 1 << 63 else []
    try:
        url = urls.canonical(what)
        lane = urls.lane_of(url)
    except BadUrl:
        # Invalid URLs are dead letters too, under the text that was given.
        url, lane = what, urls.lane_of(what) if "://" in what else ""
    found: list[DeadLetter] = []
    after = 0
    while letters := await frontier.dead(Selection(job=job, lane=lane), after=after, limit=PAGE):
        found += [letter for letter in letters if letter.request.url == url]
        after = letters[-1].id
    return found


@app.command
def retry(
    *,
    job: OfJob = None,
    host: OfHost = None,
    error: OfError = None,
    id: OfIds = None,
    everything: Everything = False,
    reset_attempts: Flag = False,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """Put dead letters back in the queue. Those of cancelled jobs stay dead.

    Parameters
    ----------
    reset_attempts
        Reset the attempt counters: each URL gets all its attempts again, instead of one.
    """
    which = _check_selection("retry", selected(job, host, error, id), everything=everything)
    return run(lambda: _retry(which, frontier, reset_attempts=reset_attempts, json=json))


async def _retry(which: Selection, frontier: str | None, *, reset_attempts: bool, json: bool) -> int:
    async with open_session(create=False, frontier=frontier) as session:
        await _check_job(session.frontier, which.job)
        number = await session.frontier.revive(which, reset_attempts=reset_attempts)
    if json:
        emit({"retried": number})
    elif number:
        say(
            f"{number:,} are back in the queue; `shoal worker --drain` or `shoal crawl --resume` fetches them"
        )
    else:
        say("nothing to retry: no dead letter matches, or their jobs are cancelled")
    return OK


@app.command
def purge(
    *,
    job: OfJob = None,
    host: OfHost = None,
    error: OfError = None,
    id: OfIds = None,
    everything: Everything = False,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """Delete dead letters. Their URLs stay known and are still counted as dead."""
    which = _check_selection("purge", selected(job, host, error, id), everything=everything)
    return run(lambda: _purge(which, frontier, json=json))


async def _purge(which: Selection, frontier: str | None, *, json: bool) -> int:
    async with open_session(create=False, frontier=frontier) as session:
        await _check_job(session.frontier, which.job)
        number = await session.frontier.purge(which)
    if json:
        emit({"purged": number})
    else:
        say(f"{number:,} dead letters deleted" if number else "nothing to purge: no dead letter matches")
    return OK


async def _check_job(frontier: Backend, job: str | None) -> None:
    """Raises NoSuchJob: a mistyped name must not look like a job without dead letters."""
    if job is not None:
        await frontier.job(job)


def selected(job: str | None, host: str | None, error: str | None, ids: list[int] | None = None) -> Selection:
    """Returns the selection that the options mean. Raises UsageError for impossible values."""
    from shoal.urls import lane_named

    if error is not None and error not in CLASSES and not re.fullmatch(r"http_[1-5]\d\d", error):
        raise UsageError(
            f"unknown error class {error!r}",
            hint="docs/reference/errors.md lists them: http_404, connect_timeout, tls_invalid…",
        )
    if error in ("http_4xx", "http_5xx"):
        raise UsageError(f"{error!r} is a group of classes", hint="give an exact status: http_404, http_500")
    if ids and any(not 0 < number < 1 << 63 for number in ids):
        raise UsageError("--id is out of range", hint="`shoal dead list --urls` shows the numbers")
    # An invalid URL has no host: its host is the empty string.
    lane = host if not host else lane_named(host)
    return Selection(job=job, lane=lane, error=error, ids=tuple(ids) if ids else None)


def _check_selection(verb: str, which: Selection, *, everything: bool) -> Selection:
    """Returns `which`. Raises UsageError if it means all dead letters and --all was not given."""
    if which == Selection() and not everything:
        raise UsageError(
            f"no dead letters selected to {verb}",
            hint="select some with --job, --host, --error or --id, or all with --all",
        )
    if which != Selection() and everything:
        raise UsageError("--all and a filter exclude each other", hint="leave one of them out")
    return which


def _facts(letter: DeadLetter) -> list[tuple[str, str]]:
    request = letter.request
    rows = [
        ("id", str(letter.id)),
        ("url", request.url),
        ("job", request.job),
        ("state", letter.state),
        ("error", letter.failure.error),
        ("message", letter.failure.message or "-"),
        ("attempts", str(request.attempt)),
        ("ended", at_clock(letter.ended_at)),
        ("depth", str(request.depth)),
        ("queue", f"{request.queue}, priority {request.priority}"),
    ]
    if request.method != "GET":
        rows.append(("method", request.method))
    if request.label:
        rows.append(("label", request.label))
    if request.origin:
        rows.append(("redirected from", request.origin))
    rows.append(("retry with", f"shoal dead retry --id {letter.id}"))
    return rows
