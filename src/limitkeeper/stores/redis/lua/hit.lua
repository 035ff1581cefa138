-- Hits and nothing else, one limit and one key each: the straight way, without a table for one of them.
-- Whatever is out of the ordinary (a state of another rate, a clock that went back) is answered "stale" and asked again
-- the long way (frame.lua). Reply: now, remaining, retry, reset in microseconds from now; retry 0 is allowed, -1 never.
local call, unpack, pack, body, keys = redis.call, struct.unpack, struct.pack, ARGV[1], KEYS
local said, now_us
local at = 1
--@time
for i = 1, #keys do
  local rule, fingerprint, cost, tick, p, q, r, s
  rule, fingerprint, cost, tick, p, q, r, s, at = unpack('<Bddddddd', body, at)
  --@now
  local key = keys[i]
  local raw = call('GET', key)
  local written, last, a, b, c = fingerprint, 0, 0, 0, 0
  if raw then written, last, a, b, c = unpack('<ddddd', raw) end
  local reply
  if written ~= fingerprint or last > now_us then
    reply = pack('<i8i8I4', -1, now_us, #raw) .. raw
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
      if reset > 1e18 then reset = 1e18 end
    end
    if wait >= 0 then
      --@ttl
      call('SET', key, pack('<ddddd', fingerprint, now_us, a, b, c), 'PX', ttl)
    elseif wait == -2 then
      retry = -1
    end
    reply = pack('<i8i8i8i8', now_us, left, retry, reset)
  end
  if i == 1 then
    said = reply
  elseif i == 2 then
    said = { said, reply }
  else
    said[i] = reply
  end
end
return #keys > 1 and table.concat(said) or said
