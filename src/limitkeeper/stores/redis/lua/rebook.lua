-- Some leave a line and the others move up, in one step: the mirror of MemoryStore.rebooked. A turn in the body: how many claims,
-- whether it stays, when it was charged, its deadline (-1: none), and its charges. Reply: now; for each turn 0 when it is as it
-- was, or 1 and what `concluded` says.
local function put_back(turns, saved)
  for key, was in pairs(saved) do
    if was.there then
      local _, reset = look(was.claim, was.a, was.b, was.c)
      store(was.claim, was.a, was.b, was.c, reset)
    else
      call('DEL', key)
    end
  end
  local same = {}
  for i = #turns, 1, -1 do
    if not turns[i].stays then
      for _, claim in ipairs(turns[i]) do
        load(claim)
        return_one(claim, turns[i].charged_at_us)
      end
    end
    same[i] = pack('<B', 0)
  end
  return table.concat(same)
end

local function rebooked(turns)
  local saved = {}
  for i = 1, #turns do
    for _, claim in ipairs(turns[i]) do
      if not saved[claim.key] then
        saved[claim.key] = { claim = claim, there = claim.raw, a = claim.a, b = claim.b, c = claim.c }
      end
    end
  end
  for i = #turns, 1, -1 do
    local turn = turns[i]
    if not turn.stays or turn.charged_at_us > now_us then
      for _, claim in ipairs(turn) do
        load(claim)
        return_one(claim, turn.charged_at_us)
      end
    end
  end
  local found = {}
  for i = 1, #turns do
    local turn = turns[i]
    if not turn.stays or turn.charged_at_us <= now_us then
      found[i] = pack('<B', 0)
    else
      local left = turn.deadline_us < 0 and 4503599627370496 or turn.deadline_us - now_us
      for _, claim in ipairs(turn) do load(claim) end
      local start_us = decide_all(turn, 0, left > 0 and left or 0)
      if start_us < 0 or start_us > turn.charged_at_us then return put_back(turns, saved) end
      found[i] = pack('<B', 1) .. concluded(turn, start_us, true, true)
    end
  end
  return table.concat(found)
end

local function rebook_ask()
  local n, size, stays
  n, at = unpack('<I4', body, at + 1)
  --@now
  local turns, claims = {}, {}
  for i = 1, n do
    local turn = {}
    size, stays, turn.charged_at_us, turn.deadline_us, at = unpack('<I2Bdd', body, at)
    turn.stays = stays > 0
    for j = 1, size do
      turn[j] = next_charge()
      claims[#claims + 1] = turn[j]
    end
    turns[i] = turn
  end
  if not load_all(claims) then return end
  asked = asked + 1
  said[asked] = pack('<i8', now_us) .. rebooked(turns)
end
