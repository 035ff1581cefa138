-- Gives charges back: the mirror of MemoryStore.give_back. A claim is followed by its whole charge, the start of that (-1: unknown),
-- the number of the reset marker that the charge saw (-1: unknown, -2: one that is gone), and, where they are known, the states
-- before and after the charge, of other rates of the key too: when the state has not changed since, those before are restored
-- exactly. A charge from before a reset gives nothing back.
-- Reply: now, and how many claims gave back.
-- The state of a rate without a part of a claim's charge: the mirror of `given_back` in algorithms/all_of.py.
given_back = function(rate, claim, before_until)
  local at, c, charged = claim.charged_at_us >= 0 and in_ticks(rate, claim.charged_at_us) or -1, rate.c, claim.charged
  if rate.rule.sums_later_starts and before_until >= 0 and claim.cost > 0 then
    if claim.cost < charged and at > rate.now then -- the rest is still to come, behind those before it
      if before_until > at then at = before_until end
    else
      c, charged = before_until, 0 -- which this charge has no part in
    end
  end
  return rate.rule.give_back(rate.p, rate.q, rate.r, rate.s, rate.a, rate.b, c, rate.now, claim.cost, charged, at)
end

local function give_back_claim(claim)
  local seen = claim.seen_id
  if seen == -2 or seen >= 0 and claim.reset_id > 0 and seen ~= claim.reset_id then return 0 end
  if claim.cost == 0 or claim.cost > 0 and not claim.present then return 1 end
  local a, b, c = claim.a, claim.b, claim.c
  local known = claim.undoable and not claim.moved
  local untouched = known and claim.cost == claim.charged and a == claim.after_a and b == claim.after_b and c == claim.after_c
  if untouched then
    a, b, c = claim.before_a, claim.before_b, claim.before_c
  else
    a, b, c = given_back(claim, claim, known and c == claim.after_c and claim.before_c or -1)
    if claim.rule.logs and b > 0 then c = claim.rule.add(claim.longest, c, now_us, a, b) end
  end
  local _, reset = peek(claim, a, b, c)
  if claim.rates then
    if claim.cost > 0 and not claim.own then a = false end -- of a rate that has no state nothing can be taken
    give_back_rates(claim, known, untouched)
  end
  write_state(claim, a, b, c, reset)
  return 1
end

-- The next claim of the body and its charge.
local function next_charge()
  local claim = next_claim()
  local known
  claim.charged, claim.charged_at_us, claim.seen_id, known, at = unpack('<dddB', body, at)
  if known > 0 then
    claim.undoable = true
    claim.before_a, claim.before_b, claim.before_c, claim.after_a, claim.after_b, claim.after_c, at =
      unpack('<dddddd', body, at)
    claim.others = {}
    for _ = 2, known do
      local fingerprint, other = 0, {}
      fingerprint, other[1], other[2], other[3], other[4], other[5], other[6], at = unpack('<i8i8i8i8i8i8i8', body, at)
      claim.others[fingerprint] = other
    end
  end
  return claim
end

local function give_back_request()
  local n
  n, at = unpack('<I2', body, at + 1)
  local claims, seen, given = {}, {}, 0
  for i = 1, n do claims[i] = next_charge() end
  if not read_states(claims) then return end
  for i = 1, n do
    local claim = claims[i]
    if seen[claim.key] then read_state(claim) end
    seen[claim.key] = true
    given = given + give_back_claim(claim)
  end
  add_reply(pack('<i8i8', now_us, given))
end
