"""The Lua scripts that count in Redis, each one atomic step. The clock is the server's.

Keys of a tenant: `used`, a hash of whole seconds to "REQUESTS TOKENS"; `places`, a sorted set of the leases of requests
that run or wait, by the millisecond at which each ends; `sent:REPLICA`, the number of that replica's last `REFRESH`
with counts.

The first command that writes needs no memory: after one a full server lets a script go on. What is counted is small,
and expires.
"""

from __future__ import annotations

_COMMON = """
local time = redis.call('TIME')
local now, ms = tonumber(time[1]), tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function counts(value)
  local requests, tokens = string.match(value or '0 0', '^(%d+) (%d+)$')
  return tonumber(requests), tonumber(tokens)
end
local function add(used, second, requests, tokens)
  local r, t = counts(redis.call('HGET', used, second))
  redis.call('HSET', used, second, string.format('%d %d', math.max(0, r + requests), math.max(0, t + tokens)))
end
local function renew(leases, milliseconds, member)
  redis.call('ZADD', leases, string.format('%d', ms + milliseconds), member)
  redis.call('PEXPIRE', leases, 2 * milliseconds)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', ms))
"""

# KEYS: used leases. ARGV: buckets requests_limit tokens_limit concurrency tokens lease_ms member requests; limits 0 for
# none, requests 0 for further tokens of one that is counted already.
# Returns {'ok', second} or {limit's name, used, milliseconds until the request fits}.
RESERVE = (
    _COMMON
    + """
local buckets, most, tokens = tonumber(ARGV[1]), {tonumber(ARGV[2]), tonumber(ARGV[3])}, tonumber(ARGV[5])
local concurrency, lease, requests = tonumber(ARGV[4]), tonumber(ARGV[6]), tonumber(ARGV[8])
if concurrency > 0 then
  local held = redis.call('ZCARD', KEYS[2])
  if held >= concurrency then return {'concurrency', held, 0} end
end
local rows, sums, all = {}, {0, 0}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local second = tonumber(all[i])
  if second <= now - buckets then
    redis.call('HDEL', KEYS[1], all[i])
  else
    local r, t = counts(all[i + 1])
    rows[#rows + 1] = {second, r, t}
    sums[1], sums[2] = sums[1] + r, sums[2] + t
  end
end
local needed, names = {requests, tokens}, {'requests_per_minute', 'tokens_per_minute'}
for kind = 1, 2 do
  local excess = sums[kind] + needed[kind] - most[kind]
  if most[kind] > 0 and excess > 0 then
    table.sort(rows, function(a, b) return a[1] < b[1] end)
    local wait = buckets * 1000
    for _, row in ipairs(rows) do
      excess = excess - row[kind + 1]
      if excess <= 0 then wait = (row[1] + buckets) * 1000 - ms break end
    end
    return {names[kind], sums[kind], wait}
  end
end
if most[1] > 0 or most[2] > 0 then
  add(KEYS[1], time[1], requests, tokens)
  redis.call('PEXPIRE', KEYS[1], 1000 * (buckets + 1))
end
if concurrency > 0 then renew(KEYS[2], lease, ARGV[7]) end
return {'ok', now}
"""
)

# KEYS: used leases. ARGV: second unused_tokens member unused_requests.
RELEASE = (
    _COMMON
    + """
local unused, requests = tonumber(ARGV[2]), tonumber(ARGV[4])
if unused + requests > 0 and redis.call('HGET', KEYS[1], ARGV[1]) then
  add(KEYS[1], ARGV[1], -requests, -unused)
end
redis.call('ZREM', KEYS[2], ARGV[3])
return 1
"""
)

# Renews the leases of a replica, and adds what it admitted while the store did not answer: each number once.
# KEYS: used leases sent. ARGV: buckets lease_ms number members, then the members, then age requests tokens for each
# second.
REFRESH = (
    _COMMON
    + """
local buckets, lease, number, members = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
for i = 5, 4 + members do renew(KEYS[2], lease, ARGV[i]) end
if #ARGV > 4 + members and number > tonumber(redis.call('GET', KEYS[3]) or 0) then
  for i = 5 + members, #ARGV, 3 do
    add(KEYS[1], string.format('%d', now - tonumber(ARGV[i])), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
  end
  redis.call('PEXPIRE', KEYS[1], 1000 * (buckets + 1))
  redis.call('SET', KEYS[3], string.format('%d', number), 'EX', 2 * buckets)
end
return 1
"""
)
