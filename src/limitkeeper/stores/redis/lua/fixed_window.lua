-- Fixed window: the mirror of algorithms/fixed_window.py, which explains the numbers. Answers are distances from now.

---- traits
reserves = true

---- decide
local function fixed_window(size, count, aligned, _, window, used, before, now, not_before, cost, max_wait)
  local verdict, retry = -1, 0
  if cost > count then
    verdict = -2
  else
    local start = not_before > now and not_before or now
    if start < window then start = window end -- something is reserved ahead: behind it
    local opened = start
    if aligned > 0 then
      opened = start - start % size
    elseif used > 0 and start < window + size then
      opened = window
    end
    local filled, past = used, before
    if opened ~= window then
      if opened == window + size then
        past = used
      elseif window + size <= now or used == 0 then
        past = -3
      else -- a gap: what is in the old window is no longer known
        past = window > now and -1 or -2
      end
      filled = 0
    end
    if filled + cost > count then
      past = filled
      opened = opened + size
      start = opened
      filled = 0
    end
    if start - now <= max_wait then
      filled = filled + cost
      return opened, filled, past, start - now, 0,
        opened <= now and filled < count and count - filled or 0, filled > 0 and opened + size - now or 0
    end
    retry = start - max_wait - now
  end
  local left, reset = count, 0
  if used > 0 and now < window + size then
    reset = window + size - now
    left = used < count and count - used or 0
    if now < window then left = 0 end
  end
  return window, used, before, verdict, retry, left, reset
end

---- give_back
local function fixed_window_give_back(size, count, aligned, _, window, used, before, now, cost, charged, charged_at)
  if cost < 0 then -- settled above its estimate: over the count of the window that is running; of another rate: in that of its start
    if -cost > 2251799813685247 then cost = -2251799813685247 end
    local start = charged == 0 and charged_at > now and charged_at or now
    if start >= window + size or used == 0 then
      local opened = aligned > 0 and start - start % size or start
      if opened <= now then return opened, -cost, 0 end
      if opened == window + size then return opened, -cost, used end
      if window + size <= now or used == 0 then return opened, -cost, -3 end
      return opened, -cost, window > now and -1 or -2
    end
    if window > start and window - size <= start and before ~= -1 and before ~= -2 then
      if before < 0 then before = 0 end
      return window, used, before < 4503599627370495 and before - cost or before
    end
    return window, used < 4503599627370495 and used - cost or used, before
  end
  if charged_at < 0 then charged_at = now end
  if charged_at >= window and charged_at < window + size and now < window + size then
    used = used > cost and used - cost or 0
    while used == 0 and window > now do -- the reservation ahead is gone: back to the window before it that is not empty
      if before == -3 then return 0, 0, 0 end
      if before == -2 then return aligned > 0 and now - now % size or now, count, 0 end
      window = window - size
      used = before >= 0 and before or count
      before = window <= now and 0 or -1
    end
  elseif before > 0 and charged_at < window and charged_at >= window - size and now < window then
    before = before > cost and before - cost or 0
  end
  return window, used, before
end

---- used
local function fixed_window_used(size, count, aligned, _, window, used, before, now)
  if now >= window + size then return 0 end
  if now >= window or before == -3 then return used end
  if before < 0 then return used + count end
  -- A later window is reserved: the one before it counts too, and those between it and the present one as full.
  local between = math.floor((window - now - 1) / size)
  used = used + before
  return between > math.floor((9007199254740991 - used) / count) and 9007199254740991 or used + between * count
end

---- redate
-- Windows on the clock go back by whole windows, so that the one that was running is the one that runs now.
local function fixed_window_redate(size, count, aligned, _, window, used, before, now, last)
  if aligned > 0 then return window - ((last - last % size) - (now - now % size)), used, before end
  return window - (last - now), used, before
end
