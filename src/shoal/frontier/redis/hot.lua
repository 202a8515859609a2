-- The verbs of workers: claim, settle, add, take, extend, pace and wait. Continues prelude.lua.
--
-- Each call pays for each function in this file and in the prelude. So functions that are called rarely,
-- even by workers (notes), are in catalog.lua.

local function text(number) return fmt('%d', number) end
local function texts(t)
  for i = 1, #t do t[i] = fmt('%d', t[i]) end
  return t
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
local function room(job, lane)
  if job.max_pages and job.added - job.skipped - job.dead - job.expired >= job.max_pages then return false end
  if not counts_per_host(job, lane) then return true end
  return tonumber(call('HGET', P .. 'spread:' .. job.id, lane) or 0) < job.max_per_host
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

-- -- upkeep -------------------------------------------------------------------------------

-- Requests of each kind in one call; the client calls again for the rest. Lanes are placed after each call, so
-- with more than this at once a lane may have a place that it owes to a request that ends in the next call.
local UPKEEP = 100
local PLACES = {x = 'expiring:', e = 'ends:', d = 'delayed:'}
local function head_of(name) -- the actual earliest moment behind an entry of `due`
  return tonumber(call('ZRANGE', P .. PLACES[sub(name, 1, 1)] .. sub(name, 2), 0, 0, 'WITHSCORES')[2] or nil)
end
local function overdue(kind) -- {moment, member, stream}, earliest first; true if there are more
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

-- End expired requests, take back expired leases, promote requests that are due. Lanes are placed
-- afterwards, all at once: a request that ended must not lend its lane its priority.
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

-- -- claiming -----------------------------------------------------------------------------

-- Returns a function that says whether a stream is requested; `queues` and `job` false mean any.
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
local function wake_at(asked) -- the next moment at which a claim can succeed; -1 drained, -2 unknown
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

local function obey(lane) -- a pause or cancel of a job may not have reached this lane yet
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

local STEP = {256, 128, 64, 32, 16, 8, 4, 2, 1}
local function picks(lane, free, asked) -- the lines to serve, in order: the one whose next visit ends first
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

-- -- verbs --------------------------------------------------------------------------------

local verbs = {}

-- {limit, lease, worker, queues, job, whether more calls of this claim follow, suspects so far}
-- Returns {now, wake_at, first token, suspects, version, groups {lane, job, stream, priority, entry...}};
-- wake_at -3: call again, upkeep is not finished; -4: the job is not dedicated.
function verbs.claim()
  local limit, lease, worker = A[1], A[2], A[3]
  if A[5] and not job_of(A[5]).dedicated then return {now, -4} end
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
    -- The next call of this claim continues where this one was cut off.
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

-- {tokens, kinds, jobs (for late verdicts), items per verdict, found per verdict,
-- failures (verdict -> after, class, message), R}; ARGV after R: the items.
-- Kinds: 0 done, 1 done and skipped, 2 retry, 3 dead, 4 release, 5 expired. Returns {lost, refused}.
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

-- {R}. Returns one digit for each request: 0 new, 1 known, 2 refused.
function verbs.add()
  local R, answers = A[1], {}
  R.base = 3
  prepare(R)
  add_rows(R, 1, #R.lane, answers)
  store_fresh()
  flush()
  return table.concat(answers)
end

-- {seconds, worker, tokens}. Returns {now, the indices of the leases that the worker holds now}.
function verbs.take()
  local till, worker, tokens, ours, ends, held = text(now + A[1]), A[2], texts(A[3]), {}, {}, {}
  local gone, refused = {}, false
  local blobs = call('HMGET', P .. 'lease', unpack(tokens))
  for i = 1, #tokens do
    if blobs[i] and not gone[tokens[i]] then
      local _, _, stream, job, _, holder, entry = lease_parts(blobs[i])
      local state, travels = job_of(job).state, in_transit(holder)
      if travels and (state == CANCELLED or (state == PAUSED and not in_transit(worker))) then
        end_lease(tokens[i], blobs[i], 0) -- no worker may visit it: free its slot
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

-- {seconds, tokens}. Returns the indices of the leases that are lost.
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

-- {queues, job, how long, version}. Returns {now, wake_at, version}, and records that a worker waits.
function verbs.wait()
  local at = wake_at(filter(A[1], A[2]))
  if meta().version == A[4] and (at < 0 or at > now) then
    set_meta('told', max(M.told, now + A[3]))
    flush()
  end
  return {now, at, M.version}
end

return verbs[verb]()
end)()
