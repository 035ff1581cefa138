"""Conflicts between the bursts of rules that apply to the same request: which rule cuts the burst of another one.

The burst of a rule is the number of requests that one of its keys may make at once: the least capacity of its limits, divided by
the cost of a request. A rule whose requests are all counted under one key of another rule (no key, the same key, or fewer parts)
can't have a larger burst than that rule. Queues pace requests and have no burst; nor have blocked keys, which admit nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..algorithms import LeakyBucket, LeakyBucketQueue, TokenBucket
from ..algorithms.limit import Limit
from .identity.paths import segments_of
from .model import Blocked, Key, Match, Rule, When

#: The limits that are written with a burst.
BUCKETS = (TokenBucket, LeakyBucket)


def burst_of(limits: Iterable[Limit], cost: int) -> int | None:
    """The requests of this cost that one key may make at once; None: any number."""
    bounding = [limit for limit in limits if not isinstance(limit, (LeakyBucketQueue, Blocked))]
    return min((limit.capacity // max(1, cost) for limit in bounding), default=None)


def shares_key(narrow: Key, wide: Key) -> bool:
    """Whether all requests that are counted under one key of `narrow` are counted under one key of `wide`."""
    return all(other in narrow or other[:1] in narrow for other in wide)


def cuts(other: Rule, rule: Rule) -> bool:
    """Whether `other` bounds the burst of `rule`: it counts all requests of a key together, on all routes of `rule`, or for more
    than this one key on a part of them. A stricter limit of the same key on a part of the routes is what rules are for."""
    if not shares_key(rule.key, other.key) or not implies(rule, other.when):
        return False
    if not rule.cost.source == other.cost.source == "constant":
        return False
    return on_all_routes(other, rule) or (len(other.key) < len(rule.key) and meet_somewhere(rule, other))


def implies(rule: Rule, when: When) -> bool:
    """Whether a condition holds for every request to which a rule applies; one without its only identity has no key."""
    own, needs_key = rule.when, len(rule.key) == 1 and len(rule.key[0]) == 1 and rule.unidentified is None
    present = {*own.present, *(name for name, _ in own.equals), *(rule.key[0] if needs_key else ())}
    return present.issuperset(when.present) and {*own.absent}.issuperset(when.absent) and {*own.equals}.issuperset(when.equals)


def meet(one: Match, other: Match) -> bool:
    """Whether some request matches both."""
    methods = not one.methods or not other.methods or bool(one.methods & other.methods)
    hosts = not one.host or not other.host or one.host == other.host
    return methods and hosts and overlap(segments_of(one.path or "/**"), segments_of(other.path or "/**"))


def meet_somewhere(one: Rule, other: Rule) -> bool:
    """Whether some request matches both rules."""
    return any(meet(mine, its) for mine in one.match or (Match(),) for its in other.match or (Match(),))


def on_all_routes(other: Rule, rule: Rule) -> bool:
    """Whether every request that `rule` matches is one that `other` matches."""
    return all(any(covers(wide, narrow) for wide in other.match or (Match(),)) for narrow in rule.match or (Match(),))


def covers(wide: Match, narrow: Match) -> bool:
    """Whether `wide` matches every request that `narrow` matches."""
    if wide.host and wide.host != narrow.host:
        return False
    if wide.methods and (not narrow.methods or not narrow.methods <= wide.methods):
        return False
    if not wide.methods and "MESSAGE" in narrow.methods:
        return False
    if not wide.path or wide.path == "/**":
        return True
    return bool(narrow.path) and path_covers(segments_of(wide.path), segments_of(narrow.path))


def path_covers(wide: list[str], narrow: list[str]) -> bool:
    for number, segment in enumerate(wide):
        if segment == "**":
            return True
        if number >= len(narrow) or narrow[number] == "**":
            return False
        if segment != "*" and not segment.startswith("{") and narrow[number].casefold() != segment.casefold():
            return False
    return len(wide) == len(narrow)


def overlap(first: list[str], second: list[str]) -> bool:
    """Whether some path matches both templates."""
    for a, b in zip(first, second, strict=False):
        if "**" in (a, b):
            return True
        if a[:1] not in ("*", "{") and b[:1] not in ("*", "{") and a.casefold() != b.casefold():
            return False
    longer = first if len(first) > len(second) else second
    return len(first) == len(second) or longer[min(len(first), len(second))] == "**"
