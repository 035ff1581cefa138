-- Executes the requests of a call in order; the first byte of each names its operation.
local size = #body
while at <= size do
  --@now
  operations[string.byte(body, at)]()
end
return table.concat(replies)
