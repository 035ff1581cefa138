-- Leaky bucket, the queue: the mirror of algorithms/leaky_queue.py, which explains the numbers. Answers are distances from now.

---- traits
reserves = true, paces = true, queues = true

---- decide
local function leaky_queue(gain, unit, full, capacity, at, backlog, gap, now, not_before, cost, max_wait)
  local level = backlog
  local elapsed = now - at
  if elapsed > 0 then
    level = backlog - elapsed * gain
    if level < 0 then level = 0 end
  end
  local verdict, retry = -1, 0
  local rest = level % gain
  local drained = (level - rest) / gain -- ticks until the line is empty
  if rest > 0 then drained = drained + 1 end
  if cost > capacity then
    verdict = -2
  else
    local need = cost * unit
    local wait = drained
    local late = not_before - now
    if late > wait then
      wait = late
    else
      late = 0 -- its own start, rounded up to a tick: the fraction stays in the line
    end
    if max_wait > 0 then
      local horizon = 9007199254740991 - full - gain
      horizon = (horizon - horizon % gain) / gain
      if max_wait > horizon then max_wait = horizon end
    end
    local over = level + (need - full)
    if over > 0 then -- no room: it must drain first, whatever the patience
      rest = over % gain
      retry = (over - rest) / gain
      if rest > 0 then retry = retry + 1 end
    elseif wait <= max_wait then
      gap = 0
      if late > 0 and late * gain > level then
        gap = late * gain - level
        level = late * gain
      end
      level = level + need
      rest = level % gain
      local reset = (level - rest) / gain
      if rest > 0 then reset = reset + 1 end
      return elapsed > 0 and now or at, level, gap, wait, 0, level > 0 and 0 or capacity, reset
    end
    if wait - max_wait > retry then retry = wait - max_wait end
  end
  return at, backlog, gap, verdict, retry, level > 0 and 0 or capacity, drained
end

---- give_back
local function leaky_queue_give_back(gain, unit, full, capacity, at, backlog, gap, now, cost, charged, charged_at)
  local elapsed = now - at
  if elapsed > 0 then
    backlog = backlog - elapsed * gain
    if backlog < 0 then backlog = 0 end
    at = now
  end
  if cost < 0 then
    local room = 9007199254740991 - backlog
    local rest = room % unit
    if -cost > (room - rest) / unit then return at, 9007199254740991 - rest, gap end
    return at, backlog - cost * unit, gap
  end
  if cost > capacity then cost = capacity end
  local back = cost * unit
  local ahead = charged_at - now
  local horizon = 9007199254740991 - full - gain
  horizon = (horizon - horizon % gain) / gain
  if ahead > horizon or -ahead > horizon then return at, backlog, gap end
  -- The turns behind this one are taken: only the last turn of the line can be given back.
  local own = backlog - ahead * gain
  if own > 0 and (own - 1 - (own - 1) % unit) / unit >= charged then return at, backlog, gap end
  if ahead > 0 and cost == charged and own == back then back = back + gap end
  return at, backlog > back and backlog - back or 0, back > 0 and 0 or gap
end

---- used
local function leaky_queue_used(gain, unit, full, capacity, at, backlog, gap, now)
  local elapsed = now - at
  if elapsed > 0 then backlog = backlog - elapsed * gain end
  if backlog <= 0 then return 0 end
  local rest = backlog % unit
  return rest > 0 and (backlog - rest) / unit + 1 or backlog / unit
end

---- redate
local function leaky_queue_redate(gain, unit, full, capacity, at, backlog, gap, now, last)
  return at - (last - now), backlog, gap
end
