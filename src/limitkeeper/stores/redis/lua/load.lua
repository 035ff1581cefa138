-- Writes a state that came from another store, replacing that of this rate, or the log: after its claim three numbers, or a log as it
-- is stored. Reply: now.
local function load_request()
  at = at + 1
  local claim = next_claim()
  local state
  state, at = unpack('<I4c0', body, at)
  local a, b, c = 0, 0, 0
  if claim.rule.logs then
    c = claim.rule.open(state)
  else
    if not read_states({ claim }) then return end
    if claim.rates then make_room(claim) end
    claim.reset_id, claim.kept_until = 0, 0
    a, b, c = unpack('<ddd', state)
  end
  local _, reset = peek(claim, a, b, c)
  write_state(claim, a, b, c, reset)
  add_reply(pack('<i8', now_us))
end
