"""The statements, by name.

Each has two texts. Most are written once, in PostgreSQL's dialect, and SQLite's text is derived from it
(`_for_sqlite`). Statements over many rows take arrays on PostgreSQL and run row by row on SQLite.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from shoal.frontier.rows import LANE
from shoal.model import TRANSIT


class Statement(NamedTuple):
    """One statement in both dialects."""

    sqlite: str
    postgres: str
    untrusted: tuple[int, ...] = ()
    """Columns with text from outside, which may hold characters that PostgreSQL cannot store."""


_RULES = (
    (r"=\s*ANY\(\$(\d+)::\w+\[\]\)", r" IN carray(?\1)"),
    (r"\$(\d+)(::\w+(\[\])?)?", r"?\1"),
    (r"starts_with\((\w+), '([^']*)'\)", lambda m: f"substr({m[1]}, 1, {len(m[2])})='{m[2]}'"),
    (r"\bgreatest\(", "max("),
    (r" FOR NO KEY UPDATE", ""),
)


def _for_sqlite(text: str) -> str:
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text


def same(text: str) -> Statement:
    """Return a statement that both dialects understand, except for the spelling of its parameters."""
    return Statement(_for_sqlite(text), text)


conditional = lru_cache(256)(same)
"""The same for statements whose conditions are chosen at run time; there are few variants of each."""


def _each(sqlite: str, types: str, postgres: str) -> Statement:
    """Return a statement over many rows. `{rows}` in PostgreSQL's text stands for arrays of these types."""
    arrays = ", ".join(f"${n}::{_TYPES[name]}[]" for n, name in enumerate(types.split(), 1))
    untrusted = tuple(n for n, name in enumerate(types.split()) if name == "words")
    return Statement(_for_sqlite(sqlite), postgres.replace("{rows}", f"unnest({arrays})"), untrusted)


_TYPES = {"int": "bigint", "text": "text", "words": "text", "bytes": "bytea"}


def _inserts(table: str, types: str, more: str = "") -> Statement:
    """Return a statement that inserts many rows."""
    values = ", ".join(f"${n}" for n in range(1, len(types.split()) + 1))
    return _each(
        f"INSERT INTO {table} VALUES({values}){more}",
        types,
        f"INSERT INTO {table} SELECT * FROM {{rows}}{more}",
    )


TRAVELS = f"starts_with(worker, '{TRANSIT}')"
"""Whether a lease is in transit."""

_WAITS = "EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"

# -- jobs -----------------------------------------------------------------------------------

_JOB_ROW = (
    "SELECT id, name, spec, state, added-skipped-dead-expired, added-done-dead-expired-cancelled"
    " FROM job WHERE "
)
JOB = same(_JOB_ROW + "name=$1")
JOB_BY_ID = same(_JOB_ROW + "id=$1")
JOBS_BY_NAME = same(_JOB_ROW + "name=ANY($1::text[])")
JOBS_BY_ID = same(_JOB_ROW + "id=ANY($1::bigint[])")
JOB_ID = same("SELECT id FROM job WHERE name=$1")
JOB_NAMES = same("SELECT id, name FROM job WHERE id=ANY($1::bigint[])")

# -- lanes, streams, lines ------------------------------------------------------------------

LANE_IDS = same("SELECT name, id FROM lane WHERE name=ANY($1::text[])")
NEW_LANES = Statement(
    "INSERT INTO lane(name) SELECT value FROM carray(?1) WHERE true RETURNING name, id",
    "INSERT INTO lane(name) SELECT unnest($1::text[]) RETURNING name, id",
)
LANES = same(f"SELECT {LANE} FROM lane l WHERE id=ANY($1::bigint[]) ORDER BY id FOR NO KEY UPDATE")
LIVE_STREAMS = same(
    f"SELECT lane, stream, max(priority) FROM line WHERE lane=ANY($1::bigint[]) AND off=0 AND {_WAITS}"
    " GROUP BY lane, stream"
)
TOP_PRIORITIES = same(
    f"SELECT lane, max(priority) FROM line WHERE lane=ANY($1::bigint[]) AND off=0 AND {_WAITS} GROUP BY lane"
)
STREAM = same("SELECT id FROM stream WHERE queue=$1 AND job=$2")
NEW_STREAM = same("INSERT INTO stream(queue, job) VALUES($1, $2) RETURNING id")
QUEUE_NAMES = same("SELECT id, queue FROM stream WHERE id=ANY($1::bigint[])")
STREAMS = same("SELECT id, queue FROM stream WHERE $1::bigint IS NULL OR job=$1")
STREAMS_OF_JOB = same("SELECT id, queue FROM stream WHERE job=$1")
# Streams of jobs that ended long ago have no turns: jump from each stream with turns to the next one.
BUSY_STREAMS = same(
    "WITH RECURSIVE busy(id) AS (SELECT min(stream) FROM turn UNION ALL"
    " SELECT (SELECT min(stream) FROM turn WHERE stream>id) FROM busy WHERE id IS NOT NULL)"
    " SELECT stream.id, stream.queue FROM busy JOIN stream ON stream.id=busy.id"
)
LINES = same("SELECT id, lane, stream, job, priority FROM line WHERE id=ANY($1::bigint[])")
LINES_AT = _each(
    "SELECT id, lane, stream, job, priority FROM line WHERE lane=$1 AND stream=$2 AND job=$3 AND priority=$4",
    "int int int int",
    "SELECT l.id, l.lane, l.stream, l.job, l.priority FROM line l"
    " JOIN {rows} AS p(lane, stream, job, priority)"
    " ON l.lane=p.lane AND l.stream=p.stream AND l.job=p.job AND l.priority=p.priority",
)
LINES_ON = same("SELECT lane, job, id FROM line WHERE lane=ANY($1::bigint[])")
DROP_LINES = same("DELETE FROM line WHERE id=ANY($1::bigint[])")
_LINE = "INSERT INTO line(lane, stream, job, priority, vt, off)"
NEW_LINES = _each(
    f"{_LINE} VALUES($1, $2, $3, $4, $5, $6) RETURNING id, lane, stream, job, priority",
    "int int int int int int",
    f"{_LINE} SELECT * FROM {{rows}} RETURNING id, lane, stream, job, priority",
)
NEXT_EPOCH = same("UPDATE tick SET epoch=epoch+1 RETURNING epoch")
# A line that was empty starts at its lane's virtual time: it gets no credit for absence.
ACTIVATE = _each(
    "UPDATE line SET vt=$2 WHERE id=$1 AND vt<$2 AND NOT EXISTS(SELECT 1 FROM waiting WHERE waiting.line=$1)",
    "int int",
    "UPDATE line SET vt=a.vt FROM {rows} AS a(id, vt) WHERE line.id=a.id AND line.vt<a.vt"
    " AND NOT EXISTS(SELECT 1 FROM waiting WHERE waiting.line=a.id)",
)
STEP_LINES = _each(
    "UPDATE line SET vt=$1 WHERE id=$2",
    "int int",
    "UPDATE line SET vt=c.vt FROM {rows} AS c(vt, id) WHERE line.id=c.id",
)

# -- requests -------------------------------------------------------------------------------

FORGET_KEYS = same("DELETE FROM seen WHERE key=ANY($1::bytea[])")
WAIT = _inserts("waiting", "int int text int int int bytes")
DELAY = _inserts("delayed", "int int int text int int int bytes")
BURY = _inserts("ended", "int text int int words words int words int int bytes words words words")
ITEMS = _inserts("item", "int bytes")

_ENTRY = "line, id, url, depth, attempt, expires, extra"
EXPIRE_WAITING = same(f"DELETE FROM waiting WHERE expires<=$1 RETURNING {_ENTRY}")
EXPIRE_DELAYED = same(f"DELETE FROM delayed WHERE expires<=$1 RETURNING {_ENTRY}")
PROMOTE = same(f"DELETE FROM delayed WHERE at<=$1 RETURNING at, {_ENTRY}")


def _end_leases(where: str) -> Statement:
    return same(
        f"DELETE FROM lease WHERE {where}"
        " RETURNING until, token, line, id, url, depth, attempt, extra, worker"
    )


END_EXPIRED = _end_leases("until<=$1")
END_OF_WORKERS = _end_leases("worker=ANY($1::text[])")
END_TRAVELLING = _end_leases(f"token=ANY($1::bigint[]) AND {TRAVELS}")
END_TRAVELLING_OF_JOB = _end_leases(f"{TRAVELS} AND line IN (SELECT id FROM line WHERE job=$1)")
TRAVELLING = same(f"SELECT count(*) FROM lease WHERE token=ANY($1::bigint[]) AND {TRAVELS}")
EXTEND = same(
    "UPDATE lease SET until=$1 WHERE token=ANY($2::bigint[]) AND NOT EXISTS(SELECT 1 FROM line"
    " JOIN job ON job.id=line.job WHERE line.id=lease.line AND job.state='cancelled') RETURNING token"
)
# $4: the new holder will visit. A holder in transit may also take leases of a paused job.
TAKE = same(
    f"UPDATE lease SET until=$1, worker=$2 WHERE token=ANY($3::bigint[]) AND (worker=$2 OR {TRAVELS})"
    " AND NOT EXISTS(SELECT 1 FROM line JOIN job ON job.id=line.job WHERE line.id=lease.line"
    " AND (job.state='cancelled' OR (job.state='paused' AND worker<>$2 AND $4))) RETURNING token"
)

# -- counters -------------------------------------------------------------------------------

SPREAD = _each(
    "SELECT job, lane, added FROM spread WHERE job=$1 AND lane=$2",
    "int text",
    "SELECT s.job, s.lane, s.added FROM spread s JOIN {rows} AS p(job, lane)"
    " ON s.job=p.job AND s.lane=p.lane",
)
MOVE_SPREAD = _inserts(
    "spread AS s", "int text int", " ON CONFLICT(job, lane) DO UPDATE SET added=s.added+excluded.added"
)
TALLY = _inserts("tally AS t", "int words int", " ON CONFLICT(job, error) DO UPDATE SET n=t.n+excluded.n")

# -- the catalog ----------------------------------------------------------------------------

COUNTS = (
    "added",
    "known",
    "refused",
    "done",
    "skipped",
    "dead",
    "expired",
    "cancelled",
    "retried",
    "items",
    "stale",
)
NEW_JOB = same(
    "INSERT INTO job(name, spec, state, created) VALUES($1, $2, 'running', $3) ON CONFLICT(name) DO NOTHING"
)
JOB_VIEWS = same(
    f"SELECT id, name, spec, state, created, finished, started, {', '.join(COUNTS)} FROM job"
    " WHERE name=ANY($1::text[])"
)
JOBS_BEFORE = same("SELECT name FROM job WHERE created<$1 ORDER BY created DESC, id DESC LIMIT $2")
ALL_JOBS = same("SELECT name FROM job ORDER BY id")
HELD_BY_JOB = {
    table: same(
        f"SELECT line.job, count(*) FROM {table} t JOIN line ON line.id=t.line"
        " WHERE line.job=ANY($1::bigint[]) GROUP BY line.job"
    )
    for table in ("lease", "delayed")
}
TALLIES = same("SELECT job, error, n FROM tally WHERE job=ANY($1::bigint[]) ORDER BY n DESC, error")
SET_SPEC = same("UPDATE job SET spec=$1 WHERE id=$2")
SET_CANCELLED = same("UPDATE job SET state='cancelled', finished=$1, cancelled=cancelled+$2 WHERE id=$3")
SET_STATE = same(
    "UPDATE job SET state=CASE WHEN $1='running' AND added>0 AND added=done+dead+expired+cancelled"
    " THEN 'done' ELSE $1 END WHERE id=$2"
)
CANCEL_REQUESTS = {
    table: same(f"DELETE FROM {table} WHERE line IN (SELECT id FROM line WHERE job=$1)")
    for table in ("waiting", "delayed")
}
SWITCH_LINES = same("UPDATE line SET off=$1 WHERE job=$2")
CATCH_UP_LINES = same(
    "UPDATE line SET vt=greatest(line.vt, lane.vt) FROM lane WHERE lane.id=line.lane AND line.job=$1"
    f" AND {_WAITS}"
)
LANES_OF_JOB = same("SELECT DISTINCT lane FROM line WHERE job=$1")
LANES_SHARED = same(
    "SELECT DISTINCT line.lane FROM line JOIN job ON job.id=line.job WHERE line.job<>$1 AND"
    " job.added>job.done+job.dead+job.expired+job.cancelled AND line.lane IN"
    " (SELECT lane FROM line WHERE job=$1)"
)
ITEM_LOG = same("SELECT seq, body FROM item WHERE seq>$1 AND seq<$2 ORDER BY seq LIMIT $3")

LETTER = (
    "e.id, e.state, e.at, job.name, e.lane, e.queue, e.priority, e.url, e.depth, e.attempt, e.extra,"
    " e.error, e.message, e.worker"
)
LETTERS = f"SELECT {LETTER} FROM ended e JOIN job ON job.id=e.job WHERE "
LETTER_OF = same(f"{LETTERS} e.job=$1 AND e.url=$2 LIMIT 1")
FORGET_LETTERS = same("DELETE FROM ended WHERE id=ANY($1::bigint[])")

_LANE_VIEW = (
    "SELECT l.name, (SELECT count(*) FROM waiting JOIN line ON line.id=waiting.line WHERE line.lane=l.id),"
    f" {LANE} FROM lane l"
)
LANE_VIEWS = same(f"{_LANE_VIEW} WHERE l.name=ANY($1::text[])")
_BUSIEST = f"{_LANE_VIEW} ORDER BY l.busy DESC, l.streams<>{{none}} DESC, l.id LIMIT $1"
BUSIEST_LANES = Statement(_for_sqlite(_BUSIEST.format(none=0)), _BUSIEST.format(none="'0'"))

KNOWN_KEYS = same("SELECT key FROM seen WHERE key=ANY($1::bytea[])")
_HERE = (
    "JOIN line ON line.id=t.line JOIN lane ON lane.id=line.lane JOIN stream ON stream.id=line.stream"
    " WHERE lane.name=$2 AND line.job=$3 AND t.url=$1 LIMIT 1"
)
_REQUEST = "stream.queue, line.priority, t.depth, t.attempt, t.extra"
FIND_WAITING = same(f"SELECT t.line, t.id, {_REQUEST} FROM waiting t {_HERE}")
FIND_DELAYED = same(f"SELECT t.at, {_REQUEST} FROM delayed t {_HERE}")
FIND_LEASE = same(f"SELECT t.until, t.worker, {_REQUEST} FROM lease t {_HERE}")
AHEAD = same("SELECT count(*) FROM waiting WHERE line=$1 AND id<$2")

BY_QUEUE = {
    state: same(
        f"SELECT s.queue, count(*) FROM {table} t JOIN line ON line.id=t.line"
        " JOIN stream s ON s.id=line.stream GROUP BY s.queue"
    )
    for state, table in (("waiting", "waiting"), ("delayed", "delayed"), ("leased", "lease"))
}

_LEASES = (
    "SELECT lease.worker, s.queue, lease.url, job.name, lane.name FROM lease"
    " JOIN line ON line.id=lease.line JOIN stream s ON s.id=line.stream"
    " JOIN job ON job.id=line.job JOIN lane ON lane.id=line.lane"
    " WHERE ($1::text IS NULL OR job.name=$1) AND ($2::text IS NULL OR lane.name=$2)"
    " ORDER BY lease.token DESC LIMIT $3"
)
# Newest leases first, until enough match: this needs no index of its own. SQLite keeps the order of the
# tables only with CROSS JOIN.
LEASES = Statement(_for_sqlite(_LEASES).replace(" JOIN ", " CROSS JOIN "), _LEASES)

# -- checking -------------------------------------------------------------------------------

_STATES = " UNION ALL ".join(f"SELECT id FROM {table}" for table in ("waiting", "delayed", "lease", "ended"))
TWICE = same(f"SELECT id, count(*) FROM ({_STATES}) p GROUP BY id HAVING count(*)>1 ORDER BY id")
LEASES_BY_LANE = same("SELECT line.lane, count(*) FROM lease JOIN line ON line.id=lease.line GROUP BY 1")
TURNS = same("SELECT stream, at, lane FROM turn")
ALL_LIVE_STREAMS = same(f"SELECT DISTINCT lane, stream FROM line WHERE off=0 AND {_WAITS}")
ALL_LINES = same("SELECT id, lane FROM line")
ALL_LANES = same(f"SELECT l.name, {LANE} FROM lane l ORDER BY l.id")
STRAY = {
    table: same(f"SELECT count(*) FROM {table} t WHERE NOT EXISTS(SELECT 1 FROM line WHERE line.id=t.line)")
    for table in ("waiting", "delayed", "lease")
}
_LIVE_ROWS = " + ".join(
    f"(SELECT count(*) FROM {table} t JOIN line ON line.id=t.line WHERE line.job=j.id)"
    for table in ("waiting", "delayed", "lease")
)
JOB_SUMS = same(
    f"SELECT j.name, j.added-j.done-j.dead-j.expired-j.cancelled, {_LIVE_ROWS}, j.items,"
    " (SELECT count(*) FROM item WHERE seq>j.id<<40 AND seq<(j.id+1)<<40) FROM job j ORDER BY j.id"
)

# -- notes ----------------------------------------------------------------------------------

NOTE = same("SELECT value FROM note WHERE shelf=$1 AND name=$2 AND until>$3")
NOTES = same("SELECT name, value, at FROM note WHERE shelf=$1 AND until>$2 ORDER BY name")
SWEEP_NOTES = same("DELETE FROM note WHERE until<=$1")
DROP_NOTE = same("DELETE FROM note WHERE shelf=$1 AND name=$2")
_PUT = (
    "INSERT INTO note(shelf, name, at, until, value) VALUES($1, $2, $3, $4, $5)"
    " ON CONFLICT(shelf, name) DO UPDATE SET at=excluded.at, until=excluded.until, value=excluded.value"
)
PUT_NOTE = same(_PUT)
# One statement each: a transaction that has waited for a row of another one sees its new state.
MAKE_NOTE = same(f"{_PUT} WHERE note.until<=$3 RETURNING 1")
CHANGE_NOTE = same(
    "UPDATE note SET at=$3, until=$4, value=$5"
    " WHERE shelf=$1 AND name=$2 AND until>$3 AND value=$6 RETURNING 1"
)
REMOVE_NOTE = same("DELETE FROM note WHERE shelf=$1 AND name=$2 AND until>$3 AND value=$4 RETURNING 1")
