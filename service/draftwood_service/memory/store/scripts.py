"""The Lua scripts that read and change a memory in Redis, each one atomic step.

A memory's meta hash has the fields: epoch; pos, chain, bytes, tokens (of all entries ever appended in this epoch);
snap_pos, snap_tokens, snap_records, snap_total (`tokens` at snap_pos), snap_at (server's clock in seconds); purged
(server's clock in milliseconds); name; schema (see `base.SCHEMA`), which never goes down; and "m:SOURCE", the highest
sequence number of each source with the server's seconds. An epoch is the time of the purge in microseconds, or the
previous epoch plus one if the clock went back: after a store lost everything, the same epochs must not be used again.
The log's entry at position p has the stream id p-0 and the fields c, b, t (chain, bytes and tokens before it) and r
(the record).
"""

from __future__ import annotations

_COMMON = """
local function number(value) return tonumber(value or 0) or 0 end
local function newer(meta, schema) return number(redis.call('HGET', meta, 'schema')) > tonumber(schema) end
local function first_entry(log)
  local found = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
  if not found then return nil end
  return {tonumber(string.match(found[1], '^%d+')), found[2]}
end
local function expire(ttl, ...)
  for _, key in ipairs({...}) do
    if ttl > 0 then redis.call('PEXPIRE', key, ttl) else redis.call('PERSIST', key) end
  end
end
"""

# KEYS: log snap meta. ARGV: epoch source log_bytes ttl_ms name after schema, then seq tokens value for each entry.
APPEND = (
    _COMMON
    + """
local log, snap, meta = KEYS[1], KEYS[2], KEYS[3]
local epoch, source, ttl = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[4])
if newer(meta, ARGV[7]) then return {'newer'} end
local now = redis.call('TIME')[1]
local m = redis.call('HMGET', meta, 'epoch', 'pos', 'chain', 'bytes', 'tokens', 'm:' .. source, 'snap_pos',
  'snap_records')
local known = tonumber(m[1])
if known and epoch < known then return {'stale', known} end
local pos, chain, bytes, tokens, mark = number(m[2]), m[3] or '', number(m[4]), number(m[5]), 0
if m[6] then mark = number(string.match(m[6], '^%d+')) end
local snap_pos, snap_records = number(m[7]), number(m[8])
local new_epoch = known and epoch > known
if (new_epoch and 0 or mark) < tonumber(ARGV[6]) then return {'lost'} end
if new_epoch then
  redis.call('DEL', log, snap, meta)
  pos, chain, bytes, tokens, mark, snap_pos, snap_records = 0, '', 0, 0, 0, 0, 0
end
local oldest = first_entry(log)
local held = 0
if oldest then
  for i = 1, #oldest[2], 2 do
    if oldest[2][i] == 'b' then held = bytes - number(oldest[2][i + 1]) end
  end
end
if held > tonumber(ARGV[3]) then return {'full'} end
for i = 8, #ARGV, 3 do
  local seq, n, value = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), ARGV[i + 2]
  if seq > mark then
    pos = pos + 1
    redis.call('XADD', log, string.format('%d-0', pos), 'c', chain, 'b', string.format('%d', bytes), 't',
      string.format('%d', tokens), 'r', value)
    chain = string.sub(redis.sha1hex(chain .. value), 1, 16)
    bytes, tokens, mark = bytes + #value, tokens + n, seq
  end
end
redis.call('HSET', meta, 'epoch', string.format('%d', epoch), 'pos', string.format('%d', pos), 'chain', chain, 'bytes',
  string.format('%d', bytes), 'tokens', string.format('%d', tokens), 'name', ARGV[5], 'schema', ARGV[7],
  'm:' .. source, string.format('%d %s', mark, now))
expire(ttl, log, snap, meta)
return {'ok', pos, pos - snap_pos, snap_records}
"""
)

# KEYS: log snap meta. ARGV: position source.
READ = (
    _COMMON
    + """
local log, snap, meta = KEYS[1], KEYS[2], KEYS[3]
local m = redis.call('HMGET', meta, 'epoch', 'pos', 'chain', 'snap_pos', 'purged', 'm:' .. ARGV[2], 'schema')
if not m[1] then return {} end
local pos, after, snap_pos = number(m[2]), tonumber(ARGV[1]), number(m[4])
local mark = 0
if m[6] then mark = number(string.match(m[6], '^%d+')) end
local since = -1
if m[5] then
  local now = redis.call('TIME')
  since = math.max(0, tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000) - tonumber(m[5]))
end
local missing = snap_pos > 0 and redis.call('EXISTS', snap) == 0
local oldest = first_entry(log)
local earliest = oldest and oldest[1] or pos + 1
local snapshot = false
if after + 1 < earliest or after > pos or after == 0 then
  after = missing and earliest - 1 or snap_pos
  if snap_pos > 0 and not missing then snapshot = redis.call('GET', snap) end
end
local entries = redis.call('XRANGE', log, string.format('%d-0', after + 1), '+')
local values, before = {}, m[3] or ''
for index, entry in ipairs(entries) do
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'r' then values[index] = entry[2][i + 1] end
    if index == 1 and entry[2][i] == 'c' then before = entry[2][i + 1] end
  end
end
return {number(m[1]), pos, m[3] or '', after, before, missing and 1 or 0, mark, since, snapshot or '', values,
  redis.call('PTTL', meta), number(m[7])}
"""
)

# KEYS: lease, and a key that never exists. ARGV: holder ms. A server that is full refuses a script's first write if it
# may take memory, and none after another write: to fold is what makes room.
LEASE = """
redis.call('DEL', KEYS[2])
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
return 0
"""

# KEYS: log snap meta lease. ARGV: holder epoch position chain tokens records value tail ttl_ms max_marks mark_seconds
# schema.
FOLD = (
    _COMMON
    + """
local log, snap, meta, lease = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local pos = tonumber(ARGV[3])
local now = tonumber(redis.call('TIME')[1])
if redis.call('GET', lease) ~= ARGV[1] then return 0 end
redis.call('DEL', lease)
if newer(meta, ARGV[12]) then return 0 end
local m = redis.call('HMGET', meta, 'epoch', 'pos', 'chain', 'snap_pos', 'tokens')
if number(m[1]) ~= tonumber(ARGV[2]) or not m[1] or number(m[2]) < pos then return 0 end
local missing = redis.call('EXISTS', snap) == 0
if number(m[4]) > pos or (number(m[4]) == pos and not missing) then return 0 end
local chain, total = m[3] or '', number(m[5])
if number(m[2]) > pos then
  local id = string.format('%d-0', pos + 1)
  local entry = redis.call('XRANGE', log, id, id)[1]
  if not entry then return 0 end
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'c' then chain = entry[2][i + 1] end
    if entry[2][i] == 't' then total = number(entry[2][i + 1]) end
  end
end
if chain ~= ARGV[4] then return 0 end
redis.call('SET', snap, ARGV[7])
redis.call('HSET', meta, 'snap_pos', ARGV[3], 'snap_tokens', ARGV[5], 'snap_records', ARGV[6], 'snap_total',
  string.format('%d', total), 'snap_at', string.format('%d', now), 'schema', ARGV[12])
redis.call('XTRIM', log, 'MINID', '=', string.format('%d-0', math.max(0, pos + 1 - tonumber(ARGV[8]))))
if redis.call('HLEN', meta) > tonumber(ARGV[10]) then
  local all = redis.call('HGETALL', meta)
  for i = 1, #all, 2 do
    local at = string.match(all[i + 1], '^%d+ (%d+)$')
    if string.sub(all[i], 1, 2) == 'm:' and at and now - tonumber(at) > tonumber(ARGV[11]) then
      redis.call('HDEL', meta, all[i])
    end
  end
end
expire(tonumber(ARGV[9]), log, snap, meta)
return 1
"""
)

# KEYS: log snap meta. ARGV: epoch position chain tokens records value name ttl_ms schema, then source mark for each
# source.
SEED = (
    _COMMON
    + """
local log, snap, meta = KEYS[1], KEYS[2], KEYS[3]
if redis.call('EXISTS', meta) == 1 then return 0 end
local now = redis.call('TIME')[1]
redis.call('DEL', log)
redis.call('SET', snap, ARGV[6])
redis.call('HSET', meta, 'epoch', ARGV[1], 'pos', ARGV[2], 'chain', ARGV[3], 'bytes', '0', 'tokens', ARGV[4],
  'snap_pos', ARGV[2], 'snap_tokens', ARGV[4], 'snap_records', ARGV[5], 'snap_total', ARGV[4], 'snap_at', now, 'name',
  ARGV[7], 'schema', ARGV[9])
for i = 10, #ARGV, 2 do redis.call('HSET', meta, 'm:' .. ARGV[i], ARGV[i + 1] .. ' ' .. now) end
expire(tonumber(ARGV[8]), snap, meta)
return 1
"""
)

# KEYS: log snap meta lease aside. ARGV: at_least only_raise tombstone_ms schema. Returns -1 for a newer schema.
PURGE = (
    _COMMON
    + """
local meta = KEYS[3]
if newer(meta, ARGV[4]) then return -1 end
local known, least = redis.call('HGET', meta, 'epoch'), tonumber(ARGV[1])
if ARGV[2] == '1' and known and tonumber(known) >= least then return tonumber(known) end
local now = redis.call('TIME')
local epoch = least
if ARGV[2] ~= '1' then
  epoch = math.max(least, tonumber(now[1]) * 1000000 + tonumber(now[2]), number(known) + 1)
end
local ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('DEL', KEYS[1], KEYS[2], meta, KEYS[4], KEYS[5])
redis.call('HSET', meta, 'epoch', string.format('%d', epoch), 'pos', '0', 'chain', '', 'purged',
  string.format('%d', ms), 'schema', ARGV[4])
redis.call('PEXPIRE', meta, ARGV[3])
return epoch
"""
)

# KEYS: snap aside meta. ARGV: sha1 ttl_ms schema.
SET_ASIDE = (
    _COMMON
    + """
if newer(KEYS[3], ARGV[3]) then return 0 end
local value = redis.call('GET', KEYS[1])
if not value or redis.sha1hex(value) ~= ARGV[1] then return 0 end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""
)

# KEYS: active counter (see `naming.activity_keys`). ARGV: tags.
ANNOUNCE = """
local write = redis.call('INCR', KEYS[2])
for _, tag in ipairs(ARGV) do redis.call('ZADD', KEYS[1], write, tag) end
return write
"""

# KEYS: active counter. ARGV: the write that the reader knows.
ACTIVITY = """
local write = tonumber(redis.call('GET', KEYS[2]) or 0)
if write <= tonumber(ARGV[1]) then return {write, {}} end
return {write, redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf')}
"""

# KEYS: instances (see `naming.instances_key`), and a key that never exists, as for LEASE. ARGV: instance settings
# seconds.
REGISTER = """
redis.call('DEL', KEYS[2])
local now = tonumber(redis.call('TIME')[1])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %s', now, ARGV[2]))
local all, others = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local at, settings = string.match(all[i + 1], '^(%d+) (.*)$')
  if now - tonumber(at) > tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], all[i])
  elseif all[i] ~= ARGV[1] then others[#others + 1] = settings end
end
return others
"""

# KEYS: served (see `naming.KINDS_KEY`), and a key that never exists, as for LEASE. ARGV: kind.
SERVE = """
redis.call('DEL', KEYS[2])
return redis.call('ZADD', KEYS[1], redis.call('TIME')[1], ARGV[1])
"""

# KEYS: served. Kinds, each followed by seconds.
KINDS = """
local now, found = tonumber(redis.call('TIME')[1]), redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 2, #found, 2 do found[i] = math.max(0, now - tonumber(found[i])) end
return found
"""

# KEYS: log snap meta.
INFO = (
    _COMMON
    + """
local m = redis.call('HMGET', KEYS[3], 'epoch', 'pos', 'tokens', 'bytes', 'snap_tokens', 'snap_total', 'snap_at',
  'name', 'schema')
if not m[1] then return {} end
local oldest = first_entry(KEYS[1])
local held = 0
if oldest then
  for i = 1, #oldest[2], 2 do
    if oldest[2][i] == 'b' then held = number(m[4]) - number(oldest[2][i + 1]) end
  end
end
local age = -1
if m[7] then age = math.max(0, tonumber(redis.call('TIME')[1]) - tonumber(m[7])) end
return {number(m[1]), number(m[2]), number(m[5]) + number(m[3]) - number(m[6]), held + redis.call('STRLEN', KEYS[2]),
  redis.call('XLEN', KEYS[1]), age, m[8] or '', number(m[9])}
"""
)
