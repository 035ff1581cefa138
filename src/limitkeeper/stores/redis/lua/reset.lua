-- Deletes the states of a key and leaves a reset marker for `keep_us`: a number that grows with every reset, by which charges made
-- before it are recognised (give_back.lua), also where nothing was stored any more. Reply: now.
local function reset_request()
  at = at + 1
  local claim = next_claim()
  local reset_id = 0
  local keep_us, _
  keep_us, at = unpack('<d', body, at)
  local raw = call('GET', claim.key)
  if raw then
    if claim.rule.logs then
      _, _, _, reset_id = claim.rule.open(raw)
    else
      local first, fingerprint
      first, _, fingerprint, reset_id = unpack('<dddd', raw)
      if first >= 0 or fingerprint > 0 then reset_id = 0 end
    end
  end
  reset_id = reset_id < now_us and now_us or reset_id + 1
  local value, reset
  if claim.rule.logs then
    value, reset = claim.rule.close(1, now_us, false, reset_id, now_us + keep_us) -- no rate uses it yet
  else
    value, reset = pack('<ddddddddddd', -1, now_us, 0, reset_id, now_us + keep_us, 0, 0, 0, 0, 0, 0), keep_us
  end
  if claim.tail then value = value .. claim.tail end
  --@ttl
  if redis.pcall('SET', claim.key, value, 'PX', ttl).err then call('DEL', claim.key) end -- out of memory
  add_reply(pack('<i8', now_us))
end
