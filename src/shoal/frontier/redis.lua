-- The frontier on Redis: every verb is one call of this script, so it happens whole or not at all.
--
-- Redis runs one script at a time, and while it runs nobody else is served. So calls are small:
-- the client cuts a batch into calls of about a millisecond. Orders of people (pause, resume,
-- cancel, respec) hold for the job from their first call on; its lanes follow, some in each call.
--
-- Semantics are those of memory.py, line by line where it could be; arithmetic is rules.py.
-- All times are whole microseconds (a double holds them exactly until the year 2255). Never
-- concatenate a time or a token into a string: Lua prints 14 digits. Redis prints 17, and slowly: what
-- is given to it more than once goes through `text` first.
--
--   KEYS[1]  prefix, hash-tagged: all keys of a frontier live in one slot of a cluster
--   ARGV[1]  verb     ARGV[2]  the time, only given by tests; '' = the server's
--   ARGV[3]  arguments (msgpack)     ARGV[4...]  bytes: keys, entries, items
--
-- Keys, all behind the prefix:
--
--   meta          HASH   last token, request id, line, lane, stream, job; `version` counts jobs that
--                        ended; `told` the latest moment until which somebody sleeps; layout
--   jobids        HASH   job name -> job number
--   jobs          HASH   job number -> msgpack: state, pace, budgets, counters (field order: JOB)
--   specs         HASH   job number -> its JobSpec as JSON
--   created       ZSET   job number by creation
--   starts:<job>  SET    lanes of its start URLs (only looked at with a budget per host)
--   spread:<job>  HASH   lane -> requests that count against the budget per host
--   tally:<job>   HASH   error class -> failed visits
--   seen:<job>    SET    16-byte keys of all its requests, for ever
--   items:<job>   LIST   item bodies; position + 1 is the seq
--   cursor:<job>  HASH   sink -> seq
--   joblanes:<job> SET   lanes (4 bytes) on which it has a line
--   laneids       HASH   lane name -> lane number, 4 bytes big-endian: ties sort as numbers do
--   lanes         HASH   lane number -> msgpack: pace, state and lines (see `lane_from`)
--   streamids     HASH   job number (0: of all jobs) and queue -> stream number
--   streams       HASH   stream number -> msgpack {queue, job number or 0}
--   active        SET    streams that may have turns
--   turn:<stream> ZSET   lane number by the moment of its turn: lanes with work and a free slot
--   waiting       HASH   stream -> requests in its lines; streams without any are not in it
--   line:<line>   LIST   entries in the order of their ids: what was never taken out of turn
--   front:<line>  ZSET   entries by id that came back or have a ttl; merged with the list by id
--   delayed:<stream>  ZSET  lane, line, job, entry by the moment they are due
--   expiring:<stream> ZSET  request id by the end of its ttl
--   ttl           HASH   request id -> lane, line, moment it is delayed to
--   lease         HASH   token -> lane, line, stream, job, priority, worker, entry
--   ends:<stream> ZSET   token by the end of its lease
--   due           ZSET   x/e/d + stream by the earliest moment in expiring/ends/delayed; may be
--                        too early (a settled lease leaves it), never too late
--   dead          HASH   request id -> dead letter     deadids  ZSET  request id by itself
--   deadat        ZSET   request id by the moment of its end
--   note:<key>    STRING until (8 bytes), value; Redis forgets it some time after
--   lock:<name>   STRING until (8 bytes), owner; the same
--   workers       HASH   worker -> since, last heard of, what it says of itself (JSON)
--   wake          pub/sub channel: something a sleeper waits for has come sooner
--
-- An entry is a request on its way: id (double), failed visits (2 bytes), crashes (1), flags (1),
-- depth (2), then its URL, or with flag 2 msgpack of all that is not ordinary. Flag 1: has a ttl. Flag 4:
-- had one when it was leased; the moment of its end (double) comes last, for who hands it back.

local P, verb = KEYS[1], ARGV[1]
local call, pack, unp, sub = redis.call, struct.pack, struct.unpack, string.sub
local mp, mu = cmsgpack.pack, cmsgpack.unpack
local max, min, floor, fmt = math.max, math.min, math.floor, string.format
local A = mu(ARGV[3])

local now
if ARGV[2] == '' then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
else
  now = tonumber(ARGV[2])
end

local US = 1000000
local STEP = {256, 128, 64, 32, 16, 8, 4, 2, 1}
local BONUS = {0, 0, 0, 0, 0, 10 * US, 20 * US, 30 * US, 40 * US}
local STAGGER = 2 * US
local CRASH_LIMIT = 3
-- Of each kind in one call; the client calls again for the rest. Lanes are placed after each, so with
-- more than this at once a lane may have a place that it owes to what ended in the next call.
local UPKEEP = 100
local RUNNING, PAUSED, CANCELLED, DONE = 0, 1, 2, 3
local HEAD = '<dHBBH' -- of an entry
local HEAD_SIZE = 14
local NEVER = 1e18

-- Everything below is inside one function, and the verbs of people are behind those of workers. A script
-- runs from its top in each call, so each call makes all functions anew, and looks for each name
-- that a function borrows among all names of the level around it, except for those that this level
-- has borrowed itself. Flat, a call cost 70 µs before it did anything; like this 20.
return (function()

-- -- small things -------------------------------------------------------------------------

local function text(number) return fmt('%d', number) end
local function texts(t)
  for i = 1, #t do t[i] = fmt('%d', t[i]) end
  return t
end

local function many(cmd, key, t) -- Lua's stack ends at about 8,000 arguments
  local n = #t
  for i = 1, n, 4000 do call(cmd, key, unpack(t, i, min(i + 3999, n))) end
end

local function many_of(cmd, key, t)
  if #t <= 4000 then return call(cmd, key, unpack(t)) end
  local out = {}
  for i = 1, #t, 4000 do
    local some = call(cmd, key, unpack(t, i, min(i + 3999, #t)))
    for k = 1, #some do out[#out + 1] = some[k] end
  end
  return out
end

local M, moved = nil, {}
local META = {'token', 'id', 'line', 'lane', 'stream', 'job', 'version', 'told'}
local function meta()
  if not M then
    M = {}
    local r = call('HMGET', P .. 'meta', unpack(META))
    for i = 1, #META do M[META[i]] = tonumber(r[i] or 0) end
  end
  return M
end
local function set_meta(field, value)
  meta()[field] = value
  moved[field] = true
  return value
end
local function next_of(field) return set_meta(field, meta()[field] + 1) end

local JOB = {
  'name', 'state', 'created', 'finished', 'gap', 'width', 'apart', 'max_pages', 'max_per_host', 'added',
  'known', 'refused', 'done', 'skipped', 'dead', 'expired', 'cancelled', 'retried', 'items', 'stale',
  'leased', 'delayed', 'started',
}
local jobs, job_list = {}, {}
local function job_of(id)
  local job = jobs[id]
  if job then return job end
  local r = mu(call('HGET', P .. 'jobs', id))
  job = {id = id}
  for i = 1, #JOB do job[JOB[i]] = r[i] end
  jobs[id] = job
  job_list[#job_list + 1] = job
  return job
end
local function count(job, field, by)
  job[field] = job[field] + (by or 1)
  job.dirty = true
end
local function live(job) return job.added - job.done - job.dead - job.expired - job.cancelled end
local function tally(job, class) call('HINCRBY', P .. 'tally:' .. job.id, class, 1) end

local function counts_per_host(job, lane)
  return job.max_per_host and call('SISMEMBER', P .. 'starts:' .. job.id, lane) == 0
end
local function count_lane(job, lane, by)
  if counts_per_host(job, lane) then call('HINCRBY', P .. 'spread:' .. job.id, lane, by) end
end
local function room(job, lane)
  if job.max_pages and job.added - job.skipped - job.dead - job.expired >= job.max_pages then return false end
  if not counts_per_host(job, lane) then return true end
  return tonumber(call('HGET', P .. 'spread:' .. job.id, lane) or 0) < job.max_per_host
end

local function wake() -- everybody who sleeps; they come back and say again how long they will
  if meta().told > 0 then
    call('PUBLISH', P .. 'wake', '')
    set_meta('told', 0)
  end
end
local function maybe_finish(job)
  if job.added > 0 and live(job) == 0 and (job.state == RUNNING or job.state == PAUSED) then
    job.state = DONE
    job.finished = now
    job.dirty = true
    next_of('version')
    wake()
  end
end

-- -- lanes and lines ----------------------------------------------------------------------

local lanes, lane_list = {}, {}
local waiting, waits = {}, false -- how much the streams' counts of waiting requests move

local function keep(lane)
  lanes[lane.id] = lane
  lane_list[#lane_list + 1] = lane
  return lane
end
local function live_streams(lane)
  local streams = {}
  for i = 1, #lane.lines do
    local line = lane.lines[i]
    if not line.off and line.tail + line.front > 0 then streams[line.stream] = true end
  end
  return streams
end
local function lane_from(id, raw)
  local r = mu(raw)
  local lines, n = {}, 0
  for i = 13, #r, 8 do
    n = n + 1
    lines[n] = {
      id = r[i], job = r[i + 1], stream = r[i + 2], priority = r[i + 3], vt = r[i + 4], off = r[i + 5],
      tail = r[i + 6], front = r[i + 7],
    }
  end
  local lane = {
    id = id, name = r[1], gap = r[2], width = r[3], burst = r[4], floor = r[5], tat = r[6], blocked = r[7],
    busy = r[8], vt = r[9], pinned = r[10], paused = r[11], at = r[12], lines = lines, old_at = r[12],
  }
  lane.streams = live_streams(lane)
  lane.old_streams = lane.at and lane.streams or {}
  return keep(lane)
end
local function lane_bytes(lane)
  local r = {
    lane.name, lane.gap, lane.width, lane.burst, lane.floor, lane.tat, lane.blocked, lane.busy, lane.vt,
    lane.pinned, lane.paused, lane.at,
  }
  local n = 12
  for i = 1, #lane.lines do
    local line = lane.lines[i]
    r[n + 1], r[n + 2], r[n + 3], r[n + 4] = line.id, line.job, line.stream, line.priority
    r[n + 5], r[n + 6], r[n + 7], r[n + 8] = line.vt, line.off, line.tail, line.front
    n = n + 8
  end
  return mp(r)
end
local function lane_by_id(id) return lanes[id] or lane_from(id, call('HGET', P .. 'lanes', id)) end
local function load_lanes(ids)
  local ask = {}
  for i = 1, #ids do
    if ids[i] and not lanes[ids[i]] then ask[#ask + 1] = ids[i] end
  end
  if #ask == 0 then return end
  local raws = many_of('HMGET', P .. 'lanes', ask)
  for i = 1, #ask do
    if not lanes[ask[i]] then lane_from(ask[i], raws[i]) end
  end
end
local function make_lane(name)
  local id = pack('>I4', next_of('lane'))
  call('HSET', P .. 'laneids', name, id)
  return keep({
    id = id, name = name, gap = 0, width = 1, burst = 0, floor = 0, tat = 0, blocked = 0, busy = 0, vt = 0,
    pinned = false, paused = false, at = false, lines = {}, old_at = false, streams = {}, old_streams = {},
    dirty = true,
  })
end
local function lane_named(name)
  local id = call('HGET', P .. 'laneids', name)
  return id and lane_by_id(id) or make_lane(name)
end

local function pace_gap(lane) return lane.pinned and lane.gap or max(lane.gap, lane.floor) end

local function reschedule(lane) -- where the lane stands in the turns of its streams, after any change
  local streams, top = {}, 0
  for i = 1, #lane.lines do
    local line = lane.lines[i]
    if not line.off and line.tail + line.front > 0 then
      streams[line.stream] = true
      if line.priority > top then top = line.priority end
    end
  end
  local at = false
  if top > 0 and lane.busy < lane.width and not lane.paused then
    at = max(lane.tat - lane.burst * pace_gap(lane), lane.blocked)
    if at <= now then
      at = now - BONUS[top]
      if lane.at and lane.at < at then at = lane.at end -- it is in line already and keeps its place
    end
  end
  lane.at, lane.streams, lane.dirty = at, streams, true
end

local touched, touch_list = {}, {}
local function touch(lane)
  if not touched[lane.id] then
    touched[lane.id] = true
    touch_list[#touch_list + 1] = lane
  end
end
local function place_touched()
  for i = 1, #touch_list do reschedule(touch_list[i]) end
end

local function find_line(lane, id)
  for i = 1, #lane.lines do
    if lane.lines[i].id == id then return lane.lines[i] end
  end
end

local stream_ids = {}
local function stream_of(queue, job)
  local name = (job.apart and job.id or 0) .. ' ' .. queue
  local id = stream_ids[name]
  if id then return id end
  id = tonumber(call('HGET', P .. 'streamids', name) or nil)
  if not id then
    id = next_of('stream')
    call('HSET', P .. 'streamids', name, id)
    call('HSET', P .. 'streams', id, mp({queue, job.apart and job.id or 0}))
  end
  stream_ids[name] = id
  return id
end

local function adopt(lane, job) -- the lane takes over the job's pace as agreed
  if not lane.pinned and (lane.gap ~= job.gap or lane.width ~= job.width) then
    if lane.busy > 0 or next(lane.streams) then
      lane.gap, lane.width = max(lane.gap, job.gap), min(lane.width, job.width)
    else
      lane.gap, lane.width = job.gap, job.width
    end
    lane.dirty = true
  end
end
local function line_of(lane, queue, job, priority)
  local stream = stream_of(queue, job)
  for i = 1, #lane.lines do
    local line = lane.lines[i]
    if line.job == job.id and line.stream == stream and line.priority == priority then return line end
  end
  for i = #lane.lines, 1, -1 do -- lines of jobs that are over go, so that a lane's lines stay few
    local old = lane.lines[i].job
    if old ~= job.id and live(job_of(old)) == 0 then
      table.remove(lane.lines, i)
      call('SREM', P .. 'joblanes:' .. old, lane.id)
    end
  end
  local line = {
    id = next_of('line'), job = job.id, stream = stream, priority = priority, vt = lane.vt,
    off = job.state == PAUSED, tail = 0, front = 0,
  }
  lane.lines[#lane.lines + 1] = line
  lane.dirty = true
  call('SADD', P .. 'joblanes:' .. job.id, lane.id)
  return line
end
local function line_for(lane, queue, job, priority)
  adopt(lane, job)
  return line_of(lane, queue, job, priority)
end

local function move(line, field, by)
  line[field] = line[field] + by
  waiting[line.stream] = (waiting[line.stream] or 0) + by
  waits = true
end
local function activate(lane, line) -- an empty line starts at the lane's time: no credit for absence
  if line.tail + line.front == 0 then line.vt = max(line.vt, lane.vt) end
end
local function to_front(lane, line, entry)
  activate(lane, line)
  call('ZADD', P .. 'front:' .. line.id, unp('<d', entry), entry)
  move(line, 'front', 1)
  lane.dirty = true
end

local told_due = {}
local soonest = NEVER -- the earliest moment at which a claim may now succeed that could not before
local function due(kind, stream, at)
  local name = kind .. stream
  if told_due[name] and told_due[name] <= at then return end
  told_due[name] = at
  call('ZADD', P .. 'due', 'LT', at, name)
end
local function delay(lane, line, job, entry, at)
  call('ZADD', P .. 'delayed:' .. line.stream, at, lane.id .. pack('<dd', line.id, line.job) .. entry)
  due('d', line.stream, at)
  soonest = min(soonest, at)
  count(job, 'delayed')
end

local function entry_moved(entry, visits, crashes) -- the entry after a visit: its ttl no longer counts
  local id, failed, died, flags, depth = unp(HEAD, entry)
  return pack(HEAD, id, min(failed + visits, 65535), died + crashes, flags % 4 - flags % 2, depth)
    .. sub(entry, HEAD_SIZE + 1, flags >= 4 and -9 or -1), died + crashes, id
end
local function without_ttl(entry, stream) -- the entry as it is leased
  local id, failed, died, flags, depth = unp(HEAD, entry)
  if flags % 2 == 0 then return entry end
  local expires = tonumber(call('ZSCORE', P .. 'expiring:' .. stream, id))
  call('ZREM', P .. 'expiring:' .. stream, id)
  call('HDEL', P .. 'ttl', id)
  return pack(HEAD, id, failed, died, flags + 3, depth) .. sub(entry, HEAD_SIZE + 1) .. pack('<d', expires)
end
local function hand_back(lane, line, entry) -- nobody visited it: what was left of its ttl counts again
  local id, failed, died, flags, depth = unp(HEAD, entry)
  if flags >= 4 then
    local expires = unp('<d', sub(entry, -8))
    entry = pack(HEAD, id, failed, died, flags - 3, depth) .. sub(entry, HEAD_SIZE + 1, -9)
    call('ZADD', P .. 'expiring:' .. line.stream, expires, id)
    call('HSET', P .. 'ttl', id, lane.id .. pack('<dd', line.id, 0))
    due('x', line.stream, expires)
    soonest = min(soonest, expires)
  end
  to_front(lane, line, entry)
end

local function end_entry(job, lane, line, entry, state, class, message, worker)
  count_lane(job, lane.name, -1)
  count(job, state)
  if state == 'expired' then tally(job, class) end
  local head = mp({state, now, job.id, line.stream, line.priority, lane.name, class, message, worker})
  local id = unp('<d', entry)
  call('HSET', P .. 'dead', id, pack('<H', #head) .. head .. entry)
  call('ZADD', P .. 'deadids', id, id)
  call('ZADD', P .. 'deadat', now, id)
end

local pushes = {}
local function flush()
  for id, entries in pairs(pushes) do many('RPUSH', P .. 'line:' .. id, entries) end
  local rows, gone, come = {}, {}, {}
  for i = 1, #lane_list do
    local lane = lane_list[i]
    if lane.dirty then
      rows[#rows + 1] = lane.id
      rows[#rows + 1] = lane_bytes(lane)
      local at, old_at, streams, old = lane.at, lane.old_at, lane.streams, lane.old_streams
      if old_at then
        for stream in pairs(old) do
          if not at or not streams[stream] then
            local t = gone[stream] or {}
            gone[stream] = t
            t[#t + 1] = lane.id
          end
        end
      end
      if at then
        for stream in pairs(streams) do
          if at ~= old_at or not old[stream] then
            local t = come[stream] or {}
            come[stream] = t
            t[#t + 1] = at
            t[#t + 1] = lane.id
            if not old_at or at < old_at or not old[stream] then soonest = min(soonest, at) end
          end
        end
      end
    end
  end
  if #rows > 0 then many('HSET', P .. 'lanes', rows) end
  for stream, ids in pairs(gone) do many('ZREM', P .. 'turn:' .. stream, ids) end
  for stream, rows in pairs(come) do
    many('ZADD', P .. 'turn:' .. stream, rows)
    call('SADD', P .. 'active', stream)
  end
  if waits then
    for stream, by in pairs(waiting) do
      if by ~= 0 and call('HINCRBY', P .. 'waiting', stream, by) == 0 then
        call('HDEL', P .. 'waiting', stream) -- streams of jobs long over must not add up
      end
    end
  end
  if soonest < NEVER and soonest < meta().told then wake() end
  rows = {}
  for i = 1, #job_list do
    local job = job_list[i]
    if job.dirty then
      local r = {}
      for k = 1, #JOB do r[k] = job[JOB[k]] end
      rows[#rows + 1] = job.id
      rows[#rows + 1] = mp(r)
    end
  end
  if #rows > 0 then many('HSET', P .. 'jobs', rows) end
  rows = {}
  for field in pairs(moved) do
    rows[#rows + 1] = field
    rows[#rows + 1] = M[field]
  end
  if #rows > 0 then call('HSET', P .. 'meta', unpack(rows)) end
  -- What is in memory is what is stored: a claim reads the turns after its upkeep wrote them.
  for i = 1, #lane_list do
    local lane = lane_list[i]
    lane.old_at, lane.old_streams, lane.dirty = lane.at, lane.at and lane.streams or {}, false
  end
  for i = 1, #job_list do job_list[i].dirty = false end
  pushes, waiting, waits, moved, soonest = {}, {}, false, {}, NEVER
end

-- -- adding -------------------------------------------------------------------------------

-- R: kinds {job, queue, priority}, lanes (names), lane and kind of each request (kind false: all the
-- first), extra (request -> delay, ttl); ARGV from R.base: n keys, then n entries without their id.
local fresh = {}
local function prepare(R)
  local n = #R.lane
  R.known = {}
  if n == 0 then return end
  local one = true
  for i = 2, #R.kinds do one = one and R.kinds[i][1] == R.kinds[1][1] end
  if one then
    for i = 1, n, 4000 do
      local top = min(i + 3999, n)
      local r = call('SMISMEMBER', P .. 'seen:' .. R.kinds[1][1], unpack(ARGV, R.base + i, R.base + top))
      for k = 1, #r do R.known[i + k - 1] = r[k] end
    end
  else
    for i = 1, n do
      local kind = R.kinds[R.kind and R.kind[i] or 1]
      R.known[i] = call('SISMEMBER', P .. 'seen:' .. kind[1], ARGV[R.base + i])
    end
  end
  local all = true
  for i = 1, n do all = all and R.known[i] == 1 end
  R.ids = all and {} or many_of('HMGET', P .. 'laneids', R.lanes)
  load_lanes(R.ids)
end
local function add_rows(R, first, last, answers)
  local n = #R.lane
  for i = first, last do
    local kind = R.kinds[R.kind and R.kind[i] or 1]
    local job, key = job_of(kind[1]), ARGV[R.base + i]
    local new = fresh[job.id]
    if not new then
      new = {}
      fresh[job.id] = new
    end
    local name = R.lanes[R.lane[i]]
    if job.state == CANCELLED then
      count(job, 'refused')
      answers[i] = '2'
    elseif R.known[i] == 1 or new[key] then
      count(job, 'known')
      answers[i] = '1'
    elseif not room(job, name) then
      count(job, 'refused')
      answers[i] = '2'
    else
      answers[i] = '0'
      new[key] = true
      new[#new + 1] = key
      count(job, 'added')
      count_lane(job, name, 1)
      if job.state == DONE then job.state = RUNNING end
      job.finished = false
      local id = R.ids[R.lane[i]]
      local lane = id and lane_by_id(id)
      if not lane then
        lane = make_lane(name)
        R.ids[R.lane[i]] = lane.id
      end
      local line = line_for(lane, kind[2], job, kind[3])
      local number = next_of('id')
      local entry = pack('<d', number) .. ARGV[R.base + n + i]
      local wait, ttl = 0, false
      if R.extra and R.extra[i] then wait, ttl = R.extra[i][1], R.extra[i][2] end
      if ttl then
        call('ZADD', P .. 'expiring:' .. line.stream, now + ttl, number)
        call('HSET', P .. 'ttl', number, lane.id .. pack('<dd', line.id, wait > 0 and now + wait or 0))
        due('x', line.stream, now + ttl)
      end
      if wait > 0 then
        delay(lane, line, job, entry, now + wait)
      else
        if ttl then
          to_front(lane, line, entry)
        else
          activate(lane, line)
          local t = pushes[line.id]
          if not t then
            t = {}
            pushes[line.id] = t
          end
          t[#t + 1] = entry
          move(line, 'tail', 1)
          lane.dirty = true
        end
        if not lane.at or not lane.streams[line.stream] then reschedule(lane) end
      end
    end
  end
end
local function store_fresh()
  for job, keys in pairs(fresh) do
    if #keys > 0 then many('SADD', P .. 'seen:' .. job, keys) end
  end
end

-- -- claiming -----------------------------------------------------------------------------

local TRANSIT = 'transit:'
local function in_transit(worker) return sub(worker, 1, #TRANSIT) == TRANSIT end
local function take_back(job, lane, line, entry, suspects, worker)
  lane.busy = lane.busy - 1
  count(job, 'leased', -1)
  local crashed, crashes = entry_moved(entry, 0, 1)
  if job.state == CANCELLED then
    count(job, 'cancelled')
  elseif in_transit(worker) then
    hand_back(lane, line, entry)
  elseif crashes >= CRASH_LIMIT then
    tally(job, 'worker_crashed')
    end_entry(job, lane, line, crashed, 'dead', 'worker_crashed',
      crashes .. ' workers died or hung while visiting it', worker)
    maybe_finish(job)
  elseif crashes > 1 then
    delay(lane, line, job, crashed, now + suspects * STAGGER)
    touch(lane)
    return 1
  else
    to_front(lane, line, crashed)
  end
  touch(lane)
  return 0
end
local function lease_parts(blob)
  local line, stream, job, priority, length = unp('<dddBH', blob, 5)
  return sub(blob, 1, 4), line, stream, job, priority, sub(blob, 32, 31 + length), sub(blob, 32 + length)
end
local function lease_entry(blob) return sub(blob, 32 + unp('<H', blob, 30)) end
local function lease_place(blob) -- its lane, line, stream and job, without making texts of the rest
  return sub(blob, 1, 4), unp('<ddd', blob, 5)
end
local function end_lease(token, blob, suspects)
  local lane_id, line_id, stream, job_id, _, worker, entry = lease_parts(blob)
  call('HDEL', P .. 'lease', token)
  call('ZREM', P .. 'ends:' .. stream, token)
  local lane = lane_by_id(lane_id)
  return take_back(job_of(job_id), lane, find_line(lane, line_id), entry, suspects, worker)
end

local PLACES = {x = 'expiring:', e = 'ends:', d = 'delayed:'}
local function head_of(name) -- the real first moment behind an entry of `due`
  return tonumber(call('ZRANGE', P .. PLACES[sub(name, 1, 1)] .. sub(name, 2), 0, 0, 'WITHSCORES')[2] or nil)
end
local function overdue(kind) -- {moment, member, stream}, earliest first; true when there is more
  local found, more = {}, false
  local names = call('ZRANGE', P .. 'due', '-inf', now, 'BYSCORE')
  for i = 1, #names do
    local name = names[i]
    if sub(name, 1, 1) == kind then
      local stream = tonumber(sub(name, 2))
      local r = call('ZRANGE', P .. PLACES[kind] .. stream, '-inf', now, 'BYSCORE', 'LIMIT', 0, UPKEEP,
        'WITHSCORES')
      for k = 1, #r, 2 do found[#found + 1] = {tonumber(r[k + 1]), r[k], stream} end
      more = more or #r == UPKEEP * 2
    end
  end
  table.sort(found, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return (tonumber(a[2]) or 0) < (tonumber(b[2]) or 0)
  end)
  return found, more
end
local function settle_due(kind)
  local names = call('ZRANGE', P .. 'due', '-inf', now, 'BYSCORE')
  for i = 1, #names do
    if sub(names[i], 1, 1) == kind then
      local head = head_of(names[i])
      told_due[names[i]] = nil
      if head then call('ZADD', P .. 'due', head, names[i]) else call('ZREM', P .. 'due', names[i]) end
    end
  end
end

local function expire(id, stream)
  local where = call('HGET', P .. 'ttl', id)
  call('HDEL', P .. 'ttl', id)
  call('ZREM', P .. 'expiring:' .. stream, id)
  if not where then return end
  local lane, line_id, at = lane_by_id(sub(where, 1, 4)), unp('<dd', sub(where, 5))
  local line = find_line(lane, line_id)
  local job = job_of(line.job)
  local entry = call('ZRANGE', P .. 'front:' .. line_id, id, id, 'BYSCORE')[1]
  if entry then
    call('ZREM', P .. 'front:' .. line_id, entry)
    move(line, 'front', -1)
  else
    local some = call('ZRANGE', P .. 'delayed:' .. stream, at, at, 'BYSCORE')
    for i = 1, #some do
      if unp('<d', sub(some[i], 21)) == tonumber(id) then
        entry = sub(some[i], 21)
        call('ZREM', P .. 'delayed:' .. stream, some[i])
        count(job, 'delayed', -1)
      end
    end
  end
  entry = entry_moved(entry, 0, 0)
  end_entry(job, lane, line, entry, 'expired', 'expired', 'its time to live ran out')
  maybe_finish(job)
  touch(lane)
end

-- End what is too old, take back what dead workers hold, promote what is due. Lanes are placed
-- afterwards, all at once: what ended must not lend them its priority.
local function upkeep(suspects)
  if #call('ZRANGE', P .. 'due', '-inf', now, 'BYSCORE', 'LIMIT', 0, 1) == 0 then return false, suspects end
  local found, more = overdue('x')
  for i = 1, #found do expire(found[i][2], found[i][3]) end
  settle_due('x')
  if not more then
    found, more = overdue('e')
    for i = 1, #found do
      local token = found[i][2]
      suspects = suspects + end_lease(token, call('HGET', P .. 'lease', token), suspects)
    end
    settle_due('e')
  end
  if not more then
    found, more = overdue('d')
    for i = 1, #found do
      local member = found[i][2]
      call('ZREM', P .. 'delayed:' .. found[i][3], member)
      local lane = lane_by_id(sub(member, 1, 4))
      local line = find_line(lane, (unp('<d', sub(member, 5))))
      count(job_of(line.job), 'delayed', -1)
      to_front(lane, line, sub(member, 21))
      touch(lane)
    end
    settle_due('d')
  end
  place_touched()
  return more, suspects
end

-- Which streams are asked for: `queues` and `job` false mean any.
local function filter(queues, job)
  if not queues and not job then return function() return true end end
  local wanted, memo = {}, {}
  for i = 1, #(queues or {}) do wanted[queues[i]] = true end
  return function(stream)
    local is = memo[stream]
    if is == nil then
      local r = mu(call('HGET', P .. 'streams', stream))
      is = (not queues or wanted[r[1]] or false) and (not job or r[2] == job)
      memo[stream] = is
    end
    return is
  end
end
local function active(asked)
  local found, all = {}, call('SMEMBERS', P .. 'active')
  for i = 1, #all do
    local stream = tonumber(all[i])
    if asked(stream) then found[#found + 1] = stream end
  end
  return found
end
local function wake_at(asked) -- the next moment at which a claim can succeed; -1 drained, -2 nobody knows
  local first = NEVER
  local streams = active(asked)
  for i = 1, #streams do
    local r = call('ZRANGE', P .. 'turn:' .. streams[i], 0, 0, 'WITHSCORES')
    if r[2] then first = min(first, tonumber(r[2])) else call('SREM', P .. 'active', streams[i]) end
  end
  local names = call('ZRANGE', P .. 'due', 0, -1)
  for i = 1, #names do
    if asked(tonumber(sub(names[i], 2))) then
      local head = head_of(names[i])
      if head then first = min(first, head) else call('ZREM', P .. 'due', names[i]) end
    end
  end
  if first < NEVER then return first end
  local counts = call('HGETALL', P .. 'waiting')
  for i = 1, #counts, 2 do
    if tonumber(counts[i + 1]) > 0 and asked(tonumber(counts[i])) then return -2 end
  end
  return -1
end

local function pop(line, n) -- the first n entries of a line, in the order of their ids
  local list, front = P .. 'line:' .. line.id, P .. 'front:' .. line.id
  if line.front == 0 then
    move(line, 'tail', -n)
    return call('LPOP', list, n)
  end
  local came = call('ZRANGE', front, 0, n - 1)
  local tail = line.tail > 0 and call('LRANGE', list, 0, n - 1) or {}
  local out, gone, a, b = {}, {}, 1, 1
  while #out < n do
    if came[a] and (not tail[b] or unp('<d', came[a]) < unp('<d', tail[b])) then
      gone[a] = came[a]
      out[#out + 1] = without_ttl(came[a], line.stream)
      a = a + 1
    else
      out[#out + 1] = tail[b]
      b = b + 1
    end
  end
  if a > 1 then
    many('ZREM', front, gone)
    move(line, 'front', 1 - a)
  end
  if b > 1 then
    call('LPOP', list, b - 1)
    move(line, 'tail', 1 - b)
  end
  return out
end

local function empty_lines(lane, job) -- the job is cancelled: what waits of it here ends. Any of it?
  local some = false
  for k = 1, #lane.lines do
    local line = lane.lines[k]
    if line.job == job.id and line.tail + line.front > 0 then
      some = true
      if line.front > 0 then
        local entries = call('ZRANGE', P .. 'front:' .. line.id, 0, -1)
        for n = 1, #entries do without_ttl(entries[n], line.stream) end
      end
      call('UNLINK', P .. 'line:' .. line.id, P .. 'front:' .. line.id)
      count(job, 'cancelled', line.tail + line.front)
      move(line, 'tail', -line.tail)
      move(line, 'front', -line.front)
    end
  end
  return some
end
local function obey(lane) -- a pause or cancel of a job may not have come to this lane yet
  for i = 1, #lane.lines do
    local line = lane.lines[i]
    local job = job_of(line.job)
    if job.state == CANCELLED then
      empty_lines(lane, job)
    elseif job.state == PAUSED then
      line.off = true
    end
  end
end

local function picks(lane, free, asked) -- which lines may go, in turn: whoever would be through first
  local order, left, able = {}, {}, {}
  for i = 1, #lane.lines do
    local line = lane.lines[i]
    if not line.off and line.tail + line.front > 0 and asked(line.stream) then
      able[#able + 1] = line
      left[line.id] = line.tail + line.front
    end
  end
  while #order < free do
    local best, least, weights = nil, nil, 0
    for i = 1, #able do
      local line = able[i]
      local tag = line.vt + STEP[line.priority]
      if left[line.id] > 0 then
        weights = weights + 256 / STEP[line.priority]
        if not best or tag < least or (tag == least and line.id < best.id) then best, least = line, tag end
      end
    end
    if not best then break end
    left[best.id] = left[best.id] - 1
    best.vt = least
    lane.vt = max(lane.vt, min(lane.vt + math.ceil(256 / weights), least))
    order[#order + 1] = best
  end
  return order
end

local verbs = {}

-- {limit, lease, worker, queues, job, whether more calls of this claim follow, suspects so far}
-- Answers {now, wake_at, first token, suspects, version, groups {lane, job, stream, priority, entry...}};
-- wake_at -3: call again, the upkeep is not finished; -4: the job is not apart.
function verbs.claim()
  local limit, lease, worker = A[1], A[2], A[3]
  if A[5] and not job_of(A[5]).apart then return {now, -4} end
  local unfinished, suspects = upkeep(A[7])
  if unfinished then
    flush()
    return {now, -3, 0, suspects, 0}
  end
  if #touch_list > 0 then flush() end
  local asked = filter(A[4], A[5])
  local streams = active(asked)
  local groups, taken, left = {}, 0, limit
  local token = max(meta().token, now)
  local first, till = token + 1, text(now + lease)
  local heads, ends, held = {}, {}, {}
  local worker_part = pack('<H', #worker) .. worker

  local function serve(lane)
    obey(lane)
    local free = lane.width - lane.busy
    local gap = pace_gap(lane)
    if gap > 0 then
      free = min(free, floor((now + lane.burst * gap - max(lane.tat, now)) / gap) + 1)
    end
    local cut = free > left
    free = min(free, left)
    local order, got, n = nil, {}, 0
    local sole = #lane.lines == 1 and lane.lines[1]
    if sole then
      if not sole.off and asked(sole.stream) then
        n = min(free, sole.tail + sole.front)
        if n > 0 then got[sole.id] = pop(sole, n) end
      end
    else
      order = picks(lane, free, asked)
      n = #order
      local counts = {}
      for i = 1, n do counts[order[i]] = (counts[order[i]] or 0) + 1 end
      for line, k in pairs(counts) do got[line.id] = pop(line, k) end
    end
    local used, group, last = {}, nil, nil
    for i = 1, n do
      local line = sole or order[i]
      if line ~= last then
        group = {lane.name, line.job, line.stream, line.priority}
        groups[#groups + 1] = group
        last = line
        local served = job_of(line.job)
        count(served, 'leased', 0)
        served.started = served.started or now
        heads[line.id] = heads[line.id]
          or lane.id .. pack('<dddB', line.id, line.stream, line.job, line.priority) .. worker_part
      end
      used[line.id] = (used[line.id] or 0) + 1
      local entry = got[line.id][used[line.id]]
      group[#group + 1] = entry
      token = token + 1
      local name = text(token)
      held[#held + 1] = name
      held[#held + 1] = heads[line.id] .. entry
      local e = ends[line.stream]
      if not e then
        e = {}
        ends[line.stream] = e
      end
      e[#e + 1] = till
      e[#e + 1] = name
      local job = jobs[line.job]
      job.leased = job.leased + 1
    end
    if n > 0 then
      taken = taken + n
      left = left - n
      lane.busy = lane.busy + n
      lane.tat = max(lane.tat, now) + n * gap
    end
    local at = lane.at
    lane.at = false
    reschedule(lane)
    -- The next call of this claim goes on where this one was cut off.
    if cut and A[6] and lane.at and lane.at <= now then lane.at = at end
  end

  if #streams == 1 then
    local offset, size = 0, min(limit, 8)
    while left > 0 do
      local ids = call('ZRANGE', P .. 'turn:' .. streams[1], '-inf', now, 'BYSCORE', 'LIMIT', offset, size)
      load_lanes(ids)
      for i = 1, #ids do
        if left <= 0 then break end
        serve(lanes[ids[i]])
      end
      if #ids < size then break end
      offset = offset + size
      size = min(left, size * 2)
    end
  else
    local ready, given = {}, {}
    for s = 1, #streams do
      local r = call('ZRANGE', P .. 'turn:' .. streams[s], '-inf', now, 'BYSCORE', 'LIMIT', 0, limit,
        'WITHSCORES')
      for k = 1, #r, 2 do ready[#ready + 1] = {tonumber(r[k + 1]), r[k]} end
    end
    table.sort(ready, function(a, b)
      if a[1] ~= b[1] then return a[1] < b[1] end
      return a[2] < b[2]
    end)
    for i = 1, #ready do
      if left <= 0 then break end
      local id = ready[i][2]
      if not given[id] then
        given[id] = true
        serve(lane_by_id(id))
      end
    end
  end
  if taken > 0 then
    set_meta('token', token)
    many('HSET', P .. 'lease', held)
    for stream, rows in pairs(ends) do
      many('ZADD', P .. 'ends:' .. stream, rows)
      due('e', stream, now + lease)
    end
  end
  flush()
  local at = now
  if taken == 0 then at = wake_at(asked) end
  return {now, at, first, suspects, meta().version, groups}
end

-- {tokens, kinds, jobs (for those that come too late), items per verdict, found per verdict,
-- failures (verdict -> after, class, message), R}; ARGV after R: the items.
-- Kinds: 0 done, 1 done and skipped, 2 retry, 3 dead, 4 release, 5 expired. Answers {lost, refused}.
function verbs.settle()
  local tokens, kinds, R = texts(A[1]), A[2], A[7]
  local blobs = call('HMGET', P .. 'lease', unpack(tokens))
  R.base = 3
  prepare(R)
  local ids = {}
  for v = 1, #tokens do ids[v] = blobs[v] and sub(blobs[v], 1, 4) end
  load_lanes(ids)
  local lost, refused, answers, ended, items = {}, {}, {}, {}, {}
  local gone, ends, settled = {}, {}, {}
  local item, found = 3 + 2 * #R.lane, 0
  for v = 1, #tokens do
    local token, n_items, n_found = tokens[v], A[4] and A[4][v] or 0, A[5] and A[5][v] or 0
    if not blobs[v] or ended[token] then
      lost[#lost + 1] = v
      if A[3][v] > 0 then count(job_of(A[3][v]), 'stale') end
    else
      ended[token] = true
      local lane_id, line_id, stream, job_id = lease_place(blobs[v])
      local lane, job, kind = lanes[lane_id], job_of(job_id), kinds[v]
      gone[#gone + 1] = token
      local e = ends[stream]
      if not e then
        e = {}
        ends[stream] = e
      end
      e[#e + 1] = token
      lane.busy = lane.busy - 1
      count(job, 'leased', -1)
      touch(lane)
      settled[job_id] = job
      if job.state == CANCELLED then
        count(job, 'cancelled')
      elseif kind <= 1 then
        count(job, 'done')
        if kind == 1 then
          count(job, 'skipped')
          count_lane(job, lane.name, -1)
        end
        if n_items > 0 then
          local log = items[job_id]
          if not log then
            log = {}
            items[job_id] = log
          end
          for i = item + 1, item + n_items do log[#log + 1] = ARGV[i] end
          count(job, 'items', n_items)
        end
        if n_found > 0 then
          add_rows(R, found + 1, found + n_found, answers)
          for i = found + 1, found + n_found do
            if answers[i] == '2' then refused[#refused + 1] = i end
          end
        end
      elseif kind == 4 then
        hand_back(lane, find_line(lane, line_id), lease_entry(blobs[v]))
      elseif kind == 5 then
        local entry = entry_moved(lease_entry(blobs[v]), 0, 0)
        local why = A[6][v]
        end_entry(job, lane, find_line(lane, line_id), entry, 'expired', why[2], why[3])
      else
        local why = A[6][v]
        local _, _, _, _, _, worker, entry = lease_parts(blobs[v])
        tally(job, why[2])
        entry = entry_moved(entry, 1, 0)
        if kind == 2 then
          count(job, 'retried')
          delay(lane, find_line(lane, line_id), job, entry, now + why[1])
        else
          end_entry(job, lane, find_line(lane, line_id), entry, 'dead', why[2], why[3],
            in_transit(worker) and '' or worker)
        end
      end
    end
    item, found = item + n_items, found + n_found
  end
  if #gone > 0 then
    call('HDEL', P .. 'lease', unpack(gone))
    for stream, some in pairs(ends) do call('ZREM', P .. 'ends:' .. stream, unpack(some)) end
  end
  for job, log in pairs(items) do many('RPUSH', P .. 'items:' .. job, log) end
  store_fresh()
  place_touched()
  for _, job in pairs(settled) do maybe_finish(job) end
  flush()
  return {lost, refused}
end

-- {R}. Answers one digit for each request: 0 new, 1 known, 2 refused.
function verbs.add()
  local R, answers = A[1], {}
  R.base = 3
  prepare(R)
  add_rows(R, 1, #R.lane, answers)
  store_fresh()
  flush()
  return table.concat(answers)
end

-- {seconds, worker, tokens}. Answers {now, the places of those that are ours}.
function verbs.take()
  local till, worker, tokens, ours, ends, held = text(now + A[1]), A[2], texts(A[3]), {}, {}, {}
  local gone, refused = {}, false
  local blobs = call('HMGET', P .. 'lease', unpack(tokens))
  for i = 1, #tokens do
    if blobs[i] and not gone[tokens[i]] then
      local _, _, stream, job, _, holder, entry = lease_parts(blobs[i])
      local state, travels = job_of(job).state, in_transit(holder)
      if travels and (state == CANCELLED or (state == PAUSED and not in_transit(worker))) then
        end_lease(tokens[i], blobs[i], 0) -- nobody is to visit it: what its lane lent is free
        gone[tokens[i]], refused = true, true
      elseif state ~= CANCELLED and (travels or holder == worker) then
        ours[#ours + 1] = i
        held[#held + 1] = tokens[i]
        held[#held + 1] = sub(blobs[i], 1, 29) .. pack('<H', #worker) .. worker .. entry
        local e = ends[stream]
        if not e then
          e = {}
          ends[stream] = e
        end
        e[#e + 1] = till
        e[#e + 1] = tokens[i]
      end
    end
  end
  if #held > 0 then call('HSET', P .. 'lease', unpack(held)) end
  for stream, rows in pairs(ends) do
    many('ZADD', P .. 'ends:' .. stream, rows)
    due('e', stream, now + A[1])
  end
  if refused then
    place_touched()
    flush()
  end
  return {now, ours}
end

-- {seconds, tokens}. Answers the places of those that are lost.
function verbs.extend()
  local till, tokens, lost, ends = text(now + A[1]), texts(A[2]), {}, {}
  local blobs = call('HMGET', P .. 'lease', unpack(tokens))
  for i = 1, #tokens do
    local stream, job
    if blobs[i] then
      local _
      _, _, stream, job = lease_place(blobs[i])
    end
    if not job or job_of(job).state == CANCELLED then
      lost[#lost + 1] = i
    else
      local e = ends[stream]
      if not e then
        e = {}
        ends[stream] = e
      end
      e[#e + 1] = till
      e[#e + 1] = tokens[i]
    end
  end
  for stream, rows in pairs(ends) do
    many('ZADD', P .. 'ends:' .. stream, rows)
    due('e', stream, now + A[1])
  end
  return lost
end

-- {lane, {field -> value}}
function verbs.pace()
  local lane = lane_named(A[1])
  for field, value in pairs(A[2]) do
    if field ~= 'blocked' then
      lane[field] = value
    else
      lane.blocked = value > 0 and max(lane.blocked, now + value) or 0
    end
  end
  reschedule(lane)
  flush()
end

-- {queues, job, how long, version}. Answers {now, wake_at, version}, and has noted that somebody sleeps.
function verbs.wait()
  local at = wake_at(filter(A[1], A[2]))
  if meta().version == A[4] and (at < 0 or at > now) then
    set_meta('told', max(M.told, now + A[3]))
    flush()
  end
  return {now, at, M.version}
end

if verbs[verb] then return verbs[verb]() end

-- -- people -------------------------------------------------------------------------------

local function respec(job, spec, pace, starts)
  job.gap, job.width, job.apart, job.max_pages, job.max_per_host = unpack(pace)
  job.dirty = true
  call('HSET', P .. 'specs', job.id, spec)
  call('DEL', P .. 'starts:' .. job.id)
  if #starts > 0 then many('SADD', P .. 'starts:' .. job.id, starts) end
end

-- {name, spec, {gap, width, apart, max_pages, max_per_host}, start lanes}
function verbs.open_job()
  if call('HEXISTS', P .. 'jobids', A[1]) == 1 then return end
  local job = {id = next_of('job')}
  for i = 1, #JOB do job[JOB[i]] = 0 end
  job.name, job.state, job.created, job.finished, job.started = A[1], RUNNING, now, false, false
  jobs[job.id] = job
  job_list[#job_list + 1] = job
  respec(job, A[2], A[3], A[4])
  call('HSET', P .. 'jobids', A[1], job.id)
  call('ZADD', P .. 'created', now, job.id)
  flush()
end

-- Some of a job's lanes, and where to go on; '0' after the last. A lane may come twice.
local function job_lanes(job, cursor)
  local r = call('SSCAN', P .. 'joblanes:' .. job.id, cursor, 'COUNT', 100)
  load_lanes(r[2])
  return r[2], r[1]
end

-- {job, spec, pace, start lanes, cursor}
function verbs.respec()
  local job = job_of(A[1])
  if A[5] == '0' then respec(job, A[2], A[3], A[4]) end
  local ids, cursor = job_lanes(job, A[5])
  for i = 1, #ids do
    local lane = lanes[ids[i]]
    if not lane.pinned then
      local shared = false
      for k = 1, #lane.lines do
        local other = lane.lines[k].job
        shared = shared or (other ~= job.id and live(job_of(other)) > 0)
      end
      lane.gap = shared and max(lane.gap, job.gap) or job.gap
      lane.width = shared and min(lane.width, job.width) or job.width
      reschedule(lane)
    end
  end
  flush()
  return cursor
end

-- {job, off, cursor}. Resuming walks the lanes of a job that runs, too: whoever resumed it before
-- may have died on the way.
function verbs.switch()
  local job, off = job_of(A[1]), A[2]
  if job.state == (off and RUNNING or PAUSED) then
    job.state = off and PAUSED or (job.added > 0 and live(job) == 0 and DONE or RUNNING)
    job.dirty = true
  elseif job.state ~= (off and PAUSED or RUNNING) then
    return '0'
  end
  local ids, cursor = job_lanes(job, A[3])
  for i = 1, #ids do
    local lane = lanes[ids[i]]
    for k = 1, #lane.lines do
      local line = lane.lines[k]
      if line.job == job.id and line.off ~= off then
        line.off = off
        if not off and line.tail + line.front > 0 then line.vt = max(line.vt, lane.vt) end
        reschedule(lane)
      end
    end
  end
  flush()
  return cursor
end

-- {job, cursor}
function verbs.cancel()
  local job = job_of(A[1])
  if job.state == DONE then return '0' end
  if job.state ~= CANCELLED then
    job.state, job.finished = CANCELLED, now
    job.dirty = true
    local names = call('HGETALL', P .. 'streams')
    for k = 1, #names, 2 do
      local owner = mu(names[k + 1])[2]
      local key = P .. 'delayed:' .. names[k]
      local all, gone = (owner == 0 or owner == job.id) and call('ZRANGE', key, 0, -1) or {}, {}
      for i = 1, #all do
        local _, of = unp('<dd', sub(all[i], 5))
        if of == job.id then
          gone[#gone + 1] = all[i]
          without_ttl(sub(all[i], 21), names[k])
        end
      end
      if #gone > 0 then many('ZREM', key, gone) end
      count(job, 'cancelled', #gone)
      count(job, 'delayed', -#gone)
    end
  end
  local ids, cursor = job_lanes(job, A[2])
  for i = 1, #ids do
    local lane = lanes[ids[i]]
    if empty_lines(lane, job) then reschedule(lane) end
  end
  next_of('version')
  wake()
  flush()
  return cursor
end

-- {name}. Answers {number, record, spec, tally}, or nothing.
function verbs.job()
  local id = call('HGET', P .. 'jobids', A[1])
  if not id then return false end
  return {tonumber(id), call('HGET', P .. 'jobs', id), call('HGET', P .. 'specs', id),
    call('HGETALL', P .. 'tally:' .. id)}
end

-- {ids, reset}. Answers how many wait again.
function verbs.revive()
  local revived = 0
  for i = 1, #A[1] do
    local id = A[1][i]
    local letter = call('HGET', P .. 'dead', id)
    if letter then
      local size = unp('<H', letter)
      local head = mu(sub(letter, 3, 2 + size))
      local job = job_of(head[3])
      if job.state ~= CANCELLED then
        call('HDEL', P .. 'dead', id)
        call('ZREM', P .. 'deadids', id)
        call('ZREM', P .. 'deadat', id)
        local _, failed, _, flags, depth = unp(HEAD, sub(letter, 3 + size))
        if A[2] then failed = 0 end
        local entry = pack(HEAD, id, failed, 0, flags - flags % 2, depth) .. sub(letter, 3 + size + HEAD_SIZE)
        count(job, head[1], -1)
        local lane = lane_named(head[6])
        local queue = mu(call('HGET', P .. 'streams', head[4]))[1]
        local line = line_for(lane, queue, job, head[5])
        count_lane(job, lane.name, 1)
        if job.state == DONE then job.state = RUNNING end
        job.finished = false
        to_front(lane, line, entry)
        reschedule(lane)
        revived = revived + 1
      end
    end
  end
  flush()
  return revived
end

-- {ids}
function verbs.purge()
  if #A[1] == 0 then return 0 end
  call('ZREM', P .. 'deadids', unpack(A[1]))
  call('ZREM', P .. 'deadat', unpack(A[1]))
  return call('HDEL', P .. 'dead', unpack(A[1]))
end

-- {job, lane, queue, priority, class, message}; ARGV[4] key, ARGV[5] entry without its id
function verbs.bury()
  local job = job_of(A[1])
  if call('SADD', P .. 'seen:' .. job.id, ARGV[4]) == 0 then return end
  count(job, 'added')
  count(job, 'dead')
  tally(job, A[5])
  local id = next_of('id')
  local head = mp({'dead', now, job.id, stream_of(A[3], job), A[4], A[2], A[5], A[6]})
  call('HSET', P .. 'dead', id, pack('<H', #head) .. head .. pack('<d', id) .. ARGV[5])
  call('ZADD', P .. 'deadids', id, id)
  call('ZADD', P .. 'deadat', now, id)
  maybe_finish(job)
  flush()
end

-- {workers, tokens, suspects}. Answers {taken, suspects}.
function verbs.evict()
  local gone, taken, suspects = {}, 0, A[3]
  for i = 1, #A[1] do gone[A[1][i]] = true end
  for i = 1, #A[2] do
    local blob = call('HGET', P .. 'lease', A[2][i])
    if blob then
      local _, _, _, _, _, worker = lease_parts(blob)
      if gone[worker] then
        suspects = suspects + end_lease(A[2][i], blob, suspects)
        taken = taken + 1
      end
    end
  end
  place_touched()
  flush()
  return {taken, suspects}
end

-- {job, tokens}. Answers how many came back, without a crash.
function verbs.recall()
  local job, taken = job_of(A[1]), 0
  for i = 1, #A[2] do
    local blob = call('HGET', P .. 'lease', A[2][i])
    if blob then
      local lane_id, line_id, stream, job_id, _, _, entry = lease_parts(blob)
      if job_id == job.id then
        call('HDEL', P .. 'lease', A[2][i])
        call('ZREM', P .. 'ends:' .. stream, A[2][i])
        local lane = lane_by_id(lane_id)
        lane.busy = lane.busy - 1
        count(job, 'leased', -1)
        if job.state == CANCELLED then
          count(job, 'cancelled')
        else
          hand_back(lane, find_line(lane, line_id), entry)
        end
        touch(lane)
        taken = taken + 1
      end
    end
  end
  place_touched()
  flush()
  return taken
end

-- -- jobs that arrive: parcel.py says what and why -------------------------------------------

-- {name, spec, pace, start lanes, counters, tally, age, ended or false, last id, note, its ttl, begun or false};
-- ARGV[4] what is noted of the head, behind the number that ids are shifted by. Answers 1, or 0 if
-- there is such a job.
function verbs.arrive()
  if call('HEXISTS', P .. 'jobids', A[1]) == 1 then return 0 end
  local job = {id = next_of('job')}
  for i = 1, #JOB do job[JOB[i]] = 0 end
  for field, n in pairs(A[5]) do job[field] = n end
  job.name, job.state, job.created = A[1], PAUSED, now - A[7]
  job.finished, job.started = A[8] and now - A[8], A[12] and now - A[12]
  jobs[job.id] = job
  job_list[#job_list + 1] = job
  respec(job, A[2], A[3], A[4])
  call('HSET', P .. 'jobids', A[1], job.id)
  call('ZADD', P .. 'created', job.created, job.id)
  for class, n in pairs(A[6]) do call('HSET', P .. 'tally:' .. job.id, class, n) end
  local base = meta().id
  set_meta('id', base + A[9])
  call('SET', P .. 'note:' .. A[10], pack('<dd', now + A[11], base) .. ARGV[4], 'PX', floor(A[11] / 1000))
  flush()
  return 1
end

-- {job, {name, gap, width, burst, floor, pinned, paused, rest, blocked, lines {queue, priority, ahead}}...}
-- As parcel.take_over. Answers how many lines are new.
function verbs.arrive_lanes()
  local job, made = job_of(A[1]), 0
  for i = 1, #A[2] do
    local name, gap, width, burst, least, pinned, paused, rest, blocked, lines = unpack(A[2][i])
    local lane = lane_named(name)
    local shared = false
    for k = 1, #lane.lines do
      local other = lane.lines[k].job
      shared = shared or (other ~= job.id and live(job_of(other)) > 0)
    end
    if not lane.pinned then
      lane.gap = shared and max(lane.gap, gap) or gap
      lane.width = shared and min(lane.width, width) or width
      if not shared then lane.burst, lane.pinned = burst, pinned end
    end
    lane.floor = max(lane.floor, least)
    if rest > 0 then lane.tat = max(lane.tat, now + rest) end
    if blocked > 0 then lane.blocked = max(lane.blocked, now + blocked) end
    lane.paused = lane.paused or paused
    for k = 1, #lines do
      local before = meta().line
      local line = line_of(lane, lines[k][1], job, lines[k][2])
      if line.id > before then
        line.vt = line.vt + lines[k][3]
        made = made + 1
      end
    end
    reschedule(lane)
  end
  flush()
  return made
end

-- Which of the keys ARGV[4...] are new; they are known from now on.
local function arriving_keys(job, n)
  local known = call('SMISMEMBER', P .. 'seen:' .. job.id, unpack(ARGV, 4, 3 + n))
  local new, here = {}, {}
  for i = 1, n do
    local key = ARGV[3 + i]
    if known[i] == 0 and not here[key] then
      here[key] = true
      new[#new + 1] = i
      call('SADD', P .. 'seen:' .. job.id, key)
    end
  end
  return new
end

-- {job, lanes (names), lane of each, kinds {queue, priority}, kind of each, extra (request -> delay,
-- ttl)}; ARGV: keys, entries. Answers how many came.
function verbs.arrive_requests()
  local job, n = job_of(A[1]), #A[3]
  local new, last = arriving_keys(job, n), {}
  for k = 1, #new do
    local i = new[k]
    local lane, kind = lane_named(A[2][A[3][i]]), A[4][A[5][i]]
    local line, entry = line_of(lane, kind[1], job, kind[2]), ARGV[3 + n + i]
    local id = unp('<d', entry)
    local wait, ttl = 0, false
    if A[6] and A[6][i] then wait, ttl = A[6][i][1], A[6][i][2] end
    if ttl then
      call('ZADD', P .. 'expiring:' .. line.stream, now + ttl, id)
      call('HSET', P .. 'ttl', id, lane.id .. pack('<dd', line.id, wait > 0 and now + wait or 0))
      due('x', line.stream, now + ttl)
    end
    if wait > 0 then
      delay(lane, line, job, entry, now + wait)
    else
      if not last[line.id] then
        local tail = line.tail > 0 and call('LINDEX', P .. 'line:' .. line.id, -1)
        last[line.id] = tail and unp('<d', tail) or 0
      end
      -- The list is in the order of ids; what comes out of turn stands in front.
      if ttl or id < last[line.id] then
        to_front(lane, line, entry)
      else
        local t = pushes[line.id] or {}
        pushes[line.id] = t
        t[#t + 1] = entry
        last[line.id] = id
        move(line, 'tail', 1)
      end
    end
    lane.dirty = true
  end
  count(job, 'added', #new)
  if #new > 0 and job.state == DONE then job.state, job.finished = PAUSED, false end
  flush()
  return #new
end

-- {job, {state, at, queue, priority, lane, class, message, worker, late}...}; ARGV: keys, entries. `at` is
-- measured from now, `late`: the head did not count it.
function verbs.arrive_letters()
  local job, n = job_of(A[1]), #A[2]
  local new = arriving_keys(job, n)
  for k = 1, #new do
    local i = new[k]
    local state, at, queue, priority, lane, class, message, worker, late = unpack(A[2][i])
    local entry = ARGV[3 + n + i]
    local id = unp('<d', entry)
    local head = mp({state, now + at, job.id, stream_of(queue, job), priority, lane, class, message, worker})
    call('HSET', P .. 'dead', id, pack('<H', #head) .. head .. entry)
    call('ZADD', P .. 'deadids', id, id)
    call('ZADD', P .. 'deadat', now + at, id)
    if late then
      count(job, 'added')
      count(job, 'expired')
    end
  end
  flush()
  return #new
end

-- {job, seq of the first}; ARGV[4...] bodies
function verbs.arrive_items()
  local job, new = job_of(A[1]), {}
  for i = 4, #ARGV do
    if A[2] + i - 4 > job.items then new[#new + 1] = ARGV[i] end
  end
  if #new > 0 then many('RPUSH', P .. 'items:' .. job.id, new) end
  count(job, 'items', #new)
  flush()
  return #new
end

-- {key, ttl}; ARGV[4] value
function verbs.note()
  call('SET', P .. 'note:' .. A[1], pack('<d', now + A[2]) .. ARGV[4], 'PX', floor(A[2] / 1000) + 60000)
end
function verbs.noted()
  local raw = call('GET', P .. 'note:' .. A[1])
  if not raw or unp('<d', raw) <= now then return false end
  return sub(raw, 9)
end
-- {key, ttl, whether nothing may be noted}; ARGV[4] value, ARGV[5] what must be noted otherwise. Answers 1 or 0.
function verbs.swap()
  local old = verbs.noted()
  if A[3] and old or not A[3] and old ~= ARGV[5] then return 0 end
  verbs.note()
  return 1
end
function verbs.now() return now end

-- {name, owner, ttl}. Answers who holds the lock now.
function verbs.lock()
  local key = P .. 'lock:' .. A[1]
  local raw = call('GET', key)
  if raw and unp('<d', raw) > now and sub(raw, 9) ~= A[2] then return sub(raw, 9) end
  call('SET', key, pack('<d', now + A[3]) .. A[2], 'PX', floor(A[3] / 1000) + 60000)
  return A[2]
end
-- {name, owner}
function verbs.unlock()
  local raw = call('GET', P .. 'lock:' .. A[1])
  if raw and sub(raw, 9) == A[2] then call('DEL', P .. 'lock:' .. A[1]) end
end

-- {worker, forget after}; ARGV[4] what it says. Somebody always beats, so the forgotten go here.
function verbs.beat()
  local key = P .. 'workers'
  local old = call('HGET', key, A[1])
  call('HSET', key, A[1], pack('<dd', old and unp('<d', old) or now, now) .. ARGV[4])
  local all, gone = call('HGETALL', key), {}
  for i = 1, #all, 2 do
    local _, seen = unp('<dd', all[i + 1])
    if seen < now - A[2] then gone[#gone + 1] = all[i] end
  end
  if #gone > 0 then many('HDEL', key, gone) end
end
function verbs.leave() call('HDEL', P .. 'workers', A[1]) end
function verbs.workers() return {now, call('HGETALL', P .. 'workers')} end

-- {layout}. Answers {layout, version, now}.
function verbs.open()
  call('HSETNX', P .. 'meta', 'layout', A[1])
  return {tonumber(call('HGET', P .. 'meta', 'layout')), meta().version, now}
end

return verbs[verb]()
end)()
