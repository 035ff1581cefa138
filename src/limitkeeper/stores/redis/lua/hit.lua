-- Fast path: hits on one limit and one key each, without a table per claim. A state of another rate, or one from the future (the
-- clock went back), is replied as stale, and the request is sent again as a decision (decide.lua).
-- Reply: now, remaining, retry, reset in microseconds from now; retry 0 is allowed, -1 never.
local call, unpack, pack, body, keys = redis.call, struct.unpack, struct.pack, ARGV[1], KEYS
local replies, now_us
local at = 1
--@time
for i = 1, #keys do
  --@now
  local rule, fingerprint, cost, tick, p, q, r, s
  rule, fingerprint, cost, tick, p, q, r, s, at = unpack('<Bddddddd', body, at)
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
    replies = reply
  elseif i == 2 then
    replies = { replies, reply }
  else
    replies[i] = reply
  end
end
return #keys > 1 and table.concat(replies) or replies
