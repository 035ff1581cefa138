-- Hits that are batched with other operations; the replies are those of hit.lua and hit_all.lua.
local function next_hit()
  local rule, fingerprint, cost, tick, p, q, r, s
  rule, fingerprint, cost, tick, p, q, r, s, at = unpack('<Bddddddd', body, at)
  return new_claim(rule, fingerprint, cost, tick, p, q, r, s)
end

local function hit_request()
  local claim = next_hit()
  if not read_state(claim) or claim.moved or claim.rates then
    add_reply(pack('<i8i8I4', -1, now_us, #claim.raw) .. claim.raw)
    return
  end
  decide_claim(claim, now_us, 0)
  if claim.start >= 0 then
    commit_claim(claim, now_us)
  elseif claim.start == -2 then
    claim.retry = -1
  end
  add_reply(pack('<i8i8i8i8', now_us, claim.left, claim.retry, claim.reset))
end

local function hit_all_request()
  local claims, n = {}, 0
  n, at = unpack('<I2', body, at + 1)
  for i = 1, n do claims[i] = next_hit() end
  if not read_states(claims, true) then return end
  local start_us = decide_all(claims, 0, 0)
  add_reply(pack('<i8', now_us) .. commit_claims(claims, start_us, true, false))
end
