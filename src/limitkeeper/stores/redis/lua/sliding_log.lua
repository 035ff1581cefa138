-- Sliding window log: the mirror of algorithms/sliding_log.py, which explains the numbers. Answers are distances from now.
--
-- Under its key a log is the longest window of the rates that use it, moment of writing, base, n, and n pairs of (moment, running
-- total): the flat array of the .py without the ring, so that both questions are a binary search in the bytes as they are. After a
-- reset the window is negative, and the reset marker (its number, until when it is kept) stands at the end. Where the clock went
-- back, n is larger by 1/64 for each such step, and behind the entries stand pairs of (by how much it moved the entries, until when
-- it is kept): a charge is given back by its moment, which may be from before a step. While a script runs, a log is a table {text,
-- first byte of the entries, n, base, steps}; false when there is none.

---- traits
reserves = true, logs = true, open = open_log, close = close_log, add = add_entry

---- logs
local function moment_of(log, i) return (struct.unpack('<d', log.text, log.first + 16 * i)) end

local function total_of(log, i) return (struct.unpack('<d', log.text, log.first + 16 * i + 8)) end

local function total_before(log, i) return i == 0 and log.base or total_of(log, i - 1) end

-- The first entry >= low whose field (0 moment, 1 total) is beyond `bound`: doubling steps, then halving.
local function first_beyond(log, field, bound, low)
  local n, step, high = log.n, 1, low
  local get = field == 0 and moment_of or total_of
  while high < n and get(log, high) <= bound do
    low = high + 1
    high = high + step
    step = step + step
  end
  if high > n then high = n end
  while low < high do
    local middle = (low + high - (low + high) % 2) / 2
    if get(log, middle) <= bound then low = middle + 1 else high = middle end
  end
  return low
end

-- The log in a value, the longest window, the moment of writing, and the reset marker.
local function open_log(raw)
  local longest, last, base, n = struct.unpack('<dddd', raw)
  local count, steps = n % 1 * 64, nil
  n = n - n % 1
  local log, reset_id, kept_until = { text = raw, first = 33, n = n, base = base }, 0, 0
  if count > 0 then
    steps = {}
    for i = 1, count do steps[i] = { struct.unpack('<dd', raw, 17 + 16 * (n + i)) } end
    log.steps = steps
  end
  if longest < 0 then reset_id, kept_until = struct.unpack('<dd', raw, 33 + 16 * (n + count)) end
  return log, longest < 0 and -longest or longest, last, reset_id, kept_until
end

-- The bytes of entries from i up to, not including, j.
local function entries(log, i, j) return string.sub(log.text, log.first + 16 * i, log.first + 16 * j - 1) end

-- The bytes of entries from i on, with totals larger by `more` (or smaller) and moments later by `later`.
local function shifted(log, i, more, later)
  local parts = {}
  for j = i, log.n - 1 do parts[#parts + 1] = struct.pack('<dd', moment_of(log, j) + later, total_of(log, j) + more) end
  return table.concat(parts)
end

-- The value of a log, and how long (µs) it counts for the longest window.
local function close_log(longest, now_us, log, reset_id, kept_until)
  log = log or { text = '', first = 1, n = 0, base = 0 }
  if log.base > 4503599627370496 then -- totals start again before they leave 2^53
    log = { text = shifted(log, 0, -log.base, 0), first = 1, n = log.n, base = 0, steps = log.steps }
  end
  local reset = log.n > 0 and moment_of(log, log.n - 1) + longest - now_us or 0
  local steps, count = '', 0
  for i = log.steps and math.max(1, #log.steps - 7) or 1, log.steps and #log.steps or 0 do -- the last eight
    local till = log.steps[i][2] or now_us + longest
    if till > now_us then steps, count = steps .. struct.pack('<dd', log.steps[i][1], till), count + 1 end
  end
  local text = struct.pack('<ddd', now_us, log.base, log.n + count / 64) .. entries(log, 0, log.n) .. steps
  if kept_until <= now_us then return struct.pack('<d', longest) .. text, reset end
  if kept_until - now_us > reset then reset = kept_until - now_us end
  return struct.pack('<d', -longest) .. text .. struct.pack('<dd', reset_id, kept_until), reset
end

-- Prunes what is older than the window, and adds an entry in its place; calls of one moment share one.
local function add_entry(window, log, now, moment, cost)
  if not log then return { text = struct.pack('<dd', moment, cost), first = 1, n = 1, base = 0 } end
  local gone = first_beyond(log, 0, now - window, 0)
  local n = log.n - gone
  local base = n > 0 and total_before(log, gone) or 0
  log = { text = log.text, first = log.first + 16 * gone, n = n, base = base, steps = log.steps }
  local i = first_beyond(log, 0, moment, 0)
  local k = i
  if i > 0 and moment_of(log, i - 1) == moment then k = i - 1 end
  local total = total_before(log, i) + cost
  local text = entries(log, 0, k) .. struct.pack('<dd', moment, total) .. shifted(log, i, cost, 0)
  return { text = text, first = 1, n = #text / 16, base = base, steps = log.steps }
end

---- decide
local function sliding_log(window, count, _, _, _, _, log, now, not_before, cost, max_wait)
  local start = not_before > now and not_before or now
  if not log or log.n == 0 then
    if cost > count then return 0, 0, log, -2, 0, count, 0 end
    if start - now > max_wait then return 0, 0, log, -1, start - max_wait - now, count, 0 end
    return start, cost, log, start - now, 0, count - cost, cost > 0 and start + window - now or 0
  end
  local n = log.n
  local live = first_beyond(log, 0, now - window, 0)
  local last = total_before(log, n)
  local left = count - (last - total_before(log, live))
  local reset = live < n and moment_of(log, n - 1) + window - now or 0
  local verdict, retry = -1, 0
  if cost > count then
    verdict = -2
  else
    if start > now then live = first_beyond(log, 0, start - window, live) end
    local over = last - total_before(log, live) + cost - count
    if over > 0 then -- wait until entries worth `over` have expired
      live = first_beyond(log, 1, total_before(log, live) + over - 1, live)
      start = moment_of(log, live) + window
    end
    if start - now <= max_wait then
      if cost > 0 and start + window - now > reset then reset = start + window - now end
      left = left - cost
      return start, cost, log, start - now, 0, left > 0 and left or 0, reset
    end
    retry = start - max_wait - now
  end
  return 0, 0, log, verdict, retry, left > 0 and left or 0, reset
end

---- give_back
-- Takes `cost` out of entry i, and the entry out of the log when nothing is left of it.
local function take(log, i, cost)
  local moment, total = moment_of(log, i), total_of(log, i) - cost
  local kept = total > total_before(log, i) and struct.pack('<dd', moment, total) or ''
  local text = entries(log, 0, i) .. kept .. shifted(log, i + 1, -cost, 0)
  return { text = text, first = 1, n = #text / 16, base = log.base, steps = log.steps }
end

local function sliding_log_give_back(window, count, _, _, _, _, log, now, cost, charged, charged_at)
  if cost < 0 then -- settled above its estimate: an entry now, for the store to add
    return now, -cost < 4503599627370496 and -cost or 4503599627370496, log
  end
  if not log then return 0, 0, log end
  local i, part
  if charged_at >= 0 then
    local steps = log.steps or {}
    for step = #steps, 0, -1 do -- the moment itself, or where the steps since then have moved it
      i = first_beyond(log, 0, charged_at - 1, 0)
      if i < log.n and moment_of(log, i) == charged_at then
        part = total_of(log, i) - total_before(log, i)
        return 0, 0, charged_at > now - window and take(log, i, cost < part and cost or part) or log
      end
      if step > 0 then charged_at = charged_at + steps[step][1] end
    end
    return 0, 0, log
  end
  i = first_beyond(log, 0, now, 0) - 1
  while cost > 0 and i >= 0 do -- a refund: from the newest entries that still count, not from what is still to come
    if moment_of(log, i) <= now - window then break end
    part = total_of(log, i) - total_before(log, i)
    if part > cost then part = cost end
    log = take(log, i, part)
    cost = cost - part
    i = i - 1
  end
  return 0, 0, log
end

---- redate
local function sliding_log_redate(window, count, _, _, a, b, log, now, last)
  local steps = log.steps or {}
  steps[#steps + 1] = { now - last }
  return a, b, { text = shifted(log, 0, 0, now - last), first = 1, n = log.n, base = log.base, steps = steps }
end
