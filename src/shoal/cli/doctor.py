"""`shoal doctor`: checks every configured part, and hints at the fix."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from msgspec import Struct

from shoal.cli.common import OK, open_session, run, shared
from shoal.cli.options import Dispatch, Frontier, Json
from shoal.cli.output import emit, print_table, say
from shoal.errors import DispatchError, FrontierCorrupt, FrontierError, NoFrontier, ShoalError

if TYPE_CHECKING:
    from shoal.frontier.port import Backend
    from shoal.model import Info
    from shoal.settings import Settings

HUGE = 2 * 1024**3
"""Verifying a file of this size takes minutes: it is done only with --no-quick."""
LOW_SPACE = 1024**3
BIG_LOG = 512 * 1024**2
"""Twice the size at which the frontier forces a checkpoint of its log: something prevents it."""

# A module that the extra installs, the extra, and what it is for.
EXTRAS = (
    ("redis", "redis", "a frontier on Redis"),
    ("asyncpg", "postgres", "a frontier on PostgreSQL"),
    ("aiormq", "rabbitmq", "dispatch by RabbitMQ"),
    ("celery", "celery", "visits in Celery workers"),
    ("pyarrow", "parquet", "exports to Parquet"),
)


class Row(Struct, frozen=True):
    """The result of one check. Only `bad` changes the exit code."""

    part: str
    state: Literal["ok", "note", "bad"]
    warning: str
    hint: str = ""


def doctor(
    *,
    quick: Annotated[
        bool | None,
        Parameter(
            help="Do not verify the frontier's counters (default: skipped for files above 2 GiB only);"
            " --no-quick always verifies."
        ),
    ] = None,
    json: Json = False,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
) -> int:
    """Check versions, settings, the frontier and the broker.

    Exits with 0 if everything that is needed works, with 4 if the frontier or the broker is unreachable or
    the frontier is damaged, with 2 for any other problem.
    """
    return run(lambda: _doctor(quick=quick, json=json, frontier=frontier, dispatch=dispatch))


async def _doctor(*, quick: bool | None, json: bool, **where: str | None) -> int:
    rows = list(_libraries())
    settings, found, code = _settings(where)
    rows += [*found, *_variables()]
    if settings is not None:
        found, code = await _frontier(settings, quick=quick)
        rows += [*_overlooked(settings), *found, *_app(settings)]
        if settings.dispatch and not code:
            found, code = await _broker(settings)
            rows += found
    rows += _extras()
    bad = [row for row in rows if row.state == "bad"]
    code = code or (2 if bad else OK)
    if json:
        emit({"ok": not bad, "checks": [_described(row) for row in rows]})
        return code
    print_table(("", "part", "remark"), [(row.state, row.part, row.warning) for row in rows])
    for row in rows:
        if row.hint and row.state != "ok":
            say(f"{row.part}: {row.hint}")
    say("something needs attention" if bad else "everything that is needed works")
    return code


def _libraries() -> Iterator[Row]:
    from importlib.metadata import PackageNotFoundError, version

    import apsw
    import pycurl

    from shoal import __version__
    from shoal.frontier.sqlite.store import SAFE_SQLITE

    yield Row("shoal", "ok", __version__)
    yield Row("python", "ok", f"{sys.version.split()[0]} on {sys.platform}")
    sqlite = apsw.sqlite_lib_version()
    safe = tuple(int(part) for part in sqlite.split(".")) >= SAFE_SQLITE
    needed = ".".join(str(part) for part in SAFE_SQLITE)
    yield Row(
        "sqlite",
        "ok" if safe else "bad",
        f"{sqlite} by apsw {apsw.apsw_version()}"
        + (", without the WAL-reset bug" if safe else ", which can lose data with several processes"),
        "" if safe else f"pip install -U apsw (it brings SQLite {needed} or newer)",
    )
    curl = pycurl.version_info()
    tls = str(curl[5] or "")
    yield Row(
        "libcurl",
        "ok" if tls else "bad",
        f"{curl[1]} with {tls or 'no TLS'}",
        "" if tls else "install a pycurl that was built with OpenSSL",
    )
    for name in ("turbohtml", "ada-url", "msgspec"):
        try:
            yield Row(name, "ok", version(name))
        except PackageNotFoundError:
            yield Row(name, "bad", "not installed", "pip install --force-reinstall shoal")


def _settings(where: dict[str, Any]) -> tuple[Settings | None, list[Row], int]:
    sources = [name for name in ("shoal.toml",) if Path(name).is_file()]
    if _has_table(Path("pyproject.toml")):
        sources.append("[tool.shoal] in pyproject.toml")
    # Names only: a value may be a password.
    sources += sorted(name for name in os.environ if name.startswith("SHOAL_"))
    found = ", ".join(sources) or "none found, all at their defaults"
    try:
        settings = shared(**where)
    except ShoalError as error:
        return None, [Row("settings", "bad", f"{error} (from {found})", error.hint)], error.exit_code
    return settings, [Row("settings", "ok", found)], OK


def _variables() -> list[Row]:
    from shoal.cli import app
    from shoal.cli.variables import unknown_variables

    hint = "check the spelling: docs/reference/settings.md and cli.md list all variables"
    return [
        Row("environment", "note", f"{name} is not a setting or a flag", hint)
        for name in unknown_variables(app)
    ]


def _has_table(path: Path) -> bool:
    import tomllib

    try:
        return "shoal" in tomllib.loads(path.read_text("utf-8")).get("tool", {})
    except (OSError, ValueError):
        return False


def _overlooked(settings: Settings) -> list[Row]:
    from shoal.registry import overlooked

    found = overlooked(settings.frontier)
    return [Row("environment", "note", *found)] if found else []


async def _frontier(settings: Settings, *, quick: bool | None) -> tuple[list[Row], int]:
    """Returns the rows about the frontier, and the exit code they call for. Never creates a store."""
    from shoal.registry import DEFAULT_FRONTIER, file_of, place

    address = settings.frontier or DEFAULT_FRONTIER
    try:
        file = file_of(address)
        if file is not None and not file.exists():
            return list(_future_file(file)), OK
        async with open_session(create=False, frontier=settings.frontier) as session:
            info = await session.frontier.info()
            where = f"{place(address)} is open" + (f", {info.server}" if info.server else "")
            rows = [Row("frontier", "ok", where), *_durable(info)]
            if info.schema:
                rows.append(Row("schema", "ok", f"{info.schema} of {info.newest}"))
            if file is not None:
                rows += _file(file)
            rows.append(await _contents(session.frontier))
            checked = await _check(session.frontier, _size(file), quick=quick)
    except NoFrontier:
        return [_none_yet(place(address))], OK
    except ShoalError as error:
        return [Row("frontier", "bad", str(error), error.hint)], error.exit_code
    return [*rows, checked], FrontierCorrupt.exit_code if checked.state == "bad" else OK


def _none_yet(where: object) -> Row:
    return Row("frontier", "note", f"{where}: none yet, the first crawl creates it")


def _future_file(path: Path) -> Iterator[Row]:
    """The rows about a file that does not exist yet. Raises FrontierError if it cannot be created."""
    import tempfile

    folder = next(place for place in path.absolute().parents if place.exists())
    try:
        # A file without a name: only writing proves that writing works, and it leaves nothing behind.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FrontierError(
            f"cannot open {path}: {error.strerror}", hint="choose a writable directory with --frontier"
        ) from None
    yield _none_yet(path)
    yield _disk(folder)


async def _broker(settings: Settings) -> tuple[list[Row], int]:
    """Returns the rows about the broker, and the exit code they call for."""
    try:
        try:
            state = await _broker_state(settings.frontier, settings.dispatch)
        except NoFrontier:  # then no job has queues of its own yet
            state = await _broker_state("memory:", settings.dispatch)
    except ShoalError as error:  # no such broker, or its library is not installed
        return [Row("dispatch", "bad", str(error), error.hint)], error.exit_code
    if "error" in state:
        return [Row("dispatch", "bad", state["error"], state["hint"])], DispatchError.exit_code
    rows = [Row("dispatch", "ok", f"{state['about']} at {state['address']}")]
    for name, depth in state["queues"].items():
        depths = f"{depth['waiting']:,} messages waiting, {depth['consumers']:,} consumers"
        rows.append(Row(name, "ok", depths))
    return rows, OK


async def _broker_state(frontier: str, dispatch: str) -> dict[str, Any]:
    from shoal.app import broker_state

    async with open_session(create=False, frontier=frontier, dispatch=dispatch) as session:
        return await broker_state(session) or {}


def _durable(info: Info) -> list[Row]:
    if info.warnings:
        return [Row("durable", "note", warning.text, warning.hint) for warning in info.warnings]
    return [Row("durable", "note" if info.durable.hint else "ok", info.durable.text, info.durable.hint)]


def _file(path: Path) -> Iterator[Row]:
    """The rows about the frontier's file."""
    import apsw

    from shoal.frontier.migrate import migrations

    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        schema = db.pragma("user_version")
    finally:
        db.close()
    yield Row("schema", "ok", f"{schema} of {len(migrations('sqlite/schema.sql'))}")
    size = path.stat().st_size
    yield Row("file", "ok", f"{path.resolve()}, {_bytes(size)}")
    mode = path.stat().st_mode
    # It holds the headers of jobs, which may be secrets.
    shared = bool(mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH))
    risk = "others can change it" if mode & (stat.S_IWGRP | stat.S_IWOTH) else "others can read it"
    yield Row(
        "permissions",
        "note" if shared else "ok",
        stat.filemode(mode) + (f": {risk}" if shared else ""),
        f"chmod 600 {path} if its jobs have secret headers" if shared else "",
    )
    log = Path(f"{path}-wal")
    length = log.stat().st_size if log.exists() else 0
    yield Row(
        "log",
        "note" if length > BIG_LOG else "ok",
        f"{_bytes(length)} not yet merged into the file",
        "end programs that keep the file open for reading" if length > BIG_LOG else "",
    )
    yield _disk(path.parent)


def _disk(folder: Path) -> Row:
    import shutil

    free = shutil.disk_usage(folder).free
    return Row(
        "disk",
        "note" if free < LOW_SPACE else "ok",
        f"{_bytes(free)} free",
        "free some space, or choose another disk with --frontier" if free < LOW_SPACE else "",
    )


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None else 0


async def _contents(frontier: Backend) -> Row:
    jobs = await frontier.jobs(limit=1000)
    totals = {"waiting": 0, "delayed": 0, "leased": 0}
    for row in (await frontier.queues()).values():
        for name, number in row.items():
            totals[name] += number
    urls = ", ".join(f"{number:,} {name}" for name, number in totals.items())
    return Row("contents", "ok", f"{len(jobs):,}{'+' if len(jobs) == 1000 else ''} jobs, {urls}")


async def _check(frontier: Backend, size: int, *, quick: bool | None) -> Row:
    if quick is None:
        quick = size > HUGE
        if quick:
            return Row(
                "invariants", "note", "not verified: the file is large", "--no-quick verifies it anyway"
            )
    if quick:
        return Row("invariants", "note", "not verified (--quick)")
    wrong = await frontier.check()
    if not wrong:
        return Row("invariants", "ok", "all hold")
    more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
    return Row(
        "invariants",
        "bad",
        wrong[0] + more,
        "stop all workers and restore a backup, or start with a new file",
    )


def _app(settings: Settings) -> list[Row]:
    from shoal.app import load_app

    if not settings.app:
        return [Row("app", "ok", "none, only the built-in site scraper")]
    try:
        scrapers = load_app(settings.app).scrapers
    except ShoalError as error:
        return [Row("app", "bad", str(error), error.hint)]
    return [Row("app", "ok", f"{settings.app}: {', '.join(sorted(scrapers)) or 'no scrapers in it'}")]


def _extras() -> Iterator[Row]:
    from importlib.util import find_spec

    from shoal.calling import install

    for module, extra, what in EXTRAS:
        # find_spec finds a module without importing it: these are large.
        if find_spec(module) is not None:
            yield Row(extra, "ok", f"installed ({what})")
        else:
            yield Row(extra, "ok", f"not installed, optional: {install(extra)} ({what})")


def _described(row: Row) -> dict[str, Any]:
    return {"part": row.part, "state": row.state, "remark": row.warning, "hint": row.hint or None}


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 10 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"
