-- Removes bookings from a queue and moves the others up, in one step: the mirror of MemoryStore.rebook. A booking in the body:
-- number of claims, whether it stays, when it was charged, its deadline (-1: none), and its charges. Reply: now; for each booking 0
-- when it keeps its start or has left, 2 when it has left and is from before a reset, or 1 and the reply of `commit_claims`.

-- Gives back the claims of a booking, as far as they are not from before a reset.
local function give_back_booking(booking)
  booking.given = 0
  for _, claim in ipairs(booking) do
    read_state(claim)
    booking.given = booking.given + give_back_claim(claim)
  end
end

-- The reply of a booking that is not charged again.
local function kept(booking)
  return pack('<B', not booking.stays and booking.given == 0 and 2 or 0)
end

-- Undoes a rebooking that would delay a waiter: restores all states, then gives back only the bookings that leave.
local function restore(bookings, saved)
  for key, was in pairs(saved) do
    if was.value then
      call('SET', key, was.value, 'PX', was.ttl > 0 and was.ttl or 1)
    else
      call('DEL', key)
    end
  end
  local same = {}
  for i = #bookings, 1, -1 do
    if not bookings[i].stays then give_back_booking(bookings[i]) end
    same[i] = kept(bookings[i])
  end
  return table.concat(same)
end

local function rebook(bookings)
  local saved = {}
  for i = 1, #bookings do
    for _, claim in ipairs(bookings[i]) do
      if not saved[claim.key] then
        saved[claim.key] = { value = claim.raw, ttl = call('PTTL', claim.key) }
      end
    end
  end
  for i = #bookings, 1, -1 do
    local booking = bookings[i]
    if not booking.stays or booking.charged_at_us > now_us then give_back_booking(booking) end
  end
  local reply = {}
  for i = 1, #bookings do
    local booking = bookings[i]
    if not booking.stays or booking.charged_at_us <= now_us or booking.given == 0 then
      reply[i] = kept(booking)
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
