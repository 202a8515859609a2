-- The common beginning of both scripts of the Redis frontier: the map of the keys, and the functions that the
-- verbs of workers (hot.lua) and of the catalog (catalog.lua) share. The client appends one of those files to
-- this one and loads the two as separate scripts, so a claim does not create the functions of the catalog.
--
-- Every verb is one call of a script, so it happens completely or not at all.
--
-- Redis runs one script at a time and serves no other client meanwhile. So calls are small: the client cuts
-- a batch into calls of about a millisecond. Changes of a job (pause, resume, cancel, respec) hold for the
-- job from their first call on; its lanes follow, some in each call.
--
-- The behaviour is that of memory.py, line by line where possible; the arithmetic is that of rules.py.
-- All times are whole microseconds (a double holds them exactly until the year 2255). Never
-- concatenate a time or a token into a string: Lua prints 14 digits. Redis prints 17, and slowly: a
-- number that is passed to it more than once goes through `text` (in hot.lua) first.
--
--   KEYS[1]  prefix, hash-tagged: all keys of a frontier live in one slot of a cluster
--   ARGV[1]  verb     ARGV[2]  the time, given only by tests; '' = the server's
--   ARGV[3]  arguments (msgpack)     ARGV[4...]  bytes: keys, entries, items
--
-- Keys, all behind the prefix:
--
--   meta          HASH   last token, request id, line, lane, stream, job; `version` counts jobs that
--                        ended; `told` the latest moment until which a worker waits; layout
--   jobids        HASH   job name -> job number
--   jobs          HASH   job number -> msgpack: state, pace, budgets, counters (field order: JOB)
--   specs         HASH   job number -> its JobSpec as JSON
--   created       ZSET   job number by creation
--   starts:<job>  SET    lanes of its start URLs (read only with a budget per host)
--   spread:<job>  HASH   lane -> requests that count against the budget per host
--   tally:<job>   HASH   error class -> failed visits
--   seen:<job>    SET    16-byte keys of all its requests, for ever
--   items:<job>   LIST   item bodies; position + 1 is the seq
--   joblanes:<job> SET   lanes (4 bytes) on which it has a line
--   laneids       HASH   lane name -> lane number, 4 bytes big-endian: ties sort as numbers do
--   lanes         HASH   lane number -> msgpack: pace, state and lines (see `lane_from`)
--   streamids     HASH   job number (0: of all jobs) and queue -> stream number
--   streams       HASH   stream number -> msgpack {queue, job number or 0}
--   active        SET    streams that may have turns
--   turn:<stream> ZSET   lane number by the moment of its turn: lanes with work and a free slot
--   waiting       HASH   stream -> requests in its lines; streams without any are not in it
--   line:<line>   LIST   entries in the order of their ids: those that never left the line
--   front:<line>  ZSET   entries by id that came back or have a ttl; merged with the list by id
--   delayed:<stream>  ZSET  lane, line, job, entry by the moment they are due
--   expiring:<stream> ZSET  request id by the end of its ttl
--   ttl           HASH   request id -> lane, line, moment it is delayed to
--   lease         HASH   token -> lane, line, stream, job, priority, worker, entry
--   ends:<stream> ZSET   token by the end of its lease
--   due           ZSET   x/e/d + stream by the earliest moment in expiring/ends/delayed; it may be
--                        too early (settling a lease does not change it), never too late
--   dead          HASH   request id -> dead letter     deadids  ZSET  request id by itself
--   deadat        ZSET   request id by the moment of its end
--   note:<shelf>:<name>  STRING  when it was written and when it ends (8 bytes each), value; Redis
--                        deletes it some time after its end
--   notes:<shelf> ZSET   name by the end of its note; each put removes the names that have ended
--   wake          pub/sub channel: work is due earlier than a waiting worker was told
--
-- An entry is a stored request: id (double), failed visits (2 bytes), crashes (1), flags (1),
-- depth (2), then its URL, or with flag 2 the msgpack of all its fields that are not defaults. Flag 1: has a ttl.
-- Flag 4: had one when it was leased; the end of that ttl (double) comes last, for a release.

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
local BONUS = {0, 0, 0, 0, 0, 10 * US, 20 * US, 30 * US, 40 * US}
local STAGGER = 2 * US
local CRASH_LIMIT = 3
local RUNNING, PAUSED, CANCELLED, DONE = 0, 1, 2, 3
local HEAD = '<dHBBH' -- of an entry
local HEAD_SIZE = 14
local NEVER = 1e18

-- Everything below is inside one function, which the appended file closes. A script runs from its top in
-- each call, so each call creates all functions again, and searches each outer name that a function uses
-- among all names of the enclosing level, except for those that this level takes from further out. Without
-- the outer function, a call cost 70 µs before it did anything; with it, 20.
return (function()

-- -- small things -------------------------------------------------------------------------

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
  'name', 'state', 'created', 'finished', 'gap', 'width', 'dedicated', 'max_pages', 'max_per_host', 'added',
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

local function wake() -- all waiting workers; they call again and say how long they will wait
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
local waiting, waits = {}, false -- changes of the streams' counts of waiting requests

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

local function reschedule(lane) -- computes its place in the turns of its streams, after any change
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
      if lane.at and lane.at < at then at = lane.at end -- it has a place already, and keeps it
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
  local name = (job.dedicated and job.id or 0) .. ' ' .. queue
  local id = stream_ids[name]
  if id then return id end
  id = tonumber(call('HGET', P .. 'streamids', name) or nil)
  if not id then
    id = next_of('stream')
    call('HSET', P .. 'streamids', name, id)
    call('HSET', P .. 'streams', id, mp({queue, job.dedicated and job.id or 0}))
  end
  stream_ids[name] = id
  return id
end

local function adopt(lane, job) -- the lane takes the job's pace; with other work it keeps the slower
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
  for i = #lane.lines, 1, -1 do -- drop the lines of jobs that are over, so that a lane's lines stay few
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
local function activate(lane, line) -- an empty line starts at its lane's time: absence earns no credit
  if line.tail + line.front == 0 then line.vt = max(line.vt, lane.vt) end
end
local function to_front(lane, line, entry)
  activate(lane, line)
  call('ZADD', P .. 'front:' .. line.id, unp('<d', entry), entry)
  move(line, 'front', 1)
  lane.dirty = true
end

local told_due = {}
local soonest = NEVER -- the earliest moment at which a claim may succeed because of this call
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

-- -- entries ------------------------------------------------------------------------------

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
local function hand_back(lane, line, entry) -- it was not visited: the rest of its ttl counts again
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

-- -- the end of a call: storing its changes -----------------------------------------------

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
        call('HDEL', P .. 'waiting', stream) -- streams of jobs that ended must not add up
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
  -- Memory and store are equal again: a claim reads the turns that its upkeep has written.
  for i = 1, #lane_list do
    local lane = lane_list[i]
    lane.old_at, lane.old_streams, lane.dirty = lane.at, lane.at and lane.streams or {}, false
  end
  for i = 1, #job_list do job_list[i].dirty = false end
  pushes, waiting, waits, moved, soonest = {}, {}, false, {}, NEVER
end

-- -- leases -------------------------------------------------------------------------------

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
local function lease_place(blob) -- its lane, line, stream and job, without creating strings of the rest
  return sub(blob, 1, 4), unp('<ddd', blob, 5)
end
local function end_lease(token, blob, suspects)
  local lane_id, line_id, stream, job_id, _, worker, entry = lease_parts(blob)
  call('HDEL', P .. 'lease', token)
  call('ZREM', P .. 'ends:' .. stream, token)
  local lane = lane_by_id(lane_id)
  return take_back(job_of(job_id), lane, find_line(lane, line_id), entry, suspects, worker)
end

local function empty_lines(lane, job) -- the job is cancelled: end its waiting requests here. Returns whether there were any
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

-- hot.lua or catalog.lua follows.
