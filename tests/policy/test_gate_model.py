"""The gate against a slow, obviously right model: regular expressions for paths, one claim after the other, no memory."""

from __future__ import annotations

import re

from gates import asked, key, request, rule
from hypothesis import given, settings
from hypothesis import strategies as st

from limitkeeper import MemoryStore
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.policy import Gate
from limitkeeper.policy.identity.identify import Header
from limitkeeper.policy.model import Match, Policy, When
from limitkeeper.testing import ManualClock
from stand_ins import NOON

WORDS = ("a", "b", "orders", "{id}", "*")
TEMPLATES = st.builds(
    lambda parts, rest: "/" + "/".join([*parts, *(["**"] if rest else [])]),
    st.lists(st.sampled_from(WORDS), max_size=3),
    st.booleans(),
)
METHODS = st.sampled_from([frozenset(), frozenset({"GET"}), frozenset({"POST"}), frozenset({"GET", "POST"})])
NAMES = ("user", "tenant")
PARTS = st.sampled_from(["user", "tenant", "user|ip", "tenant|user"])
LIMITS = st.sampled_from(
    ["token bucket 2/s burst 3", "fixed window 4/min", "sliding window log 3 per 10 s", "9/s; fixed window 5/min"]
)
RULES = st.lists(
    st.tuples(
        st.lists(st.builds(Match, METHODS, TEMPLATES), max_size=2),
        st.lists(PARTS, max_size=2),
        LIMITS,
        st.sampled_from([When(), When(present=("user",)), When(absent=("user",)), When(equals=(("tenant", ("t1",)),))]),
    ),
    min_size=1,
    max_size=6,
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["GET", "POST", "HEAD", "PUT"]),
        st.lists(st.sampled_from(["a", "b", "orders", "7", "A"]), max_size=4),
        st.sampled_from([None, "u1", "u2"]),
        st.sampled_from([None, "t1"]),
        st.sampled_from([0.0, 0.3, 1.0, 7.0]),
    ),
    min_size=1,
    max_size=25,
)


def matches(match: Match, method: str, path: str) -> bool:
    """Whether a match applies to a request, by a regular expression."""
    methods = match.methods | {"HEAD"} if "GET" in match.methods else match.methods
    if methods and method not in methods:
        return False
    pattern = "".join("(/.*)?" if s == "**" else "/[^/]+" if s[0] in "{*" else "/" + s for s in match.path.split("/") if s)
    return re.fullmatch(pattern or "", "" if path == "/" else path.lower()) is not None


def modelled_key(parts, received):
    found = []
    for part in parts:
        names = part.split("|")
        present = next(((name, received[name]) for name in names if received[name] is not None), None)
        found.append(None if present is None else present[1] if len(names) == 1 else ":".join(present))
    if not parts:
        return "*"
    if all(value is None for value in found):
        return None
    return found[0] if len(found) == 1 else "|".join("-" if value is None else value for value in found)


@settings(deadline=None)
@given(RULES, REQUESTS)
def test_a_gate_decides_as_its_rules_one_by_one(said, requests):
    """The applicable rules, their keys, and the joint decision equal the result of trying every rule."""
    rules = [rule(f"r{i}", text, match=tuple(m), key=key(*k), when=w) for i, (m, k, text, w) in enumerate(said)]
    clock, other = ManualClock(NOON), ManualClock(NOON)
    gate = Gate(Policy(rules=tuple(rules), identify={n: Header(n) for n in NAMES}), store=MemoryStore(clock=clock))
    store = MemoryStore(clock=other)
    for method, segments, user, tenant, pause in requests:
        clock.advance(pause)
        other.advance(pause)
        path = "/" + "/".join(segments)
        received = {"user": user, "tenant": tenant, "ip": "192.0.2.7"}
        claims = []
        for one, (m, parts, _, when) in zip(rules, said, strict=True):
            if m and not any(matches(match, method, path) for match in m):
                continue
            if not all(received[n] for n in when.present) or any(received[n] for n in when.absent):
                continue
            if not all(received[n] in values for n, values in when.equals):
                continue
            made = modelled_key(parts, received)
            if made is not None:
                for i, limit in enumerate(one.limit):
                    claims.append(Claim(NamedLimit("limitkeeper", one.name + (f".{i + 1}" if i else ""), limit), made, 1))
        evaluation = asked(gate, request(f"{method} {path}", **{n: received[n] for n in NAMES if received[n]}), "quick")
        assert [(entry.label, k) for entry, k in zip(evaluation.entries, evaluation.keys, strict=True)] == [
            (claim.limit.name, claim.key) for claim in claims
        ]
        assert evaluation.decision == (store.decide(claims) if claims else None)


@settings(deadline=None)
@given(RULES, REQUESTS)
def test_the_seconds_of_a_refusal_are_enough(said, requests):
    """Law 1 through a gate: whatever rules refuse together, the same request passes after Retry-After seconds."""
    rules = [rule(f"r{i}", text, match=tuple(m), key=key(*k), when=w) for i, (m, k, text, w) in enumerate(said)]
    clock = ManualClock(NOON)
    gate = Gate(Policy(rules=tuple(rules), identify={n: Header(n) for n in NAMES}), store=MemoryStore(clock=clock))
    for method, segments, user, tenant, pause in requests:
        clock.advance(pause)
        received = {name: value for name, value in (("user", user), ("tenant", tenant)) if value}
        line = f"{method} /{'/'.join(segments)}"
        for _ in range(6):
            evaluation = asked(gate, request(line, **received), "quick")
            if not evaluation.allowed:
                assert evaluation.refusal.retry_us <= evaluation.refusal.retry_after * 1_000_000
                clock.advance(evaluation.refusal.retry_after)
                assert asked(gate, request(line, **received), "quick").allowed
                break
