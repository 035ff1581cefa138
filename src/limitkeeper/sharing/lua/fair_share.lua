-- The mirror of weighted_fair_queueing.py, which explains the numbers; compared with it by ==.
-- KEYS: a string (doubles: start, now, virtual, backlog, weight, a lower bound of all finish times, when to renew the second key's
-- time to live, and the time at which each guarantee is full), a sorted set (tenant -> finish time).
-- ARGV: tenant, cost, operation (hit, peek or refund), settings as MessagePack {rate, size, window, weights, guarantees, clock}.
-- Reply: allowed, remaining, retry in microseconds (-1: never), reset in microseconds.
local call = redis.call
local tenant, cost, operation = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local settings = cmsgpack.unpack(ARGV[4])
local rate_of_all, size, window, weights = settings[1], settings[2], settings[3], settings[4]
local guaranteed, guarantees, full_at = {}, {}, {} -- in order, so that sums are rounded alike everywhere
for i = 1, #settings[5], 2 do
  guaranteed[#guaranteed + 1] = settings[5][i]
  guarantees[settings[5][i]] = settings[5][i + 1]
end

local clock_us = settings[6]
if clock_us < 0 then
  local time = call('TIME')
  clock_us = time[1] * 1000000 + time[2]
end
local FORMAT = '>' .. string.rep('d', 7 + #guaranteed)
local start, lowest, renew = clock_us, 0, 0
-- `passed` entries of the sorted set have ended; `weight` is 0 when all have.
local state = {now = 0, virtual = 0, backlog = 0, weight = 0, passed = 0}
local stored = call('GET', KEYS[1])
if stored then
  local found = {struct.unpack(FORMAT, stored)}
  start, state.now, state.virtual, state.backlog, state.weight, lowest, renew = unpack(found, 1, 7)
  for i, name in ipairs(guaranteed) do full_at[name] = found[7 + i] end
elseif operation ~= 'peek' then
  call('DEL', KEYS[2])
end

local entries, loaded = {}, 0 -- the sorted set, read as far as needed: {finish, tenant}
local function entry(i) -- nil when there is none: the server may have evicted the sorted set
  while i > loaded do
    local more = call('ZRANGE', KEYS[2], loaded, loaded == 0 and 1 or loaded + 31, 'WITHSCORES')
    if #more == 0 then return nil end
    for j = 1, #more, 2 do
      loaded = loaded + 1
      entries[loaded] = {tonumber(more[j + 1]), more[j]}
    end
  end
  return entries[i]
end

local function segment(s, now)
  local rate, till = rate_of_all, now
  for _, name in ipairs(guaranteed) do
    local full = full_at[name] or 0
    if full > s.now then
      rate = rate - guarantees[name]
      if full < till then till = full end
    end
  end
  return rate, till
end

local function serve(s, till, rate)
  while s.weight > 0 and rate > 0 do
    local first = lowest
    local amount = (first - s.virtual) * s.weight
    if s.passed > 0 or s.now + amount / rate <= till then -- a tenant may end: its finish time is needed
      local ending = entry(s.passed + 1)
      if not ending then
        s.weight = 0
        break
      end
      first = ending[1]
      amount = (first - s.virtual) * s.weight
      if s.passed == 0 then lowest = first end
    end
    local at = s.now + amount / rate
    if at > till then
      local served = (till - s.now) * rate
      s.virtual = s.virtual + served / s.weight
      s.backlog = s.backlog - served
      break
    end
    s.passed = s.passed + 1
    s.virtual, s.now = first, at
    s.weight = s.weight - (weights[entry(s.passed)[2]] or 1)
    s.backlog = s.backlog - amount
  end
  if s.weight == 0 then s.backlog, s.virtual = 0, 0 end
  s.now = till
end

local function advance(s, now)
  while s.now < now do
    local rate, till = segment(s, now)
    serve(s, till, rate)
  end
end

advance(state, clock_us - start)
local now, weight, guarantee = state.now, weights[tenant] or 1, guarantees[tenant] or 0
local own = state.weight > 0 and tonumber(call('ZSCORE', KEYS[2], tenant) or 0) or 0

-- The tenant's finish time as a state sees it: 0 when its backlog has ended.
local function finish_in(s)
  if own == 0 or s.weight == 0 then return 0 end
  local last = s.passed > 0 and entry(s.passed) or nil
  if last and (own < last[1] or (own == last[1] and tenant <= last[2])) then return 0 end
  return own
end

local function save(charged)
  if state.passed > 0 then
    call('ZREMRANGEBYRANK', KEYS[2], 0, state.passed - 1)
    lowest = state.virtual -- no tenant ends before
  end
  local ttl = math.floor(4 * window / 1000) + 60000
  if charged then
    call('ZADD', KEYS[2], string.format('%.17g', charged), tenant)
    lowest = state.weight == weight and charged or math.min(lowest, charged) -- equal: there is no other tenant
    if clock_us >= renew then
      call('PEXPIRE', KEYS[2], 2 * ttl)
      renew = clock_us + ttl * 1000
    end
  end
  local fulls = {}
  for i, name in ipairs(guaranteed) do fulls[i] = full_at[name] or 0 end
  local data = struct.pack(FORMAT, start, state.now, state.virtual, state.backlog, state.weight, lowest, renew, unpack(fulls))
  call('SET', KEYS[1], data, 'PX', ttl)
end

local finish = finish_in(state)
local queued = finish > 0 and weight * (finish - state.virtual) or 0

if operation == 'refund' then
  if finish > 0 then
    local amount = math.min(cost, queued)
    state.backlog = state.backlog - amount
    cost = cost - amount
    if finish - amount / weight <= state.virtual or cost > 0 then
      state.weight = state.weight - weight
      call('ZREM', KEYS[2], tenant)
    else
      call('ZADD', KEYS[2], string.format('%.17g', finish - amount / weight), tenant)
      lowest = math.min(lowest, finish - amount / weight)
    end
  end
  if cost > 0 and guarantee > 0 then full_at[tenant] = (full_at[tenant] or 0) - cost / guarantee end
  save()
  return {1, 0, 0, 0}
end

local function free(backlog, waiting)
  local room = size - backlog
  local share = waiting <= 0 and size / 2 or (room - waiting) / 2
  return share < room and share or room
end

local full = math.max(full_at[tenant] or 0, now)
local reserved = (now + window - full) * guarantee
local left = free(state.backlog, queued)
local allowed, charged = true, nil
if guarantee > 0 and cost <= reserved + 1e-9 then
  if operation == 'hit' then
    full = full + cost / guarantee
    full_at[tenant] = full
    reserved = reserved - cost
  end
elseif cost <= left + 1e-9 then
  if operation == 'hit' and cost > 0 then
    queued = queued + cost
    if finish == 0 then
      state.weight = state.weight + weight
      finish = state.virtual
    end
    charged = finish + cost / weight
    state.backlog = state.backlog + cost
    left = free(state.backlog, queued)
  end
else
  allowed = false
end

local function share_at(before)
  local s = {now = state.now, virtual = state.virtual, backlog = state.backlog, weight = state.weight, passed = state.passed}
  while true do
    local rate, till = segment(s, 1e18)
    local mine = finish_in(s)
    local waiting = mine > 0 and weight * (mine - s.virtual) or 0
    local wait = 1e18
    if rate > 0 then
      wait = math.max(0, cost - (size - s.backlog)) / rate
      if waiting > 0 then
        wait = math.max(wait, (waiting + s.backlog + 2 * cost - size) / (rate + weight * rate / s.weight))
      end
      local ending = s.weight > 0 and entry(s.passed + 1)
      if ending then till = math.min(till, s.now + (ending[1] - s.virtual) * s.weight / rate) end
    end
    if s.now + wait <= till or (before >= 0 and before <= till) then return s.now + wait end
    serve(s, till, rate)
  end
end

local retry = 0
if not allowed then
  local at = -1
  if guarantee > 0 and cost <= guarantee * window + 1e-9 then at = full + cost / guarantee - window end
  if cost <= size / 2 then
    local other = share_at(at)
    if at < 0 or other < at then at = other end
  end
  retry = at < 0 and -1 or math.max(1, math.ceil(at - state.now - 1e-6))
end
local remaining = math.floor(math.max(reserved, left, 0) + 1e-9)
local reset = math.ceil(math.max(full - now, state.backlog / rate_of_all))
if operation == 'hit' then
  save(charged)
end
return {allowed and 1 or 0, remaining, retry, reset}
