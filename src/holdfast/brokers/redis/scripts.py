"""Names on Redis, and Lua scripts for steps that have to happen together."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from holdfast.brokers.addresses import Address
from holdfast.brokers.naming import NameTemplate, template_of

_OVERLAP: Final = timedelta(minutes=1)


def streams_of(address: Address) -> NameTemplate:
    """Return the template of stream names; the part in braces keeps all keys of a channel on one node of a cluster.

    >>> streams_of(Address("redis", (), "", {})).name("events")
    'hf:{events}:0'
    """
    return template_of(address, "stream", "hf:{{channel}}:0", r"._:{}\-", 512)


def owner_of(stream: str, handler_name: str) -> str:
    """Return the key that names the one consumer which may take for an ordered handler."""
    return f"{stream}:owner:{handler_name}"


def start_of(since: datetime) -> str:
    """Return an id a minute before the first entry that a handler is owed; the inbox skips what comes twice."""
    return f"{max(int((since - _OVERLAP).timestamp() * 1000), 0)}-0"


def id_order(entry: bytes) -> tuple[int, int]:
    """Return an id as a pair of numbers, which compares as ids do."""
    milliseconds, _, sequence = entry.partition(b"-")
    return int(milliseconds), int(sequence or 0)


# Sets the idle time of entries: 0 keeps them, and a lease gives them back, so that others claim them. It leaves entries
# alone that another consumer has claimed meanwhile.
CLAIM_OWN: Final = """
local kept = 0
for i = 4, #ARGV do
    if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) > 0 then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
        kept = kept + 1
    end
end
return kept
"""

# Deletes consumers without pending entries: DELCONSUMER would delete those too. ARGV: group, a name or '', idle ms.
DELETE_EMPTY: Final = """
local deleted = 0
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local info = {}
    for i = 1, #row, 2 do info[row[i]] = row[i + 1] end
    if info.pending == 0 and (info.name == ARGV[2] or (ARGV[2] == '' and info.idle >= tonumber(ARGV[3]))) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], info.name)
        deleted = deleted + 1
    end
end
return deleted
"""

# Trims entries older than ARGV[1] that every group has acknowledged. In a stream without groups it trims nothing.
TRIM_READ: Final = """
local function less(a, b)
    local a_ms, a_seq = string.match(a, '(%d+)-(%d+)')
    local b_ms, b_seq = string.match(b, '(%d+)-(%d+)')
    if a_ms ~= b_ms then return tonumber(a_ms) < tonumber(b_ms) end
    return tonumber(a_seq) < tonumber(b_seq)
end
local low = ARGV[1]
local groups = redis.call('XINFO', 'GROUPS', KEYS[1])
if #groups == 0 then return 0 end
for _, row in ipairs(groups) do
    local info = {}
    for i = 1, #row, 2 do info[row[i]] = row[i + 1] end
    local first = info['last-delivered-id']
    if info.pending > 0 then
        local pending = redis.call('XPENDING', KEYS[1], info.name)[2]
        if less(pending, first) then first = pending end
    end
    if less(first, low) then low = first end
end
return redis.call('XTRIM', KEYS[1], 'MINID', '~', low)
"""

# Takes or renews the ownership of an ordered handler's stream. Returns 2 if taken, 1 if renewed, 0 if another has it.
OWN: Final = """
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return 1
end
if owner then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 2
"""

DISOWN: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
