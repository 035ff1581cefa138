-- The base of every operation but plain hits: reads claims from the body and states from their keys, converts between
-- microseconds (outside) and ticks (inside a rule), writes states.
--
-- A claim in the body: rule, extras, fingerprint, cost, tick, four numbers of the rule; then, by the bits of extras,
--   1: the state of an unseen key (a, b), and when it has filled up (µs)     2: the whole key, stored behind a state under its hash
--      `is_early`: the clock went back since the limit's birth; an unseen key then begins to fill up with its first call
--   4: other rates of this name: their number, and of each fingerprint, tick and the four numbers of the rule (see rates.lua)
local call, unpack, pack, body, keys = redis.call, struct.unpack, struct.pack, ARGV[1], KEYS
local replies, reply_count, at, last_key, now_us = {}, 0, 1, 0, 0
local known = {} -- the rates that the requests of this call name, by fingerprint
local read_rates, pack_rates, charge_rates, charges_of_others, give_back_rates, make_room -- rates.lua, in the calls that include it
local given_back -- give_back.lua
--@time

-- A claim with all its fields: a table that grows field by field is reallocated half a dozen times.
local function new_claim(rule, fingerprint, cost, tick, p, q, r, s)
  last_key = last_key + 1
  local claim = {
    rule = rules[rule], key = keys[last_key], fingerprint = fingerprint, cost = cost, tick = tick, p = p, q = q, r = r, s = s,
    now = (now_us - now_us % tick) / tick, raw = false, present = false, moved = false, a = 0, b = 0, c = 0, new_a = 0, new_b = 0,
    new_c = 0, start = 0, retry = 0, left = 0, reset = 0, rates = false, own = false, first_use = false, longest = p, reset_id = 0,
    kept_until = 0, is_early = false,
  }
  known[fingerprint] = claim
  return claim
end

local function next_claim()
  local rule, extras, fingerprint, cost, tick, p, q, r, s
  rule, extras, fingerprint, cost, tick, p, q, r, s, at = unpack('<BBddddddd', body, at)
  local claim = new_claim(rule, fingerprint, cost, tick, p, q, r, s)
  if extras > 0 then
    if extras % 2 >= 1 then
      claim.first_a, claim.first_b, claim.full_at_us, at = unpack('<ddd', body, at)
      if claim.first_a > claim.now then claim.first_a, claim.is_early = claim.now, true end
    end
    if extras % 4 >= 2 then claim.tail, at = unpack('<I4c0', body, at) end
    if extras % 8 >= 4 then
      local n, met
      n, at = unpack('<B', body, at)
      for _ = 1, n do
        met = {}
        met.fingerprint, met.tick, met.p, met.q, met.r, met.s, at = unpack('<dddddd', body, at)
        known[met.fingerprint] = met
      end
    end
  end
  return claim
end

local function in_ticks(claim, moment_us)
  return (moment_us - moment_us % claim.tick) / claim.tick
end

-- How far ahead a rule that paces can count, in ticks.
local function horizon(claim)
  local gain, full = claim.p, claim.r
  local most = 9007199254740991 - full - gain
  return (most - most % gain) / gain
end

-- Reads a claim's state. False: the key has states of other rates, and this call lacks what it takes to read them (rates.lua, or
-- the numbers of such a rate). A key with a reset marker but no state is not `present`.
local function read_state(claim)
  local raw = call('GET', claim.key)
  local rule = claim.rule
  claim.raw, claim.present, claim.moved, claim.rates, claim.own, claim.first_use = raw, raw and true, false, false, false, false
  claim.reset_id, claim.kept_until = 0, 0
  if not raw then
    claim.a, claim.b, claim.c = claim.first_a or 0, claim.first_b or 0, 0
    claim.first_use = claim.is_early
    if rule.logs then claim.c = false end
    return true
  end
  local written, last
  if rule.logs then
    claim.c, written, last, claim.reset_id, claim.kept_until = rule.open(raw)
    claim.first_use = written < claim.p
    if written > claim.longest then claim.longest = written end
    if claim.kept_until <= now_us then claim.reset_id, claim.kept_until = 0, 0 end
    claim.present = claim.reset_id == 0 or claim.c.n > 0
  else
    written, last, claim.a, claim.b, claim.c = unpack('<ddddd', raw)
    if written ~= claim.fingerprint then return read_rates and read_rates(claim, written, last) or false end
  end
  if last > now_us then -- the clock went back: dates move back with it, and reservations keep their distance from now
    claim.moved = true
    claim.a, claim.b, claim.c = rule.redate(
      claim.p, claim.q, claim.r, claim.s, claim.a, claim.b, claim.c, claim.now, in_ticks(claim, last))
  end
  return true
end

-- Writes a state that will be as new in `reset_us`. It expires a second later, or when an unseen key would be as full.
local function write_state(claim, a, b, c, reset_us)
  if claim.full_at_us and claim.full_at_us - now_us > reset_us then reset_us = claim.full_at_us - now_us end
  local value
  if claim.rule.logs then
    value, reset_us = claim.rule.close(claim.longest, now_us, c, claim.reset_id, claim.kept_until)
  elseif claim.rates then
    value, reset_us = pack_rates(claim, a, b, c, reset_us)
  else
    value = pack('<ddddd', claim.fingerprint, now_us, a, b, c)
  end
  if claim.tail then value = value .. claim.tail end
  if reset_us > 1e18 then reset_us = 1e18 end
  local reset = reset_us
  --@ttl
  call('SET', claim.key, value, 'PX', ttl)
end

-- Remaining units of a state, and microseconds until it is as new.
local function peek(claim, a, b, c)
  local now = claim.now
  local _, left, reset
  _, _, _, _, _, left, reset = claim.rule.decide(claim.p, claim.q, claim.r, claim.s, a, b, c, now, now, 0, 0)
  if reset > 0 then reset = (now + reset) * claim.tick - now_us end
  return left, reset
end

local function add_reply(reply)
  reply_count = reply_count + 1
  replies[reply_count] = reply
end

-- Reads the states of all claims of a request. False: at least one could not be read; the reply holds the bytes of each such one.
-- With `hits` also one that has several rates or a reset marker: the general form of the request is sent next.
local function read_states(claims, hits)
  local stale = false
  for i = 1, #claims do
    if not read_state(claims[i]) or hits and claims[i].rates then
      stale = true
      claims[i].stale = true
    end
  end
  if not stale then return true end
  local reply = { pack('<i8i8', -1, now_us) }
  for i = 1, #claims do
    local raw = claims[i].stale and claims[i].raw or ''
    reply[i + 1] = pack('<I4', #raw) .. raw
  end
  add_reply(table.concat(reply))
  return false
end
