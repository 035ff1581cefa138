-- Writes a state that came from another store, replacing what is there: after its claim three numbers, or a log as it is stored.
local function load_request()
  at = at + 1
  local claim = next_claim()
  local state
  state, at = unpack('<I4c0', body, at)
  local a, b, c, _
  if claim.rule.logs then
    _, _, a, b, c = claim.rule.open(state)
  else
    a, b, c = unpack('<ddd', state)
  end
  local reset
  _, reset = peek(claim, a, b, c)
  write_state(claim, a, b, c, reset)
  add_reply(pack('<i8', now_us))
end
