"""Events reach every listener, and listeners can neither change nor break anything."""

from __future__ import annotations

import gc
import logging

import pytest

from limitkeeper import LeakyBucketQueue, Limiter, MemoryStore, RateLimited, SlidingWindowCounter, TokenBucket
from limitkeeper.observe import Event, Publisher


@pytest.fixture
def received():
    return []


def kinds(received):
    return [event.kind for event in received]


def test_an_allowed_hit_is_an_event(make, received):
    """An allowed hit is an event with its limiter, key, cost and decision."""
    limiter = make("5/s burst 10", name="search")
    limiter.events.on("allowed", received.append)
    found = limiter.hit("a", cost=3)
    assert received == [Event("allowed", "search", "a", 3, found)]


def test_a_refused_hit_is_an_event(make, received):
    """A refused hit is an event, and listeners for allowed ones do not get it."""
    limiter = make("1/s")
    other = []
    limiter.events.on("refused", received.append)
    limiter.events.on("allowed", other.append)
    limiter.hit("a")
    limiter.hit("a")
    assert (kinds(received), kinds(other)) == (["refused"], ["allowed"])
    assert not received[0].decision


def test_an_acquire_that_slept_is_a_waited_event(make, received):
    """An acquire that slept is an allowed event at its decision, and a waited one at its start."""
    limiter = make("1/s")
    limiter.events.on("*", received.append)
    limiter.acquire("a")
    limiter.acquire("a")
    assert kinds(received) == ["allowed", "allowed", "waited"]
    assert received[-1].decision.wait == 1.0


def test_waiting_in_a_counters_queue_is_a_waited_event(make, received):
    """On a sliding counter too, an acquire that slept is a waited event."""
    limiter = make(SlidingWindowCounter("1/s"))
    limiter.events.on("*", received.append)
    limiter.acquire("a")
    limiter.acquire("a")
    assert sorted(kinds(received)) == ["allowed", "allowed", "waited"]


def test_a_refused_acquire_is_an_event(make, received):
    """An acquire that is refused is a refused event."""
    limiter = make("1/s")
    limiter.hit("a")
    limiter.events.on("*", received.append)
    with pytest.raises(RateLimited):
        limiter.acquire("a", timeout=0)
    assert kinds(received) == ["refused"]


def test_a_reservation_is_an_event(make, received):
    """A reservation is allowed or refused like a hit; entering one that waits is a waited event."""
    limiter = make("1/s")
    limiter.events.on("*", received.append)
    with limiter.reserve("a"):
        pass
    with limiter.reserve("a"):
        pass
    limiter.reserve("a", max_wait=0)
    assert kinds(received) == ["allowed", "allowed", "waited", "refused"]


def test_hit_many_has_an_event_for_every_key(make, received):
    """Every key of a list is an event of its own, in order, with its cost."""
    limiter = make("2/s")
    limiter.events.on("*", received.append)
    limiter.hit_many(["a", "b", "a", "a"], cost=[1, 2, 1, 1])
    assert [(event.kind, event.key, event.cost) for event in received] == [
        ("allowed", "a", 1),
        ("allowed", "b", 2),
        ("allowed", "a", 1),
        ("refused", "a", 1),
    ]


def test_a_peek_is_no_event(make, received):
    """Peeks, refunds and resets are not events."""
    limiter = make("1/s")
    limiter.events.on("*", received.append)
    limiter.peek("a")
    limiter.refund("a")
    limiter.reset("a")
    assert received == []


def test_several_limits_are_one_event(make, received):
    """A decision of several limits is one event, with the given mapping of keys and costs."""
    limiter = make({"user": "5/s", "tenant": "9/s"}, name="api")
    limiter.events.on("*", received.append)
    limiter.hit({"user": "u", "tenant": "t"}, cost={"tenant": 3})
    assert [(event.limiter, event.key, event.cost) for event in received] == [
        ("api", {"user": "u", "tenant": "t"}, {"tenant": 3})
    ]


def test_decorated_calls_are_events(make, received):
    """A decorated call is an event as any other."""
    limiter = make("1/s")
    limiter.events.on("*", received.append)
    call = limiter.limit(key="a")(lambda: None)
    call()
    with pytest.raises(RateLimited):
        call()
    assert kinds(received) == ["allowed", "refused"]


@pytest.fixture
def full(clock):
    """A store for one key that is full with it."""
    store = MemoryStore(max_keys=1, clock=clock)
    Limiter("1/h burst 2", store=store).hit("known")
    return store


def test_a_decision_on_a_shared_cell_is_an_event(make, received, full):
    """When a full store decides an unknown key on an overflow cell, that is an event beside the decision."""
    limiter = make("1/h burst 2", store=full)
    limiter.events.on("*", received.append)
    found = limiter.hit("stranger")
    assert kinds(received) == ["overflow", "allowed"]
    assert received[0].decision == found
    limiter.hit("known")
    assert kinds(received) == ["overflow", "allowed", "allowed"]


@pytest.mark.parametrize("verb", ["acquire", "reserve", "hit_many"])
def test_every_verb_has_an_event_for_a_shared_cell(make, received, full, verb):
    """acquire, reserve and hit_many have an event for an overflow cell as hit does."""
    limiter = make("1/h burst 2", store=full)
    limiter.events.on("overflow", received.append)
    getattr(limiter, verb)(["stranger"] if verb == "hit_many" else "stranger")
    assert kinds(received) == ["overflow"]


def test_shared_cells_are_counted_without_a_listener(make, full):
    """The counter of shared decisions works without listeners."""
    limiter = make("1/h burst 2", store=full)
    limiter.hit("stranger")
    assert limiter.stats().overflow > 0


# Listeners


def test_a_listener_can_not_change_a_decision(make):
    """Whatever a listener does to the event and its decision, the caller gets the original decision."""
    limiter = make("1/s")

    def meddle(event):
        for target, name, value in ((event, "decision", None), (event, "kind", "x"), (event.decision, "allowed", True)):
            try:
                setattr(target, name, value)
            except (AttributeError, TypeError):
                pass

    limiter.events.on("*", meddle)
    assert limiter.hit("a").remaining == 0
    found = limiter.hit("a")
    assert (found.allowed, found.retry_after) == (False, 1.0)


def test_what_a_listener_returns_is_ignored(make):
    """A listener's return value is ignored."""
    limiter = make("1/s")
    limiter.events.on("*", lambda event: not event.decision)
    assert [bool(limiter.hit("a")) for _ in range(2)] == [True, False]


def test_a_listener_that_raises_does_not_break_the_caller(make, caplog):
    """An exception in a listener is logged and counted, and the call continues."""
    limiter = make("1/s", name="search")

    def fail(event):
        raise RuntimeError("listener broke")

    limiter.events.on("*", fail)
    with caplog.at_level(logging.ERROR, logger="limitkeeper"):
        assert [bool(limiter.hit("a")) for _ in range(2)] == [True, False]
        assert limiter.acquire("a").wait == 1.0
    assert limiter.events.failures == 4
    assert "listener broke" in caplog.text
    assert "'search'" in caplog.text


def test_a_listener_behind_one_that_raises_is_still_called(make, received):
    """An exception in one listener does not keep the next from being called."""
    limiter = make("1/s")
    limiter.events.on("allowed", lambda event: 1 / 0)
    limiter.events.on("allowed", received.append)
    limiter.hit("a")
    assert kinds(received) == ["allowed"]


def test_listeners_are_called_in_order_of_registration(make):
    """Listeners are called one after the other, in order of registration."""
    limiter = make("1/s")
    order = []
    for name in ("one", "two", "three"):
        limiter.events.on("allowed", lambda event, name=name: order.append(name))
    limiter.hit("a")
    assert order == ["one", "two", "three"]


def test_stopping_to_listen(make, received):
    """The function that `on` returns ends the listening; a second call does nothing."""
    limiter = make("5/s")
    stop = limiter.events.on("allowed", received.append)
    limiter.hit("a")
    stop()
    limiter.hit("a")
    stop()
    assert len(received) == 1


def test_stopping_to_listen_to_everything(make, received):
    """A listener for every kind is removed from every kind."""
    limiter = make("1/s")
    stop = limiter.events.on("*", received.append)
    stop()
    limiter.hit("a")
    limiter.hit("a")
    assert received == []
    assert not limiter.events


def test_stopping_one_leaves_the_others(make, received):
    """Removing one listener does not remove another, not even an equal one."""
    limiter = make("5/s")
    stop = limiter.events.on("allowed", received.append)
    limiter.events.on("allowed", received.append)
    stop()
    limiter.hit("a")
    assert len(received) == 1


def test_a_listener_may_stop_itself_during_its_call(make):
    """A listener that removes itself in its first event gets only that one, and those behind it get all."""
    limiter = make("5/s")
    received, others = [], []

    def once(event):
        received.append(event)
        stop()

    stop = limiter.events.on("allowed", once)
    limiter.events.on("allowed", others.append)
    limiter.hit("a")
    limiter.hit("a")
    assert (len(received), len(others)) == (1, 2)


def test_a_listener_may_hit(make, received):
    """A listener that hits the same limiter is decided as any caller."""
    limiter = Limiter("3/s", store=MemoryStore())

    def again(event):
        received.append(event)
        if len(received) == 1:
            limiter.hit("a")

    limiter.events.on("allowed", again)
    limiter.hit("a")
    assert len(received) == 2
    assert limiter.peek("a").remaining == 1


def test_an_unknown_kind_is_an_error_that_lists_the_kinds(make):
    """Listening for a kind that does not exist is a ValueError that names the existing ones."""
    with pytest.raises(ValueError, match=r"'alowed'.*allowed, refused, waited"):
        make("1/s").events.on("alowed", print)


# No listeners


@pytest.mark.parametrize("limit", [TokenBucket("1/s"), LeakyBucketQueue("1/s", 5), SlidingWindowCounter("1/s")], ids=str)
def test_no_publisher_is_made_without_listeners(store, limit):
    """Without listeners every verb runs without a publisher and without events."""
    gc.collect()
    before = sum(type(one) in (Publisher, Event) for one in gc.get_objects())
    limiter = Limiter(limit, store=store)
    limiter.hit("a")
    limiter.hit("a")
    limiter.peek("a")
    limiter.acquire("a")
    limiter.hit_many(["a", "b"])
    limiter.reserve("b").cancel()
    limiter.reset("a")
    limiter.stats()
    assert limiter._publisher is None
    assert sum(type(one) in (Publisher, Event) for one in gc.get_objects()) == before


def test_no_event_is_made_for_a_kind_without_listeners(make, monkeypatch, received):
    """With a listener for refused calls only, an allowed one makes no event."""
    made = []

    class Noted(Event):
        def __init__(self, *fields):
            made.append(fields[0])
            super().__init__(*fields)

    monkeypatch.setattr("limitkeeper.observe.events.Event", Noted)
    limiter = make("1/s")
    limiter.events.on("refused", received.append)
    limiter.hit("a")
    assert made == []
    limiter.hit("a")
    assert made == ["refused"]


def test_limiters_have_events_of_their_own(make, received):
    """Listening to one limiter is not listening to another on the same store."""
    one, two = make("5/s"), make("5/s")
    one.events.on("*", received.append)
    two.hit("a")
    assert received == []


def test_an_event_is_frozen():
    """An event is immutable."""
    event = Event("allowed", "search")
    with pytest.raises(AttributeError):
        event.kind = "refused"
