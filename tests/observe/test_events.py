"""Events reach every listener, and listeners can neither change nor break anything."""

from __future__ import annotations

import gc
import logging

import pytest

from limitkeeper import LeakyBucketQueue, Limiter, MemoryStore, RateLimited, SlidingWindowCounter, TokenBucket
from limitkeeper.observe import Event, Publisher


@pytest.fixture
def heard():
    return []


def kinds(heard):
    return [event.kind for event in heard]


def test_an_allowed_hit_is_told(make, heard):
    """An allowed hit is an event with its limiter, key, cost and decision."""
    limiter = make("5/s burst 10", name="search")
    limiter.events.on("allowed", heard.append)
    found = limiter.hit("a", cost=3)
    assert heard == [Event("allowed", "search", "a", 3, found)]


def test_a_refused_hit_is_told(make, heard):
    """A refused hit is an event, and those who listen for allowed ones do not hear it."""
    limiter = make("1/s")
    other = []
    limiter.events.on("refused", heard.append)
    limiter.events.on("allowed", other.append)
    limiter.hit("a")
    limiter.hit("a")
    assert (kinds(heard), kinds(other)) == (["refused"], ["allowed"])
    assert not heard[0].decision


def test_an_acquire_that_slept_is_told_as_waited(make, heard):
    """An acquire that slept is allowed when it was decided, and waited when its turn has come."""
    limiter = make("1/s")
    limiter.events.on("*", heard.append)
    limiter.acquire("a")
    limiter.acquire("a")
    assert kinds(heard) == ["allowed", "allowed", "waited"]
    assert heard[-1].decision.wait == 1.0


def test_waiting_in_a_counters_line_is_told_as_waited(make, heard):
    """On a sliding counter too, an acquire that slept is told as waited."""
    limiter = make(SlidingWindowCounter("1/s"))
    limiter.events.on("*", heard.append)
    limiter.acquire("a")
    limiter.acquire("a")
    assert sorted(kinds(heard)) == ["allowed", "allowed", "waited"]


def test_a_refused_acquire_is_told(make, heard):
    """An acquire that is refused is a refused event."""
    limiter = make("1/s")
    limiter.hit("a")
    limiter.events.on("*", heard.append)
    with pytest.raises(RateLimited):
        limiter.acquire("a", timeout=0)
    assert kinds(heard) == ["refused"]


def test_a_reservation_is_told(make, heard):
    """A reservation is allowed or refused like a hit; entering one that waits is told as waited."""
    limiter = make("1/s")
    limiter.events.on("*", heard.append)
    with limiter.reserve("a"):
        pass
    with limiter.reserve("a"):
        pass
    limiter.reserve("a", max_wait=0)
    assert kinds(heard) == ["allowed", "allowed", "waited", "refused"]


def test_hit_many_tells_every_key(make, heard):
    """Every key of a list is an event of its own, in order, with its cost."""
    limiter = make("2/s")
    limiter.events.on("*", heard.append)
    limiter.hit_many(["a", "b", "a", "a"], cost=[1, 2, 1, 1])
    assert [(event.kind, event.key, event.cost) for event in heard] == [
        ("allowed", "a", 1),
        ("allowed", "b", 2),
        ("allowed", "a", 1),
        ("refused", "a", 1),
    ]


def test_a_peek_is_no_event(make, heard):
    """Looking is not told, and neither are refund and reset."""
    limiter = make("1/s")
    limiter.events.on("*", heard.append)
    limiter.peek("a")
    limiter.refund("a")
    limiter.reset("a")
    assert heard == []


def test_several_limits_are_one_event(make, heard):
    """A decision of several limits is one event, with the mapping of keys and costs as they were given."""
    limiter = make({"user": "5/s", "tenant": "9/s"}, name="api")
    limiter.events.on("*", heard.append)
    limiter.hit({"user": "u", "tenant": "t"}, cost={"tenant": 3})
    assert [(event.limiter, event.key, event.cost) for event in heard] == [("api", {"user": "u", "tenant": "t"}, {"tenant": 3})]


def test_decorated_calls_are_told(make, heard):
    """A decorated call is an event as any other."""
    limiter = make("1/s")
    limiter.events.on("*", heard.append)
    call = limiter.limit(key="a")(lambda: None)
    call()
    with pytest.raises(RateLimited):
        call()
    assert kinds(heard) == ["allowed", "refused"]


@pytest.fixture
def full(clock):
    """A store for one key that is full of it."""
    store = MemoryStore(max_keys=1, clock=clock)
    Limiter("1/h burst 2", store=store).hit("known")
    return store


def test_a_decision_on_a_shared_cell_is_told(make, heard, full):
    """When a full store decides a stranger on an overflow cell, that is an event beside the decision."""
    limiter = make("1/h burst 2", store=full)
    limiter.events.on("*", heard.append)
    found = limiter.hit("stranger")
    assert kinds(heard) == ["overflow", "allowed"]
    assert heard[0].decision == found
    limiter.hit("known")
    assert kinds(heard) == ["overflow", "allowed", "allowed"]


@pytest.mark.parametrize("verb", ["acquire", "reserve", "hit_many"])
def test_every_verb_tells_of_a_shared_cell(make, heard, full, verb):
    """acquire, reserve and hit_many tell of an overflow cell as hit does."""
    limiter = make("1/h burst 2", store=full)
    limiter.events.on("overflow", heard.append)
    getattr(limiter, verb)(["stranger"] if verb == "hit_many" else "stranger")
    assert kinds(heard) == ["overflow"]


def test_shared_cells_are_counted_without_a_listener(make, full):
    """The counter of shared decisions does not need anybody to listen."""
    limiter = make("1/h burst 2", store=full)
    limiter.hit("stranger")
    assert limiter.stats().overflow > 0


# Listeners


def test_a_listener_can_not_change_a_decision(make):
    """Whatever a listener tries on the event and its decision, the caller gets what was decided."""
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
    """A listener's answer does not matter."""
    limiter = make("1/s")
    limiter.events.on("*", lambda event: not event.decision)
    assert [bool(limiter.hit("a")) for _ in range(2)] == [True, False]


def test_a_listener_that_raises_does_not_break_the_caller(make, caplog):
    """An exception in a listener is logged and counted, and the call goes on."""
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


def test_a_listener_behind_one_that_raises_still_hears(make, heard):
    """One broken listener does not keep the next from hearing."""
    limiter = make("1/s")
    limiter.events.on("allowed", lambda event: 1 / 0)
    limiter.events.on("allowed", heard.append)
    limiter.hit("a")
    assert kinds(heard) == ["allowed"]


def test_listeners_hear_in_the_order_in_which_they_came(make):
    """Listeners are told one after the other, first come, first told."""
    limiter = make("1/s")
    order = []
    for name in ("one", "two", "three"):
        limiter.events.on("allowed", lambda event, name=name: order.append(name))
    limiter.hit("a")
    assert order == ["one", "two", "three"]


def test_stopping_to_listen(make, heard):
    """What `on` returns ends the listening; ending twice is nothing."""
    limiter = make("5/s")
    stop = limiter.events.on("allowed", heard.append)
    limiter.hit("a")
    stop()
    limiter.hit("a")
    stop()
    assert len(heard) == 1


def test_stopping_to_listen_to_everything(make, heard):
    """A listener for every kind stops hearing every kind."""
    limiter = make("1/s")
    stop = limiter.events.on("*", heard.append)
    stop()
    limiter.hit("a")
    limiter.hit("a")
    assert heard == []
    assert not limiter.events


def test_stopping_one_leaves_the_others(make, heard):
    """One listener going does not take another along, not even an equal one."""
    limiter = make("5/s")
    stop = limiter.events.on("allowed", heard.append)
    limiter.events.on("allowed", heard.append)
    stop()
    limiter.hit("a")
    assert len(heard) == 1


def test_a_listener_may_stop_itself_while_it_is_told(make):
    """A listener that stops listening when it hears something hears it once, and those behind it hear all."""
    limiter = make("5/s")
    heard, others = [], []

    def once(event):
        heard.append(event)
        stop()

    stop = limiter.events.on("allowed", once)
    limiter.events.on("allowed", others.append)
    limiter.hit("a")
    limiter.hit("a")
    assert (len(heard), len(others)) == (1, 2)


def test_a_listener_may_hit(make, heard):
    """A listener that hits the same limiter is decided as any caller."""
    limiter = Limiter("3/s", store=MemoryStore())

    def again(event):
        heard.append(event)
        if len(heard) == 1:
            limiter.hit("a")

    limiter.events.on("allowed", again)
    limiter.hit("a")
    assert len(heard) == 2
    assert limiter.peek("a").remaining == 1


def test_an_unknown_kind_says_which_there_are(make):
    """Listening for a kind that does not exist is a ValueError that names those that do."""
    with pytest.raises(ValueError, match=r"'alowed'.*allowed, refused, waited"):
        make("1/s").events.on("alowed", print)


# Nobody listens


@pytest.mark.parametrize("limit", [TokenBucket("1/s"), LeakyBucketQueue("1/s", 5), SlidingWindowCounter("1/s")], ids=str)
def test_no_publisher_is_made_when_nobody_listens(store, limit):
    """Every verb runs without a publisher and without events when nobody asked for them."""
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


def test_no_event_is_made_for_a_kind_that_nobody_listens_for(make, monkeypatch, heard):
    """With a listener for refused calls only, an allowed one makes no event."""
    made = []

    class Noted(Event):
        def __init__(self, *fields):
            made.append(fields[0])
            super().__init__(*fields)

    monkeypatch.setattr("limitkeeper.observe.events.Event", Noted)
    limiter = make("1/s")
    limiter.events.on("refused", heard.append)
    limiter.hit("a")
    assert made == []
    limiter.hit("a")
    assert made == ["refused"]


def test_limiters_have_events_of_their_own(make, heard):
    """Listening to one limiter is not listening to another on the same store."""
    one, two = make("5/s"), make("5/s")
    one.events.on("*", heard.append)
    two.hit("a")
    assert heard == []


def test_an_event_is_frozen():
    """An event can't be changed by anybody."""
    event = Event("allowed", "search")
    with pytest.raises(AttributeError):
        event.kind = "refused"
