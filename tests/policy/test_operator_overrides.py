"""Overrides of operators: kept in the store, used by every gate over it, and ended by their expiry."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interrupts import interrupted_at
from limitkeeper import FixedWindow, LeasedStore, MemoryStore, RedisStore, ShardedStore, SharedStore
from limitkeeper.errors import ConfigurationError, InvalidLimit, StoreUnavailable
from limitkeeper.policy import Policy, WrittenRequest, operator_overrides
from limitkeeper.policy.calls_by_rule_name import hit_rules, peek_rule, reserve_rule
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.operator_overrides import MAX_OVERRIDES, OperatorOverrides, matches
from limitkeeper.stores.sans_io import run
from limitkeeper.stores.store_hash import FileHash, MemoryHash
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey

LIMITS = [
    {"name": "api", "key": "user | ip", "limit": "fixed window 2/h align first"},
    {"name": "all", "key": "ip", "limit": "fixed window 100/h align first"},
    {"name": "dark", "key": "ip", "limit": "fixed window 1/h align first", "on_refusal": "shadow"},
]


def policy(name="shop", **more):
    return Policy.of(name=name, identify={"user": {"header": "X-User"}}, limits=LIMITS, **more)


def gate(store=None, **options):
    return Gate(policy(), store=MemoryStore() if store is None else store, **options)


def hits(g, key, n, rule="api"):
    """How many of n hits are allowed."""
    return sum(bool(g.hit_rule_nowait(g.compiled.rules_by_name[rule], key, 1)) for _ in range(n))


def until(condition, seconds=30.0):
    """Waits for a background thread; a deadline for a busy machine, not a bound on it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# Patterns


@given(st.text("ab*", max_size=8), st.text("ab*", max_size=10))
def test_a_pattern_matches_as_its_regular_expression_does(pattern, key):
    """`*` stands for any text, every other character for itself."""
    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), key, re.S)
    assert matches(pattern, key) == (expected is not None)


def test_an_exact_key_precedes_patterns_and_the_longest_pattern_the_others():
    """The more specific pattern precedes."""
    g = gate()
    for key, limit in (("*", "3/h"), ("premium_*", "4/h"), ("premium_a*", "5/h"), ("premium_ab", "6/h")):
        g.operator_overrides.put("api", key, f"fixed window {limit} align first")
    assert [hits(g, key, 10) for key in ("x", "premium_b", "premium_ac", "premium_ab")] == [3, 4, 5, 6]
    assert hits(g, "x", 10, "all") == 10  # another rule
    assert g.operator_overrides.remove("api", "premium_ab")
    assert not g.operator_overrides.remove("api", "premium_ab")
    assert hits(g, "premium_ab", 1) == 0  # charged with 6 by now, and 5 are allowed


def test_a_key_is_named_with_its_identity_or_by_its_value():
    """As in the policy's own overrides."""
    g = gate()
    g.operator_overrides.put("api", "user:42", "blocked")
    g.operator_overrides.put("api", "43", "blocked")
    asked = [g.ask(WrittenRequest(headers={"X-User": user}, peer="10.0.0.1")) for user in ("42", "43", "44")]
    assert [one.allowed for one in asked] == [False, False, True]
    for pattern, limit in (("*", "9/h"), ("user:4*", "8/h"), ("premium_*", "7/h")):  # exact values precede patterns as well
        g.operator_overrides.put("api", pattern, f"fixed window {limit} align first")
    asked = [g.ask(WrittenRequest(headers={"X-User": user}, peer="10.0.0.1")) for user in ("42", "43", "44", "premium_4")]
    assert [one.allowed and one.decision.limit for one in asked] == [False, False, 8, 7]


# Effects


def test_an_override_follows_the_law_of_several_rates():
    """A key that has used its 2 has 3 left of 5; back under its own limit it has none."""
    g = gate()
    assert hits(g, "a", 3) == 2
    g.operator_overrides.put("api", "a", "fixed window 5/h align first", reason="campaign", by="anna")
    assert hits(g, "a", 9) == 3
    g.operator_overrides.remove("api", "a")
    assert hits(g, "a", 1) == 0


def test_a_rate_alone_has_the_algorithm_of_the_rule():
    """Charges are kept; with the option of another algorithm it is that one."""
    g = Gate(
        Policy.of(limits=[{"name": "api", "key": "ip", "limit": "fixed window 2/h"}]), store=MemoryStore(clock=ManualClock())
    )
    assert hits(g, "a", 3) == 2
    g.operator_overrides.put("api", "a", "5/h")
    assert hits(g, "a", 9) == 3
    g.operator_overrides.put("api", "b", "5/h burst 7")
    assert hits(g, "b", 9) == 7


def test_it_precedes_the_overrides_of_the_policy():
    """Those of the file, and of a callback."""
    limits = [{"name": "api", "key": "ip", "limit": "1/h", "override": {"a": "unlimited"}}]
    limits += [{"name": "called", "key": "ip", "limit": "1/h", "overrides": {"call": lambda key: "unlimited"}}]
    g = Gate(Policy.of(limits=limits), store=MemoryStore())
    assert (hits(g, "a", 5), hits(g, "a", 5, "called")) == (5, 5)
    for rule in ("api", "called"):
        g.operator_overrides.put(rule, "a", "fixed window 2/h align first")
    assert (hits(g, "a", 5), hits(g, "a", 5, "called")) == (2, 2)


def test_it_ends_when_it_expires():
    """By the gate's clock, without a reader; a hidden override holds again."""
    clock = ManualClock(1000.0)
    g = gate(MemoryStore(clock=clock), clock=clock)
    g.operator_overrides.put("api", "a*", "fixed window 4/h align first")
    g.operator_overrides.put("api", "ab", "unlimited", for_us=10_000_000)
    assert hits(g, "ab", 50) == 50
    clock.advance(9.999999)
    assert hits(g, "ab", 50) == 50
    clock.advance(0.000001)
    assert hits(g, "ab", 50) == 4
    assert [one.key for one in g.operator_overrides.all()] == ["a*"]


def test_unlimited_is_an_override_too():
    """And nothing is charged under it."""
    g = gate()
    g.operator_overrides.put("api", "a", "unlimited")
    assert hits(g, "a", 9) == 9
    g.operator_overrides.remove("api", "a")
    assert hits(g, "a", 9) == 2


# Blocking


@pytest.mark.parametrize("text", ["blocked", "0", " Blocked "])
def test_a_blocked_key_is_refused_and_nothing_is_charged(text):
    """Neither under the rule nor under the others of the request; the refusal has no retry time."""
    g = gate()
    g.operator_overrides.put("api", "ip:10.0.0.*", text)
    asked = g.ask(WrittenRequest(peer="10.0.0.1"))
    assert (asked.allowed, asked.refusal.status, asked.refusal.retry_after, asked.refusal.reason) == (False, 429, None, "blocked")
    assert (asked.decision.limit, asked.decision.remaining, asked.decision.retry_us) == (0, 0, -1)
    assert asked.refusal.violated == ("api",)
    assert hits(g, "10.0.0.1", 101, "all") == 100
    assert g.snapshot().rules[0].refused == 1
    g.operator_overrides.remove("api", "ip:10.0.0.*")
    assert hits(g, "ip:10.0.0.1", 3) == 2


def test_every_call_of_a_blocked_key_is_refused():
    """Hits in a batch, reservations, peeks, and rules in shadow mode, which refuse nothing else."""
    g = gate()
    g.operator_overrides.put("api", "a", "blocked")
    g.operator_overrides.put("dark", "a", "blocked")
    rule, dark = g.compiled.rules_by_name["api"], g.compiled.rules_by_name["dark"]
    found = run(hit_rules(g, [(rule, "a", 1, None), (rule, "b", 1, None), (dark, "a", 1, None), (dark, "b", 1, None)]))
    assert [one.allowed for one in found] == [False, True, False, True]
    reserved = run(reserve_rule(g, (rule, "a", 1, None), 0))
    assert not reserved.allowed
    assert reserved.claims is None
    assert not run(peek_rule(g, (rule, "a", 1, None)))
    assert hits(g, "a", 5, "dark") == 0
    (one,) = [one for one in g.explain(WrittenRequest(headers={"X-User": "a"}, peer="1.2.3.4")) if one.rule.name == "api"]
    assert (bool(one.decision), one.operator) == (False, "blocked by an operator")


# Gates that use overrides


@pytest.mark.server
@pytest.mark.parametrize("kind", ["memory", "shared", "redis", "leased", "sharded"])
def test_every_gate_over_the_store_follows(kind, tmp_path):
    """Another process has another store object on the same file or server."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(Valkey()) if kind in ("redis", "leased", "sharded") else None
        memory = MemoryStore()
        makes = {
            "memory": lambda: memory,
            "shared": lambda: SharedStore(tmp_path / "limits"),
            "redis": lambda: RedisStore(server.url, timeout="60s"),
            "leased": lambda: LeasedStore(RedisStore(server.url, timeout="60s")),
            "sharded": lambda: ShardedStore([RedisStore(f"{server.url}/{db}", timeout="60s") for db in range(2)]),
        }
        one, other = Gate(policy(), store=makes[kind]()), Gate(policy(), store=makes[kind]())
        stranger = Gate(policy("another"), store=makes[kind]())
        with one, other, stranger:
            asked = other.compiled.rules_by_name["api"].operator_limits
            one.operator_overrides.put("api", "a", "blocked")
            assert one.compiled.rules_by_name["api"].operator_limits("a") is not None
            until(lambda: asked("a") is not None)
            one.operator_overrides.put("api", "a", "fixed window 7/h")
            until(lambda: asked("a") == (FixedWindow("7/h"),))
            one.operator_overrides.remove("api", "a")
            until(lambda: asked("a") is None)
            assert stranger.operator_overrides.all() == []


@pytest.mark.server
def test_bytes_that_are_no_text_hide_no_override():
    """Other programs may write to the hash of a server: invalid entries are skipped."""
    with Valkey() as server, Gate(policy(), store=RedisStore(server.url, timeout="60s")) as one:
        one.operator_overrides.put("api", "a", "blocked")
        server.client().hset("limitkeeper:=overrides:shop", mapping={b"\xff": b"{}", b'["api", "b"]': b"\xff"})
        assert [each.key for each in one.operator_overrides.all()] == ["a"]
        assert one.operator_overrides.remove("api", "a")


def test_a_reload_keeps_them():
    """Also where the policy names another rule first; a removed rule removes its overrides."""
    g = gate()
    g.operator_overrides.put("api", "a", "blocked")
    g.reload(Policy.of(name="shop", limits=[{"name": "new", "limit": "1/s"}, *[dict(one, key="ip") for one in LIMITS]]))
    assert hits(g, "a", 1) == 0
    g.reload(Policy.of(name="other", limits=LIMITS[1:2]))
    g.reload(policy())
    assert hits(g, "a", 1) == 0


def test_gates_of_single_rules_follow_too():
    """Those of decorated handlers, with their own key or the rule's."""
    g = gate()
    apart = g.for_rule("api", key=(("ip",),)), g.for_rule("api")
    g.operator_overrides.put("api", "10.0.0.1", "blocked")
    assert [one.ask(WrittenRequest(peer="10.0.0.1")).allowed for one in apart] == [False, False]


class FailingHash(MemoryHash):
    failing = False

    def read(self):
        if self.failing:
            raise StoreUnavailable("away")
        return super().read()


def test_while_the_store_fails_the_known_ones_stay(caplog):
    """The error is logged; entries of another version are skipped."""
    kept = FailingHash()
    overrides = OperatorOverrides(kept, ManualClock(1.0))
    g = gate()
    overrides.follow(g, g.compiled)
    overrides.put("api", "a", "blocked")
    kept.failing = True
    overrides.try_refresh()
    assert hits(g, "a", 1) == 0
    assert "can't be read from the store (away); those read before stay in force" in caplog.text
    kept.failing = False
    kept.write('["api", "b"]', '{"limit": "no such limit"}')
    kept.write("nonsense", "nonsense")
    kept.write("[" * 100_000, "[" * 100_000)
    kept.write('["api", "c"]', '{"limit": "blocked", "until_us": "soon"}')
    overrides.refresh()
    assert hits(g, "c", 3) == 2
    assert [one.key for one in overrides.all()] == ["a"]
    assert hits(g, "b", 3) == 2


def test_a_store_that_is_opened_while_overrides_are_read_does_not_end_the_reading(monkeypatch):
    """The thread that reads the overrides of all stores survives another thread that adds a store."""
    first, second = (OperatorOverrides(MemoryHash(), ManualClock()) for _ in range(2))

    class GrowingSet(WeakSet):
        def __iter__(self):
            for one in super().__iter__():
                self.add(second)
                yield one

    polled = GrowingSet([first])
    monkeypatch.setattr(operator_overrides, "_polled", polled)
    thread = operator_overrides.OverridesThread("test", 1_000_000, start_thread=lambda run, name: threading.Thread(target=run))
    thread.work(False)
    for one in (first, second):
        one._ready.clear()
    thread.work(True)
    assert [first.ready(0), second.ready(0)] == [True, True]


def test_wrong_ones_are_refused():
    """The error names the right form, and nothing is half written."""
    g = gate()
    with pytest.raises(InvalidLimit, match="unknown algorithm"):
        g.operator_overrides.put("api", "a", "lots 5/s")
    with pytest.raises(InvalidLimit, match="at most 500 characters, got 998"):
        g.operator_overrides.put("api", "a", "; ".join(["5/s"] * 200))
    with pytest.raises(ConfigurationError, match="at most 8"):
        g.operator_overrides.put("api", "*a" * 9, "5/s")
    for for_us in (0, -1, 400 * 86_400_000_000, 10**320):
        with pytest.raises(ConfigurationError, match=r"at most 366 days, got .*; write a duration such as 1h"):
            g.operator_overrides.put("api", "a", "5/s", for_us=for_us)
    assert g.operator_overrides.all() == []
    for i in range(MAX_OVERRIDES):
        g.operator_overrides._hash._fields[f'["api", "{i}"]'] = '{"limit": "blocked"}'
    with pytest.raises(ConfigurationError, match="there are 1000 overrides; remove some"):
        g.operator_overrides.put("api", "one more", "5/s")
    g.operator_overrides.put("api", "7", "5/s")  # a change of an existing one


@pytest.mark.parametrize(
    ("rule", "key", "counted"),
    [
        ("all", "2001:db8:1:2::5", "2001:db8:1:2::/64"),
        ("api", "ip:2001:db8:1:2::5", "ip:2001:db8:1:2::/64"),
        ("api", "2001:db8:1:2::5", "2001:db8:1:2::/64"),
        ("all", "::ffff:203.0.113.9", "203.0.113.9"),
        ("all", "203.0.113.9:4711", "203.0.113.9"),
    ],
)
def test_an_address_that_no_request_is_counted_by_is_refused(rule, key, counted):
    """An override of a single IPv6 address would never hold; the error names the network, whose override does."""
    g = gate()
    with pytest.raises(ConfigurationError, match=re.escape(f"no request has the key {key!r}; write {counted!r}")):
        g.operator_overrides.put(rule, key, "blocked")
    assert g.operator_overrides.all() == []
    g.operator_overrides.put(rule, counted, "blocked")
    assert not g.ask(WrittenRequest(peer="203.0.113.9" if "." in counted else "2001:db8:1:2::5"))
    g.operator_overrides.put("api", "user:2001:db8:1:2::5", "blocked")
    assert not g.ask(WrittenRequest(headers={"X-User": "2001:db8:1:2::5"}, peer="192.0.2.7"))


def of_two_parts(store=None):
    """A gate whose rule counts by tenant and address together."""
    identify = {"tenant": {"header": "X-Tenant"}}
    rules = [{"name": "both", "key": ["tenant", "ip"], "limit": "9/h"}]
    return Gate(Policy.of(identify=identify, limits=rules), store=MemoryStore() if store is None else store)


def test_the_address_in_a_joined_key_is_counted_by_its_network_too():
    """An override of one IPv6 address of a tenant would never hold either."""
    g = of_two_parts()
    with pytest.raises(ConfigurationError, match=re.escape("write 'acme|2001:db8:1:2::/64'")):
        g.operator_overrides.put("both", "acme|2001:db8:1:2::5", "blocked")
    g.operator_overrides.put("both", "acme|2001:db8:1:2::/64", "blocked")
    g.operator_overrides.put("both", "2001:db8:1:2::5", "blocked")  # not of two parts: nothing is known of it
    asked = [g.ask(WrittenRequest(headers={"X-Tenant": tenant}, peer="2001:db8:1:2::5")) for tenant in ("acme", "other")]
    assert [one.allowed for one in asked] == [False, True]


def test_a_joined_key_whose_parts_together_are_long_is_found():
    """No part of it is hashed, and the override of the whole key holds, as `keys list` shows it."""
    g = of_two_parts()
    tenant = "t" * 250
    g.operator_overrides.put("both", f"{tenant}|203.0.113.9", "blocked")
    assert not g.ask(WrittenRequest(headers={"X-Tenant": tenant}, peer="203.0.113.9"))
    assert g.ask(WrittenRequest(headers={"X-Tenant": tenant}, peer="203.0.113.8"))
    assert g.operator_overrides.remove("both", f"{tenant}|203.0.113.9")
    assert g.ask(WrittenRequest(headers={"X-Tenant": tenant}, peer="203.0.113.9"))


def test_a_pattern_and_a_function_read_the_parts_of_a_long_key():
    """A client that makes its part of the key long escapes neither, although the store has the hash of such a key."""
    tenant, asked = "t" * 250, []
    rules = [
        {"name": "both", "key": ["tenant", "ip"], "limit": "9/h"},
        {"name": "called", "key": ["tenant", "ip"], "limit": "9/h", "overrides": {"call": asked.append}},
    ]
    g = Gate(Policy.of(identify={"tenant": {"header": "X-Tenant"}}, limits=rules), store=MemoryStore())
    g.operator_overrides.put("both", "*|203.0.113.9", "blocked")
    assert not g.ask(WrittenRequest(headers={"X-Tenant": tenant}, peer="203.0.113.9"))
    assert g.ask(WrittenRequest(headers={"X-Tenant": tenant}, peer="203.0.113.8"))
    assert set(asked) == {f"{tenant}|203.0.113.8", f"{tenant}|203.0.113.9"}


def test_a_reading_that_a_signal_interrupts_does_not_stop_later_ones():
    """At whatever moment the handler raises."""
    for moment in itertools.count(1):
        g = gate()
        overrides = g.operator_overrides
        overrides._hash._fields['["api", "a"]'] = '{"limit": "3/h"}'
        interrupted = interrupted_at(moment, overrides.refresh)
        later = threading.Thread(target=overrides.put, args=("api", "b", "4/h"), daemon=True)
        later.start()
        later.join(60)
        assert not later.is_alive(), moment
        if not interrupted:
            break


def test_a_rule_with_a_capacity_has_no_overrides():
    """One that would have no effect is refused."""
    g = Gate(Policy.of(limits=[{"name": "all", "key": "ip", "capacity": "5/s"}]), store=MemoryStore())
    with pytest.raises(ConfigurationError, match="'all' has a capacity"):
        g.operator_overrides.put("all", "a", "blocked")


def test_a_long_key_is_hashed_as_requests_hash_theirs():
    """The key is canonical, so that its override is found."""
    g = gate()
    g.operator_overrides.put("all", "x" * 300, "blocked")
    assert g.operator_overrides.all() == [g.operator_overrides.find("all", "x" * 300)]
    assert g.operator_overrides.all()[0].key.startswith("sha256:")
    assert g.operator_overrides.remove("all", "x" * 300)


# The hash in a file


def test_processes_that_write_a_file_hash_at_once_lose_nothing(tmp_path):
    """Each write is a change of one field."""
    path = str(tmp_path / "limits")

    def write(n):
        for i in range(20):
            FileHash(path, "overrides:a/b").write(f"{n}.{i}", "x")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(FileHash(path, "overrides:a/b").read()) == 80
    (tmp_path / "limits.overrides%3Aa%2Fb.json").write_text("{")
    with pytest.raises(StoreUnavailable, match="can't read it"):
        FileHash(path, "overrides:a/b").read()
