-- Fast path: hits on several limits each, all or none, without a table per claim; one MGET reads all states of a request. Stale
-- states are replied as in hit.lua. Reply: as decide.lua.
local call, unpack, pack, body, keys, spread = redis.call, struct.unpack, struct.pack, ARGV[1], KEYS, unpack
local replies, reply_count, now_us = {}, 0, 0
local at, size, last_key = 1, #body, 0
--@time
while at <= size do
  --@now
  local n
  n, at = unpack('<I2', body, at + 1)
  local raws = call('MGET', spread(keys, last_key + 1, last_key + n))
  local first, start_us, stale = at, now_us, false
  local values, ttls, reply = {}, {}, { '' }
  for i = 1, n do
    local rule, fingerprint, cost, tick, p, q, r, s
    rule, fingerprint, cost, tick, p, q, r, s, at = unpack('<Bddddddd', body, at)
    local written, last, a, b, c = fingerprint, 0, 0, 0, 0
    local raw = raws[i]
    if raw then written, last, a, b, c = unpack('<ddddd', raw) end
    if written ~= fingerprint or last > now_us then
      stale = stale or {}
      stale[i] = raw
    else
      local now = now_us
      if tick > 1 then now = (now_us - now_us % tick) / tick end
      local wait, retry, left, reset
      --@decide
      a, b, c, wait, retry, left, reset = decide(p, q, r, s, a, b, c, now, now, cost, 0)
      if tick > 1 then
        local begun = now_us - now * tick
        if retry > 0 then retry = retry * tick - begun end
        if reset > 0 then reset = reset * tick - begun end
      end
      if wait < 0 then
        if start_us > wait then start_us = wait end
        reply[i + 1] = pack('<i8i8i8i8', wait, retry, left, reset)
      else
        reply[i + 1] = pack('<i8i8i8i8', now_us, 0, left, reset)
        values[i] = pack('<ddddd', fingerprint, now_us, a, b, c)
        if reset > 1e18 then reset = 1e18 end
        --@ttl
        ttls[i] = ttl
      end
    end
  end
  if stale then
    reply[1] = pack('<i8i8', -1, now_us)
    for i = 1, n do
      local raw = stale[i] or ''
      reply[i + 1] = pack('<I4', #raw) .. raw
    end
  elseif start_us >= 0 then
    reply[1] = pack('<i8i8', now_us, start_us)
    for i = 1, n do call('SET', keys[last_key + i], values[i], 'PX', ttls[i]) end
  else -- refused: limits with room reply what is there without the charge
    reply[1] = pack('<i8i8', now_us, start_us)
    for i = 1, n do
      if values[i] then
        local rule, _, _, tick, p, q, r, s = unpack('<Bddddddd', body, first + (i - 1) * 57)
        local a, b, c = 0, 0, 0
        if raws[i] then _, _, a, b, c = unpack('<ddddd', raws[i]) end
        local now = (now_us - now_us % tick) / tick
        local left, reset
        --@decide
        _, _, _, _, _, left, reset = decide(p, q, r, s, a, b, c, now, now, 0, 0)
        if reset > 0 then reset = (now + reset) * tick - now_us end
        reply[i + 1] = pack('<i8i8i8i8', now_us, 0, left, reset)
      end
    end
  end
  last_key = last_key + n
  reply_count = reply_count + 1
  replies[reply_count] = table.concat(reply)
end
return reply_count > 1 and table.concat(replies) or replies[1]
