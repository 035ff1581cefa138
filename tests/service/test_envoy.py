"""The Envoy translator: files of the reference server's form, and requests answered from them, on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper.errors import ConfigurationError, StoreUnavailable
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import Policy
from limitkeeper.service.app import MAX_RATES, Application, RequestError
from limitkeeper.service.envoy import MAX_UINT32, OK, OVER_LIMIT, EnvoyTranslator
from limitkeeper.service.envoy_config import load_domains, matches, read_domain
from limitkeeper.service.envoy_messages import DecodeError, RateLimitRequest, RateLimitResponse
from limitkeeper.stores import GuardedStore, MemoryStore
from limitkeeper.stores.sans_io import run
from limitkeeper.testing import ManualClock

SHOP = """
domain: shop
descriptors:
  - {key: ip, rate_limit: {unit: minute, requests_per_unit: 3, name: per-ip}}
  - {key: ip, value: 10.0.0.9, rate_limit: {unit: second, requests_per_unit: 0}}
  - {key: ip, value: 10.0.0.1, rate_limit: {unlimited: true}}
  - key: kind
    value: marketing
    descriptors:
      - {key: number, rate_limit: {unit: DAY, requests_per_unit: 1}}
  - {key: number, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: dark, shadow_mode: true, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: path, value: /api/*/act, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: path, value: /each/*, rate_limit: {unit: week, requests_per_unit: 1}}
  - {key: bucket, rate_limit: {unit: 10s, requests_per_unit: 10, algorithm: token bucket, burst: 20}}
  - {key: meter, rate_limit: {unit: 1 hour, requests_per_unit: 4, algorithm: leaky bucket}}
  - {key: general, rate_limit: {unit: hour, requests_per_unit: 1, name: general}}
  - {key: special, rate_limit: {unit: hour, requests_per_unit: 9, name: special, replaces: [{name: general}]}}
"""
QUOTAS = """
domain: shop
descriptors:
  - {key: own, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: pool, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: all, rate_limit: {unit: hour, requests_per_unit: 5}}
"""
ENTRIES = list[tuple[str, str]]


class Shop:
    """A translator whose time stands still until the clock is moved; `ask` returns (overall code, codes, remaining)."""

    def __init__(self, text: str = SHOP) -> None:
        self.clock = ManualClock(1_000_040.0)  # a minute began 20 s ago
        store: Any = MemoryStore(clock=self.clock)
        self.app = Application(Gate(Policy(), store=store), secret=b"s" * 32)
        domain = read_domain(text.encode())
        self.translator = EnvoyTranslator(self.app, {domain.name: domain})

    def answer(self, *descriptors: Any, domain: str = "shop", hits: int = 0) -> Any:
        request = RateLimitRequest(domain=domain, hits_addend=hits)
        for one in descriptors:
            entries, more = one if isinstance(one, tuple) else (one, {})
            added = request.descriptors.add(**more)
            for key, value in entries:
                added.entries.add(key=key.encode(), value=value.encode())
        data = request.SerializeToString()
        known = self.translator.answer_known(data)
        if known is not None:
            return RateLimitResponse.FromString(known)
        return run(self.translator.should_rate_limit(RateLimitRequest.FromString(data), data))

    def ask(self, *descriptors: Any, **more: Any) -> tuple[int, list[int], list[int]]:
        found = self.answer(*descriptors, **more)
        return found.overall_code, [one.code for one in found.statuses], [one.limit_remaining for one in found.statuses]


FUZZED = Shop()


@pytest.fixture
def shop() -> Shop:
    return Shop()


IP: ENTRIES = [("ip", "1.2.3.4")]


def test_a_limit_is_counted_per_value_and_refuses_with_its_times(shop):
    """The status has the limit with its name, the time to the end of the window, and header fields with the wait."""
    assert [shop.ask(IP) for _ in range(3)] == [(OK, [OK], [2]), (OK, [OK], [1]), (OK, [OK], [0])]
    found = shop.answer(IP)
    status = found.statuses[0]
    assert (found.overall_code, status.code, status.duration_until_reset.seconds) == (OVER_LIMIT, OVER_LIMIT, 40)
    limit = status.current_limit
    assert (limit.requests_per_unit, limit.unit, limit.name) == (3, 2, "per-ip")
    assert {one.key: one.value for one in found.response_headers_to_add} == {
        "ratelimit-limit": "3", "ratelimit-remaining": "0", "ratelimit-reset": "40", "retry-after": "40",
    }  # fmt: skip
    assert shop.ask([("ip", "5.6.7.8")]) == (OK, [OK], [2])
    shop.clock.advance(40)
    assert shop.ask(IP) == (OK, [OK], [2])


@pytest.mark.parametrize(
    ("entries", "times", "answers"),
    [
        ([("ip", "10.0.0.9")], 1, (OVER_LIMIT, [OVER_LIMIT], [0])),  # 0 requests per unit
        ([("ip", "10.0.0.1")], 9, (OK, [OK], [MAX_UINT32])),  # unlimited
        ([("kind", "marketing"), ("number", "7")], 2, (OVER_LIMIT, [OVER_LIMIT], [0])),  # nested
        ([("kind", "marketing")], 9, (OK, [OK], [0])),  # no limit at this depth
        ([("kind", "other"), ("number", "7")], 9, (OK, [OK], [0])),  # no such value
        ([("number", "7"), ("kind", "marketing")], 9, (OK, [OK], [0])),  # another order
        ([("number", "7")], 3, (OVER_LIMIT, [OVER_LIMIT], [0])),
        ([("dark", "x")], 5, (OK, [OK], [0])),  # shadow mode
        ([("bucket", "x")], 20, (OK, [OK], [0])),
        ([("bucket", "x")], 21, (OVER_LIMIT, [OVER_LIMIT], [0])),
        ([("meter", "x")], 5, (OVER_LIMIT, [OVER_LIMIT], [0])),
        ([], 1, (OK, [OK], [0])),
        ([("none", "x")], 1, (OK, [OK], [0])),
    ],
)
def test_the_last_answer_of_a_number_of_requests(shop, entries, times, answers):
    """By the form of the descriptor."""
    assert [shop.ask(entries) for _ in range(times)][-1] == answers


def test_patterns_with_and_without_a_shared_state(shop):
    """`share_threshold` counts all matching values together; otherwise each value has its own state."""
    assert shop.ask([("path", "/api/a/act")]) == (OK, [OK], [1])
    assert shop.ask([("path", "/api/b/act")]) == (OK, [OK], [0])
    assert shop.ask([("path", "/api/c/act")])[0] == OVER_LIMIT
    assert [shop.ask([("path", f"/each/{one}")])[0] for one in (1, 2, 1)] == [OK, OK, OVER_LIMIT]


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("*", "", True), ("a*", "a", True), ("a*", "ba", False), ("*a", "ba", True), ("a*a", "a", False), ("a*a", "aa", True),
        ("a*b*c", "aXbYc", True), ("a*b*c", "acb", False), ("*b*b*", "b", False), ("*b*b*", "abab", True),
        ("ab*bc", "abc", False),
    ],
)  # fmt: skip
def test_patterns(pattern, text, fits):
    """A `*` stands for any number of characters."""
    assert matches(pattern, text) is fits


def test_a_refused_request_costs_nothing(shop):
    """All limits of a request are charged together or not at all; shadow limits on their own."""
    general = [("general", "x")]
    assert shop.ask(general, IP) == (OK, [OK, OK], [0, 2])
    assert shop.ask(general, IP, [("dark", "x")]) == (OVER_LIMIT, [OVER_LIMIT, OK, OK], [0, 2, 0])
    assert shop.ask(IP) == (OK, [OK], [1])
    assert shop.ask([("ip", "10.0.0.9")], IP) == (OVER_LIMIT, [OVER_LIMIT, OK], [0, 1])
    assert shop.ask(IP) == (OK, [OK], [0])


def test_the_same_descriptor_twice_is_charged_twice(shop):
    """In one claim with the sum of both."""
    assert shop.ask(IP, IP) == (OK, [OK, OK], [1, 1])
    assert shop.ask(IP, IP)[0] == OVER_LIMIT


def test_the_same_descriptor_with_another_rate_is_charged_with_it(shop):
    """The lower rate decides for both, in either order."""
    hourly = (IP, {"limit": {"requests_per_unit": 3, "unit": 3}})
    for descriptors in ((IP, hourly), (hourly, IP)):
        other = Shop()
        assert other.ask(*descriptors) == (OK, [OK, OK], [1, 1])
        assert other.ask(*descriptors)[0] == OVER_LIMIT
    check = (IP, {"hits_addend": {"value": 0}})
    assert shop.ask(check, (IP, {**hourly[1], **check[1]}))[0] == OK


def test_hits_addend_of_request_and_descriptor(shop):
    """The descriptor's counts before the request's; 0 in the request means 1, 0 in the descriptor only inspects."""
    assert shop.ask(IP, hits=2) == (OK, [OK], [1])
    assert shop.ask(IP, hits=2) == (OVER_LIMIT, [OVER_LIMIT], [1])
    check = (IP, {"hits_addend": {"value": 0}})
    assert shop.ask(check, hits=5) == shop.ask(check) == (OK, [OK], [1])
    assert shop.ask((IP, {"hits_addend": {"value": 1}}), hits=5) == (OK, [OK], [0])
    number = [("number", "1")]
    assert shop.ask(check, number) == (OVER_LIMIT, [OVER_LIMIT, OK], [0, 2])
    assert shop.ask(number) == (OK, [OK], [1])  # nothing was charged
    assert shop.ask((number, {"hits_addend": {"value": 2**64 - 1}}))[0] == OVER_LIMIT


def test_a_limit_in_the_request_overrides_the_file(shop):
    """It disables shadow mode, applies where the file has no limit, and 0 refuses."""
    override = {"limit": {"requests_per_unit": 1, "unit": 3}}
    for entries in ([("dark", "x")], [("none", "x")]):
        assert [shop.ask((entries, override)) for _ in range(2)] == [(OK, [OK], [0]), (OVER_LIMIT, [OVER_LIMIT], [0])]
    assert shop.answer((IP, override)).statuses[0].current_limit.unit == 3
    assert shop.ask(([("none", "x")], {"limit": {"requests_per_unit": 0, "unit": 1}}))[0] == OVER_LIMIT
    with pytest.raises(RequestError, match=r"limit\.unit: expected 1 \(SECOND\) to 7"):
        shop.ask((IP, {"limit": {"requests_per_unit": 1}}))
    many = [(IP, {"limit": {"requests_per_unit": count, "unit": 1}}) for count in range(1, MAX_RATES)]
    with pytest.raises(RequestError, match="at most 1000 different overrides"):
        shop.ask(*many)
    assert shop.ask(many[9])[0] == OK  # those in use still work


def test_replaces(shop):
    """A limit that applies replaces the ones that it names."""
    pair = ([("general", "x")], [("special", "x")])
    assert [shop.ask(*pair)[0] for _ in range(3)] == [OK, OK, OK]
    found = shop.answer(*pair)
    assert [one.HasField("current_limit") for one in found.statuses] == [False, True]
    assert shop.ask(pair[0]) == (OK, [OK], [0])


def test_unknown_domains_pass_and_empty_requests_are_errors(shop):
    """As in the reference server; an error lets Envoy's failure mode decide."""
    assert shop.ask(IP, IP, domain="other") == (OK, [OK, OK], [0, 0])
    with pytest.raises(RequestError, match="domain: expected a string"):
        shop.ask(IP, domain="")
    with pytest.raises(RequestError, match="descriptors: expected 1 to 1000, got 0"):
        shop.ask()


def test_values_that_are_not_utf8_are_limited_too(shop):
    """A client can't avoid its limit with bytes that are no text."""
    request = RateLimitRequest(domain="shop")
    request.descriptors.add().entries.add(key=b"number", value=b"\xff\xfe")
    codes = [run(shop.translator.should_rate_limit(request)).overall_code for _ in range(3)]
    assert codes == [OK, OK, OVER_LIMIT]


def test_values_are_not_confused():
    """The joined key of several values keeps them apart."""
    nested = "domain: shop\ndescriptors: [{key: a, descriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]}]"
    shop = Shop(nested)
    for first, second in (("x|y", "z"), ("x", "y|z"), ("x\\", "y"), ("x", "\\y"), ("x\\|y", "z")):
        assert shop.ask([("a", first), ("b", second)])[0] == OK


def test_a_failing_store_is_an_error():
    """Neither allowed nor refused: Envoy has a failure mode of its own."""

    class Broken(MemoryStore):
        def decide_one(self, *args: Any, **more: Any) -> Any:
            raise StoreUnavailable("down")

        decide_many = decide_one

    for guard in ("open", "closed"):
        app = Application(Gate(Policy(), store=GuardedStore(Broken(), on_failure=guard)), secret=b"s" * 32)
        shop = Shop()
        shop.translator = EnvoyTranslator(app, shop.translator.domains)
        with pytest.raises(StoreUnavailable):
            shop.ask(IP)


def test_a_new_version_keeps_the_state_of_its_limits(shop):
    """Charges are kept, also under another rate."""
    shop.ask(IP, hits=3)
    domain = read_domain(SHOP.replace("requests_per_unit: 3", "requests_per_unit: 5").encode())
    shop.translator.replace({"shop": domain})
    assert shop.ask(IP) == (OK, [OK], [1])


def test_no_old_limit_is_remembered_beyond_a_new_version(shop):
    """A watcher's thread replaces the limits while a request is matched: the next one is decided by the new ones."""

    class Replaced(dict):
        def get(self, name):
            shop.translator.replace({"shop": read_domain(SHOP.replace("requests_per_unit: 3", "requests_per_unit: 1").encode())})
            return self[name]

    shop.translator.domains = Replaced(shop.translator.domains)
    assert [shop.ask([("ip", "1")])[0] for _ in range(2)] == [OK, OVER_LIMIT]


def test_header_fields_can_be_switched_off():
    """`headers: off` in the domain."""
    shop = Shop("headers: off\n" + SHOP)
    assert not shop.answer(IP).response_headers_to_add


@given(st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=5))
def test_no_bytes_break_the_translator(data, place, patch):
    """Each message is unreadable, a caller's mistake, or answered with one status for each descriptor."""
    valid = RateLimitRequest(domain="shop", hits_addend=1)
    for key, value in ((b"ip", b"1"), (b"path", b"/api/x/act"), (b"dark", b"")):
        valid.descriptors.add(limit={"requests_per_unit": 2**32 - 1, "unit": 6}).entries.add(key=key, value=value)
    text = valid.SerializeToString()
    for message in (data, text[:place] + patch + text[place + len(patch) :]):
        try:
            request = RateLimitRequest.FromString(message)
            answer = run(FUZZED.translator.should_rate_limit(request))
        except (DecodeError, RequestError):
            continue
        assert len(answer.statuses) == len(request.descriptors)


# Files


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("{key: a, rate_limit: {unit: fortnight, requests_per_unit: 1}}", "unknown unit 'fortnight'; write one of second"),
        ("{key: a, rate_limit: {unit: day}}", "incomplete rate_limit; write unit and requests_per_unit, or unlimited"),
        ("{key: a, rate_limit: {unit: day, requests_per_unit: -1}}", "an integer from 0 to"),
        ("{key: a, rate_limit: {unit: day, requests_per_unit: 1, unlimited: true}}", "an unlimited rate limit has no unit"),
        ("{key: a, rate_limit: {unit: day, requests_per_unit: 1, burst: 2}}", "unknown option 'burst'"),
        ("{key: a, rate_limit: {unit: day, requests_per_unit: 1, algorithm: tokens}}", "expected one of sliding window"),
        ("{key: a, rate_limit: {unlimited: true, name: x, replaces: [{name: x}]}}", "can't replace itself"),
        ("{key: a, ratelimit: {unlimited: true}}", "unknown field 'ratelimit' in descriptor; did you mean 'rate_limit'?"),
        ("{key: a, quota_mode: 7}", "expected true or false"),
        ("{key: a, metadata: {x: y}}", "metadata in responses is not supported"),
        ("{key: ''}", "expected a string, got an empty one"),
        ("{value: a}", "missing field 'key' in descriptor"),
        ("{key: a}\n  - {key: a}", "duplicate descriptor 'a' ''; the first one is in line 3"),
    ],
)
def test_errors_of_a_file_name_their_line_and_the_remedy(item, message):
    """All are found before the service starts."""
    with pytest.raises(ConfigurationError) as caught:
        read_domain(f"domain: shop\ndescriptors:\n  - {item}\n".encode(), "shop.yaml")
    assert message in str(caught.value)
    assert "shop.yaml:" in str(caught.value)


def test_a_folder_has_a_file_for_each_domain(tmp_path):
    """A domain in two files is an error, and so is a folder without files."""
    with pytest.raises(ConfigurationError, match=r"no \.yaml file"):
        load_domains(str(tmp_path))
    (tmp_path / "a.yaml").write_text("domain: a\n")
    (tmp_path / "b.yml").write_text("domain: b\n")
    assert list(load_domains(str(tmp_path))) == ["a", "b"]
    (tmp_path / "c.yaml").write_text("domain: a\n")
    with pytest.raises(ConfigurationError, match="duplicate domain 'a'"):
        load_domains(str(tmp_path))


# Quota mode


def test_limits_in_quota_mode_refuse_only_together():
    """As the reference server: a request passes while one of its quotas has room; each is charged as long as it has room."""
    shop, both = Shop(QUOTAS), ([("own", "a")], [("pool", "x")], [("all", "x")])
    found = [shop.ask(*both) for _ in range(4)]
    assert [one[0] for one in found] == [OK, OK, OK, OVER_LIMIT]
    assert [one[1] for one in found][1:3] == [[OVER_LIMIT, OK, OK]] * 2
    assert found[3][1:] == ([OVER_LIMIT, OVER_LIMIT, OK], [0, 0, 2])  # the refused one has cost nothing


def test_a_quota_is_not_charged_when_another_limit_refuses():
    """And a single one is a limit like any other."""
    shop = Shop(QUOTAS)
    shop.ask([("all", "x")], hits=5)
    assert shop.ask([("pool", "x")], [("all", "x")]) == (OVER_LIMIT, [OK, OVER_LIMIT], [3, 0])
    assert [shop.ask([("own", "b")])[0] for _ in range(2)] == [OK, OVER_LIMIT]
    assert shop.ask(([("pool", "x")], {"hits_addend": {"value": 0}}), [("own", "b")]) == (OK, [OK, OVER_LIMIT], [3, 0])
