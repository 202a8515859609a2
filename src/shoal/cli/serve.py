"""`shoal serve`: the job service."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter, validators

from shoal.cli.common import (
    Flag,
    Frontier,
    Json,
    Signals,
    Switch,
    Visits,
    emit,
    run,
    say,
    working_session,
)
from shoal.errors import UsageError


def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    workers: Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=256))] = None,
    queues: str | None = None,
    concurrency: Visits = None,
    app: str | None = None,
    token_file: str | None = None,
    require_token: Switch = None,
    allow_private: Switch = None,
    frontier: Frontier = None,
    allow_endpoint: Annotated[list[str] | None, Parameter(show=False)] = None,
    staff: Annotated[str | None, Parameter(show=False)] = None,
    no_access_log: Flag = False,
    json: Json = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative=())] = False,
) -> int:
    """Serve the API, with worker processes beside it, until stopped.

    On loopback the local user needs no token. Any other address needs the one in the token file, or one
    of those in the settings. /docs shows what can be asked. Exits with 0 after SIGTERM, with 130 after
    Ctrl-C.

    Parameters
    ----------
    host
        The address to listen on (127.0.0.1).
    port
        Its port (8000); 0 takes a free one.
    workers
        Worker processes (1); 0 for the API alone.
    queues
        What these workers take from (scraping,business,rag and those of the routing rules).
    concurrency
        Visits of one worker at a time (16).
    app
        Your scrapers: file.py or module:app.
    token_file
        The owner's token (.shoal/token); made if it does not exist.
    require_token
        Ask for a token on loopback as well.
    allow_private
        Allow addresses that are not public, for every job.
    no_access_log
        No line for each request.
    json
        Print one line with the address and where the token is.
    quiet
        Say nothing but errors: no line for each request.
    """
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "workers": workers or None,
        "concurrency": concurrency,
        "app": app,
        "token_file": token_file,
        "require_token": require_token,
        "allow_private": allow_private,
        "frontier": frontier,
    }
    return run(
        lambda: _serve(
            settings,
            alone=workers == 0,
            queues=_listed(queues),
            staff=_listed(staff),
            allow=tuple(allow_endpoint or ()),
            json=json,
            quiet=quiet,
            access_log=not quiet and not no_access_log,
        )
    )


def _listed(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip()) if names else ()


async def _serve(
    given: dict[str, Any],
    *,
    alone: bool,
    queues: tuple[str, ...],
    staff: tuple[str, ...],
    allow: tuple[str, ...],
    json: bool,
    quiet: bool,
    access_log: bool,
) -> int:
    from shoal.api.serve import Server, bound, is_loopback, url_of
    from shoal.api.service import usual_queues
    from shoal.app import load_app
    from shoal.engine.supervisor import follow_parent
    from shoal.registry import overlooked, place
    from shoal.settings import load

    follow_parent()
    settings = load(**given)
    workers = 0 if alone else settings.workers
    if workers > 1 and settings.frontier.startswith("memory"):
        raise UsageError("worker processes cannot share memory:", hint="leave --frontier out")
    if settings.app:
        load_app(settings.app)  # what is wrong with it is told once and now, not by every worker
    made = bound(settings.host, settings.port)
    try:
        async with working_session(settings, allow=allow, quiet=quiet) as session:
            server = Server(
                session,
                made,
                workers=workers,
                queues=queues or usual_queues(session.routes),
                tell=say,
                log=say if access_log else None,
                allow=allow,
                staff=staff,
            )
            url = url_of(made)
            if json:
                emit(
                    {"url": url, "token_file": settings.token_file, "workers": workers, "docs": f"{url}/docs"}
                )
            if not quiet:
                here = place(settings.frontier) or ".shoal/shoal.db"
                with_them = {0: "", 1: " with 1 worker"}.get(workers, f" with {workers} workers")
                say(f"{url}{with_them} on {here}; what it can do: {url}/docs")
                if told := overlooked(settings.frontier):
                    say("note: {}; {}".format(*told))
                need = (
                    "not needed on loopback" if is_loopback(made) and not settings.require_token else "needed"
                )
                say(f"token: {settings.token_file} ({need})")
            with Signals(server.stop) as signals:
                await server.run()
    finally:
        made.close()
    return signals.code
