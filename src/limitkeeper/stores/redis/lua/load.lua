-- A state from elsewhere, whatever is there now: behind its claim three numbers, or a log as it lies under its key.
local function load_ask()
  at = at + 1
  --@now
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
  _, reset = look(claim, a, b, c)
  store(claim, a, b, c, reset)
  asked = asked + 1
  said[asked] = pack('<i8', now_us)
end
