"""Loading a policy file: the whole sample, every field, and YAML values with special rules."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from source_trees import to_python

from limitkeeper import ConfigurationError, FixedWindow, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.application_overrides import CalledOverrides, HashOverrides
from limitkeeper.policy.identity.client_ip import ClientIp
from limitkeeper.policy.identity.identify import Called, Captured, Certificate, Cookie, Header, Network, Query
from limitkeeper.policy.identity.jwt import Jwt
from limitkeeper.policy.model import (
    Answer,
    Charge,
    Cost,
    Exemption,
    Headers,
    Match,
    Once,
    OnFailure,
    OnRefusal,
    PenaltyBoxConfig,
    RetryAmplification,
    Tiers,
    When,
)
from limitkeeper.policy.reading.diagnostics import PolicyError
from limitkeeper.policy.reading.import_string import ImportString, callables_of
from limitkeeper.policy.reading.policy_sections import policy_schema
from limitkeeper.policy.reading.yaml import MAX_BYTES, parse_yaml

HERE = Path(__file__).parents[1]
POST_CHECKOUT = (Match(frozenset({"POST"}), "/checkout"),)


@pytest.fixture(scope="module")
def shop() -> Policy:
    return Policy.load(HERE / "shop.yaml")


@pytest.fixture(scope="module")
def everything() -> dict[str, object]:
    policy = Policy.load(HERE / "everything.yaml")
    return {"policy": policy, **{rule.name: rule for rule in policy.rules}}


# The sample ------------------------------------------------------------------------------------------------------------------


def test_the_sample_loads_as_it_stands(shop, caplog):
    """The sample policy has eight rules in their order, its own store, and neither errors nor warnings."""
    names = "partner tenant-and-user user checkout login payment checkout-capacity public-checkout"
    assert [rule.name for rule in shop.rules] == names.split()
    assert shop.store == "redis://localhost:6379"
    assert shop.name == "limitkeeper"
    assert shop.source == HERE / "shop.yaml"
    Policy.load(HERE / "shop.yaml")
    assert caplog.records == []


def test_the_samples_identities_have_their_values(shop):
    """Headers, verified claims (the second under the key of the first) and the client's address behind proxies."""
    assert shop.identify["tenant"] == Header("x-tenant")
    user, plan = shop.identify["user"], shop.identify["plan"]
    assert isinstance(user, Jwt)
    assert isinstance(plan, Jwt)
    assert user.verifier is plan.verifier
    assert user.verifier.key == (HERE / "jwt.pub").read_bytes()
    assert (user.claim, plan.claim, plan.default) == ("sub", "plan", "free")
    assert shop.identify["ip"] == ClientIp(("10.0.0.0/8",), ipv6_prefix=64)


def test_the_samples_rules_have_their_values(shop):
    """Keys joined and first present, conditions, limits by plan, overrides and messages come out as values."""
    rules = {rule.name: rule for rule in shop.rules}
    assert rules["partner"].when == When(present=("partner",))
    assert rules["partner"].override == (("acme-corp", (TokenBucket("500/s burst 1000"),)),)
    assert rules["tenant-and-user"].key == (("tenant",), ("user",))
    assert rules["tenant-and-user"].limit == (SlidingWindowCounter("1000/min"),)
    assert rules["user"].key == (("user", "ip"),)
    free, pro = (TokenBucket("20/s burst 40"),), (TokenBucket("100/s burst 200"),)
    assert rules["user"].limit == Tiers("plan", (("free", free), ("pro", pro), ("enterprise", ())), free)
    assert rules["checkout"].match == POST_CHECKOUT
    assert rules["checkout"].answer == Answer(message="Too many checkout attempts. Retry after {retry_after}s.")
    assert [match.path for match in rules["login"].match] == ["/login", "/otp", "/password-reset"]
    assert rules["login"].limit == (FixedWindow("5/min"),)
    assert rules["payment"].limit == (SlidingWindowLog("5/min"),)
    assert rules["checkout-capacity"].key == ()
    assert rules["public-checkout"].when == When(absent=("partner",))
    assert shop.exempt == (Exemption(match=(Match(path="/healthz"),)), Exemption(networks=("10.1.0.0/16",)))


# Every field --------------------------------------------------------------------------------------------------------------------


def test_the_top_of_a_policy(everything):
    """Name, store, budget, headers and penalty box are read; `off` means off, not the string."""
    policy = everything["policy"]
    assert (policy.name, policy.store, policy.budget_us, policy.problem) == (
        "everything",
        "memory://?max_keys=1000",
        50_000,
        True,
    )
    names = {"limit": "X-Quota", "remaining": "X-Quota-Left", "reset": "X-Quota-Reset", "retry_after": "X-Retry"}
    assert policy.headers == Headers(
        "draft-7", x=False, reset="epoch", success="near", partition=True, cors=False, names=tuple(names.items())
    )
    assert policy.penalty_box == PenaltyBoxConfig(
        TokenBucket("100/min"), 60_000_000, (("user", "ip"),), (3_600_000_000, 86_400_000_000)
    )
    assert policy.retry_amplification == RetryAmplification((("user", "ip"),), 30_000_000)
    assert (policy.instances, policy.safe_concurrency) == (3, 1000)
    assert [rule.total_concurrency for rule in policy.rules[:3]] == [3000, 120, 3000]


def test_every_kind_of_identity(everything):
    """Each kind of identity has its fields; a network class uses the policy's own client address."""
    found = everything["policy"].identify
    ip = ClientIp(("10.0.0.0/8", "unix"), "Forwarded", ipv6_prefix=56, ipv4_prefix=24)
    assert found["ip"] == ip
    assert found["key"] == Query("api_key")
    assert found["session"] == Cookie("sid")
    assert found["order"] == Captured("order_id")
    assert found["service"] == Certificate("san")
    assert found["vip"] == Called(ImportString("os.path:basename"))
    assert found["class"] == Network(
        ip, (("internal", ("10.1.0.0/16", "2001:db8::/32")), ("office", ("192.168.0.0/16",))), "public"
    )
    verifier = found["user"].verifier
    assert (verifier.issuer, verifier.audience, verifier.leeway_us, verifier.header) == (
        "https://id.example",
        "shop",
        30_000_000,
        "X-Token",
    )


def test_every_kind_of_exemption(everything):
    """Paths, matches, networks, headers, conditions, and exemptions from some rules only."""
    get = frozenset({"GET", "HEAD"})
    assert everything["policy"].exempt == (
        Exemption(match=(Match(path="/healthz"), Match(path="/livez"))),
        Exemption(match=(Match(get, "/static/**", "cdn.example.com"),)),
        Exemption(networks=("10.1.0.0/16",)),
        Exemption(headers=(("x-probe", "letmein"),)),
        Exemption(when=When(equals=(("service", ("billing",)),))),
        Exemption(networks=("10.2.0.0/16",), rules=("plain",)),
    )


def test_a_rule_with_every_field(everything):
    """All fields of a rule are in its value."""
    rule = everything["orders"]
    assert rule.match == (
        Match(frozenset({"GET", "HEAD"}), "/orders/{order_id}"),
        Match(frozenset({"POST"}), "/orders/{order_id}/lines", "*.example.com"),
    )
    assert rule.when == When(("tenant",), ("key", "session"), (("plan", ("free", "pro")), ("class", ("public",))))
    assert rule.key == (("tenant",), ("user", "ip"))
    assert rule.unidentified == "share"
    assert rule.limit == (TokenBucket("5/s burst 10"), FixedWindow("1000/d"))
    assert rule.override == (("acme|42", ()), ("acme|-", (TokenBucket("10/s"),)))
    assert rule.cost == Cost("header", 2, "x-cost", 10)
    assert rule.charge == Charge(((401, 401), (400, 499), (500, 503)))
    assert rule.once == Once("idempotency-key", 3_600_000_000, 3, ("user",))
    assert rule.on_refusal == OnRefusal("wait", 200_000, 50)
    assert rule.on_failure == OnFailure("local", "1/4")
    body = {"code": "SLOW_DOWN", "message": "{message}", "list": [1, 2.5, True, None, "{limit}"]}
    assert rule.answer == Answer(503, "Slow down: {retry_after}s.", body, False)
    assert (rule.priority, rule.alert) == (10, 0.8)


def test_a_rule_with_as_little_as_can_be(everything):
    """Absent fields have their defaults; the policy's on_failure is the default of the rules."""
    rule = everything["plain"]
    assert rule.limit == (TokenBucket("100/s"),)
    assert (rule.match, rule.key, rule.when, rule.once, rule.alert) == ((), (), When(), None, None)
    assert rule.on_failure == OnFailure("closed")
    assert rule.description == "All that can be left out is."


def test_costs_charges_and_handlers_by_name(everything):
    """Costs by response, by call and by query, charges by call, overrides from elsewhere, handlers by name."""
    assert everything["tiers"].cost == Cost("response", 2, per=4096)
    assert everything["calls"].cost == Cost("call", 1, most=5, call=ImportString("os.path:getsize"))
    assert everything["calls"].charge == Charge(call=ImportString("os.path:exists"))
    assert everything["query"].cost == Cost("query", 0, "n", 10)
    assert everything["hash"].cost == Cost("constant", 3)
    assert everything["hash"].on_refusal == OnRefusal("degrade", handler="cached")
    assert everything["tiers"].on_refusal == OnRefusal("degrade", handler="shop.cheap:answer")
    called, hashed = everything["tiers"].overrides, everything["hash"].overrides
    assert isinstance(called, CalledOverrides)
    assert (called.call, called.keep_us) == (ImportString("os.path:basename"), 60_000_000)
    assert isinstance(hashed, HashOverrides)
    assert (hashed.url, hashed.hash, hashed.refresh_us) == ("redis://localhost:6379/1", "shop:limits", 10_000_000)
    assert everything["calls"].limit == Tiers("class", (("internal", (TokenBucket("500/s"),)),), (TokenBucket("5/s"),))


def test_override_keys_stay_strings(everything):
    """Keys that YAML would read as a number or as false are the strings in the file."""
    assert [key for key, _ in everything["query"].override] == ["acme", "42", "no"]


@pytest.mark.parametrize("name", ["shop.yaml", "everything.yaml"])
def test_the_schema_accepts_what_loads(name):
    """A file that loads is valid by the schema."""
    tree, _ = parse_yaml((HERE / name).read_text())
    jsonschema.Draft202012Validator(policy_schema()).validate(to_python(tree))


def test_the_full_file_has_every_field():
    """tests/policy/everything.yaml has every field of the schema, so that none remains untested."""
    text = (HERE / "everything.yaml").read_text()
    words: set[str] = set()

    def walk(part: object) -> None:
        if isinstance(part, dict):
            words.update(part.get("properties", {}) if isinstance(part.get("properties"), dict) else {})
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(policy_schema())
    assert [word for word in sorted(words) if f"{word}:" not in text] == ["env", "key_env"]


# Details ----------------------------------------------------------------------------------------------------------------


def rule(text: str) -> object:
    return Policy.read(
        f"identify: {{user: {{header: U}}, tenant: {{header: T}}}}\nlimits:\n  - {{name: a, limit: 5/s, {text}}}"
    ).rules[0]


def test_every_policy_has_the_client_address():
    """`ip` is available without a definition."""
    assert Policy.read("limits: [{name: a, key: ip, limit: 5/s}]").identify == {"ip": ClientIp()}


def test_joined_keys_and_alternatives_differ():
    """A list joins parts to one key, a bar takes the first one present, and both may be mixed."""
    assert rule("key: user | ip").key == (("user", "ip"),)
    assert rule("key: [user, ip]").key == (("user",), ("ip",))
    assert rule("key: [tenant, user | ip]").key == (("tenant",), ("user", "ip"))
    assert rule("key: everyone").key == ()


def test_headers_off_is_none_at_all():
    """`headers: off` sends no header field; `headers: on` is the default."""
    off = Policy.read("headers: off\nlimits: [{name: a, limit: 5/s}]").headers
    assert off == Headers("none", x=False, reset="off", success="never", partition=False, cors=False)
    assert Policy.read("headers: on\nlimits: [{name: a, limit: 5/s}]").headers == Headers()


def test_a_method_may_be_any():
    """Methods are read in any case; a non-standard one is accepted unless it looks misspelt."""
    assert rule("match: post /x").match == (Match(frozenset({"POST"}), "/x"),)
    assert rule("match: PURGE /x").match == (Match(frozenset({"PURGE"}), "/x"),)
    assert rule('match: "GET, HEAD /x"').match == (Match(frozenset({"GET", "HEAD"}), "/x"),)


def test_a_secret_may_come_from_the_environment(monkeypatch):
    """A header's value and a key may be in the environment."""
    monkeypatch.setenv("LIMITKEEPER_TEST_PROBE", "letmein")
    monkeypatch.setenv("LIMITKEEPER_TEST_KEY", "k" * 32)
    text = """
identify: {user: {jwt: {claim: sub, key_env: LIMITKEEPER_TEST_KEY, algorithms: HS256}}}
exempt: [{header: {X-Probe: {env: LIMITKEEPER_TEST_PROBE}}}]
limits: [{name: a, key: user, limit: 5/s}]
"""
    policy = Policy.read(text)
    assert policy.exempt[0].headers == (("x-probe", "letmein"),)
    assert policy.identify["user"].verifier.key == "k" * 32


def test_nothing_is_imported_by_reading():
    """Names of calls are read, not imported: a file can be checked where the application is not."""
    policy = Policy.read('identify: {vip: {call: "no_such_thing:at_all"}}\nlimits: [{name: a, key: vip | ip, limit: 5/s}]')
    (named,) = [call for call, _ in callables_of(policy) if isinstance(call, ImportString)]
    with pytest.raises(ConfigurationError, match="no_such_thing"):
        named.load()


def test_a_named_call_is_called():
    """A call by name is the named object."""
    assert ImportString("os.path:basename")("/a/b") == "b"
    with pytest.raises(ConfigurationError, match="can't be called"):
        ImportString("os.path:sep").load()


def test_a_missing_file_is_an_error_with_its_name(tmp_path):
    """A missing file is a ConfigurationError with the file's name."""
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml: can't read the policy: no such file"):
        Policy.load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigurationError, match="can't read the policy"):
        Policy.load(tmp_path)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    """A byte order mark is allowed; UTF-16 is an error."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbflimits: [{name: a, limit: 5/s}]")
    assert Policy.load(path).rules[0].name == "a"
    path.write_text("limits: []", encoding="utf-16")
    with pytest.raises(PolicyError, match="UTF-16"):
        Policy.load(path)


def test_a_huge_file_is_refused_at_once(tmp_path):
    """A file of more than MAX_BYTES is not parsed."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(PolicyError, match="500,001 bytes; a policy has at most 500,000"):
        Policy.load(path)


@pytest.mark.parametrize("part", ["[", "{", "- ", "? ", "{a: ", "[{a: ["], ids=repr)
def test_half_a_megabyte_of_nesting_is_refused(part):
    """Parsing ends at MAX_DEPTH."""
    with pytest.raises(PolicyError, match=r"nested more than 32 deep|invalid YAML|can't be the key"):
        Policy.read("limits: " * (part[0] in "[{") + part * (499_000 // len(part)))


def test_a_large_policy_loads():
    """A thousand rules are read well within a second or two, each with its own name."""
    rules = "".join(f"  - {{name: r{i}, match: GET /a/{i}, key: ip, limit: token bucket 5/s burst 10}}\n" for i in range(1000))
    assert len(Policy.read("limits:\n" + rules).rules) == 1000


@pytest.mark.parametrize("nonsense", [None, 5, [], {}, object(), b"limits: []"])
def test_a_wrong_argument_type_is_an_error(nonsense):
    """The error names the expected argument."""
    with pytest.raises(ConfigurationError, match="expected the text of a policy"):
        Policy.read(nonsense)
    for reader in (Policy.load, Gate):
        with pytest.raises(ConfigurationError, match="expected the path of a policy file"):
            reader(nonsense)


def test_a_policy_shows_no_secret_of_its_own():
    """The repr of a policy holds no password of a store, no value of an exempt header, no key of tokens."""
    policy = Policy.read("""
store: redis://:s3cret-1@localhost:6379
identify: {user: {jwt: {claim: sub, key: s3cret-2 of at least thirty-two bytes, algorithms: [HS256]}}}
exempt: [{header: {X-Probe: s3cret-3}}]
limits: [{name: all, key: user, limit: 5/s, overrides: {redis_hash: limits}}]
""")
    with Gate(policy) as gate:
        assert "s3cret" not in repr(policy) + repr(gate) + repr(gate.store) + repr(policy.rules[0].overrides)
