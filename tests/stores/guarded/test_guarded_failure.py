"""A store that fails, behind a guard: the answers meanwhile, the place of refunds, and the events."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random

import pytest
from failing import ALL, FailingStore

from limitkeeper import ConfigurationError, FixedWindow, Limiter, StoreError, StoreUnavailable, TokenBucket
from limitkeeper.policy import Gate, Policy
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.web.asgi import RateLimitMiddleware


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def behind(request, store):
    """The store behind the guard, which fails on demand: one with a deadline of its own, and one that worker threads call."""
    return FailingStore(store, local=request.param)


@pytest.fixture
def guarded(behind, clock):
    """Makes guards that open at the second failure and are probed by hand."""

    def build(on_failure="open", share=None, inner=behind, **more):
        options = {
            "failures": 2,
            "ramp": 1,
            "backoff": 1,
            "clock": clock,
            "rng": Random(7),
            "background": False,
            "budget": 10,
            **more,
        }
        return GuardedStore(inner, on_failure=on_failure, share=share, **options)

    return build


def broken(behind, guard, limiter):
    """Lets the store fail until its guard is open."""
    behind.failing |= ALL
    while guard.state != "open":
        limiter.hit("other")


def mended(behind, guard, clock):
    """Lets the store work until its guard is closed."""
    behind.failing.clear()
    assert guard.probe() is True
    clock.advance(1)
    guard._health.may_call()
    assert guard.state == "closed"


# Answers without the store


def test_open_admits_and_the_decision_shows_it(make, behind, guarded):
    """on_failure="open": allowed, with the limit's own name and size; all of it remains, since nothing is counted."""
    guard = guarded("open")
    limiter = make(TokenBucket("5/s burst 10"), store=guard)
    behind.failing |= ALL
    decision = limiter.hit("a", cost=7)
    assert (decision.allowed, decision.limit, decision.remaining, decision.retry_after) == (True, 10, 10, 0.0)
    assert decision.name == "token bucket 5/s burst 10"
    assert guard.answered_here(decision)


def test_open_still_refuses_what_can_never_fit(make, behind, guarded):
    """A cost above the limit is refused for ever, with the store or without."""
    limiter = make(TokenBucket("5/s burst 10"), store=guarded("open"))
    behind.failing |= ALL
    assert limiter.hit("a", cost=11).retry_after == float("inf")


def test_closed_refuses_until_the_next_probe(make, behind, guarded, clock):
    """on_failure="closed": refused, with the next probe as the retry time; a cost of nothing is still allowed."""
    guard = guarded("closed")
    limiter = make(TokenBucket("5/s burst 10"), store=guard)
    broken(behind, guard, limiter)
    decision = limiter.hit("a")
    assert (decision.allowed, decision.remaining) == (False, 0)
    assert decision.retry_after == (guard._breaker.probe_at_us - clock.now_us()) / 1e6
    assert limiter.hit("a", cost=0)
    assert limiter.hit("a", cost=11).retry_after == float("inf")
    assert guard.answered_here(decision)


def test_local_enforces_the_share(make, behind, guarded, clock):
    """on_failure="local": a quarter of 8/s burst 8 is two at once and two a second."""
    guard = guarded("local", share=4)
    limiter = make(TokenBucket("8/s"), store=guard)
    broken(behind, guard, limiter)
    decisions = [limiter.hit("a") for _ in range(4)]
    assert [bool(one) for one in decisions] == [True, True, False, False]
    assert (decisions[0].limit, decisions[0].remaining, decisions[2].retry_after) == (2, 1, 0.5)
    clock.advance(0.5)
    assert limiter.hit("a")
    assert not limiter.hit("a")


def test_what_is_too_large_for_the_share_only_is_not_refused_for_ever(make, behind, guarded, clock):
    """A cost that fits the limit but not the share may pass when the store is back: the retry is the next probe."""
    guard = guarded("local", share=4)
    limiter = make(TokenBucket("8/s"), store=guard)
    broken(behind, guard, limiter)
    decision = limiter.hit("a", cost=5)
    assert decision.retry_after == (guard._breaker.probe_at_us - clock.now_us()) / 1e6
    assert limiter.hit("a", cost=9).retry_after == float("inf")


@pytest.mark.parametrize("on_failure", ["open", "closed", "local"])
def test_several_limits_are_answered_together(make, behind, guarded, on_failure):
    """Each limit has its part in the answer, and the deciding one is its result."""
    guard = guarded(on_failure, share=2 if on_failure == "local" else None)
    limiter = make({"user": TokenBucket("4/s"), "tenant": FixedWindow("100/min")}, store=guard)
    behind.failing |= ALL
    decision = limiter.hit({"user": "u", "tenant": "t"})
    assert [part.name for part in decision.decisions] == ["user", "tenant"]
    assert bool(decision) is (on_failure != "closed")
    assert decision.name == "user"
    never = limiter.hit({"user": "u", "tenant": "t"}, cost={"user": 5})
    assert (never.allowed, never.retry_after, never.name) == (False, float("inf"), "user")


@pytest.mark.parametrize("on_failure", ["open", "closed", "local"])
def test_every_verb_is_answered_without_the_store(make, behind, guarded, on_failure):
    """hit, peek, hit_many, acquire, reserve, settle, cancel, refund: none of them raises because of the store."""
    guard = guarded(on_failure, share=2 if on_failure == "local" else None)
    limiter = make("100/s", store=guard)
    behind.failing |= ALL
    limiter.hit("a")
    limiter.peek("a")
    assert len(limiter.hit_many(["a", "b", "a"])) == 3
    if on_failure != "closed":
        assert limiter.acquire("a")
    limiter.reserve("a", cost=3).settle(1)
    limiter.reserve("a", cost=3).cancel()
    limiter.refund("a")
    assert guard.stats().degraded >= 6


def test_a_peek_of_the_share_takes_nothing(make, behind, guarded):
    """Peeking while the store is away charges nothing here either."""
    limiter = make("8/s", store=guarded("local", share=4))
    behind.failing |= ALL
    assert [limiter.peek("a").remaining for _ in range(3)] == [2, 2, 2]


def test_hit_many_sees_its_own_hits_in_the_share(make, behind, guarded):
    """Keys of one call are decided in order on the share too."""
    limiter = make("8/s", store=guarded("local", share=4))
    behind.failing |= ALL
    assert [bool(one) for one in limiter.hit_many(["a", "b", "a", "a"])] == [True, True, True, False]


def test_a_share_can_be_waited_for(make, behind, guarded, clock):
    """acquire on the share charges a future start and sleeps until then."""
    limiter = make("8/s", store=guarded("local", share=4))
    behind.failing |= ALL
    limiter.hit("a", cost=2)
    assert limiter.acquire("a").wait == 0.5


# Calls of the store


def test_a_refusal_is_no_failure(make, behind, guarded):
    """A store that refuses is not failing."""
    guard = guarded()
    limiter = make("1/h", store=guard)
    for _ in range(20):
        limiter.hit("a")
    assert (guard.state, guard.stats().failures) == ("closed", 0)


def test_other_exceptions_are_no_failure_and_are_not_hidden(behind, guarded, monkeypatch):
    """An exception other than StoreError is a bug, and goes to the caller."""
    guard = guarded()
    limiter = Limiter("5/s", store=guard)
    monkeypatch.setattr(behind, "decide", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        limiter.hit("a")
    assert guard.stats().failures == 0


def test_an_open_guard_does_not_call_its_store(make, behind, guarded):
    """While the breaker is open the store is not called."""
    guard = guarded()
    limiter = make("5/s", store=guard)
    broken(behind, guard, limiter)
    behind.calls.clear()
    for _ in range(50):
        limiter.hit("a")
        limiter.peek("b")
    limiter.hit_many(["a", "b"])
    assert behind.calls == []


def test_a_probe_is_one_call_that_charges_nothing(behind, guarded, clock, store):
    """A probe repeats the failed call, without charging it."""
    guard = guarded()
    limiter = Limiter("5/s", store=guard)
    broken(behind, guard, limiter)
    behind.calls.clear()
    assert guard.probe() is False
    behind.failing.clear()
    assert guard.probe() is True
    assert guard.probe() is True  # nothing to probe any more
    assert behind.calls == ["decide", "decide"]
    assert list(store.items(limiter.named[0])) == []


def test_recovery_is_gradual(behind, guarded, clock):
    """Half open, few calls reach the store at first; at the end of the ramp all do."""
    guard = guarded()
    limiter = Limiter("1000000/s", store=guard)
    broken(behind, guard, limiter)
    behind.failing.clear()
    guard.probe()
    asked = []
    for _ in range(11):
        behind.calls.clear()
        for _ in range(100):
            limiter.hit("a")
        asked.append(len(behind.calls))
        clock.advance(0.1)
    assert asked[0] == 0
    assert asked[-1] == 100
    assert sum(a < b for a, b in pairwise(asked)) >= 8
    assert guard.state == "closed"


def test_a_fleet_comes_back_without_a_stampede(store, clock):
    """Forty nodes that lost a server together return to it over a second: its load never jumps by more than a quarter."""
    links = [FailingStore(store, local=True) for _ in range(40)]
    guards = [
        GuardedStore(link, failures=1, backoff="100ms", max_backoff=1, ramp=1, clock=clock, rng=Random(n))
        for n, link in enumerate(links)
    ]
    limiters = [Limiter("1000000/s", store=guard) for guard in guards]
    loads = []
    for step in range(160):  # of 20 ms
        for link in links:
            link.failing = set(ALL) if step < 50 else set()
            link.calls.clear()
        for guard, limiter in zip(guards, limiters, strict=True):
            if guard.state == "open" and guard._breaker.probe_at_us <= clock.now_us():
                guard.probe()
            limiter.hit("a")
        loads.append(sum(len(link.calls) for link in links))
        clock.advance(0.02)
    assert max(loads[1:50]) <= 15  # probes of servers that are away, spread at random
    assert loads[-1] == 40
    assert max(after - before for before, after in pairwise(loads[50:])) <= 10
    assert sum(loads[50:75]) < 25 * 40 / 2


def test_one_failure_while_half_open_costs_one_call(behind, guarded, clock):
    """A store that fails its first caller again is not called any more at once."""
    guard = guarded()
    limiter = Limiter("5/s", store=guard)
    broken(behind, guard, limiter)
    behind.failing.clear()
    guard.probe()
    behind.failing |= ALL
    behind.calls.clear()
    clock.advance(0.9)
    for _ in range(50):
        limiter.hit("a")
    assert behind.calls == ["decide"]
    assert (guard.state, guard.stats().opened) == ("open", 2)


def test_a_limiter_can_be_made_while_the_store_is_down(behind, guarded, store, monkeypatch):
    """A limit that can't be registered is registered when the store is back."""
    behind.failing |= {*ALL, "register"}
    guard = guarded("local", share=2)
    limiter = Limiter({"slow": TokenBucket("1/h burst 10 initial 0")}, store=guard)
    assert not limiter.hit("a")
    broken(behind, guard, limiter)
    known = []
    monkeypatch.setattr(behind, "register", lambda limit: known.append(limit.name))
    behind.failing.clear()
    guard.probe()
    assert known == ["slow"]


# Refunds


def test_a_local_charge_goes_back_to_the_share(make, behind, guarded):
    """A charge made here is given back here, exactly, also after the store is back."""
    guard = guarded("local", share=4)
    limiter = make("8/s", store=guard)
    broken(behind, guard, limiter)
    reservation = limiter.reserve("a", cost=2)
    assert limiter.peek("a").remaining == 0
    assert reservation.cancel() is True
    assert limiter.peek("a").remaining == 2
    assert guard.stats().dropped == 0


def test_a_local_charge_never_goes_back_to_the_store(make, behind, guarded, clock, store):
    """A reservation made here and settled after recovery gives nothing to a store that never charged it."""
    guard = guarded("local", share=2)
    limiter = make(FixedWindow("8/h"), store=guard)
    limiter.hit("a", cost=5)
    broken(behind, guard, limiter)
    reservation = limiter.reserve("a", cost=3)
    mended(behind, guard, clock)
    assert reservation.settle(0) is True
    assert limiter.peek("a").remaining == 3


def test_what_was_let_through_without_a_charge_never_goes_back(make, behind, guarded, clock):
    """Failing open charges nothing, so nothing is given back when the store is back."""
    guard = guarded("open")
    limiter = make(FixedWindow("8/h"), store=guard)
    limiter.hit("a", cost=5)
    broken(behind, guard, limiter)
    reservation = limiter.reserve("a", cost=5)
    mended(behind, guard, clock)
    reservation.cancel()
    assert limiter.peek("a").remaining == 3
    assert guard.stats().dropped == 0


def test_a_charge_of_the_store_that_cannot_go_back_is_dropped_and_published(make, behind, guarded, clock):
    """While the store is away its own charges can't be given back: the strict side, and an event."""
    guard = guarded("local", share=2)
    published = []
    guard.events.on("give back dropped", published.append)
    limiter = make(FixedWindow("8/h"), store=guard, name="api")
    reservation = limiter.reserve("a", cost=5)
    broken(behind, guard, limiter)
    assert reservation.cancel() is True
    assert [(event.limiter, event.key, event.cost) for event in published] == [("api", "a", 5)]
    assert guard.stats().dropped == 1
    assert limiter.peek("a").remaining == 4  # the share, untouched
    mended(behind, guard, clock)
    assert limiter.peek("a").remaining == 3


def test_a_charge_of_the_store_goes_back_to_it_after_recovery(make, behind, guarded, clock):
    """A reservation made before an outage and settled after it has the same result as without the outage."""
    guard = guarded("local", share=2)
    limiter = make(FixedWindow("8/h"), store=guard)
    reservation = limiter.reserve("a", cost=5)
    broken(behind, guard, limiter)
    mended(behind, guard, clock)
    reservation.settle(1)
    assert limiter.peek("a").remaining == 7


def test_what_is_settled_above_its_estimate_is_charged_here(make, behind, guarded):
    """A debt that the store can't be charged is charged to the share, so that it is not forgiven."""
    guard = guarded("local", share=2)
    limiter = make("8/s", store=guard)
    reservation = limiter.reserve("a", cost=1)
    broken(behind, guard, limiter)
    reservation.settle(4)
    assert limiter.peek("a").remaining == 1


def test_a_refund_goes_to_the_share_while_it_decides(make, behind, guarded):
    """While the store is away, a refund is given back to the share, never above full."""
    guard = guarded("local", share=2)
    limiter = make("8/s", store=guard)
    broken(behind, guard, limiter)
    limiter.hit("a", cost=3)
    limiter.refund("a", cost=2)
    assert limiter.peek("a").remaining == 3
    limiter.refund("a", cost=100)
    assert limiter.peek("a").remaining == 4


def test_a_local_reservation_is_undone_exactly(make, behind, guarded):
    """Cancelling the last future start of the share leaves it as if it had never been made."""
    guard = guarded("local", share=2)
    limiter = make(FixedWindow("4/min"), store=guard)
    broken(behind, guard, limiter)
    limiter.hit("a")
    before = limiter.peek("a")
    reservation = limiter.reserve("a", cost=2)
    assert reservation.wait > 0
    reservation.cancel()
    assert limiter.peek("a") == before


def test_reset_raises_when_the_store_cannot_be_reached(make, behind, guarded):
    """A reset that fails in the store is an error for the caller, since the key is not forgotten everywhere."""
    guard = guarded("local", share=2)
    limiter = make("8/s", store=guard)
    behind.failing |= ALL
    with pytest.raises(StoreError):
        limiter.reset("a")
    broken(behind, guard, limiter)
    limiter.hit("a", cost=3)
    with pytest.raises(StoreUnavailable, match="next probe is in"):
        limiter.reset("a")
    assert limiter.peek("a").remaining == 4  # here it is forgotten


def test_items_and_load_are_the_stores_own(behind, guarded):
    """The store's keys can't be listed nor loaded while it is away."""
    guard = guarded()
    limiter = Limiter("8/s", store=guard)
    limiter.hit("a")
    (named,) = limiter.named
    states = list(guard.items(named))
    assert [key for key, _ in states] == ["a"]
    guard.load(named, states)
    broken(behind, guard, limiter)
    with pytest.raises(StoreUnavailable):
        guard.items(named)
    with pytest.raises(StoreUnavailable):
        guard.load(named, states)


def test_those_behind_a_leaver_move_up_while_the_store_fails(store, guarded, clock):
    """Waiters exchange their starts without the store: those behind move up, and a failed refund is dropped."""
    guard = guarded("local", share=2, inner=store)
    limiter = Limiter("2/s burst 2", store=guard)
    limiter.hit("a", cost=2)
    first, second = limiter.reserve("a"), limiter.reserve("a")
    guard._health.record_failure(StoreUnavailable("gone"), first._waiter.claims)
    guard._health.record_failure(StoreUnavailable("gone"), first._waiter.claims)
    assert guard.state == "open"
    assert first.cancel() is True
    assert second.wait == 0.5
    assert guard.stats().dropped == 1


def test_a_line_that_cannot_be_moved_because_the_store_fails_stays(store, guarded, monkeypatch):
    """When the store fails, the charge of the waiter that leaves is dropped with an event; the one behind moves up."""

    class Failing(type(store)):
        def rebook(self, turns):
            raise StoreUnavailable("gone")

        def give_back(self, claims, charged_at=-1, source="store"):
            raise StoreUnavailable("gone")

    guard = guarded("local", share=2, inner=Failing(clock=store.clock))
    published = []
    guard.events.on("give back dropped", published.append)
    limiter = Limiter("2/s burst 2", store=guard)
    limiter.hit("a", cost=2)
    first, second = limiter.reserve("a"), limiter.reserve("a")
    assert first.cancel() is True
    assert second.wait == 0.5
    assert [event.key for event in published] == ["a"]
    assert guard.stats().failures == 1


# Events


def test_every_change_of_state_is_an_event(behind, guarded, clock):
    """opened, probe failed, half open, closed: published in order, with the store's name and the error."""
    guard = guarded(name="the fleet's Redis")
    published = []
    guard.events.on("*", published.append)
    limiter = Limiter("5/s", store=guard)
    broken(behind, guard, limiter)
    guard.probe()
    mended(behind, guard, clock)
    assert [event.kind for event in published] == ["opened", "probe failed", "half open", "closed"]
    assert {event.limiter for event in published} == {"the fleet's Redis"}
    assert [type(event.error) for event in published[:2]] == [StoreUnavailable, StoreUnavailable]


def test_decisions_made_here_are_counted_not_published(behind, guarded):
    """An outage is a few events, however many decisions it costs."""
    guard = guarded()
    published = []
    guard.events.on("*", published.append)
    limiter = Limiter("5/s", store=guard)
    broken(behind, guard, limiter)
    for _ in range(100):
        limiter.hit("a")
    limiter.hit_many(["a", "b"])
    assert len(published) == 1
    assert guard.stats().degraded == 2 + 100 + 2


def test_stats_show_what_happened(behind, guarded, clock):
    """stats() counts failures, openings, probes and local answers, and has the time of the last change."""
    guard = guarded("closed")
    limiter = Limiter("5/s", store=guard)
    clock.advance(5)
    broken(behind, guard, limiter)
    guard.probe()
    stats = guard.stats()
    assert stats.state == guard.state == "open"
    assert (stats.failures, stats.timeouts, stats.opened, stats.probes, stats.degraded) == (2, 0, 1, 1, 2)
    assert stats.since_us == clock.now_us()


def test_a_listener_that_fails_changes_nothing(behind, guarded, caplog):
    """Events are published after the transition; a listener that fails is counted."""
    guard = guarded()
    guard.events.on("opened", lambda event: 1 / 0)
    limiter = Limiter("5/s", store=guard)
    broken(behind, guard, limiter)
    assert guard.events.failures == 1


# Construction


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"on_failure": "maybe"}, "'open', 'closed', 'local'"),
        ({"on_failure": "local"}, "share=4"),
        ({"on_failure": "open", "share": 4}, "belongs to on_failure='local'"),
        ({"budget": 0}, "20ms"),
    ],
)
def test_invalid_settings_of_a_guard_name_the_remedy(store, arguments, said):
    """Mistakes are errors that name the argument and the remedy."""
    with pytest.raises(ConfigurationError, match=said):
        GuardedStore(store, **arguments)


def test_a_guard_needs_a_store():
    """A URL is no store."""
    with pytest.raises(ConfigurationError, match="GuardedStore"):
        GuardedStore("redis://localhost")


def test_a_closed_guard_closes_its_store(store, clock):
    """close() and aclose() close the store behind and the share."""
    with GuardedStore(store, on_failure="local", share=2) as guard:
        Limiter("5/s", store=guard).hit("a")
        assert len(store) == 1
    assert len(store) == 0

    async def main():
        async with GuardedStore(store) as guard:
            Limiter("5/s", store=guard).hit("a")

    asyncio.run(main())
    assert len(store) == 0


# Responses


def test_the_reset_header_of_a_share_is_a_moment_of_today(store, clock, tmp_path):
    """With `reset: epoch` and a failed store, X-RateLimit-Reset is now plus the time to the share's reset."""
    text = "headers: {reset: epoch}\non_failure: local 1/2\nbudget: 10s\nlimits: [{name: api, limit: 4/min}]"
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    failing = FailingStore(store)
    gate = Gate(Policy.load(path), store=failing, clock=clock)
    failing.failing |= ALL
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(RateLimitMiddleware(app, gate)(scope, receive, send))
    headers = dict(sent[0]["headers"])
    assert int(headers[b"x-ratelimit-remaining"]) == 1  # of the share of 2
    now = clock.now_us() / 1e6
    assert now <= int(headers[b"x-ratelimit-reset"]) <= now + 61
