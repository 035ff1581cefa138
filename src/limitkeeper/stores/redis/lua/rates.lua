-- Several rates under one name: each rate in use on a key has its own state, every charge counts for all of them, and only the
-- caller's is asked. The mirror of `seeded` and `charged_too` in algorithms/. A key with several rates, or with a reset marker, is
-- stored as −n, the moment of writing, and n blocks of nine numbers: the marker first (0, its number, until when it is kept), then
-- the rates in the order of their first use (fingerprint, tick, four numbers of the rule, state). A log serves all rates as it is.
local MOST_RATES = 4

local function new_rate(claim, numbers, a, b, c)
  local tick = numbers.tick
  return {
    rule = claim.rule, fingerprint = numbers.fingerprint, tick = tick, p = numbers.p, q = numbers.q, r = numbers.r, s = numbers.s,
    now = (now_us - now_us % tick) / tick, a = a, b = b, c = c,
  }
end

-- The state of an unseen key of the claim's rate, charged with `amount` units or with as many as it can hold.
local function seed(claim, amount)
  local a, b, c = claim.first_a or 0, claim.first_b or 0, 0
  local capacity = claim.rule.paces and claim.s or claim.q
  if amount > capacity then amount = capacity end
  return claim.rule.give_back(claim.p, claim.q, claim.r, claim.s, a, b, c, claim.now, 0 - amount, amount, -1)
end

local function read_block(claim, i)
  local numbers, a, b, c = {}
  numbers.fingerprint, numbers.tick, numbers.p, numbers.q, numbers.r, numbers.s, a, b, c =
    unpack('<ddddddddd', claim.raw, 72 * i - 55)
  if numbers.fingerprint > 0 then return new_rate(claim, numbers, a, b, c) end
  claim.reset_id, claim.kept_until = numbers.tick, numbers.p
end

-- Reads the states of a key that has another rate than the claim's. False: its numbers are not known.
read_rates = function(claim, first, last)
  local rates, amount, n = {}, 0, 0
  if first < 0 then
    for i = 1, -first do
      local rate = read_block(claim, i)
      if rate then
        n = n + 1
        rates[n] = rate
        if rate.fingerprint == claim.fingerprint then claim.own = rate end
      end
    end
    if claim.kept_until <= now_us then claim.reset_id, claim.kept_until = 0, 0 end
    claim.present = n > 0
  else
    local numbers = known[first]
    if not numbers then return false end
    if numbers.tick > 0 then
      n = 1
      rates[1] = new_rate(claim, numbers, claim.a, claim.b, claim.c)
    else -- no registry has it: it counts as fully used
      amount = 9007199254740991
    end
  end
  claim.moved = n > 0 and last > now_us
  for i = 1, n do
    local rate = rates[i]
    local p, q, r, s = rate.p, rate.q, rate.r, rate.s
    if claim.moved then
      rate.a, rate.b, rate.c = rate.rule.redate(p, q, r, s, rate.a, rate.b, rate.c, rate.now, in_ticks(rate, last))
    end
    if not claim.own then
      local used = rate.rule.used(p, q, r, s, rate.a, rate.b, rate.c, rate.now)
      if used > amount then amount = used end
    end
  end
  claim.rates = rates
  claim.first_use = (claim.present or claim.is_early) and not claim.own
  if claim.own then
    claim.a, claim.b, claim.c = claim.own.a, claim.own.b, claim.own.c
  elseif claim.present then
    claim.a, claim.b, claim.c = seed(claim, amount)
  else
    claim.a, claim.b, claim.c = claim.first_a or 0, claim.first_b or 0, 0
  end
  return true
end

-- Makes room for the claim's rate where it is a fifth one: the rate that is as new the soonest goes, of equals the oldest; first of
-- those beside which another holds as much for as long.
make_room = function(claim)
  local rates, used, left, gone, was_covered = claim.rates, {}, {}
  if claim.own or #rates < MOST_RATES then return end
  for i = 1, #rates do
    local rate = rates[i]
    local _, reset = peek(rate, rate.a, rate.b, rate.c)
    used[i], left[i] = rate.rule.used(rate.p, rate.q, rate.r, rate.s, rate.a, rate.b, rate.c, rate.now), reset
  end
  for i = 1, #rates do
    local covered = false
    for j = 1, #rates do
      covered = covered or (j ~= i and used[j] >= used[i] and left[j] >= left[i])
    end
    if not gone or (covered and not was_covered) or (covered == was_covered and left[i] < left[gone]) then
      gone, was_covered = i, covered
    end
  end
  table.remove(rates, gone)
end

-- Charges the other rates of a claim's key at the common start, which the claim's own ticks may round down. One that has no room
-- there is charged above what it admits, in the window of that start or now.
charge_rates = function(claim, start_us)
  local rates, cost = claim.rates, claim.cost
  make_room(claim)
  for i = 1, #rates do
    local rate = rates[i]
    if rate ~= claim.own then
      local p, q, r, s, now, start = rate.p, rate.q, rate.r, rate.s, rate.now, in_ticks(rate, start_us)
      local a, b, c, wait = rate.rule.decide(p, q, r, s, rate.a, rate.b, rate.c, now, start, cost, 4503599627370496)
      if wait < 0 or now + wait ~= start then
        a, b, c = rate.rule.give_back(p, q, r, s, rate.a, rate.b, rate.c, now, -cost, 0, start)
      end
      rate.before = { rate.a, rate.b, rate.c }
      rate.a, rate.b, rate.c = a, b, c
    end
  end
end

-- The number of rates that were charged by a claim of another, and of each its fingerprint and its states before and after.
charges_of_others = function(claim)
  local found = {}
  for i = 1, #claim.rates do
    local rate = claim.rates[i]
    if rate.before then
      local a, b, c = rate.before[1], rate.before[2], rate.before[3]
      found[#found + 1] = pack('<i8i8i8i8i8i8i8', rate.fingerprint, a, b, c, rate.a, rate.b, rate.c)
    end
  end
  return pack('<B', #found) .. table.concat(found)
end

-- Removes a charge from the other rates. Where nothing was charged since (`untouched`), the states before it are restored, which
-- the claim has if they are `known`.
give_back_rates = function(claim, known, untouched)
  if claim.cost < 0 then make_room(claim) end
  for i = 1, #claim.rates do
    local rate = claim.rates[i]
    local other = known and claim.others[rate.fingerprint]
    if other and untouched and rate.a == other[4] and rate.b == other[5] and rate.c == other[6] then
      rate.a, rate.b, rate.c = other[1], other[2], other[3]
    elseif rate ~= claim.own then
      rate.a, rate.b, rate.c = given_back(rate, claim, other and rate.c == other[6] and other[3] or -1)
    end
  end
end

-- The value of a key, and how long (µs) it counts. `a` false: the claim's rate gets no state.
pack_rates = function(claim, a, b, c, reset_us)
  local rates, blocks = claim.rates, {}
  if not a then
    reset_us = 0
  elseif claim.own then
    claim.own.a, claim.own.b, claim.own.c = a, b, c
  else
    claim.own = new_rate(claim, claim, a, b, c)
    rates[#rates + 1] = claim.own
  end
  if claim.reset_id > 0 then
    blocks[1] = pack('<ddddddddd', 0, claim.reset_id, claim.kept_until, 0, 0, 0, 0, 0, 0)
    if claim.kept_until - now_us > reset_us then reset_us = claim.kept_until - now_us end
  elseif a and #rates == 1 then
    return pack('<ddddd', claim.fingerprint, now_us, a, b, c), reset_us
  end
  for i = 1, #rates do
    local rate = rates[i]
    if rate ~= claim.own then
      local _, reset = peek(rate, rate.a, rate.b, rate.c)
      if reset > reset_us then reset_us = reset end
    end
    blocks[#blocks + 1] =
      pack('<ddddddddd', rate.fingerprint, rate.tick, rate.p, rate.q, rate.r, rate.s, rate.a, rate.b, rate.c)
  end
  return pack('<dd', -#blocks, now_us) .. table.concat(blocks), reset_us
end
