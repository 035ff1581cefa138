"""Maps a key to its shard: consistent hashing through a table of 16 384 slots, the same in every process and on every machine.

For every slot each shard draws a number (from SHAKE-128 of its name), exponentially distributed and divided by its weight; the
smallest draw is the slot's home (rendezvous hashing). So a shard that is added or removed changes only the slots that it wins or
held: weight / sum of weights. The second smallest draw is where a slot goes when its home is lost.

Rejected, measured with 4 shards and 100 000 keys: uhashring (1.8 to 2.1 µs a lookup and shares up to 19 % off, where a slot takes
0.3 to 0.5 µs as plain Python and shares are up to 1.6 % off); a ring with bisect (it needs a thousand points a shard for
that); jump hashing (it can only remove its last shard).
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import lru_cache
from zlib import crc32

from ...errors import ConfigurationError

#: How many slots there are: with 4 shards the shares are within 1.4 % of even (one standard deviation), with 16 within 3.1 %.
SLOTS = 16_384

#: (name, weight) of every shard.
Members = tuple[tuple[str, float], ...]


def slot_of(key: str) -> int:
    """The slot of a key. CRC-32 alone is linear, so that keys of a pattern could collide; the multiplication breaks that."""
    return crc32(key.encode("utf-8", "surrogatepass")) * 0x9E3779B1 >> 18 & 16_383


@lru_cache(maxsize=256)
def draws(name: str, weight: float) -> tuple[float, ...]:
    """The draw of a shard for each slot; the smallest wins."""
    drawn = hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(8 * SLOTS)
    return tuple([-math.log((number + 1) * 2.0**-64) / weight for number in struct.unpack(f"<{SLOTS}Q", drawn)])


@lru_cache(maxsize=64)
def homes(members: Members) -> tuple[str, ...]:
    """The name of each slot's home."""
    if not members:
        raise ConfigurationError("a ShardedStore needs at least one shard that is not lost")
    ordered = sorted(members)
    names = [name for name, _ in ordered]
    rows = zip(*[draws(name, weight) for name, weight in ordered], strict=True)
    return tuple([names[row.index(min(row))] for row in rows])
