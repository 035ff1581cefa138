-- A limit made known: who its digest is, when it was born, and since when this rate holds. Each is written once; what is there
-- is answered: birth, "since text" of this rate, identity, each behind its length.
local function register_ask()
  local ttl, print, text, identity
  ttl, print, text, identity, at = unpack('<dI4c0I4c0I4c0', body, at + 1)
  --@now
  last_key = last_key + 1
  local key, moment = keys[last_key], string.format('%.0f', now_us)
  call('HSETNX', key, 'identity', identity)
  call('HSETNX', key, 'birth', moment)
  call('HSETNX', key, print, moment .. ' ' .. text)
  call('PEXPIRE', key, ttl)
  local known = call('HMGET', key, 'birth', print, 'identity')
  asked = asked + 1
  said[asked] = pack('<I4', #known[1]) .. known[1] .. pack('<I4', #known[2]) .. known[2] .. pack('<I4', #known[3]) .. known[3]
end
