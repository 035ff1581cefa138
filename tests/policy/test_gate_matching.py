"""Hosts, exemptions, handlers and keys, where rules and requests are unusual."""

from __future__ import annotations

import pytest
from gates import asked, gate, key, passes, request, rule

from limitkeeper import TokenBucket
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Policy, WrittenRequest
from limitkeeper.policy.callback_errors import CallbackErrors
from limitkeeper.policy.compiled_policy import CompiledPolicy
from limitkeeper.policy.identity.identify import Captured
from limitkeeper.policy.model import DEGRADE, SHARE, Cost, Exemption, Match, OnRefusal, When

INSIDE = Match(path="/x", host="in.example.com")


def meant(g, line="GET /x", **said):
    """The rules that limit a request; `explain` shows the same."""
    found = [entry.label for entry in asked(g, request(line, **said)).entries]
    assert [one.rule.name for one in g.explain(request(line, **said)) if one.applies] == found
    return found


# Hosts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_a_match_without_a_host_means_every_host(reverse):
    """Of two matches on one path the wider one holds, whichever is written first."""
    matches = (INSIDE, Match(path="/{any}"))
    g = gate(rule("all", "9/s", match=matches[::-1] if reverse else matches))
    assert meant(g, host="evil.org") == meant(g, host="in.example.com") == ["all"]


def test_hosts_of_all_readings_count():
    """Where a path can be read in two ways, a rule applies on the hosts of both; where one names no host, on all."""
    twice = (Match(path="/a/**", host="a.org"), Match(path="/b", host="b.org"))
    wide = [(Match(path="/a/**"), Match(path="/b", host="b.org")), (Match(path="/a/**", host="a.org"), Match(path="/b"))]
    g = gate(rule("both", "9/s", match=twice), *[rule(f"any{i}", "9/s", match=match) for i, match in enumerate(wide)])
    found = {host: meant(g, "GET /a/../b", host=host) for host in ("a.org", "b.org", "c.org")}
    assert found == {"a.org": ["both", "any0", "any1"], "b.org": ["both", "any0", "any1"], "c.org": ["any0", "any1"]}


def test_a_host_keeps_what_the_path_captured():
    """A rule for one host may take its key from the path, like any other."""
    match = (Match(path="/orders/{order_id}", host="in.example.com"),)
    g = gate(rule("order", "1/h", match=match, key=key("order")), identify={"order": Captured("order_id")})
    for order in ("7", "8"):
        assert passes(g, 2, f"GET /orders/{order}", host="in.example.com") == [True, False]


@pytest.mark.parametrize("host", ["in.example.com:x", "in.example.com, b.example", "@"])
def test_explaining_reads_an_odd_host_as_the_gate_does(host):
    """A Host that can't be read matches every rule that names one; a missing one matches none."""
    g = gate(rule("inside", "9/s", match=(INSIDE,)))
    assert meant(g, host=host) == ["inside"]
    assert meant(g) == meant(g, host="example.com") == []


# Exemptions -----------------------------------------------------------------------------------------------------------


def test_an_exemption_may_be_for_some_hosts():
    """Exempt on one of its hosts is exempt there, and nowhere else; a Host that can't be read is not one of them."""
    other = Match(path="/x", host="*.test")
    g = gate(rule("all", "9/s"), rule("user", "9/s", key=key("user")), exempt=(Exemption(match=(INSIDE, other)),))
    assert meant(g, host="in.example.com") == meant(g, host="a.test") == []
    for host in ("example.com", "in.example.com:x", ""):
        assert meant(g, host=host) == meant(g) == ["all"]
    some = gate(rule("all", "9/s"), rule("user", "9/s", key=key("user")), exempt=(Exemption(match=(INSIDE,), rules=("all",)),))
    assert meant(some, host="in.example.com", user="a") == ["user"]
    assert meant(some, host="evil.org", user="a") == ["all", "user"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_path_may_be_exempt_from_some_rules(reverse):
    """A path that is exempt from one rule is limited by the others; one exempt from all is exempt, whatever the rules."""
    some, other = Exemption(match=(Match(path="/x"),), rules=("all",)), Exemption(match=(Match(path="/y/**"),), rules=("user",))
    whole = Exemption(match=(Match(path="/y/z"),))
    said = (some, other, whole)
    g = gate(rule("all", "9/s"), rule("user", "9/s", key=key("user")), exempt=said[::-1] if reverse else said)
    assert meant(g, "GET /x", user="a") == ["user"]
    assert meant(g, "GET /y", user="a") == ["all"]
    assert meant(g, "GET /y/z", user="a") == []
    assert meant(g, "GET /z", user="a") == ["all", "user"]
    assert g.snapshot().exempt == 1


def test_a_client_without_an_address_is_in_no_network():
    """Over a socket without an address no client is exempt by its network."""
    g = gate(rule("all", "9/s"), exempt=(Exemption(networks=("0.0.0.0/0", "::/0")),))
    assert meant(g, peer="192.0.2.1") == []
    assert [len(g.ask(WrittenRequest("GET", "/x", peer=peer)).entries) for peer in ("", "unix:", None)] == [1, 1, 1]


@pytest.mark.parametrize("received", ["\ud800", "s3cret\x00", "s\u00e9cret", ""])
def test_no_odd_header_is_a_secret(received):
    """Whatever bytes a client sends in place of a secret, it is limited, and nothing breaks."""
    g = gate(rule("all", "9/s"), exempt=(Exemption(headers=(("x-probe", "s3cret"),)),))
    assert meant(g, **{"X-Probe": received}) == ["all"]


def test_two_exemptions_from_some_rules_add_up():
    """A request exempt from one rule by one exemption and from another by another is exempt from both, and from no third."""
    exempt = [Exemption(when=When(present=(name,)), rules=(name,)) for name in ("user", "tenant")]
    g = gate(*[rule(name, "9/s") for name in ("user", "tenant", "plan")], exempt=tuple(exempt))
    assert meant(g, user="a", tenant="b") == ["plan"]
    assert meant(g, user="a") == ["tenant", "plan"]
    assert meant(g) == ["user", "tenant", "plan"]


# Paths ----------------------------------------------------------------------------------------------------------------


def test_a_long_path_is_not_remembered():
    """An excessively long path is matched every time, and takes no memory."""
    g = gate(rule("all", "9999/s", match=(Match(path="/x/**"),)))
    for length in (256, 257):
        path = "/x/" + "y" * (length - 3)
        assert meant(g, f"GET {path}") == meant(g, f"GET {path}") == ["all"]
        assert (path in g.compiled.cached_paths["GET"]) == (length == 256)


def test_a_rules_path_has_no_case_either():
    """However a rule writes a path, it matches requests to that path."""
    g = gate(rule("all", "9/s", match=(Match(path="/CheckOut/{Id}"),)))
    assert meant(g, "GET /checkout/7") == meant(g, "GET /CHECKOUT/7") == ["all"]


def test_the_rest_of_a_path_stands_at_its_end():
    """`**` in the middle of a path is refused with the right form."""
    with pytest.raises(ConfigurationError, match=r"'/a/\*\*/b': '\*\*' is allowed only at the end"):
        gate(rule("all", "9/s", match=(Match(path="/a/**/b"),)))


# Handlers -------------------------------------------------------------------------------------------------------------


def degrading(handler):
    return Policy(rules=(rule("all", "1/s", on_refusal=OnRefusal(DEGRADE, handler=handler)),))


def test_a_handler_is_known_by_its_name_or_its_place():
    """A handler is given by name, or imported from the path in the policy; with neither, the gate is not made."""
    (one,) = degrading("cheap").rules
    assert CompiledPolicy(degrading("cheap"), {"cheap": max}).handlers[one.name] is max
    assert CompiledPolicy(degrading("os.path:join")).handlers["all"] is __import__("os").path.join
    with pytest.raises(ConfigurationError, match=r"rule 'all': unknown handler 'cheap'; pass handlers=\{'cheap': …\}"):
        CompiledPolicy(degrading("cheap"))
    assert CompiledPolicy(degrading("cheap"), imports=False).handlers == {}


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "received"),
    [
        ({"tenant": "acme", "user": "42"}, "acme|42"),
        ({"tenant": "a%b|c", "user": "-"}, "a%25b%7Cc|%2D"),
        ({"tenant": "acme"}, "acme|-"),
        ({"user": "42"}, "-|42"),
    ],
)
def test_a_joined_key_is_spelt_as_documented(said, received):
    """Parts are escaped and joined, so that overrides can name them; an absent part is a dash."""
    g = gate(rule("both", "1/h", key=key("tenant", "user"), override=((received, (TokenBucket("7/h"),)),)))
    evaluation = asked(g, request(**said))
    assert (evaluation.keys, evaluation.decision.limit) == ([received], 7)


def test_the_unidentified_can_have_a_limit_of_their_own():
    """Clients that share one key are overridden by its name."""
    said = {"unidentified": SHARE, "override": (("-", (TokenBucket("2/h"),)),)}
    g = gate(rule("all", "1/h", key=key("user|tenant"), **said))
    assert passes(g, 3) == [True, True, False]
    assert passes(g, 2, user="a") == [True, False]


def test_made_up_limits_fill_no_memory():
    """A rule whose overrides make up a limit for every key keeps a bounded number of them."""
    (compiled,) = gate(rule("all", "1/h")).compiled.rules
    for n in range(1, 10_002):
        (entry,) = compiled.entries_of((TokenBucket(f"{n}/h"),))
        assert entry.named.limit.capacity == n
    assert compiled.entries_of((TokenBucket(f"{n}/h"),)) == (entry,)
    assert len(compiled.entries_by_limits) <= 10_000  # the oldest were dropped


def test_a_rule_without_a_mark_raises_no_alert():
    """Only a rule with `alert` raises alerts."""
    g = gate(rule("all", "fixed window 5/h"))
    passes(g, 6)
    assert g.snapshot().rules[0].alerts == 0


def test_a_cost_that_is_no_number_is_complained_of(caplog, monkeypatch):
    """The log shows the result of a wrong function and the cost that the request was charged."""
    monkeypatch.setattr("limitkeeper.policy.request_cost.callback_errors", CallbackErrors())
    passes(gate(rule("all", "9/h", cost=Cost("call", 3, call=lambda facts: 1.5))), 1)
    (record,) = caplog.records
    assert record.getMessage().endswith("returned a float, not an integer: it costs 3")
