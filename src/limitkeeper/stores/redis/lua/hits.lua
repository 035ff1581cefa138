-- Hits that have come along with others: as hit.lua answers them.
local function hit_ask()
  local rule, fingerprint, cost, tick, p, q, r, s
  rule, fingerprint, cost, tick, p, q, r, s, at = unpack('<Bddddddd', body, at)
  --@now
  local claim = new_claim(rule, fingerprint, cost, tick, p, q, r, s)
  asked = asked + 1
  if not load(claim) or claim.moved then
    said[asked] = pack('<i8i8I4', -1, now_us, #claim.raw) .. claim.raw
    return
  end
  ask(claim, now_us, 0)
  if claim.start >= 0 then
    store(claim, claim.new_a, claim.new_b, claim.new_c, claim.reset)
  elseif claim.start == -2 then
    claim.retry = -1
  end
  said[asked] = pack('<i8i8i8i8', now_us, claim.left, claim.retry, claim.reset)
end
