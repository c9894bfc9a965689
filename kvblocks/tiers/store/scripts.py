"""What the store does atomically: scripts in Lua. All keys of a call are in one slot of a cluster."""

WRITE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[2] == '' then redis.call('SET', KEYS[2], ARGV[3]) else redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[2]) end
return 1
"""
"""Write a block, if the claim is still the caller's. A deletion removes claims too, so that no late write follows it.

KEYS: claim, block. ARGV: the claim's token, after how many seconds the block expires ('': never), and the value.
Returns whether the block was written.
"""

DELETE_VALUE = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return 0 end
if kind == 'string' and redis.sha1hex(redis.call('GET', KEYS[1])) ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
"""Delete a key whose value has this SHA-1, or isn't a string. Another value stays. Returns how many were deleted."""

NOTE_USES = """
local index, most, ttl, first, above = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if most ~= '' and not redis.call('ZSCORE', index, '') then return false end
local time = redis.call('TIME')
local clock = math.floor(time[1] * 10 + time[2] / 100000) * 262144 + 262143
local now = clock
local last = redis.call('ZRANGE', index, -2, -1, 'WITHSCORES')
for number = 1, #last, 2 do
  local score = last[number] ~= '' and tonumber(last[number + 1]) or 0
  if score > now then now = (math.floor(score / 262144) + 1) * 262144 + 262143 end
end
for number = 5, #ARGV do
  local place = number - 5
  if place < above then
    redis.call('ZADD', index, 'XX', string.format('%.0f', now - math.min(place, 262143)), ARGV[number])
  else
    place = place - above + first
    redis.call('ZADD', index, string.format('%.0f', now - math.min(place, 262143)), ARGV[number])
  end
end
if most == '' then return {} end
if ttl == '' then
  redis.call('PERSIST', index)
else
  redis.call('ZREMRANGEBYSCORE', index, '-inf', string.format('%.0f', clock - ttl * 10 * 262144))
  redis.call('EXPIRE', index, ttl)
end
local excess = redis.call('ZCARD', index) - 1 - most
if excess <= 0 then return {} end
return redis.call('ZRANGE', index, 0, excess - 1, 'WITHSCORES')
"""
"""Count a tenant's blocks as used now, by the store's clock in tenths of a second, and within one tenth by position.
After the clock went back, they count as used just after the latest use.

KEYS: the index. ARGV: the quota ('': only record the uses), the life of an entry in seconds ('': no end), the position
of the first new block, the number of blocks before it, the digests of those, which count only if they are in the index,
and the digests of the new ones. Returns nil if there is a quota and the index isn't complete. Otherwise it returns
digests and scores of the blocks beyond the quota.
"""

DROP = """
for number = 1, #ARGV, 2 do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[number])
  if score and tonumber(score) == tonumber(ARGV[number + 1]) then redis.call('ZREM', KEYS[1], ARGV[number]) end
end
return 0
"""
"""Take deleted blocks out of an index, except those that were used again. KEYS: the index. ARGV: digests and scores."""
