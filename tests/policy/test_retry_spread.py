"""`retry_after: spread 60s`: refused clients are sent moments spread over an interval, never earlier than the exact one."""

from __future__ import annotations

from base64 import b64decode
from collections import Counter

import pytest
from gates import asked, gate, key, request, rule
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.policy import Gate, Policy, PolicyError
from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.model import CLOSED, Cost, Match, OnFailure, PenaltyBoxConfig, RetryAfter
from limitkeeper.stores.memory import MemoryStore
from limitkeeper.testing import ManualClock
from limitkeeper.web.headers import fields
from limitkeeper.web.refusal_body import body
from stand_ins import NOON, WrappedStore

MINUTE = RetryAfter(60_000_000)


def sent(found):
    return {name.decode(): value.decode() for name, value in fields(found)}


def herd(limits, spread_s, clock, number=1000, **said):
    """So many refused clients, each with an address of its own."""
    g = gate(rule("all", limits, retry_after=RetryAfter(spread_s * 1_000_000), **said), clock=clock)
    while asked(g, request()).allowed:
        pass
    return [asked(g, request(peer=f"10.0.{n // 200}.{n % 200}")) for n in range(number)]


@pytest.mark.parametrize("spread_s", [20, 21, 22, 25, 30, 39, 60, 3600])
@pytest.mark.parametrize("second", [0, 0.3, 59.999])
@pytest.mark.parametrize("limits", ["fixed window 5/min", "token bucket 1/h burst 5", "sliding window log 5/min"])
def test_a_herd_is_spread(limits, second, spread_s):
    """Of 1000 clients that are refused in one window, at most 10 % are sent the same twentieth of the interval; none is sent a
    moment before the exact one, or after the end of the interval."""
    found = herd(limits, spread_s, ManualClock(NOON + second))
    exact = found[0].decision.retry_after
    assert {one.decision.retry_after for one in found} == {exact}  # the Decision stays exact
    waits = [int(sent(one)["retry-after"]) for one in found]
    assert min(waits) >= exact
    assert max(waits) < exact + spread_s + 1
    assert max(Counter(int((wait - exact) * 20 / spread_s) for wait in waits).values()) <= 100
    precise = [one.refusal.retry_us / 1e6 for one in found]
    assert min(precise) >= exact
    assert max(precise) <= exact + spread_s
    assert max(Counter(int((wait - exact) * 20 / spread_s) for wait in precise).values()) <= 100


def test_keys_are_spread_where_the_address_is_one():
    """Clients behind one address are distinguished by their keys, also under a rule that counts all requests together."""
    rules = (rule("all", "fixed window 5/min", retry_after=MINUTE), rule("user", "100/s", key=key("user")))
    g = gate(*rules)
    found = [asked(g, request(user=str(n))) for n in range(1005)][5:]
    assert max(Counter(one.refusal.retry_after // 3 for one in found).values()) <= 100


def test_a_client_is_sent_the_same_moment_again():
    """While the window lasts, a client that is refused again is sent the same moment; in another window, another one."""
    clock = ManualClock(NOON)
    g = gate(rule("all", "fixed window 1/min", retry_after=MINUTE, key=key("ip")), clock=clock)
    moments = []
    for _ in range(40):
        asked(g, request())
        first = asked(g, request()).refusal
        clock.advance(7)
        assert asked(g, request()).refusal.retry_after == first.retry_after - 7
        moments.append(first.spread_s)
        clock.advance(53)
    assert len(set(moments)) > 10


def test_the_moment_depends_on_the_secret_alone():
    """Gates with one secret send a client the same moment, gates with different ones do not: no client can predict its place."""

    def moments(secret):
        text = "limits: [{name: api, limit: fixed window 1/min, retry_after: spread 60s}]"
        g = Gate(Policy.read(text), store=MemoryStore(clock=ManualClock(NOON)), secret=secret)
        asked(g, request())
        return [asked(g, request(peer=f"10.0.0.{n}")).refusal.retry_us for n in range(20)]

    assert moments(b"one") == moments(b"one")
    assert moments(b"one") != moments(b"two")


def test_a_shown_partition_key_predicts_no_moment():
    """A client that chooses its key may have the text hashed of which a moment is made: it is shown another hash of it."""
    text = """
identify: {user: {header: user}}
headers: {partition: true}
limits: [{name: api, key: user, limit: fixed window 1/min, retry_after: spread 60min}]
"""
    g = Gate(Policy.read(text), store=MemoryStore(clock=ManualClock(NOON)))
    asked(g, request(user="ann"))
    refused = asked(g, request(user="ann"))
    interval = round((NOON + refused.decision.retry_after) / 3600)
    shown = sent(asked(g, request(user=f"retry {interval}|{request().peer()}|ann")))["ratelimit"]
    place = int.from_bytes(b64decode(shown.partition("pk=:")[2][:16])[:8])
    assert abs((place * 3600 >> 64) - refused.refusal.spread_s) > 1


@pytest.mark.parametrize("wire", ["draft-11", "draft-7", "draft-6"])
@pytest.mark.parametrize("reset", ["delta", "epoch"])
def test_every_field_is_spread(wire, reset):
    """Clients that read RateLimit or X-RateLimit-Reset instead of Retry-After are not all sent the same moment either; message
    and body name the time of Retry-After."""
    text = f"""
headers: {{wire: {wire}, reset: {reset}}}
limits: [{{name: api, limit: fixed window 1/min, retry_after: spread 60s, body: "{{retry_after}} {{message}}"}}]
"""
    g = Gate(Policy.read(text), store=MemoryStore(clock=ManualClock(NOON)))
    asked(g, request())
    for n in range(20):
        found = asked(g, request(peer=f"10.0.0.{n}"))
        shown, wait = sent(found), found.refusal.retry_after
        assert wait >= 60
        assert shown["retry-after"] == str(wait)
        assert shown["x-ratelimit-reset"] == str(wait + (int(NOON) if reset == "epoch" else 0))
        last = shown["ratelimit-reset"] if wire == "draft-6" else shown["ratelimit"].rpartition("=")[2]
        assert last == str(wait)
        assert body(found)[1].decode() == f"{wait} Too many requests. Retry after {wait}s."


def test_the_longest_spread_of_the_refusing_rules_counts():
    """Where several rules refuse, the longest retry is delayed by the longest spread; a rule that does not refuse delays
    nothing, and no spread delays what can never pass."""
    rules = [
        rule("short", "fixed window 1/min", retry_after=RetryAfter(1_000_000)),
        rule("long", "fixed window 2/min", retry_after=RetryAfter(3600_000_000)),
    ]
    g = gate(*rules)
    asked(g, request())
    for n in range(20):
        assert asked(g, request(peer=f"10.0.0.{n}")).refusal.retry_after == 60
    rules[1] = rule("long", "fixed window 1/h", retry_after=RetryAfter(3600_000_000))
    g = gate(*rules)
    asked(g, request())
    found = [asked(g, request(peer=f"10.0.0.{n}")).refusal.retry_after for n in range(20)]
    assert min(found) >= 3600
    assert max(found) > 3660
    never = asked(gate(rule("dear", "5/h", cost=Cost(units=9), retry_after=MINUTE)), request())
    assert (never.refusal.retry_after, never.refusal.spread_s) == (None, 0)


def test_a_failed_store_sends_spread_moments():
    """Clients that are refused because the store failed do not all come back in the same second either."""
    store = WrappedStore(MemoryStore(clock=ManualClock(NOON)), local=True)
    store.failing = {"decide", "decide_one"}
    g = gate(rule("all", "5/s", retry_after=MINUTE, on_failure=OnFailure(CLOSED)), store=store)
    found = [asked(g, request(peer=f"10.0.0.{n}")).refusal.retry_after for n in range(100)]
    assert min(found) >= 1
    assert max(found) <= 61
    assert len(set(found)) > 20


@given(
    st.integers(1, 86_400),
    st.sampled_from(["fixed window 3/7s", "1/3s burst 2", "sliding window counter 4/min"]),
    st.floats(0, 100),
)
def test_after_the_sent_wait_the_client_is_admitted(spread_s, limits, second):
    """A lone client that waits as long as it was sent is admitted."""
    clock = ManualClock(NOON + second)
    g = gate(rule("all", limits, retry_after=RetryAfter(spread_s * 1_000_000)), clock=clock)
    found = asked(g, request())
    while found.allowed:
        found = asked(g, request())
    clock.advance(int(sent(found)["retry-after"]))
    assert asked(g, request()).allowed


@pytest.mark.parametrize("text", ["spread", "spread soon", "60s", "spread 100ms", "spread 2 days", "jitter 60s"])
def test_what_is_no_spread_is_an_error(text):
    """The error names the text, the bounds and the remedy."""
    message = f"expected spread and a duration between 1s and 1d, got '{text}'; write it like spread 60s"
    with pytest.raises(PolicyError, match=message):
        Policy.read(f"limits: [{{name: api, limit: 5/s, retry_after: {text}}}]")


def test_a_file_and_python_give_the_same_rule():
    """`retry_after` may be a string or a RetryAfter."""
    read = Policy.read("limits: [{name: api, limit: 5/s, retry_after: spread 1 min}]")
    assert read == Policy.of(limits=[{"name": "api", "limit": "5/s", "retry_after": MINUTE}])
    assert read.rules[0].retry_after == MINUTE


def test_explain_names_the_spread():
    """`explain` shows the exact moment and the interval that follows it."""
    g = gate(rule("all", "fixed window 1/min", retry_after=MINUTE))
    asked(g, request())
    found = RequestExplanation(g.policy, request(), g.explain(request()))
    assert "→ refused by all with 429: retry in 60 s, spread over 60 s" in found.text()
    assert found.as_dict()["rules"][0]["retry_spread"] == 60


def test_a_herd_in_the_penalty_box_is_spread():
    """The refusal that puts a client into the box and those in it send the same moment, within the spread after the end of the
    penalty; of 1000 clients at most 10 % are sent the same twentieth of it."""
    box = PenaltyBoxConfig(parse_limit("fixed window 2/h"), 600_000_000, key("ip"))
    rules = (rule("ip", "fixed window 1/min", key=key("ip"), retry_after=MINUTE), rule("path", "9/s", key=key("user|ip")))
    g = gate(*rules, rule("other", "9/s", match=(Match(path="/other"),)), penalty_box=box)
    waits = []
    for n in range(1000):
        boxing, again = [asked(g, request(peer=f"10.0.{n // 200}.{n % 200}")) for _ in range(5)][-2:]
        assert (boxing.refusal.reason, again.refusal.reason) == ("quota", "penalty box")
        assert (boxing.refusal.retry_after, boxing.refusal.spread_s) == (again.refusal.retry_after, again.refusal.spread_s)
        waits.append(again.refusal.retry_after - 600)
    assert min(waits) >= 0
    assert max(waits) < 60
    assert max(Counter(wait // 3 for wait in waits).values()) <= 100
