"""Limits of single keys from outside: fresh within their time, never waited for, and no failure changes a limit."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from limitkeeper import FixedWindow, MemoryStore, SharedStore, SlidingWindowLog, TokenBucket
from limitkeeper.errors import ConfigurationError, InvalidLimit
from limitkeeper.observe.logs import log_refusals
from limitkeeper.policy import Policy, WrittenRequest, application_overrides
from limitkeeper.policy.application_overrides import MAX_CACHED, CalledOverrides, HashOverrides, limits_of
from limitkeeper.policy.gate import Gate
from limitkeeper.stores import cell_table
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.shared import limit_directory
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey

BUCKET = TokenBucket("500/s burst 1000")
TEXT = "token bucket 500/s burst 1000"


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        (None, None),
        (TEXT, (BUCKET,)),
        (BUCKET, (BUCKET,)),
        ("unlimited", ()),
        (" Unlimited ", ()),
        (f"{TEXT}; fixed window 9/min", (BUCKET, FixedWindow("9/min"))),
        ([BUCKET, "fixed window 9/min"], (BUCKET, FixedWindow("9/min"))),
    ],
)
def test_an_override_is_said_like_a_limit(said, limits):
    """As text, as a limit, as several of them; "unlimited" is none, None is no override."""
    assert limits_of(said) == limits


@pytest.mark.parametrize("said", ["", "5", "token bucket lots", 5, True, {"limit": 5}, b"5/s", [], object])
def test_nonsense_is_no_limit(said):
    """Any other value is refused."""
    with pytest.raises(InvalidLimit):
        limits_of(said)


class Plans:
    """A function of an application, with settable results."""

    def __init__(self, **plans):
        self.plans = plans
        self.asked: list[str] = []

    def __call__(self, key):
        self.asked.append(key)
        said = self.plans.get(key)
        if isinstance(said, Exception):
            raise said
        return said


def test_an_answer_is_kept_for_its_time():
    """Within its time the function is not called again; after it a new plan counts."""
    clock, plans = ManualClock(), Plans(acme=TEXT)
    called = CalledOverrides(plans, 10_000_000, clock)
    assert [called.get("acme"), called.get("acme"), called.get("bob")] == [(BUCKET,), (BUCKET,), None]
    assert plans.asked == ["acme", "bob"]
    plans.plans["acme"] = "unlimited"
    clock.advance(9.9)
    assert called.get("acme") == (BUCKET,)
    clock.advance(0.1)
    assert called.get("acme") == ()
    assert plans.asked == ["acme", "bob", "acme"]


@pytest.mark.parametrize("failure", [RuntimeError("key acme"), "token bucket lots", 7, True])
def test_a_function_that_fails_changes_nothing(failure, caplog):
    """The known override of a key stays, else the rule's own limit; the log has one line, the counter all."""
    clock, plans = ManualClock(), Plans(acme=TEXT)
    called = CalledOverrides(plans, 1_000_000, clock)
    called.get("acme")
    plans.plans = {"acme": failure, "bob": failure}
    clock.advance(1)
    assert [called.get("acme"), called.get("bob"), called.get("acme")] == [(BUCKET,), None, (BUCKET,)]
    assert called.failures == 2
    assert len(caplog.records) == 1
    assert "the limit stays as it was" in caplog.text


def test_what_is_kept_of_answers_is_bounded():
    """A flood of keys fills no memory."""
    called = CalledOverrides(Plans(), clock=ManualClock())
    for n in range(MAX_CACHED + 100):
        called.get(str(n))
    assert len(called._cached) <= MAX_CACHED
    called.close()
    assert not called._cached


def test_a_clock_that_goes_back_reads_again():
    """An entry dated in the future is not used."""
    clock, plans = ManualClock(100), Plans(acme=TEXT)
    called = CalledOverrides(plans, 1_000_000, clock)
    called.get("acme")
    clock.advance(-50)
    called.get("acme")
    assert len(plans.asked) == 2


async def later(key):
    return None


def test_functions_that_can_not_serve_are_refused():
    """A function that is async, none at all, and a time below zero: an error when the policy is made."""
    for call, remedy in ((later, "is async"), ("shop:limit_of", "write package.module:function")):
        with pytest.raises(ConfigurationError, match=remedy):
            CalledOverrides(call)
    with pytest.raises(ConfigurationError, match="such as 10s"):
        CalledOverrides(Plans(), -1)


# A hash in Redis


@pytest.fixture
def hashed(valkey, request):
    """A hash of its own, its client, and a maker of overrides that closes what it made."""
    name, client, made = f"limits:{request.node.name}", valkey.client(), []

    def make(url=valkey.url, refresh_us=20_000):
        made.append(HashOverrides(url, name, refresh_us))
        return made[-1]

    make.name, make.client = name, client
    yield make
    for one in made:
        one.close()
    client.close()


def test_a_hash_is_read_whole_and_again(hashed, eventually):
    """A field that is set, changed or deleted is a limit that is set, changed or gone; a request only reads a dict."""
    hashed.client.hset(hashed.name, mapping={"acme": TEXT, "café|42": "fixed window 9/min", "vip": "unlimited"})
    found = hashed()
    assert found.ready(30)
    assert [found.get(key) for key in ("acme", "café|42", "vip", "bob")] == [(BUCKET,), (FixedWindow("9/min"),), (), None]
    hashed.client.hset(hashed.name, "acme", "fixed window 5/min")
    eventually(lambda: found.get("acme") == (FixedWindow("5/min"),))
    hashed.client.delete(hashed.name)
    eventually(lambda: found.get("acme") is None)
    assert found.failures == 0


def test_senseless_fields_are_skipped_with_one_line_each(hashed, eventually, caplog):
    """The line names field and text; the other fields count, and nothing is logged again until the text changes."""
    hashed.client.hset(hashed.name, mapping={"acme": TEXT, "bob": "token bucket lots", "eve": "x" * 1_000, b"\xff": b"\xff"})
    found = hashed(refresh_us=10_000)
    assert found.ready(30)
    assert (found.get("acme"), found.get("bob"), found.get("eve")) == ((BUCKET,), None, None)
    hashed.client.hset(hashed.name, "more", TEXT)
    eventually(lambda: found.get("more") == (BUCKET,))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == found.failures == 3
    assert any("field b'bob': b'token bucket lots' is skipped" in line for line in lines)
    assert max(map(len, lines)) < 300
    hashed.client.hset(hashed.name, "bob", "7 apples")
    eventually(lambda: found.failures == 4)


def test_a_flood_of_senseless_fields_does_not_flood_the_log(hashed, caplog):
    """Ten lines and a number."""
    hashed.client.hset(hashed.name, mapping={f"k{n}": f"nonsense {n}" for n in range(200)})
    found = hashed(refresh_us=10_000_000)
    assert found.ready(30)
    assert len(caplog.records) == 11
    assert "190 more fields" in caplog.records[-1].getMessage()


def test_a_server_that_is_away_changes_nothing(eventually, caplog):
    """Known overrides stay while Redis is gone, a request never waits, and changes meanwhile are found when it is back."""
    with Valkey() as server:
        with server.client() as client:
            client.hset("limits", "acme", TEXT)
        found = HashOverrides(server.url, "limits", 20_000)
        try:
            assert found.ready(30)
            server.kill()
            eventually(lambda: found.failures > 0)
            assert found.get("acme") == (BUCKET,)
            eventually(lambda: "those known stay" in caplog.text)
            server.start()
            with server.client() as client:
                client.hset("limits", "acme", "unlimited")
            eventually(lambda: found.get("acme") == ())
        finally:
            found.close()


def test_a_server_that_was_never_there_costs_no_request_anything(caplog):
    """The rule's own limit holds."""
    found = HashOverrides("redis://127.0.0.1:1", "limits", 1_000_000)
    try:
        assert found.get("acme") is None
        assert not found.ready(0.05)
    finally:
        found.close()


def test_a_key_that_is_no_hash_is_logged(hashed, eventually, caplog):
    """The server's own error text is in the log."""
    hashed.client.set(hashed.name, "text")
    found = hashed()
    assert found.get("acme") is None
    eventually(lambda: "WRONGTYPE" in caplog.text)
    assert found.failures > 0


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "limitkeeper overrides"]


def test_no_thread_runs_before_the_first_use_nor_after_closing(hashed):
    """A policy that is only checked connects to nothing; closing ends the thread, and the next use begins anew."""
    before = len(readers())
    found = hashed()
    assert len(readers()) == before
    found.get("acme")
    assert len(readers()) == before + 1
    found.close()
    found.close()
    assert len(readers()) == before
    assert found.ready(30)
    assert len(readers()) == before + 1


def test_a_reloaded_policy_goes_on_with_what_is_known(hashed):
    """Two that read the same hash share one reader: the second has everything at once, and survives the first."""
    hashed.client.hset(hashed.name, "acme", TEXT)
    old, before = hashed(), len(readers())
    assert old.ready(30)
    new = hashed()
    assert new.get("acme") == (BUCKET,)
    assert len(readers()) == before + 1
    old.close()
    assert new.get("acme") == (BUCKET,)
    assert len(readers()) == before + 1


def test_a_second_reader_of_a_hash_begins_with_the_known_overrides(caplog):
    """Closed and made anew, as when a policy is loaded again: no request misses the overrides, though the server is away."""
    with Valkey() as server:
        with server.client() as client:
            client.hset("limits", "acme", TEXT)
        old, new = HashOverrides(server.url, "limits", 20_000), HashOverrides(server.url, "limits", 30_000)
        assert old.ready(30)
        old.close()
        server.kill()
        assert new.get("acme") == (BUCKET,)
        new.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_process_reads_for_itself(hashed):
    """After a fork the child has the parent's overrides, and reads changes in a thread of its own."""
    hashed.client.hset(hashed.name, "acme", TEXT)
    found = hashed()
    assert found.ready(30)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            known = found.get("acme") == (BUCKET,)
            os.write(writing, b"!")
            for _ in range(3000):
                if found.get("acme") == ():
                    code = 0 if known else 2
                    break
                threading.Event().wait(0.01)
        finally:
            os._exit(code)
    assert os.read(reading, 1) == b"!"
    hashed.client.hset(hashed.name, "acme", "unlimited")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reading)
    os.close(writing)


def test_the_url_of_the_store_serves(valkey):
    """Wrappers around a store in the policy have no effect here."""
    found = HashOverrides(f"{valkey.url}/0?guard=local&share=1/4&timeout=30s", "limits")
    assert found.ready(30)
    found.close()


@pytest.mark.parametrize(
    ("url", "name", "refresh_us", "remedy"),
    [
        ("redis://localhost", "", 5_000_000, "the key of the hash"),
        ("redis://localhost", "limits", 100, "at least 10ms"),
        ("http://localhost", "limits", 5_000_000, "redis"),
        ("redis://localhost:port", "limits", 5_000_000, "port"),
    ],
)
def test_a_mistake_in_the_arguments_is_raised_at_once(url, name, refresh_us, remedy):
    """When the policy is made, not in a background thread."""
    with pytest.raises(ConfigurationError, match=remedy):
        HashOverrides(url, name, refresh_us)


def test_without_a_client_the_extra_is_named(monkeypatch):
    """Naming a hash in Redis without the client library is an error that names the extra."""
    from limitkeeper.stores.redis import resp

    monkeypatch.setattr(resp, "hiredis", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'limitkeeper\[redis\]'"):
        HashOverrides("redis://localhost", "limits")


def test_every_reader_is_gone():
    """All threads of the tests of this file have ended."""
    assert application_overrides._readers == {}
    assert logging.getLogger("limitkeeper") is application_overrides.log


# In a policy

HASHED = """
limits:
  - name: partner
    key: partner
    limit: fixed window 2/min
    overrides: {{redis_hash: "{name}", url: "{url}", refresh: 100ms}}
identify:
  partner: {{header: X-Api-Key}}
"""


def passed(gate: Gate, partner: str, times: int = 10) -> int:
    return sum(bool(gate.ask(WrittenRequest(headers={"X-Api-Key": partner}))) for _ in range(times))


def test_a_plan_that_is_bought_needs_no_deploy(hashed, valkey, eventually):
    """A field of the hash is the limit of its key; the state of the key is read under it, also after a reload."""
    text = HASHED.format(name=hashed.name, url=valkey.url)
    with Gate(Policy.read(text), store=MemoryStore(clock=ManualClock())) as gate:
        assert passed(gate, "acme") == 2
        hashed.client.hset(hashed.name, mapping={"acme": "fixed window 5/min", "initech": "unlimited"})
        found = gate.policy.rules[0].overrides
        eventually(lambda: found.get("acme") is not None)
        assert (passed(gate, "acme"), passed(gate, "initech"), passed(gate, "bob")) == (3, 10, 2)
        gate.reload(Policy.read(text))
        assert (passed(gate, "acme"), passed(gate, "initech"), passed(gate, "eve")) == (0, 10, 2)
    assert application_overrides._readers == {}


def test_a_function_gives_limits_of_a_rule():
    """Its limit for a key counts for that key only."""
    policy = Policy.of(
        identify={"partner": {"header": "X-Api-Key"}},
        limits=[
            {
                "name": "partner",
                "key": "partner",
                "limit": "fixed window 2/min",
                "overrides": CalledOverrides(Plans(acme="fixed window 5/min")),
            }
        ],
    )
    with Gate(policy, store=MemoryStore(clock=ManualClock())) as gate:
        assert (passed(gate, "acme"), passed(gate, "bob")) == (5, 2)


def test_a_key_is_named_with_its_identity_or_by_its_value():
    """For a key with alternatives, the name of the identity restricts an override to it, as in the policy's own overrides."""
    plans = Plans(**{"partner:acme": "fixed window 5/min", "initech": "fixed window 4/min", "acme|user:42": "fixed window 3/min"})
    rules = [
        {"name": "one", "match": "/one", "key": "partner | user", "limit": "fixed window 2/min", "overrides": {"call": plans}},
        {
            "name": "two",
            "match": "/two",
            "key": ["partner", "user | ip"],
            "limit": "fixed window 2/min",
            "overrides": {"call": plans},
        },
    ]
    identify = {"partner": {"header": "X-Api-Key"}, "user": {"header": "X-User"}}
    with Gate(Policy.of(identify=identify, limits=rules), store=MemoryStore(clock=ManualClock())) as gate:

        def passes(path: str, **headers: str) -> int:
            return sum(bool(gate.ask(WrittenRequest("GET", path, headers=headers))) for _ in range(10))

        assert passes("/one", **{"X-Api-Key": "acme"}) == 5
        assert passes("/one", **{"X-User": "acme"}) == 2
        assert passes("/one", **{"X-User": "initech"}) == 4
        assert passes("/two", **{"X-Api-Key": "acme", "X-User": "42"}) == 3
        assert plans.asked[:4] == ["partner:acme", "user:acme", "acme", "user:initech"]


# More overrides than a store has room for

ROOM = 20
RULE = {"name": "api", "key": "user", "limit": "fixed window 3/h"}


def gate_with(store, call, **said) -> Gate:
    rule = {**RULE, "overrides": {"call": call, "keep": "1h"}, **said}
    return Gate(Policy.of(identify={"user": {"header": "X-User"}}, limits=[rule]), store=store)


def by_user(user: object) -> WrittenRequest:
    return WrittenRequest("GET", "/", headers={"X-User": str(user), "Idempotency-Key": "k"})


@pytest.fixture(params=["memory", "guarded", "shared"])
def small_store(request, monkeypatch, tmp_path):
    """A store with room for few rates."""
    monkeypatch.setattr(cell_table, "MOST_UNITS", ROOM)
    monkeypatch.setattr(limit_directory, "MOST_UNITS", ROOM)
    store = SharedStore(tmp_path / "limits") if request.param == "shared" else MemoryStore()
    yield GuardedStore(store) if request.param == "guarded" else store
    store.close()


def test_an_override_without_room_is_decided_by_the_base_limit(small_store, caplog):
    """No request fails: keys whose override does not fit are limited by the rule, with an alert, and the others continue."""
    with gate_with(small_store, lambda key: f"fixed window {100 + int(key)}/h") as gate:
        heard = []
        gate.events.on("alert", heard.append)
        log_refusals(gate)
        limits = [gate.ask(by_user(n)).decision.limit for n in range(ROOM * 2)]
        assert limits[:10] == [100 + n for n in range(10)]
        assert limits[-10:] == [3] * 10
        refused = limits.count(3)
        assert len(heard) == refused == gate.snapshot().rules[0].alerts
        assert all("limits" in str(event.error) for event in heard)
        assert [bool(gate.ask(by_user(ROOM * 2 - 1))) for _ in range(3)] == [True, True, False]
        assert gate.ask(by_user(0)).decision.remaining == 98
        assert len(heard) == refused  # once for each limit
        assert "own limit" in caplog.text
        assert [one.applies for one in gate.explain(by_user(ROOM * 2 - 1))] == [True]


def test_an_override_whose_repetitions_have_no_room_is_decided_by_the_base_limit(small_store):
    """A rule with `once` needs two limits for each override; where one of them does not fit, no repetition fails."""
    with gate_with(small_store, lambda key: f"fixed window {100 + int(key)}/h", once="Idempotency-Key") as gate:
        found = [[gate.ask(by_user(n)) for _ in range(3)] for n in range(ROOM * 2)]
        assert all(one.allowed for several in found for one in several)
        assert [several[0].decision.limit for several in found[-10:]] == [3] * 10
        assert gate.explain(by_user(ROOM * 2 - 1))[0].applies


def test_an_algorithm_that_the_store_does_not_have_is_no_error_of_a_request():
    """As any other override that the store can't take."""

    class Picky(MemoryStore):
        def register(self, limit):
            if type(limit.limit) is SlidingWindowLog:
                raise ConfigurationError("no logs here")
            super().register(limit)

    with gate_with(Picky(), lambda key: "sliding window log 9/h") as gate:
        assert gate.ask(by_user(1)).decision.limit == 3


@pytest.mark.slow
def test_seventy_thousand_overrides():
    """A table has room for 65 534 rates; every request of 70 000 is answered."""
    with gate_with(MemoryStore(), lambda key: f"fixed window {100 + int(key)}/h") as gate:
        limits = [gate.ask(by_user(n)).decision.limit for n in range(70_000)]
        assert limits[:65_533] == [100 + n for n in range(65_533)]
        assert limits[65_533:] == [3] * (70_000 - 65_533)
