-- Removes bookings from a queue and moves the others up, in one step: the mirror of MemoryStore.rebook. A booking in the body:
-- number of claims, whether it stays, when it was charged, its deadline (-1: none), and its charges. Reply: now; for each booking 0
-- when it keeps its start, or 1 and the reply of `commit_claims`.

-- Undoes a rebooking that would delay a waiter: restores all states, then gives back only the bookings that leave.
local function restore(bookings, saved)
  for key, was in pairs(saved) do
    if was.raw then
      local _, reset = peek(was.claim, was.a, was.b, was.c)
      write_state(was.claim, was.a, was.b, was.c, reset)
    else
      call('DEL', key)
    end
  end
  local same = {}
  for i = #bookings, 1, -1 do
    if not bookings[i].stays then
      for _, claim in ipairs(bookings[i]) do
        read_state(claim)
        give_back_claim(claim, bookings[i].charged_at_us)
      end
    end
    same[i] = pack('<B', 0)
  end
  return table.concat(same)
end

local function rebook(bookings)
  local saved = {}
  for i = 1, #bookings do
    for _, claim in ipairs(bookings[i]) do
      if not saved[claim.key] then
        saved[claim.key] = { claim = claim, raw = claim.raw, a = claim.a, b = claim.b, c = claim.c }
      end
    end
  end
  for i = #bookings, 1, -1 do
    local booking = bookings[i]
    if not booking.stays or booking.charged_at_us > now_us then
      for _, claim in ipairs(booking) do
        read_state(claim)
        give_back_claim(claim, booking.charged_at_us)
      end
    end
  end
  local reply = {}
  for i = 1, #bookings do
    local booking = bookings[i]
    if not booking.stays or booking.charged_at_us <= now_us then
      reply[i] = pack('<B', 0)
    else
      local left = booking.deadline_us < 0 and 4503599627370496 or booking.deadline_us - now_us
      for _, claim in ipairs(booking) do read_state(claim) end
      local start_us = decide_all(booking, 0, left > 0 and left or 0)
      if start_us < 0 or start_us > booking.charged_at_us then return restore(bookings, saved) end
      reply[i] = pack('<B', 1) .. commit_claims(booking, start_us, true, true)
    end
  end
  return table.concat(reply)
end

local function rebook_request()
  local n, size, stays
  n, at = unpack('<I4', body, at + 1)
  local bookings, claims = {}, {}
  for i = 1, n do
    local booking = {}
    size, stays, booking.charged_at_us, booking.deadline_us, at = unpack('<I2Bdd', body, at)
    booking.stays = stays > 0
    for j = 1, size do
      booking[j] = next_charge()
      claims[#claims + 1] = booking[j]
    end
    bookings[i] = booking
  end
  if not read_states(claims) then return end
  add_reply(pack('<i8', now_us) .. rebook(bookings))
end
