-- Token bucket and leaky bucket: the mirror of algorithms/token_bucket.py, which explains the numbers.
-- `till` is `until` there, a word that Lua keeps. Answers are distances from now. `drained` guards C's integers only.

---- traits
reserves = true, paces = true, sums_later_starts = true

---- decide
local function token_bucket(gain, unit, full, capacity, at, taken, till, now, not_before, cost, max_wait)
  local level = taken
  local elapsed = now - at
  if elapsed > 0 then
    level = taken - elapsed * gain
    if level < 0 then level = 0 end
  end
  local verdict, retry = -1, 0
  local rest
  if cost > capacity then
    verdict = -2
  else
    local need = cost * unit
    local wait = level + (need - full)
    if wait > 0 then
      rest = wait % gain
      wait = (wait - rest) / gain
      if rest > 0 then wait = wait + 1 end
    else
      wait = 0
    end
    if not_before - now > wait then wait = not_before - now end
    if max_wait > 0 then
      local horizon = 9007199254740991 - full - gain
      horizon = (horizon - horizon % gain) / gain
      if max_wait > horizon then max_wait = horizon end
    end
    if wait <= max_wait then
      if wait > 0 then
        local lead = wait * gain
        if lead > level then level = lead end -- at its start the bucket is full
        if till > now and (till - now) * gain > lead then lead = (till - now) * gain end
        lead = lead + need
        rest = lead % gain
        till = now + (lead - rest) / gain
        if rest > 0 then till = till + 1 end
      end
      level = level + need
      local reset = level % gain
      reset = reset > 0 and (level - reset) / gain + 1 or level / gain
      local left = full - level
      left = left > 0 and (left - left % unit) / unit or 0
      return elapsed > 0 and now or at, level, till > now and till or 0, wait, 0, left, reset
    end
    retry = wait - max_wait
  end
  local reset = level % gain
  reset = reset > 0 and (level - reset) / gain + 1 or level / gain
  local left = full - level
  left = left > 0 and (left - left % unit) / unit or 0
  return at, taken, till, verdict, retry, left, reset
end

---- give_back
local function token_bucket_give_back(gain, unit, full, capacity, at, taken, till, now, cost, charged, charged_at)
  local elapsed = now - at
  if elapsed > 0 then
    taken = taken - elapsed * gain
    if taken < 0 then taken = 0 end
    at = now
  end
  local rest = unit % gain
  local token = (unit - rest) / gain
  if rest > 0 then token = token + 1 end
  if till <= now + token then till = 0 end -- a token or less is unpaid: nothing is still to start
  if cost < 0 then -- settled above its estimate: into debt
    local room = 9007199254740991 - taken
    rest = room % unit
    if -cost > (room - rest) / unit then return at, 9007199254740991 - rest, till end
    return at, taken - cost * unit, till
  end
  if cost > capacity then cost = capacity end
  if charged > capacity then charged = 0 end -- of another rate: charged here as debt, without a start
  local back = cost * unit
  local ahead = charged_at - now
  if charged_at < 0 then ahead = 0 end
  local whole = charged * unit
  rest = whole % gain
  local paid = charged_at + (whole - rest) / gain
  if rest > 0 then paid = paid + 1 end
  if taken > full and ahead > 0 then
    local horizon = 9007199254740991 - full - gain
    horizon = (horizon - horizon % gain) / gain
    -- Go's CancelAt: what others reserved behind this start stays theirs; the rest of what is missing is debt.
    if ahead > horizon then return at, taken, till end
    local behind = taken - ahead * gain - full
    if charged == 0 or till <= paid then -- no start behind it
      behind = 0
    elseif behind > (till - paid) * gain then
      behind = (till - paid) * gain
    end
    if behind > 0 then back = back > behind and back - behind or 0 end
  end
  if charged_at >= 0 then
    if charged_at > now then
      if till > charged_at and till <= paid then -- the last start to come was this one; before it: made as debt
        whole = (charged - cost) * unit
        rest = whole % gain
        till = charged_at + (whole - rest) / gain
        if rest > 0 then till = till + 1 end
      end
    elseif till == paid and taken - (till - now) * gain <= unit - gain then
      till = 0 -- the last start was this one, which has begun: with another to come, a token more would be missing
    end
  end
  local floor = till > now and (till - now) * gain or 0
  taken = taken > back and taken - back or 0
  return at, taken > floor and taken or floor, till
end

---- used
local function token_bucket_used(gain, unit, full, capacity, at, taken, till, now)
  local elapsed = now - at
  if elapsed > 0 then taken = taken - elapsed * gain end
  if taken <= 0 then return 0 end
  local rest = taken % unit
  return rest > 0 and (taken - rest) / unit + 1 or taken / unit
end

---- redate
local function token_bucket_redate(gain, unit, full, capacity, at, taken, till, now, last)
  return at - (last - now), taken, till > 0 and till - (last - now) or 0
end
