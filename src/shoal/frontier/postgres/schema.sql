-- The frontier on a PostgreSQL server. Times are microseconds of the server's clock.
--
--   job      one row per job: its spec and its counters
--   tally    failed visits by job and error class
--   spread   requests accepted per job and lane, for jobs with a budget per host
--   stream   what a claim can ask for: a queue, or the part of it that belongs to one job (job 0: to all)
--   lane     one row per host: its pace, and `at`, its place in the turns (null: full, paused or empty);
--            the `streams` with work there: "0" for none, "3,17" for several
--   turn     when each lane may be visited, by stream: the only table that a claim scans
--   line     the requests of one (lane, stream, job, priority); `vt` is its virtual time there
--   waiting  requests in line, in the order in which they are claimed
--   delayed  requests that are not due yet
--   lease    requests that a worker holds, by fencing token
--   ended    dead letters and expired requests
--   seen     the key of every request ever accepted
--   note     small shared values that expire: locks, cursors, workers, rules of hosts
--   item     the item log; seq = job << 40 | counter, so a job's log is one range
--   tick     one row; a new `epoch` tells processes to forget the lines and jobs that they remember
--
-- A request moves as a whole row between waiting, delayed, lease and ended. Lanes and jobs are updated
-- in place all the time. So the columns that change have no index and each page has free space: an update
-- then touches neither an index nor another page. Text compares by bytes ("C") on every server.

-- migration 1: first schema
CREATE TABLE job(
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name TEXT COLLATE "C" NOT NULL UNIQUE,
    spec BYTEA NOT NULL,
    state TEXT NOT NULL CHECK(state IN ('running', 'paused', 'cancelled', 'done')),
    created BIGINT NOT NULL, started BIGINT, finished BIGINT,
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
    error TEXT COLLATE "C" NOT NULL, message TEXT NOT NULL, worker TEXT NOT NULL DEFAULT ''
);
CREATE INDEX ended_job ON ended(job);
CREATE INDEX ended_at ON ended(at);
CREATE TABLE seen(key BYTEA PRIMARY KEY);
CREATE TABLE item(seq BIGINT PRIMARY KEY, body BYTEA NOT NULL);
CREATE TABLE note(
    shelf TEXT COLLATE "C", name TEXT COLLATE "C", at BIGINT NOT NULL, until BIGINT NOT NULL,
    value BYTEA NOT NULL, PRIMARY KEY(shelf, name)
) WITH (fillfactor=50);
CREATE TABLE tick(one BIGINT PRIMARY KEY CHECK(one = 1), epoch BIGINT NOT NULL);
INSERT INTO tick VALUES(1, 0);

-- The two verbs of the hot path in their common case: one round trip and one transaction each. In any other
-- case they change nothing and say so; the Python code of frontier/sql then does the work. That code is the
-- authority on what is right. Both functions share the schema's lock with others (see __init__.py).
--
-- A statement inside a VOLATILE function sees what was committed before that statement. So lanes are
-- locked by one statement and their requests read by the next: within a single statement the lock would be
-- newer than what is read, and a request could be handed out twice.
--
-- The planner knows little about tables that change so fast. Left alone, it reads and sorts every ready lane
-- for a claim of ten: 300 ms with 100,000 hosts. So the claim forces the index; the session has further
-- settings (see store.py).

-- Claims from lanes that have one line only. `at_`: the time in tests, null for the server's clock.
-- Returns no tokens and `common` false when upkeep is due, a lane has several lines, several streams
-- are requested, or nothing is ready.
CREATE FUNCTION claim_common(
    key_ BIGINT, at_ BIGINT, limit_ INT, worker_ TEXT, lease_ BIGINT, queues_ TEXT[], job_ BIGINT,
    OUT common BOOLEAN, OUT now_ BIGINT, OUT names_ TEXT[], OUT takes_ BIGINT[], OUT streams_ BIGINT[],
    OUT jobs_ BIGINT[], OUT priorities_ BIGINT[], OUT tokens_ BIGINT[], OUT urls_ TEXT[], OUT depths_ BIGINT[],
    OUT attempts_ BIGINT[], OUT extras_ BYTEA[]
) LANGUAGE plpgsql VOLATILE
SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    asked BIGINT; left_ BIGINT := limit_; gap_ BIGINT; free BIGINT; n BIGINT; tat_ BIGINT; r RECORD; stays BOOLEAN;
    full_ BOOLEAN; at2 BIGINT;
    lanes_ BIGINT[] := '{}'; lines_ BIGINT[] := '{}'; tats BIGINT[] := '{}'; olds BIGINT[] := '{}';
    ats BIGINT[] := '{}'; works TEXT[] := '{}'; usual TEXT; served BIGINT[] := '{}';
BEGIN
    PERFORM pg_advisory_xact_lock_shared(key_);
    usual := current_setting('synchronous_commit');
    PERFORM set_config('synchronous_commit', 'off', true);
    common := false;
    now_ := coalesce(at_, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF least((SELECT min(d.at) FROM delayed d), (SELECT min(l.until) FROM lease l),
        (SELECT min(w.expires) FROM waiting w WHERE w.expires IS NOT NULL),
        (SELECT min(d.expires) FROM delayed d WHERE d.expires IS NOT NULL)) <= now_
    THEN RETURN; END IF;
    IF job_ IS NULL THEN
        WITH RECURSIVE busy(id) AS (
            SELECT min(t.stream) FROM turn t
            UNION ALL SELECT (SELECT min(t.stream) FROM turn t WHERE t.stream > b.id) FROM busy b WHERE b.id IS NOT NULL
        )
        SELECT CASE WHEN count(*) = 1 THEN min(b.id) END INTO asked FROM busy b JOIN stream s ON s.id = b.id
        WHERE queues_ IS NULL OR s.queue = ANY(queues_);
    ELSE
        SELECT CASE WHEN count(*) = 1 THEN min(s.id) END INTO asked FROM stream s
        WHERE s.job = job_ AND (queues_ IS NULL OR s.queue = ANY(queues_));
    END IF;
    IF asked IS NULL THEN RETURN; END IF;
    names_ := '{}'; takes_ := '{}'; streams_ := '{}'; jobs_ := '{}'; priorities_ := '{}';
    FOR r IN
        SELECT l.id, l.name, l.gap, l.width, l.burst, l.floor, l.pinned, l.tat, l.blocked, l.busy, l.at,
            l.streams, l.sole, n.stream, n.job, n.priority
        FROM (
            SELECT t.at, t.lane FROM turn t WHERE t.stream = asked AND t.at <= now_
            ORDER BY t.at, t.lane LIMIT 2 * limit_ + 100
        ) t JOIN lane l ON l.id = t.lane LEFT JOIN line n ON n.id = l.sole
        ORDER BY t.at, t.lane
        FOR NO KEY UPDATE OF l SKIP LOCKED
    LOOP
        -- The turn may be older than the lock, so the row of the lane decides: it may have been served since.
        CONTINUE WHEN r.at IS NULL OR r.at > now_ OR r.streams = '0';
        IF r.sole IS NULL THEN tokens_ := NULL; RETURN; END IF;
        gap_ := CASE WHEN r.pinned <> 0 OR r.floor <= r.gap THEN r.gap ELSE r.floor END;
        free := least(left_, r.width - r.busy);
        IF gap_ > 0 THEN
            free := least(free, (now_ + r.burst * gap_ - greatest(r.tat, now_)) / gap_ + 1);
        END IF;
        SELECT count(*) INTO n FROM (SELECT FROM waiting w WHERE w.line = r.sole LIMIT greatest(free, 0) + 1) h;
        stays := n > free;
        n := least(n, greatest(free, 0));
        left_ := left_ - n;
        IF n > 0 AND NOT r.job = ANY(served) THEN served := served || r.job; END IF;
        tat_ := CASE WHEN n > 0 THEN greatest(r.tat, now_) + n * gap_ ELSE r.tat END;
        full_ := NOT stays OR r.busy + n >= r.width;
        at2 := greatest(tat_ - r.burst * gap_, r.blocked);
        IF at2 <= now_ THEN at2 := now_ - greatest(0, r.priority - 5) * 10000000; END IF;
        lanes_ := lanes_ || r.id;
        lines_ := lines_ || r.sole;
        names_ := names_ || r.name;
        takes_ := takes_ || n;
        streams_ := streams_ || r.stream;
        jobs_ := jobs_ || r.job;
        priorities_ := priorities_ || r.priority;
        tats := tats || tat_;
        olds := olds || r.at;
        ats := ats || CASE WHEN NOT full_ THEN at2 END;
        works := works || CASE WHEN stays THEN r.stream::text ELSE '0' END;
        EXIT WHEN left_ <= 0;
    END LOOP;
    IF left_ = limit_ THEN RETURN; END IF;
    WITH c AS MATERIALIZED (
        SELECT * FROM unnest(lanes_, takes_, tats, olds, ats, works) AS c(id, n, tat, old, at, works)
    ), gone AS (
        DELETE FROM turn t USING c WHERE c.at IS NULL AND t.stream = asked AND t.at = c.old AND t.lane = c.id
    ), moved AS (
        UPDATE turn t SET at = c.at FROM c
        WHERE c.at <> c.old AND t.stream = asked AND t.at = c.old AND t.lane = c.id
    )
    UPDATE lane l SET tat = c.tat, busy = l.busy + c.n, at = c.at, streams = c.works FROM c WHERE l.id = c.id;
    WITH g AS MATERIALIZED (
        SELECT w.* FROM unnest(lines_, takes_) AS x(line, n) CROSS JOIN LATERAL (
            SELECT w.ctid AS place, w.line, w.id, w.url, w.depth, w.attempt, w.extra FROM waiting w
            WHERE w.line = x.line ORDER BY w.id LIMIT x.n
        ) w
    ), gone AS (
        DELETE FROM waiting w WHERE w.ctid = ANY(ARRAY(SELECT place FROM g))
    ), held AS (
        INSERT INTO lease(token, until, worker, line, id, url, depth, attempt, extra)
        SELECT nextval('token'), now_ + lease_, worker_, g.line, g.id, g.url, g.depth, g.attempt, g.extra FROM g
        RETURNING token, url, depth, attempt, extra
    )
    SELECT array_agg(token), array_agg(url), array_agg(depth), array_agg(attempt), array_agg(extra)
    INTO tokens_, urls_, depths_, attempts_, extras_ FROM held;
    -- Do not wait for another transaction that holds the row of a job, while this one holds lanes: the next
    -- claim or the first settle records the start then.
    UPDATE job SET started = now_ WHERE id = ANY(ARRAY(
        SELECT j.id FROM job j WHERE j.id = ANY(served) AND j.started IS NULL FOR NO KEY UPDATE SKIP LOCKED
    ));
    -- A claim that hands something out waits for the disk. A server that lost it in a crash would hand out the
    -- same tokens again, and the same hosts within their gap.
    PERFORM set_config('synchronous_commit', usual, true);
    common := true;
END $$;

-- Settles visits that are all done, on lanes that have one line only, whose found requests go into existing
-- lines. `tokens_` and `keys_` are sorted and without doubles; `order_` numbers the found requests in the
-- order in which they were found; `owners_` has the job of each item. In any other case it returns false and
-- changes nothing; if it notices too late, it raises 55S01, which undoes everything.
CREATE FUNCTION settle_common(
    key_ BIGINT, at_ BIGINT, epoch_ BIGINT, tokens_ BIGINT[], owners_ BIGINT[], bodies_ BYTEA[],
    keys_ BYTEA[], order_ BIGINT[], lines_ BIGINT[], urls_ TEXT[], depths_ BIGINT[], extras_ BYTEA[],
    jobs_ BIGINT[], gaps_ BIGINT[], widths_ BIGINT[], most_ BIGINT[], finds_ BIGINT[], knowns_ BIGINT[],
    skips_ BIGINT[]
) RETURNS BOOLEAN LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    now_ BIGINT; n BIGINT; freed BIGINT[]; frees BIGINT[]; done_jobs BIGINT[]; dones BIGINT[];
    grown BIGINT[] := '{}'; added_jobs BIGINT[] := '{}'; addeds BIGINT[] := '{}'; ids BIGINT[]; j RECORD; total BIGINT;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(key_);
    now_ := coalesce(at_, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF (SELECT epoch FROM tick) <> epoch_ THEN RETURN false; END IF;
    PERFORM FROM unnest(jobs_, most_, finds_) AS x(id, most, finds) JOIN job ON job.id = x.id
        WHERE job.state <> 'running' OR job.added - job.skipped - job.dead - job.expired + x.finds > x.most;
    IF FOUND THEN RETURN false; END IF;
    SELECT sum(h.n) FILTER (WHERE l.sole IS NOT NULL) INTO n FROM (
        SELECT lease.line, count(*) AS n FROM unnest(tokens_) AS x(token) JOIN lease ON lease.token = x.token
        GROUP BY lease.line
    ) h JOIN line ON line.id = h.line JOIN lane l ON l.id = line.lane;
    IF n IS DISTINCT FROM cardinality(tokens_) THEN RETURN false; END IF;
    IF cardinality(lines_) > 0 THEN
        PERFORM FROM (SELECT DISTINCT line FROM unnest(lines_) AS f(line)) f
            LEFT JOIN line n ON n.id = f.line LEFT JOIN lane l ON l.id = n.lane
            LEFT JOIN unnest(jobs_, gaps_, widths_) AS x(id, gap, width) ON x.id = n.job
            WHERE l.sole IS NULL OR x.id IS NULL
            OR NOT (l.pinned <> 0 OR (l.gap = x.gap AND l.width = x.width));
        IF FOUND THEN RETURN false; END IF;
    END IF;

    WITH d AS (DELETE FROM lease WHERE token = ANY(tokens_) RETURNING line),
    c AS (SELECT d.line, count(*) AS n FROM d GROUP BY d.line)
    SELECT array_agg(l.lane), array_agg(c.n), array_agg(l.job), sum(c.n) INTO freed, frees, done_jobs, n
    FROM c JOIN line l ON l.id = c.line;
    IF n IS DISTINCT FROM cardinality(tokens_) THEN RAISE 'a lease was lost' USING ERRCODE = '55S01'; END IF;
    IF cardinality(keys_) > 0 THEN
        WITH come AS MATERIALIZED (
            SELECT f.* FROM unnest(keys_, order_, lines_, urls_, depths_, extras_)
            AS f(key, number, line, url, depth, extra)
            WHERE NOT EXISTS(SELECT FROM seen s WHERE s.key = f.key)
        ), fresh AS (
            INSERT INTO seen SELECT c.key FROM come c ON CONFLICT DO NOTHING RETURNING 1
        ), stored AS (
            INSERT INTO waiting SELECT c.line, nextval('request'), c.url, c.depth, 0, NULL, c.extra
            FROM (SELECT * FROM come ORDER BY number) c RETURNING waiting.line
        ), counted AS (SELECT s.line, count(*) AS n FROM stored s GROUP BY s.line)
        SELECT array_agg(l.lane), array_agg(l.job), array_agg(c.n),
            (SELECT count(*) FROM come) - (SELECT count(*) FROM fresh)
        INTO grown, added_jobs, addeds, n FROM counted c JOIN line l ON l.id = c.line;
        IF n <> 0 THEN RAISE 'another transaction found the same' USING ERRCODE = '55S01'; END IF;
    END IF;

    ids := ARRAY(SELECT DISTINCT x FROM unnest(freed || coalesce(grown, '{}')) AS x ORDER BY x);
    PERFORM FROM lane WHERE id = ANY(ids) ORDER BY id FOR NO KEY UPDATE;
    WITH x AS (
        SELECT q.id, sum(q.n)::bigint AS n, bool_or(q.grows) AS grows FROM (
            SELECT f.id, f.n, false AS grows FROM unnest(freed, frees) AS f(id, n)
            UNION ALL SELECT g.id, 0, true FROM unnest(grown) AS g(id)
        ) q GROUP BY q.id
    ), c AS MATERIALIZED (
        SELECT l.id, l.at AS old, n.stream, l.busy - x.n AS busy,
            CASE WHEN x.grows THEN n.stream::text ELSE l.streams END AS works,
            CASE
                WHEN (l.streams = '0' AND NOT x.grows) OR l.busy - x.n >= l.width OR l.paused <> 0 THEN NULL
                WHEN x.n = 0 AND l.at IS NOT NULL AND l.streams <> '0' THEN l.at
                WHEN p.ready > now_ THEN p.ready
                -- It has a place already and keeps it, or it joins now.
                ELSE least(l.at, now_ - greatest(0, n.priority - 5) * 10000000)
            END AS at
        FROM x JOIN lane l ON l.id = x.id JOIN line n ON n.id = l.sole CROSS JOIN LATERAL (
            SELECT greatest(l.tat - l.burst * CASE WHEN l.pinned <> 0 OR l.floor <= l.gap THEN l.gap
                ELSE l.floor END, l.blocked) AS ready
        ) p
    ), come AS (
        INSERT INTO turn SELECT c.stream, c.at, c.id FROM c WHERE c.old IS NULL AND c.at IS NOT NULL
    ), moved AS (
        UPDATE turn t SET at = c.at FROM c
        WHERE c.at <> c.old AND t.stream = c.stream AND t.at = c.old AND t.lane = c.id
    ), gone AS (
        DELETE FROM turn t USING c
        WHERE c.at IS NULL AND c.old IS NOT NULL AND t.stream = c.stream AND t.at = c.old AND t.lane = c.id
    )
    UPDATE lane l SET busy = c.busy, at = c.at, streams = c.works FROM c WHERE l.id = c.id;

    -- Counters last: settles of one job take turns here until they are committed. That is the price of an
    -- item log without holes.
    FOR j IN
        SELECT x.id, x.most, x.finds, x.knowns, x.skips,
            (SELECT coalesce(sum(d.n), 0) FROM unnest(done_jobs, frees) AS d(id, n) WHERE d.id = x.id) AS done,
            (SELECT coalesce(sum(a.n), 0) FROM unnest(added_jobs, addeds) AS a(id, n) WHERE a.id = x.id) AS added,
            (SELECT count(*) FROM unnest(owners_) AS o WHERE o = x.id) AS items
        FROM unnest(jobs_, most_, finds_, knowns_, skips_) AS x(id, most, finds, knowns, skips) ORDER BY x.id
    LOOP
        UPDATE job SET added = job.added + j.added, known = known + j.knowns + j.finds - j.added,
            done = done + j.done, skipped = skipped + j.skips, items = job.items + j.items,
            started = coalesce(started, now_),
            state = CASE WHEN job.added + j.added = done + j.done + dead + expired + cancelled
                THEN 'done' ELSE state END,
            finished = CASE WHEN job.added + j.added = done + j.done + dead + expired + cancelled
                THEN now_ ELSE finished END
        WHERE id = j.id RETURNING job.items, added - skipped - dead - expired INTO total, n;
        IF n > j.most AND j.added > 0 THEN
            RAISE 'the page budget is used up' USING ERRCODE = '55S01';
        END IF;
        INSERT INTO item SELECT (j.id << 40) + total - j.items + row_number() OVER (), b.body
        FROM unnest(owners_, bodies_) AS b(owner, body) WHERE b.owner = j.id;
    END LOOP;
    RETURN true;
END $$;
