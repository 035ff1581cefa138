-- Sliding window counter: the mirror of algorithms/sliding_counter.py, which explains the numbers. Answers are distances from now.

---- traits
reserves = false

---- decide
local function sliding_counter(size, count, horizon, _, window, cur, prev, now, not_before, cost, max_wait)
  local here = now - now % size
  local this, last = 0, 0
  if here <= window then
    here = window
    this = cur
    last = prev
  elseif here == window + size then
    last = cur
  end
  local elapsed = now > here and now - here or 0
  local free = (count - this) * size - last * (size - elapsed)
  local verdict, retry = -1, 0
  if cost > count then
    verdict = -2
  elseif cost * size <= free then
    if not_before <= now then
      free = free - cost * size
      this = this + cost
      local reset = 0
      if this > 0 then
        reset = here + 2 * size - now
      elseif last > 0 then
        reset = here + size - now
      end
      return here, this, last, 0, 0, (free - free % size) / size, reset
    end
  else
    local room = count - this - cost
    if room >= 0 then
      room = room * size
      retry = here + size - (room - room % last) / last - now
    else
      room = (count - cost) * size
      room = (room - room % this) / this
      retry = here + size + (room < size and size - room or 0) - now
    end
  end
  local reset = 0
  if this > 0 then
    reset = here + 2 * size - now
  elseif last > 0 then
    reset = here + size - now
  end
  return window, cur, prev, verdict, retry, free > 0 and (free - free % size) / size or 0, reset
end

---- give_back
local function sliding_counter_give_back(size, count, horizon, _, window, cur, prev, now, cost, charged, charged_at)
  local here = now - now % size
  if here > window then
    prev = here == window + size and cur or 0
    cur = 0
  else
    here = window
  end
  if cost < 0 then return here, -cost > horizon - cur and horizon or cur - cost, prev end
  if charged_at < 0 or charged_at >= here then
    cur = cur > cost and cur - cost or 0
  elseif charged_at >= here - size then
    prev = prev > cost and prev - cost or 0
  end
  return here, cur, prev
end

---- used
local function sliding_counter_used(size, count, horizon, _, window, cur, prev, now)
  local here = now - now % size
  if here > window then
    prev = here == window + size and cur or 0
    cur = 0
  else
    here = window
  end
  local weighted = prev * (size - (now > here and now - here or 0))
  local rest = weighted % size
  return cur + (weighted - rest) / size + (rest > 0 and 1 or 0)
end

---- redate
-- By whole windows. Where now lies later in its window than the last write did in its own, less of the weight would be left
-- than was: then the state lies one window ahead, and keeps all of its weight until that begins.
local function sliding_counter_redate(size, count, horizon, _, window, cur, prev, now, last)
  local back = (last - last % size) - (now - now % size)
  if now % size > last % size then back = back - size end
  return window - back, cur, prev
end
