"""`shoal serve`: the HTTP API, with worker processes beside it."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter, validators

from shoal.cli.common import Signals, app_of, run, shared, working_session
from shoal.cli.options import (
    Concurrency,
    Flag,
    Frontier,
    LogFormat,
    LogLevel,
    Port,
    Quiet,
    Scrapers,
    Switch,
    listed,
)
from shoal.cli.output import emit, pass_on, say
from shoal.errors import UsageError


def serve(
    *,
    host: str | None = None,
    port: Port = None,
    workers: Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=256))] = None,
    queues: str | None = None,
    concurrency: Concurrency = None,
    app: Scrapers = None,
    token_file: str | None = None,
    require_token: Switch = None,
    allow_private: Switch = None,
    frontier: Frontier = None,
    allow_endpoint: Annotated[list[str] | None, Parameter(show=False)] = None,
    staff: Annotated[str | None, Parameter(show=False)] = None,
    no_access_log: Flag = False,
    json: Flag = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    quiet: Annotated[Quiet, Parameter(help="Print nothing but errors; requests are not logged.")] = False,
) -> int:
    """Run the HTTP API, with worker processes beside it.

    It runs until it is stopped. Requests from this machine's loopback address need no token; all others need
    the token in the token file, or one from the settings. /docs describes the endpoints. Exits with 0 after
    SIGTERM, with 130 after Ctrl-C.

    Parameters
    ----------
    host
        Address to listen on (default 127.0.0.1).
    workers
        Number of worker processes; 0 runs the API alone (default 1; 0 if CELERY_BROKER_URL is set and no
        frontier is named).
    queues
        Queues that these workers serve (default: scraping,business,rag and those of the routing rules).
    token_file
        File with the owner's token (default .shoal/token); created if it does not exist.
    require_token
        Require a token on loopback as well.
    allow_private
        Allow private and loopback addresses in every job.
    no_access_log
        Do not log each request.
    json
        Print one JSON line with the address and the path of the token file.
    """
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "workers": workers or None,
        "concurrency": concurrency,
        "app": app,
        "token_file": token_file,
        "require_token": require_token,
        "allow_private": allow_private or tuple(allow_endpoint or ()) or None,
        "frontier": frontier,
        "log_level": log_level,
        "log_format": log_format,
    }
    return run(
        lambda: _serve(
            settings,
            alone=workers == 0,
            queues=tuple(listed(queues) or ()),
            staff=tuple(listed(staff) or ()),
            json=json,
            quiet=quiet,
            access_log=not quiet and not no_access_log,
        )
    )


async def _serve(
    given: dict[str, Any],
    *,
    alone: bool,
    queues: tuple[str, ...],
    staff: tuple[str, ...],
    json: bool,
    quiet: bool,
    access_log: bool,
) -> int:
    from shoal.api.serve import Server, is_loopback, listen, url_of
    from shoal.api.service import usual_queues
    from shoal.engine.supervisor import follow_parent
    from shoal.registry import in_process, overlooked, place
    from shoal.settings import load

    follow_parent()
    asked = load(**given)
    settings = shared(quiet=quiet, logs="info", **given)
    left_to_celery = asked.celery_named and not asked.frontier and "workers" not in asked.model_fields_set
    workers = 0 if alone or left_to_celery else settings.workers
    if workers > 1 and in_process(settings.frontier):
        raise UsageError("worker processes cannot share a memory: frontier", hint="leave out --frontier")
    app = app_of(settings)  # an error in it must appear once and now, not in every worker
    made = listen(settings.host, settings.port)
    try:
        async with working_session(settings, quiet=quiet) as session:
            session.adopt(app)
            server = Server(
                session,
                made,
                workers=workers,
                queues=queues or usual_queues(session.routes),
                tell=say,
                hear=pass_on,
                log=say if access_log else None,
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
                say(f"{url}{with_them} on {here}; API reference: {url}/docs")
                if left_to_celery and not alone:
                    say("no worker processes: Celery workers do the visits; start one here with --workers 1")
                if remark := overlooked(settings.frontier):
                    say("note: {}; {}".format(*remark))
                need = (
                    "not needed on loopback" if is_loopback(made) and not settings.require_token else "needed"
                )
                say(f"token: {settings.token_file} ({need})")
            with Signals(server.stop) as signals:
                await server.run()
    finally:
        made.close()
    return signals.code
