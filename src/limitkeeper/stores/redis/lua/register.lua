-- Registers a limit: the identity behind its digest, its birth, and when this rate was first used. Each field is written once.
-- Reply: birth, "since text" of this rate, identity as they are stored, each with its length.
local function register_request()
  local ttl, print, text, identity
  ttl, print, text, identity, at = unpack('<dI4c0I4c0I4c0', body, at + 1)
  last_key = last_key + 1
  local key, moment = keys[last_key], string.format('%.0f', now_us)
  call('HSETNX', key, 'identity', identity)
  call('HSETNX', key, 'birth', moment)
  call('HSETNX', key, print, moment .. ' ' .. text)
  call('PEXPIRE', key, ttl)
  local fields = call('HMGET', key, 'birth', print, 'identity')
  for i = 1, 3 do add_reply(pack('<I4', #fields[i]) .. fields[i]) end
end
