-- Decides on several limits together, with waiting, peeking and `not before`: the mirror of algorithms/all_of.py.

-- Asks one rule and stores the answer in the claim: start is a moment in microseconds, retry and reset are distances from now.
local function decide_claim(claim, at_us, max_wait_us)
  local tick, cost = claim.tick, claim.cost
  local now = claim.now
  local max_wait, from = 0, now
  if cost > 0 then
    if max_wait_us > 0 then max_wait = in_ticks(claim, now_us + max_wait_us) - now end
    if at_us > now_us then from = in_ticks(claim, at_us) end
  end
  local decide, p, q, r, s = claim.rule.decide, claim.p, claim.q, claim.r, claim.s
  local wait, retry, reset
  claim.new_a, claim.new_b, claim.new_c, wait, retry, claim.left, reset =
    decide(p, q, r, s, claim.a, claim.b, claim.c, now, from, cost, max_wait)
  claim.retry = retry > 0 and (now + retry) * tick - now_us or 0
  claim.reset = reset > 0 and (now + reset) * tick - now_us or 0
  if wait == -1 and tick > 1 and max_wait_us > 0 then
    -- The exact retry in microseconds: max_wait_us is not a whole number of coarse ticks.
    local _, far, room, whole
    _, _, _, far, room, _, whole =
      decide(p, q, r, s, claim.a, claim.b, claim.c, now, now, cost, horizon(claim))
    if far >= 0 then
      retry = (now + far) * tick - max_wait_us - now_us
      claim.retry = retry > 0 and retry or 0
    else
      claim.retry = (now + room) * tick - now_us
      retry = (now + (claim.rule.queues and whole or room + horizon(claim))) * tick - max_wait_us - now_us
      if retry > claim.retry then claim.retry = retry end
    end
  end
  if cost == 0 then -- a cost of 0 is always allowed
    claim.start = at_us
    claim.retry = 0
  elseif wait >= 0 then
    claim.start = wait > 0 and (now + wait) * tick or now_us
  else
    claim.start = wait
  end
end

-- Finds the common start and charges all claims at it; returns -1 (refused) or -2 (never) when one of them does not fit.
local function decide_all(claims, not_before_us, max_wait_us)
  local start_us, worst, at_us = now_us, 0, now_us
  if not_before_us > now_us then
    start_us = not_before_us
    at_us = not_before_us
  end
  for i = 1, #claims do
    local claim = claims[i]
    if not claim.rule.reserves then -- a limit that can't reserve makes all of them decide for now
      max_wait_us = 0
    elseif claim.rule.paces and claim.cost > 0 and horizon(claim) * claim.tick < max_wait_us then
      max_wait_us = horizon(claim) * claim.tick -- nor do they wait longer than each of them can count
    end
  end
  for i = 1, #claims do
    local claim = claims[i]
    decide_claim(claim, at_us, max_wait_us)
    if claim.start < worst then
      worst = claim.start
    elseif claim.start > start_us then
      start_us = claim.start
    end
  end
  if worst < 0 then return worst end
  if start_us > now_us then
    for i = 1, #claims do
      if claims[i].start < start_us then decide_claim(claims[i], start_us, 4503599627370496) end
    end
  end
  return start_us
end

-- Writes a claim that is charged, and charges the other rates of its key at the common start.
local function commit_claim(claim, start_us)
  local c = claim.new_c
  if claim.rule.logs then c = claim.rule.add(claim.longest, c, now_us, claim.new_a, claim.new_b) end
  if claim.rates then charge_rates(claim, start_us) end
  write_state(claim, claim.new_a, claim.new_b, c, claim.reset)
end

-- Writes what is charged; where nothing is, but with `commit`, a state whose dates moved back, and after a refusal the one that a
-- new rate starts with on the key, so that the retry time of its first call holds (`first`: always, a charge may follow). Returns
-- the reply: the common start; for each claim its start, retry, remaining, reset; with `remember` also the number of the key's
-- reset marker, and the states before and after the charge, for an exact undo; at the end for each claim the number of other rates
-- that were charged, and of each its fingerprint and its states before and after.
local function commit_claims(claims, start_us, commit, remember, first)
  local stored = start_us >= 0 and commit
  local n = #claims
  local reply, others = { pack('<i8', start_us) }, ''
  for i = 1, n do
    local claim = claims[i]
    if stored and claim.cost > 0 then
      commit_claim(claim, start_us)
    else
      if not stored then claim.left, claim.reset = peek(claim, claim.a, claim.b, claim.c) end
      local first_use = claim.first_use and (first or commit and start_us == -1) and claim.cost > 0
      if commit and claim.moved or first_use then
        if first_use and claim.rates then make_room(claim) end
        write_state(claim, (claim.own or first_use or not claim.rates) and claim.a, claim.b, claim.c, claim.reset)
      end
    end
    local text = pack('<i8i8i8i8', claim.start, claim.retry, claim.left, claim.reset)
    if stored and remember then
      text = text .. pack('<i8', claim.reset_id)
      if not claim.rule.logs then
        text = text .. pack('<i8i8i8i8i8i8', claim.a, claim.b, claim.c, claim.new_a, claim.new_b, claim.new_c)
      end
      others = others .. (claim.cost > 0 and claim.rates and charges_of_others(claim) or '\0')
    end
    reply[i + 1] = text
  end
  return table.concat(reply) .. others
end

local function decide_request()
  local n, commit, remember, max_wait_us, not_before_us
  n, commit, remember, max_wait_us, not_before_us, at = unpack('<I2BBdd', body, at + 1)
  local claims = { next_claim() }
  for i = 2, n do claims[i] = next_claim() end
  if not read_states(claims) then return end
  local start_us = decide_all(claims, not_before_us, max_wait_us)
  add_reply(pack('<i8', now_us) .. commit_claims(claims, start_us, commit == 1, remember > 0, commit == 2))
end
