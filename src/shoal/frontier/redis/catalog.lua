-- The verbs of the catalog, and those that workers call rarely. Continues prelude.lua.

local verbs = {}

-- -- jobs ---------------------------------------------------------------------------------

local function respec(job, spec, pace, starts)
  job.gap, job.width, job.dedicated, job.max_pages, job.max_per_host = unpack(pace)
  job.dirty = true
  call('HSET', P .. 'specs', job.id, spec)
  call('DEL', P .. 'starts:' .. job.id)
  if #starts > 0 then many('SADD', P .. 'starts:' .. job.id, starts) end
end

-- {name, spec, {gap, width, dedicated, max_pages, max_per_host}, start lanes}
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

-- Some of a job's lanes, and the cursor for the next call; '0' after the last. A lane may come twice.
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

-- {job, off, cursor}. Resuming walks the lanes of a running job too: a process that resumed it before
-- may have died in the middle.
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

-- {name}. Returns {number, record, spec, tally}, or nothing.
function verbs.job()
  local id = call('HGET', P .. 'jobids', A[1])
  if not id then return false end
  return {tonumber(id), call('HGET', P .. 'jobs', id), call('HGET', P .. 'specs', id),
    call('HGETALL', P .. 'tally:' .. id)}
end

-- -- dead letters -------------------------------------------------------------------------

-- {ids, reset}. Returns how many wait again.
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

-- -- leases -------------------------------------------------------------------------------

-- {workers, tokens, suspects}. Returns {taken, suspects}.
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

-- {job, tokens}: ends leases of a cancelled job that are in transit.
function verbs.cancel_leases()
  local job = job_of(A[1])
  if job.state ~= CANCELLED then return end
  for i = 1, #A[2] do
    local blob = call('HGET', P .. 'lease', A[2][i])
    if blob then
      local lane_id, _, stream, job_id, _, worker = lease_parts(blob)
      if job_id == job.id and in_transit(worker) then
        call('HDEL', P .. 'lease', A[2][i])
        call('ZREM', P .. 'ends:' .. stream, A[2][i])
        local lane = lane_by_id(lane_id)
        lane.busy = lane.busy - 1
        count(job, 'leased', -1)
        count(job, 'cancelled')
        touch(lane)
      end
    end
  end
  place_touched()
  flush()
end

-- -- notes --------------------------------------------------------------------------------

-- ARGV[4] is the shelf, ARGV[5] the name, ARGV[6] the value. Returns the value, or nothing.
local function note_key(name) return P .. 'note:' .. ARGV[4] .. ':' .. name end
function verbs.note_get()
  local raw = call('GET', note_key(ARGV[5]))
  if not raw then return false end
  local _, till = unp('<dd', raw)
  return till > now and sub(raw, 17)
end
-- {ttl, false to remove it}
function verbs.note_put()
  local key, shelf = note_key(ARGV[5]), P .. 'notes:' .. ARGV[4]
  if A[1] then
    call('SET', key, pack('<dd', now, now + A[1]) .. ARGV[6], 'PX', fmt('%d', floor(A[1] / 1000) + 60000))
    call('ZADD', shelf, fmt('%d', now + A[1]), ARGV[5])
  else
    call('DEL', key)
    call('ZREM', shelf, ARGV[5])
  end
  call('ZREMRANGEBYSCORE', shelf, '-inf', fmt('%d', now))
end
-- {ttl, whether there must be no note}; ARGV[7] the value that the note must have otherwise. Returns 1 or 0.
function verbs.note_swap()
  local old = verbs.note_get()
  if A[2] and old or not A[2] and old ~= ARGV[7] then return 0 end
  verbs.note_put()
  return 1
end
-- Returns names and stored notes, alternating.
function verbs.note_scan()
  local names = call('ZRANGEBYSCORE', P .. 'notes:' .. ARGV[4], '(' .. fmt('%d', now), '+inf')
  local found = {}
  for i = 1, #names do
    local raw = call('GET', note_key(names[i]))
    if raw then
      found[#found + 1] = names[i]
      found[#found + 1] = raw
    end
  end
  return found
end

-- -- the frontier itself ------------------------------------------------------------------

-- {layout}. Returns {layout, version}.
function verbs.open()
  call('HSETNX', P .. 'meta', 'layout', A[1])
  return {tonumber(call('HGET', P .. 'meta', 'layout')), meta().version}
end
function verbs.now() return now end

return verbs[verb]()
end)()
