-- The mirror of virtual_time_admission.py, which explains the numbers; compared with it by ==.
-- KEYS: a string (doubles: start, now, virtual, backlog, weight, a lower bound of all finish times, when to renew the second key's
-- time to live, and the time at which each guarantee is full), a sorted set (tenant -> finish time).
-- ARGV: tenant, cost, operation (hit, peek or refund), doubles {rate, size, window, clock (-1: the server's)}; with weights or
-- guarantees also {weights, guarantees} as MessagePack.
-- Reply: 64-bit integers: allowed, remaining, retry in microseconds (-1: never), reset in microseconds.
-- What a plain hit does not need is created only where it is needed: each function and table costs server time.
local call = redis.call
local tenant, cost, operation = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local rate_of_all, size, window, clock_us = struct.unpack('>dddd', ARGV[4])
local rounding = 1e-9 + 1e-12 * size
local weight, guarantee, full, format = 1, 0, 0, '>ddddddd'
local weights, guaranteed, guarantees, full_at
if ARGV[5] then
  local settings = cmsgpack.unpack(ARGV[5])
  weights, guaranteed, guarantees, full_at = settings[1], {}, {}, {} -- in order, so that sums are rounded alike everywhere
  for i = 1, #settings[2], 2 do
    guaranteed[#guaranteed + 1] = settings[2][i]
    guarantees[settings[2][i]] = settings[2][i + 1]
  end
  weight, guarantee = weights[tenant] or 1, guarantees[tenant] or 0
  format = format .. string.rep('d', #guaranteed)
end

if clock_us < 0 then
  local time = call('TIME')
  clock_us = time[1] * 1000000 + time[2]
end
local start, lowest, renew = clock_us, 0, 0
-- `passed` entries of the sorted set have ended; `weight` is 0 when all have.
local state = {now = 0, virtual = 0, backlog = 0, weight = 0, passed = 0}
local stored = call('GET', KEYS[1])
if stored then
  start, state.now, state.virtual, state.backlog, state.weight, lowest, renew = struct.unpack(format, stored)
  if guaranteed then
    local found = {struct.unpack(format, stored)}
    for i, name in ipairs(guaranteed) do full_at[name] = found[7 + i] end
    full = full_at[tenant] or 0
  end
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

-- The rate of the fluid server, and how long that lasts.
local function segment(s, now)
  local rate, till = rate_of_all, now
  if guaranteed then
    for _, name in ipairs(guaranteed) do
      local until_full = full_at[name] or 0
      if until_full > s.now then
        rate = rate - guarantees[name]
        if until_full < till then till = until_full end
      end
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
    s.weight = s.weight - (weights and weights[entry(s.passed)[2]] or 1)
    s.backlog = s.backlog - amount
  end
  if s.weight == 0 then s.backlog, s.virtual = 0, 0 end
  s.now = till
end

if clock_us - start < state.now then -- the server's clock went back: time continues from where it was
  start, renew = clock_us - state.now, 0
end
while state.now < clock_us - start do
  local rate, till = segment(state, clock_us - start)
  serve(state, till, rate)
end
local now = state.now
local own = state.weight > 0 and tonumber(call('ZSCORE', KEYS[2], tenant) or 0) or 0

-- The tenant's finish time as a state sees it: 0 when its backlog has ended.
local function finish_in(s)
  if own == 0 or s.weight == 0 then return 0 end
  if s.passed > 0 then
    local last = entry(s.passed)
    if own < last[1] or (own == last[1] and tenant <= last[2]) then return 0 end
  end
  return own
end

local finish = finish_in(state)
local queued = finish > 0 and weight * (finish - state.virtual) or 0
local allowed, remaining, retry, reset = 1, 0, 0, 0
local charged
if operation == 'refund' then
  if finish > 0 then
    local amount = math.min(cost, queued)
    state.backlog = state.backlog - amount
    cost = cost - amount
    finish = finish - amount / weight
    if finish <= state.virtual or cost > 0 then
      state.weight = state.weight - weight
      call('ZREM', KEYS[2], tenant)
    else
      charged = finish
    end
  end
  if cost > 0 and guarantee > 0 then full_at[tenant] = full - cost / guarantee end
else
  if full < now then full = now end
  local window = guarantee > 0 and math.max(window, 2 / guarantee) or window -- it holds two units
  local reserved = (now + window - full) * guarantee
  local room = size - state.backlog
  local left = queued <= rounding and size / 2 or (room - queued) / 2
  if room < left then left = room end
  if guarantee > 0 and cost <= reserved + rounding then
    if operation == 'hit' then
      full = full + cost / guarantee
      full_at[tenant] = full
      reserved = reserved - cost
    end
  elseif cost == 0 or cost <= left + rounding then
    if operation == 'hit' and cost > 0 then
      if finish == 0 then
        state.weight = state.weight + weight
        finish = state.virtual
      end
      charged = finish + cost / weight
      state.backlog = state.backlog + cost
      room, queued = size - state.backlog, queued + cost
      left = (room - queued) / 2
      if room < left then left = room end
    end
  else
    local at = -1
    if guarantee > 0 and cost <= guarantee * window + rounding then at = full + cost / guarantee - window end
    if cost <= size / 2 then
      local s = {now = now, virtual = state.virtual, backlog = state.backlog, weight = state.weight, passed = state.passed}
      local share_at
      repeat
        local rate, till = segment(s, 1e18)
        local mine, wait = finish_in(s), 1e18
        local waiting = mine > 0 and weight * (mine - s.virtual) or 0
        if rate > 0 then
          wait = math.max(0, cost - (size - s.backlog)) / rate
          if waiting > 0 then
            wait = math.max(wait, (waiting + s.backlog + 2 * cost - size) / (rate + weight * rate / s.weight))
          end
          local ending = s.weight > 0 and entry(s.passed + 1)
          if ending then till = math.min(till, s.now + (ending[1] - s.virtual) * s.weight / rate) end
        end
        if s.now + wait <= till or (at >= 0 and at <= till) then
          share_at = s.now + wait
        else
          serve(s, till, rate)
        end
      until share_at
      if at < 0 or share_at < at then at = share_at end
    end
    allowed, retry = 0, at < 0 and -1 or math.max(1, math.ceil(at - now - rounding / 2 / rate_of_all))
  end
  remaining = math.floor(math.max(reserved, left, 0) + rounding)
  reset = math.ceil(math.max(full - now, state.backlog / rate_of_all))
end

if operation ~= 'peek' then
  if state.passed > 0 then
    call('ZREMRANGEBYRANK', KEYS[2], 0, state.passed - 1)
    lowest = state.virtual -- no tenant ends before
  end
  local longest = window
  for _, name in ipairs(guaranteed or {}) do longest = math.max(longest, 2 / guarantees[name]) end
  local ttl = math.floor(4 * longest / 1000) + 60000
  if charged then
    call('ZADD', KEYS[2], charged, tenant) -- the server writes a number with all its digits
    if state.weight == weight or charged < lowest then lowest = charged end -- equal: there is no other tenant
    if clock_us >= renew or state.weight == weight then -- this may have created the sorted set
      call('PEXPIRE', KEYS[2], 2 * ttl)
      renew = clock_us + ttl * 1000
    end
  end
  local data = struct.pack('>ddddddd', start, state.now, state.virtual, state.backlog, state.weight, lowest, renew)
  if guaranteed then
    for _, name in ipairs(guaranteed) do data = data .. struct.pack('>d', full_at[name] or 0) end
  end
  call('SET', KEYS[1], data, 'PX', ttl)
end
return struct.pack('>i8i8i8i8', allowed, remaining, retry, reset)
