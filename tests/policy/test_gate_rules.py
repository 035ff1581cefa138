"""Which rules apply to a request, with which key, limit and cost."""

from __future__ import annotations

import pytest
from gates import MODES, asked, gate, key, passes, policy, request, rule

from limitkeeper import MemoryStore, TokenBucket
from limitkeeper.policy import Gate
from limitkeeper.policy.identity.identify import Captured, Header
from limitkeeper.policy.model import SHARE, Cost, Exemption, Match, Tiers, When
from limitkeeper.testing import ManualClock, unlimited

POST = frozenset({"POST"})
GET = frozenset({"GET"})


@pytest.mark.parametrize("mode", MODES)
def test_each_key_has_its_own_limit(mode):
    """Two clients never share a limit of one of them."""
    g = gate(rule("user", "2/s", key=key("user")))
    assert passes(g, 3, mode=mode, user="a") == [True, True, False]
    assert passes(g, 3, mode=mode, user="b") == [True, True, False]


def test_a_rule_without_a_key_is_for_all_clients():
    """A keyless rule has one key for all."""
    g = gate(rule("capacity", "2/s"))
    assert passes(g, 2, user="a") == [True, True]
    assert passes(g, 1, user="b") == [False]


def test_the_first_identity_that_is_there_is_the_key():
    """`user | ip` is the user where there is one, otherwise the address."""
    g = gate(rule("user", "1/s", key=key("user|ip")))
    assert asked(g, request(user="a")).keys == ["user:a"]
    assert asked(g, request(user="a|50%")).keys == ["user:a|50%"]  # only joined keys are escaped
    assert asked(g, request()).keys == ["ip:192.0.2.7"]


def test_no_client_charges_another_by_its_name():
    """A user named like an address does not share that address's limit; overrides go by the value alone."""
    g = gate(rule("user", "1/s", key=key("user|ip"), override=(("acme", (TokenBucket("2/s"),)),)))
    assert passes(g, 2, user="192.0.2.7") == [True, False]
    assert passes(g, 2) == [True, False]
    assert passes(g, 3, user="acme") == [True, True, False]


def test_joined_keys_are_distinguished_part_by_part():
    """No two different lists of parts make the same key, whatever the values are."""
    g = gate(rule("both", "100/s", key=key("tenant", "user")))
    pairs = [("a", "b"), ("a|b", ""), ("", "a|b"), ("a", "%7C"), ("a|", "b"), ("-", "b"), ("", "b"), ("a", "-"), ("a", "")]
    made = [
        asked(g, request(**{name: value for name, value in zip(("tenant", "user"), pair, strict=True) if value})).keys[0]
        for pair in pairs
    ]
    assert len(set(made)) == len(pairs)


def test_a_joined_key_with_one_part_missing_is_still_limited():
    """Leaving a header out does not slip past a joined key."""
    g = gate(rule("login", "2/min", key=key("ip", "user")))
    assert passes(g, 3) == [True, True, False]


def test_a_rule_whose_key_is_absent_does_not_apply():
    """Without any part of the key the rule does not apply, except with `unidentified: share`."""
    g = gate(rule("user", "1/s", key=key("user")))
    assert asked(g, request()).decision is None
    g = gate(rule("user", "1/s", key=key("user"), unidentified=SHARE))
    assert passes(g, 2, peer="192.0.2.1") == [True, False]
    assert passes(g, 1, peer="192.0.2.2") == [False]
    assert passes(g, 1, user="a") == [True]


def test_conditions_choose_rules():
    """`when` compares what is present, absent, or equal."""
    g = gate(
        rule("partner", "1/s", when=When(present=("partner",))),
        rule("public", "2/s", when=When(absent=("partner",))),
        rule("free", "3/s", when=When(equals=(("plan", ("free", "trial")),))),
    )
    assert [e.label for e in asked(g, request(partner="p", plan="pro")).entries] == ["partner"]
    assert [e.label for e in asked(g, request(plan="trial")).entries] == ["public", "free"]


def test_tiers_choose_the_limit_and_keep_the_state():
    """A tier has its limit; a user who changes plan keeps the charges, read under the new limit."""
    tiers = Tiers("plan", (("free", (TokenBucket("1/s burst 2"),)), ("pro", (TokenBucket("1/s burst 10"),)), ("gold", ())), ())
    g = gate(rule("user", tiers, key=key("user")))
    assert passes(g, 3, user="a", plan="free") == [True, True, False]
    assert asked(g, request(user="a", plan="pro")).decision.limit == 10
    assert asked(g, request(user="a", plan="gold")).decision is None
    assert asked(g, request(user="a", plan="unheard of")).decision is None


def test_overrides_replace_the_limit_of_one_key():
    """An override holds for its key only; one that is looked up at run time precedes the rule's own."""

    class Table:
        def get(self, key):
            return {"b": (TokenBucket("3/s"),), "free": ()}.get(key)

        def close(self):
            pass

    g = gate(rule("user", "1/s", key=key("user"), override=(("a", (TokenBucket("2/s"),)),), overrides=Table()))
    assert passes(g, 3, user="a") == [True, True, False]
    assert passes(g, 4, user="b") == [True, True, True, False]
    assert passes(g, 2, user="c") == [True, False]
    assert asked(g, request(user="free")).decision is None


@pytest.mark.parametrize("mode", MODES)
def test_all_rules_are_charged_or_none(mode):
    """A request that one rule refuses charges nothing of the others."""
    g = gate(rule("user", "1/s burst 5", key=key("user")), rule("capacity", "1/s burst 2"))
    assert passes(g, 5, mode=mode, user="a") == [True, True, False, False, False]
    left = {e.entries[0].label: e.decision.remaining for e in g.explain(request(user="a"))}
    assert left == {"user": 3, "capacity": 0}


def test_two_limits_of_one_rule_are_one_charge():
    """`5/s; 8/min` refuses by whichever is used up, and shows both."""
    g = gate(rule("user", "token bucket 5/s burst 5; fixed window 8/min", key=key("user")))
    assert passes(g, 6, user="a") == [True] * 5 + [False]
    g.clock.advance(1)
    assert passes(g, 5, user="a") == [True] * 3 + [False] * 2
    assert [e.label for e in asked(g, request(user="a")).entries] == ["user", "user.2"]
    assert asked(g, request(user="a")).refusal.violated == ("user.2",)


def test_methods_and_paths_choose_rules():
    """A rule for POST /checkout does not apply to GET, nor to another path; GET includes HEAD."""
    g = gate(
        rule("checkout", "1/s", match=(Match(POST, "/checkout"),)),
        rule("item", "1/s", match=(Match(GET, "/products/{id}"), Match(GET, "/static/**"))),
    )

    def meant(line):
        return [entry.label for entry in asked(g, request(line)).entries]

    assert meant("POST /checkout") == ["checkout"]
    assert meant("GET /checkout") == []
    assert meant("POST /checkout/x") == []
    assert meant("HEAD /products/7") == ["item"]
    assert meant("GET /products") == meant("GET /products/7/x") == []
    assert meant("GET /static") == meant("GET /static/a/b.css") == ["item"]


@pytest.mark.parametrize(
    "path", ["//checkout", "/checkout/", "/./checkout", "/x/../checkout", "/CheckOut", "/%63heckout", "/%2Fcheckout"]
)
def test_tricks_on_the_path_do_not_slip_past(path):
    """However /checkout is written, its rule applies."""
    g = gate(rule("checkout", "1/s", match=(Match(POST, "/checkout"),)))
    assert asked(g, request(f"POST {path}")).entries


def test_messages_are_meant_only_by_rules_that_name_them():
    """A rule without methods limits requests, not every message of a connection."""
    g = gate(rule("all", "1/s"), rule("chat", "1/s", match=(Match(frozenset({"MESSAGE"}), "/ws"),)))
    assert [e.label for e in asked(g, request("MESSAGE /ws")).entries] == ["chat"]


def test_hosts_choose_rules():
    """A rule that names a host is for that host, or for all below it."""
    g = gate(
        rule("api", "9/s", match=(Match(host="api.example.com"),)),
        rule("any", "9/s", match=(Match(path="/x", host="*.example.com"), Match(path="/y"))),
    )

    def meant(line, host):
        return [entry.label for entry in asked(g, request(line, host=host)).entries]

    assert meant("GET /", "API.example.com:443") == ["api"]
    assert meant("GET /x", "shop.example.com") == ["any"]
    assert meant("GET /x", "example.com") == meant("GET /x", "evil.com") == []
    assert meant("GET /y", "evil.com") == ["any"]


def test_a_thousand_hosts_on_one_path():
    """Rules that differ by host only are found by the host, and made-up hosts fill no memory."""
    rules = [rule(f"h{i}", "9/s", match=(Match(path="/x", host=f"h{i}.example.com"),)) for i in range(1000)]
    g = gate(*rules, rule("below", "9/s", match=(Match(path="/x", host="*.example.com"),)), rule("any", "9/s"))

    def meant(host):
        return [entry.label for entry in asked(g, request("GET /x", host=host)).entries]

    assert meant("h7.example.com") == ["h7", "below", "any"]
    assert meant("a.h7.example.com") == ["below", "any"]
    assert meant("example.com") == meant("evil.org") == ["any"]
    for i in range(500):
        assert meant(f"made-up-{i}.example.com") == ["below", "any"]
    (shape,) = g.compiled.shapes.values()
    assert len(shape.plans) == 3


def test_what_a_template_captures_can_be_a_key():
    """`/orders/{order_id}` limits every order on its own."""
    said = {"identify": {"order": Captured("order_id")}}
    g = gate(rule("order", "1/s", match=(Match(path="/orders/{order_id}/pay"),), key=key("order")), **said)
    assert passes(g, 2, "POST /orders/7/pay") == [True, False]
    assert passes(g, 1, "POST /orders/8/pay") == [True]


def test_a_thousand_rules_find_the_ones_that_are_meant():
    """The matcher agrees with trying every rule separately."""
    rules = [rule(f"r{i}", "9/s", match=(Match(GET, f"/s{i % 50}/{{x}}/p{i}"),)) for i in range(1000)]
    g = gate(*rules, rule("all", "9/s"), rule("one", "9/s", match=(Match(path="/s3/*/p53"),)))
    assert [e.label for e in asked(g, request("GET /s3/abc/p53")).entries] == ["r53", "all", "one"]


@pytest.mark.parametrize(
    ("cost", "headers", "charged"),
    [
        (Cost(units=3), {}, 3),
        (Cost("header", 1, "x-cost"), {"X-Cost": "4"}, 4),
        (Cost("header", 2, "x-cost"), {}, 2),
        (Cost("header", 2, "x-cost"), {"X-Cost": "1"}, 1),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "-5"}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "1e3"}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "+3"}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": " 3"}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "1_0"}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": ""}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "003"}, 3),
        (Cost("header", 2, "x-cost", most=6), {"X-Cost": "9" * 5000}, 6),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "\u00b2"}, 7),
        (Cost("header", 2, "x-cost", most=7), {"X-Cost": "\u0663"}, 7),
        (Cost("call", call=lambda facts: len(facts.path) + 3), {}, 4),
        (Cost("call", 3, call=lambda facts: "many"), {}, 3),
        (Cost("call", 3, call=lambda facts: True), {}, 3),
        (Cost("call", 3, call=lambda facts: -4), {}, 0),
        (Cost("call", 3, call=lambda facts: 8, most=7), {}, 7),
    ],
)
def test_costs(cost, headers, charged):
    """A cost is constant, read from a header up to its maximum, or computed; an unreadable one is the maximum."""
    g = gate(rule("all", "10/s", cost=cost))
    assert asked(g, request(**headers)).decision.remaining == 10 - charged


def test_exemptions():
    """A path, a network, a header or an identity can be exempt, from all rules or from some."""
    g = gate(
        rule("all", "1/s"),
        rule("user", "5/s", key=key("user")),
        exempt=(
            Exemption(match=(Match(path="/healthz"),)),
            Exemption(networks=("10.1.0.0/16",)),
            Exemption(headers=(("x-probe", "s3cret"),)),
            Exemption(when=When(equals=(("tenant", ("billing",)),)), rules=("all",)),
            Exemption(match=(Match(path="/metrics"),), networks=("10.2.0.0/16",)),
        ),
    )

    def limited(line="GET /", **said):
        return [entry.label for entry in asked(g, request(line, **said)).entries]

    assert limited(user="a") == ["all", "user"]
    assert limited("GET /healthz", user="a") == []
    assert limited(peer="10.1.2.3", user="a") == []
    assert limited(**{"X-Probe": "s3cret"}) == []
    assert limited(**{"X-Probe": "guess"}) == ["all"]
    assert limited(tenant="billing", user="a") == ["user"]
    assert limited("GET /metrics", peer="10.2.0.1") == []
    assert limited("GET /metrics", peer="10.3.0.1") == limited("GET /", peer="10.2.0.1") == ["all"]
    assert g.snapshot().exempt == 4


def test_limiting_can_be_turned_off_for_tests():
    """Inside `unlimited()` a gate lets everything pass."""
    g = gate(rule("all", "1/s"))
    with unlimited():
        assert passes(g, 3) == [True] * 3
    assert passes(g, 2) == [True, False]


def test_rules_of_one_name_share_across_gates_on_one_store():
    """State belongs to (policy, rule, algorithm) and a key: a second gate of the same policy continues with it."""
    store = MemoryStore(clock=ManualClock(0))
    first, second = (Gate(policy(rule("all", "2/s")), store=store) for _ in range(2))
    assert passes(first, 2) == [True, True]
    assert passes(second, 1) == [False]


def test_a_header_identity_is_evaluated_once():
    """An identity's value is kept for the request."""
    calls = []

    class Counting(Header):
        def of(self, facts):
            calls.append(1)
            return super().of(facts)

    g = gate(
        rule("a", "9/s", key=key("user")),
        rule("b", "9/s", key=key("user|tenant")),
        identify={"user": Counting("user"), "tenant": Header("tenant")},
    )
    asked(g, request(user="a"))
    assert len(calls) == 1


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::/64"])
def test_no_user_gets_the_override_of_an_address(address):
    """A user named like an address with a limit of its own does not have that limit; the address has."""
    peer = address.replace("::/64", "::9")
    g = gate(rule("all", "1/h", key=key("user|ip"), override=((address, ()), ("vip", ()))))
    assert passes(g, 3, user=address, peer="198.51.100.1") == [True, False, False]
    assert passes(g, 3, peer=peer) == [True] * 3
    assert passes(g, 3, user="vip") == [True] * 3
    joined = gate(rule("all", "1/h", key=key("tenant", "user|ip"), override=((f"acme|{address}", ()),)))
    assert passes(joined, 3, tenant="acme", user=address) == [True, False, False]
    assert passes(joined, 3, tenant="acme", peer=peer) == [True] * 3
