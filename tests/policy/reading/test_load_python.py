"""Policies in Python: the fields of the file as keyword arguments, as text or values; diagnostics name the path."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import FixedWindow, TokenBucket
from limitkeeper.policy import Policy
from limitkeeper.policy.identity.client_ip import ClientIp
from limitkeeper.policy.identity.identify import Header
from limitkeeper.policy.identity.jwt import Jwt, Verifier
from limitkeeper.policy.model import Charge, Cost, Match, OnFailure, OnRefusal
from limitkeeper.policy.reading.diagnostics import PolicyError


def one_rule(**said: Any) -> Any:
    return Policy.of(limits=[{"name": "a", "limit": "5/s", **said}]).rules[0]


def test_texts_mean_the_same_in_python():
    """The fields of a file are keyword arguments."""
    policy = Policy.of(
        name="shop", identify={"user": {"header": "X-User"}}, limits=[{"name": "a", "key": "user | ip", "limit": "5/s"}]
    )
    text = "name: shop\nidentify: {user: {header: X-User}}\nlimits: [{name: a, key: user | ip, limit: 5/s}]"
    assert policy == Policy.read(text)


def test_ready_limits_are_taken():
    """A limit may be a limit, several of them, or texts and limits mixed; tiers and overrides too."""
    assert one_rule(limit=TokenBucket("5/s")).limit == (TokenBucket("5/s"),)
    both = one_rule(limit=[TokenBucket("5/s"), "fixed window 10/min"]).limit
    assert both == (TokenBucket("5/s"), FixedWindow("10/min"))
    rule = one_rule(key="ip", override={"10.0.0.1": FixedWindow("9/min")}, limit="5/s")
    assert rule.override == (("10.0.0.1", (FixedWindow("9/min"),)),)


def test_callables_are_taken_as_they_are():
    """A cost, a charge, an identity and a degrade handler may be functions."""

    def function(*args: Any) -> Any:
        return 1

    rule = one_rule(cost=function, charge=function, on_refusal=function)
    assert rule.cost == Cost("call", call=function)
    assert rule.charge == Charge(call=function)
    assert rule.on_refusal == OnRefusal("degrade", handler=function)
    assert one_rule(cost={"call": function, "max": 3}).cost == Cost("call", most=3, call=function)
    policy = Policy.of(identify={"vip": {"call": function}}, limits=[{"name": "a", "key": "vip", "limit": "5/s"}])
    assert policy.identify["vip"].call is function


def test_ready_values_are_taken():
    """Identities, matches, actions and overrides that are values already need no reading."""

    class Table:
        def get(self, key: str) -> Any:
            return None

        def close(self) -> None: ...

    table = Table()
    policy = Policy.of(
        identify={"user": Header("x-user"), "ip": ClientIp(("10.0.0.0/8",))},
        limits=[
            {
                "name": "a",
                "match": [Match(path="/x"), "GET /y"],
                "key": "user",
                "limit": "5/s",
                "on_refusal": OnRefusal("wait", 1000),
                "on_failure": OnFailure("closed"),
                "overrides": table,
            }
        ],
    )
    rule = policy.rules[0]
    assert policy.identify == {"user": Header("x-user"), "ip": ClientIp(("10.0.0.0/8",))}
    assert rule.match == (Match(path="/x"), Match(frozenset({"GET"}), "/y"))
    assert (rule.on_refusal, rule.on_failure) == (OnRefusal("wait", 1000), OnFailure("closed"))
    assert rule.overrides is table


def test_a_claim_borrows_a_ready_verifier():
    """A jwt identity without a key uses the verifier of one that is a value."""
    verifier = Verifier("k" * 32, ("HS256",))
    said = {"user": Jwt("sub", verifier), "plan": {"jwt": {"claim": "plan"}, "default": "free"}}
    policy = Policy.of(identify=said, limits=[{"name": "a", "key": "user", "limit": "5/s"}])
    assert policy.identify["plan"] == Jwt("plan", verifier, "free")


def test_durations_may_be_numbers_and_timedeltas():
    """Seconds as a number, a timedelta and a text are the same duration."""
    for span in (60, 60.0, timedelta(minutes=1), "60s", "1 minute"):
        policy = Policy.of(penalty_box={"after": "100/min", "for": span}, limits=[{"name": "a", "limit": "5/s"}])
        assert policy.penalty_box is not None
        assert policy.penalty_box.for_us == 60_000_000


def test_none_means_not_given():
    """A field that is None is absent, so computed policies need no branches."""
    assert one_rule(key=None, message=None, when=None) == one_rule()


def test_parts_may_be_shares_of_one():
    """An alert may be a fraction."""
    assert one_rule(alert=0.8).alert == one_rule(alert="80%").alert == 0.8


ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"limits": [{"name": "a", "limit": "5/s"}, {"name": "b", "limit": "tokn 5/s"}]},
        "limits[1].limit: error: unknown algorithm",
    ),
    (
        {"limits": [{"name": "a", "limit": "5/s", "kye": "ip"}]},
        "limits[0].kye: error: unknown field 'kye' in rule; did you mean 'key'?",
    ),
    ({"limits": [{"name": "a", "limit": 5}]}, "limits[0].limit: error: expected a limit, got 5"),
    (
        {"limits": [{"name": "a", "limit": "5/s", "key": "usr"}], "identify": {"user": {"header": "U"}}},
        "limits[0].key: error: unknown identity",
    ),
    ({"limits": {"a": "5/s"}}, "limits: error: expected a list of rules, got a mapping"),
    ({"identify": {"user": {"header": object()}}, "limits": []}, "identify.user.header: error: "),
    ({"store": 7}, "store: error: expected the URL of a store, got 7"),
    (
        {"limits": [{"name": "a", "limit": "5/s"}, {"name": "a", "limit": "5/s"}]},
        "limits[1].name: error: duplicate rule name 'a'; the first one is at limits[0]",
    ),
    (
        {"limits": [{"name": "a", "limit": "5/s", "priority": 10**5000}]},
        "limits[0].priority: error: expected a priority (an integer from -1000000 to 1000000), got a very large number",
    ),
    ({"limits": [{"name": "a", "limit": "5/s", "alert": float("nan")}]}, "limits[0].alert: error: "),
]


@pytest.mark.parametrize(("fields", "text"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors_name_the_path(fields, text):
    """An error in a policy from Python shows the path of the field instead of a line."""
    with pytest.raises(PolicyError) as caught:
        Policy.of(**fields)
    assert text in str(caught.value)


def test_what_contains_itself_is_refused():
    """A list that contains itself, and one that doubles with every level, are refused without endless recursion."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(PolicyError, match="contain itself"):
        Policy.of(limits=loop)
    laughs: Any = "ha"
    for _ in range(30):
        laughs = [laughs] * 30
    with pytest.raises(PolicyError, match="too large"):
        Policy.of(limits=laughs)


# Files and Python ----------------------------------------------------------------------------------------------------------

IDENTITIES = {
    "user": {"header": "X-User"},
    "plan": {"query": "plan", "default": "free"},
    "class": {"network": {"inside": ["10.0.0.0/8"]}},
}
LIMITS = st.sampled_from(["5/s", "token bucket 5/s burst 10", "fixed window 100/min", "5/s; sliding window log 9/h", "unlimited"])
LIMIT = st.one_of(
    LIMITS,
    st.lists(LIMITS.filter(lambda text: text != "unlimited"), min_size=1, max_size=2),
    st.fixed_dictionaries(
        {"by": st.just("plan"), "free": LIMITS}, optional={"pro": LIMITS, "default": LIMITS, "no": LIMITS, "1.5": LIMITS}
    ),
)
MATCH = st.one_of(
    st.sampled_from(["POST /checkout", "GET,HEAD /a/{b}/**", "/x"]),
    st.fixed_dictionaries(
        {}, optional={"methods": st.sampled_from(["GET", ["PUT", "POST"]]), "path": st.just("/y/*"), "host": st.just("a.example")}
    ),
)
RULE = st.fixed_dictionaries(
    {"limit": LIMIT},
    optional={
        "match": st.one_of(MATCH, st.lists(MATCH, min_size=1, max_size=3)),
        "key": st.sampled_from(["user", "user | ip", ["user", "ip"], "everyone", ["class", "user | ip"]]),
        "when": st.fixed_dictionaries(
            {}, optional={"present": st.just("user"), "plan": st.lists(st.text("abc019.~", max_size=4), min_size=1)}
        ),
        "unidentified": st.sampled_from(["skip", "share"]),
        "cost": st.one_of(st.integers(1, 5), st.just({"header": "X-Cost", "max": 5}), st.just({"response": "1kB"})),
        "charge": st.just({"status": [401, "5xx"]}),
        "once": st.sampled_from(["Idempotency-Key", {"header": "X-Once", "for": 3600, "replays": 2}]),
        "on_refusal": st.sampled_from(["reject", "shadow", "wait up to 200ms", "degrade cached"]),
        "on_failure": st.sampled_from(["open", "local 1/4"]),
        "status": st.integers(400, 599),
        "message": st.text(st.characters(codec="utf-8", exclude_characters="{}"), max_size=30),
        "body": st.recursive(
            st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text("ab~ :#-0 1é", max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text("ab0", min_size=1, max_size=3), inner.filter(lambda v: v is not None), max_size=3)
            ),
            max_leaves=5,
        ).filter(lambda value: value is not None),
        "problem": st.booleans(),
        "priority": st.integers(-5, 5),
        "alert": st.sampled_from(["80%", 0.5]),
        "description": st.text(max_size=10),
    },
)
POLICY = st.fixed_dictionaries(
    {"limits": st.lists(RULE, max_size=3).map(lambda rules: [{"name": f"rule {i}", **rule} for i, rule in enumerate(rules)])},
    optional={
        "name": st.sampled_from(["shop", "404", "no"]),
        "store": st.sampled_from(["memory://", "redis://localhost:6379"]),
        "budget": st.sampled_from(["20ms", 0.5, 1]),
        "problem": st.booleans(),
        "headers": st.sampled_from([{"x": False, "reset": "off"}, "off", False, True]),
        "penalty_box": st.just({"after": "100/min", "for": 60}),
        "exempt": st.lists(
            st.sampled_from([{"path": "/healthz"}, {"network": "10.1.0.0/16", "when": {"user": [1, "2"]}}]), max_size=2
        ),
    },
)


class WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@effort(120)
@given(said=POLICY)
def test_file_and_python_agree(said):
    """The same content as a YAML file and as keyword arguments makes equal policies, or errors at the same paths."""
    said = {"identify": IDENTITIES, **said}
    text = yaml.dump(said, Dumper=WithoutAliases, allow_unicode=True, sort_keys=False)
    assume("\x85" not in text)  # PyYAML writes this character as it is and reads it as the end of a line

    def made(make: Any) -> Any:
        try:
            return make()
        except PolicyError as error:
            return [(one.path, one.message, one.suggestion) for one in error.diagnostics]

    from_python, from_file = made(lambda: Policy.of(**said)), made(lambda: Policy.read(text))
    if isinstance(from_python, list) and isinstance(from_file, list):
        assert {path for path, _, _ in from_python} == {path for path, _, _ in from_file}
    else:
        assert from_python == from_file


def test_without_pyyaml_there_is_still_python(python):
    """Where PyYAML is not installed, policies from Python work, and a file's error names the extra."""
    done = python("""
        import sys
        sys.modules["yaml"] = sys.modules["jwt"] = None
        from limitkeeper import ConfigurationError
        from limitkeeper.policy import Policy
        assert Policy.of(limits=[{"name": "a", "key": "ip", "limit": "5/s"}]).rules[0].name == "a"
        try:
            Policy.read("limits: []")
        except ConfigurationError as error:
            print(error)
    """)
    assert (done.returncode, done.stdout) == (0, "a policy file needs PyYAML; pip install 'limitkeeper[policy]'\n"), done.stderr
