-- The frontier on a PostgreSQL server. Times are microseconds of the server's clock.
--
--   job      one row a job: what it was asked and its counters
--   tally    failed visits by job and error class
--   spread   requests accepted per job and lane, where a job limits that
--   stream   what a claim can ask for: a queue, or one job's part of it (job 0: everybody's)
--   lane     one row a host: its pace, and `at`, its place in the turns (null: full, paused, empty);
--            `streams` with work there: "0" for none, "3,17" for several
--   turn     which lane may be visited when, by stream: the only thing a claim scans
--   line     the requests of one (lane, stream, job, priority); `vt` is its virtual time there
--   waiting  requests in line, in the order in which they leave
--   delayed  requests whose time has not come
--   lease    requests in somebody's hands, by fencing token
--   ended    dead letters and expired requests
--   seen     keys of every request ever accepted
--   worker   who works here, and when it was last heard of
--   item     the item log; seq = job << 40 | counter, so a job's log is one range
--   tick     one row; `epoch` counts how often lines were dropped
--
-- A request moves as a whole row between waiting, delayed, lease and ended. Lanes and jobs are updated
-- in place all the time: no index on what changes and free room on each page, so that an update
-- touches neither index nor another page. Text compares by bytes ("C") on every server alike.

-- migration 1: first schema
CREATE TABLE job(
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name TEXT COLLATE "C" NOT NULL UNIQUE,
    spec BYTEA NOT NULL,
    state TEXT NOT NULL CHECK(state IN ('running', 'paused', 'cancelled', 'done')),
    created BIGINT NOT NULL, finished BIGINT,
    added BIGINT NOT NULL DEFAULT 0, known BIGINT NOT NULL DEFAULT 0, refused BIGINT NOT NULL DEFAULT 0,
    done BIGINT NOT NULL DEFAULT 0, skipped BIGINT NOT NULL DEFAULT 0, dead BIGINT NOT NULL DEFAULT 0,
    expired BIGINT NOT NULL DEFAULT 0, cancelled BIGINT NOT NULL DEFAULT 0, retried BIGINT NOT NULL DEFAULT 0,
    items BIGINT NOT NULL DEFAULT 0, stale BIGINT NOT NULL DEFAULT 0
) WITH (fillfactor=50);
CREATE INDEX job_created ON job(created);
CREATE TABLE tally(job BIGINT, error TEXT COLLATE "C", n BIGINT NOT NULL, PRIMARY KEY(job, error));
CREATE TABLE spread(job BIGINT, lane TEXT COLLATE "C", added BIGINT NOT NULL, PRIMARY KEY(job, lane));
CREATE TABLE stream(
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue TEXT COLLATE "C" NOT NULL, job BIGINT NOT NULL,
    UNIQUE(queue, job)
);
CREATE TABLE lane(
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name TEXT COLLATE "C" NOT NULL UNIQUE,
    gap BIGINT NOT NULL DEFAULT 0, width BIGINT NOT NULL DEFAULT 1, burst BIGINT NOT NULL DEFAULT 0,
    floor BIGINT NOT NULL DEFAULT 0, pinned BIGINT NOT NULL DEFAULT 0, paused BIGINT NOT NULL DEFAULT 0,
    tat BIGINT NOT NULL DEFAULT 0, blocked BIGINT NOT NULL DEFAULT 0,
    busy BIGINT NOT NULL DEFAULT 0 CHECK(busy >= 0), vt BIGINT NOT NULL DEFAULT 0,
    at BIGINT, streams TEXT COLLATE "C" NOT NULL DEFAULT '0', sole BIGINT
) WITH (fillfactor=50, autovacuum_vacuum_scale_factor=0.05);
CREATE TABLE turn(stream BIGINT, at BIGINT, lane BIGINT, PRIMARY KEY(stream, at, lane))
    WITH (autovacuum_vacuum_scale_factor=0.05);
CREATE TABLE line(
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, lane BIGINT NOT NULL, stream BIGINT NOT NULL,
    job BIGINT NOT NULL, priority BIGINT NOT NULL, vt BIGINT NOT NULL, off BIGINT NOT NULL DEFAULT 0,
    UNIQUE(lane, stream, job, priority)
) WITH (fillfactor=70);
CREATE INDEX line_job ON line(job);
CREATE SEQUENCE request;
CREATE SEQUENCE token;
CREATE TABLE waiting(
    line BIGINT, id BIGINT, url TEXT NOT NULL, depth BIGINT NOT NULL, attempt BIGINT NOT NULL,
    expires BIGINT, extra BYTEA,
    PRIMARY KEY(line, id)
) WITH (autovacuum_vacuum_scale_factor=0.05);
CREATE INDEX waiting_expires ON waiting(expires) WHERE expires IS NOT NULL;
CREATE TABLE delayed(
    at BIGINT, id BIGINT, line BIGINT NOT NULL, url TEXT NOT NULL, depth BIGINT NOT NULL,
    attempt BIGINT NOT NULL, expires BIGINT, extra BYTEA,
    PRIMARY KEY(at, id)
) WITH (autovacuum_vacuum_scale_factor=0.05);
CREATE INDEX delayed_expires ON delayed(expires) WHERE expires IS NOT NULL;
CREATE TABLE lease(
    token BIGINT PRIMARY KEY, until BIGINT NOT NULL, worker TEXT NOT NULL, line BIGINT NOT NULL,
    id BIGINT NOT NULL, url TEXT NOT NULL, depth BIGINT NOT NULL, attempt BIGINT NOT NULL, extra BYTEA
) WITH (autovacuum_vacuum_scale_factor=0.05);
CREATE INDEX lease_until ON lease(until);
CREATE TABLE ended(
    id BIGINT PRIMARY KEY, state TEXT NOT NULL CHECK(state IN ('dead', 'expired')), at BIGINT NOT NULL,
    job BIGINT NOT NULL, lane TEXT COLLATE "C" NOT NULL, queue TEXT NOT NULL, priority BIGINT NOT NULL,
    url TEXT NOT NULL, depth BIGINT NOT NULL, attempt BIGINT NOT NULL, extra BYTEA,
    error TEXT COLLATE "C" NOT NULL, message TEXT NOT NULL
);
CREATE INDEX ended_job ON ended(job);
CREATE TABLE seen(key BYTEA PRIMARY KEY);
CREATE TABLE item(seq BIGINT PRIMARY KEY, body BYTEA NOT NULL);
CREATE TABLE cursor(job BIGINT, sink TEXT COLLATE "C", seq BIGINT NOT NULL, PRIMARY KEY(job, sink));
CREATE TABLE lock(name TEXT COLLATE "C" PRIMARY KEY, owner TEXT NOT NULL, until BIGINT NOT NULL);
CREATE TABLE note(key TEXT COLLATE "C" PRIMARY KEY, until BIGINT NOT NULL, value BYTEA NOT NULL);
CREATE TABLE worker(name TEXT COLLATE "C" PRIMARY KEY, since BIGINT NOT NULL, seen BIGINT NOT NULL, beat BYTEA NOT NULL)
    WITH (fillfactor=50);
CREATE TABLE tick(one BIGINT PRIMARY KEY CHECK(one = 1), epoch BIGINT NOT NULL);
INSERT INTO tick VALUES(1, 0);
