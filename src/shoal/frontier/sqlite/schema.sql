-- The embedded frontier. Times are microseconds of the machine's clock.
--
--   job      one row per job: its spec and its counters
--   tally    failed visits by job and error class
--   spread   requests accepted per job and lane, for jobs with a budget per host
--   stream   what a claim can ask for: a queue, or the part of it that belongs to one job (job 0: to all)
--   lane     one row per host: its pace, and `at`, its place in the turns (null: full, paused or empty);
--            the `streams` with work there: 0 for none, an id for one, "3,17" for several
--   turn     when each lane may be visited, by stream: the only table that a claim scans
--   line     the requests of one (lane, stream, job, priority); `vt` is its virtual time there
--   waiting  requests in line, clustered in the order in which they are claimed
--   delayed  requests that are not due yet
--   lease    requests that a worker holds, by fencing token
--   ended    dead letters and expired requests
--   seen     the key of every request ever accepted
--   note     small shared values that expire: locks, cursors, workers, rules of hosts
--   item     the item log; seq = job << 40 | counter, so a job's log is one range
--
-- A request moves as a whole row between waiting, delayed, lease and ended: rewriting a row in
-- place under indexes dirties twice as many pages, and a commit pays by the page.

-- migration 1: first schema
CREATE TABLE job(
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, spec BLOB NOT NULL,
    state TEXT NOT NULL CHECK(state IN ('running', 'paused', 'cancelled', 'done')),
    created INT NOT NULL, started INT, finished INT,
    added INT NOT NULL DEFAULT 0, known INT NOT NULL DEFAULT 0, refused INT NOT NULL DEFAULT 0,
    done INT NOT NULL DEFAULT 0, skipped INT NOT NULL DEFAULT 0, dead INT NOT NULL DEFAULT 0,
    expired INT NOT NULL DEFAULT 0, cancelled INT NOT NULL DEFAULT 0, retried INT NOT NULL DEFAULT 0,
    items INT NOT NULL DEFAULT 0, stale INT NOT NULL DEFAULT 0
);
CREATE INDEX job_created ON job(created);
CREATE TABLE tally(job INT, error TEXT, n INT NOT NULL, PRIMARY KEY(job, error)) WITHOUT ROWID;
CREATE TABLE spread(job INT, lane TEXT, added INT NOT NULL, PRIMARY KEY(job, lane)) WITHOUT ROWID;
CREATE TABLE stream(id INTEGER PRIMARY KEY, queue TEXT NOT NULL, job INT NOT NULL, UNIQUE(queue, job));
CREATE TABLE lane(
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    gap INT NOT NULL DEFAULT 0, width INT NOT NULL DEFAULT 1, burst INT NOT NULL DEFAULT 0,
    floor INT NOT NULL DEFAULT 0, pinned INT NOT NULL DEFAULT 0, paused INT NOT NULL DEFAULT 0,
    tat INT NOT NULL DEFAULT 0, blocked INT NOT NULL DEFAULT 0, busy INT NOT NULL DEFAULT 0 CHECK(busy >= 0),
    vt INT NOT NULL DEFAULT 0,
    at INT, streams NOT NULL DEFAULT 0, sole INT
);
CREATE TABLE turn(stream INT, at INT, lane INT, PRIMARY KEY(stream, at, lane)) WITHOUT ROWID;
CREATE TABLE line(
    id INTEGER PRIMARY KEY AUTOINCREMENT, lane INT NOT NULL, stream INT NOT NULL, job INT NOT NULL, priority INT NOT NULL,
    vt INT NOT NULL, off INT NOT NULL DEFAULT 0,
    UNIQUE(lane, stream, job, priority)
);
CREATE INDEX line_job ON line(job);
CREATE TABLE waiting(
    line INT, id INT, url TEXT NOT NULL, depth INT NOT NULL, attempt INT NOT NULL, expires INT, extra BLOB,
    PRIMARY KEY(line, id)
) WITHOUT ROWID;
CREATE INDEX waiting_expires ON waiting(expires) WHERE expires IS NOT NULL;
CREATE TABLE delayed(
    at INT, id INT, line INT NOT NULL, url TEXT NOT NULL, depth INT NOT NULL, attempt INT NOT NULL,
    expires INT, extra BLOB,
    PRIMARY KEY(at, id)
) WITHOUT ROWID;
CREATE INDEX delayed_expires ON delayed(expires) WHERE expires IS NOT NULL;
CREATE TABLE lease(
    token INTEGER PRIMARY KEY, until INT NOT NULL, worker TEXT NOT NULL, line INT NOT NULL,
    id INT NOT NULL, url TEXT NOT NULL, depth INT NOT NULL, attempt INT NOT NULL, extra BLOB
);
CREATE TABLE ended(
    id INTEGER PRIMARY KEY, state TEXT NOT NULL CHECK(state IN ('dead', 'expired')), at INT NOT NULL,
    job INT NOT NULL, lane TEXT NOT NULL, queue TEXT NOT NULL, priority INT NOT NULL, url TEXT NOT NULL,
    depth INT NOT NULL, attempt INT NOT NULL, extra BLOB, error TEXT NOT NULL, message TEXT NOT NULL,
    worker TEXT NOT NULL DEFAULT ''
);
CREATE INDEX ended_job ON ended(job);
CREATE INDEX ended_at ON ended(at);
CREATE TABLE seen(key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE item(seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE note(
    shelf TEXT, name TEXT, at INT NOT NULL, until INT NOT NULL, value BLOB NOT NULL, PRIMARY KEY(shelf, name)
) WITHOUT ROWID;
CREATE TABLE tick(
    one INTEGER PRIMARY KEY CHECK(one = 1),
    token INT NOT NULL, request INT NOT NULL, epoch INT NOT NULL
);
INSERT INTO tick VALUES(1, 0, 0, 0);
