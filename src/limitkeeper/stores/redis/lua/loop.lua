-- The asks of a call, one behind the other; the first byte of each says what it wants.
local size = #body
while at <= size do
  verbs[string.byte(body, at)]()
end
return table.concat(said)
