"""The fields of a response about its limits, byte for byte."""

from __future__ import annotations

from datetime import UTC, datetime

import http_sf
import pytest
from evaluations import RequestSequence, lines

from limitkeeper import FixedWindow, LeakyBucketQueue, SlidingWindowLog, TokenBucket
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy.compiled_policy import CompiledPolicy
from limitkeeper.policy.evaluation import Evaluation
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import DEGRADE, Headers, OnRefusal, Policy
from limitkeeper.policy.refusal import PENALTY_BOX, Refusal
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.web.headers import MAX_LIMITS, append_fields, fields, text_fields
from stand_ins import NOON

CHECKOUT = TokenBucket("5/s burst 10")


def test_the_hundred_and_first_request_in_a_quarter_of_an_hour():
    """100 per 15 minutes, all used at the window's start: limit 100, remaining 0, retry after 900 seconds."""
    assert text_fields(RequestSequence(FixedWindow("100 per 15 minutes")).after(101)) == [
        ("RateLimit-Policy", '"checkout";q=100;w=900'),
        ("RateLimit", '"checkout";r=0;t=900'),
        ("X-RateLimit-Limit", "100"),
        ("X-RateLimit-Remaining", "0"),
        ("Retry-After", "900"),
        ("Cache-Control", "no-store"),
        ("Vary", "Origin"),
        (
            "Access-Control-Expose-Headers",
            "RateLimit-Policy, RateLimit, X-RateLimit-Limit, X-RateLimit-Remaining, Retry-After",
        ),
    ]


def test_the_eleventh_checkout():
    """5/s with a burst of 10: the eleventh at once may retry after a second."""
    found = lines(fields(RequestSequence(CHECKOUT).after(11)))
    assert (found["retry-after"], found["ratelimit"]) == ("1", '"checkout";r=0;t=1')


def test_a_success_has_what_is_left_and_no_retry_time():
    """An allowed request has both RateLimit fields and the X- ones, no Retry-After, and may be cached as before."""
    assert fields(RequestSequence(CHECKOUT).after(3)) == [
        (b"ratelimit-policy", b'"checkout";q=10;w=2'),
        (b"ratelimit", b'"checkout";r=7;t=2'),
        (b"x-ratelimit-limit", b"10"),
        (b"x-ratelimit-remaining", b"7"),
        (b"vary", b"Origin"),
        (b"access-control-expose-headers", b"RateLimit-Policy, RateLimit, X-RateLimit-Limit, X-RateLimit-Remaining"),
    ]


def test_several_policies_are_members_of_one_line():
    """Two limits are two members of each field, in the policy's order; the X- fields are those of the one closest to its end."""
    start = datetime(2026, 1, 10, 12, 49, 49, tzinfo=UTC).timestamp()
    sequence = RequestSequence(FixedWindow("100/s"), FixedWindow("10000/d"), labels=["burst", "daily"], start=start - 9)
    for _ in range(9):
        for _ in range(93):
            sequence.ask()
        sequence.clock.advance(1)
    sequence.after(43)
    found = lines(fields(sequence.ask(cost=0)))
    assert found["ratelimit-policy"] == '"burst";q=100;w=1, "daily";q=10000;w=86400'
    assert found["ratelimit"] == '"burst";r=57;t=1, "daily";r=9120;t=40211'
    assert (found["x-ratelimit-limit"], found["x-ratelimit-remaining"]) == ("100", "57")


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (
            "draft-6",
            {"ratelimit-policy": "10;w=2", "ratelimit-limit": "10", "ratelimit-remaining": "7", "ratelimit-reset": "2"},
        ),
        ("draft-7", {"ratelimit-policy": "10;w=2", "ratelimit": "limit=10, remaining=7, reset=2"}),
        ("draft-11", {"ratelimit-policy": '"checkout";q=10;w=2', "ratelimit": '"checkout";r=7;t=2'}),
        ("none", {}),
    ],
)
def test_wire_generations(wire, expected):
    """Each generation of the draft has its own bytes, and lists its fields in Access-Control-Expose-Headers."""
    found = lines(fields(RequestSequence(CHECKOUT, headers=Headers(wire=wire, x=False)).after(3)))
    exposed = found.pop("access-control-expose-headers", "")
    assert found.pop("vary", None) == ("Origin" if expected else None)
    assert found == expected
    assert [name.strip().lower() for name in exposed.split(",") if name] == list(expected)


def test_older_generations_have_the_deciding_limit():
    """Drafts 6 and 7 have room for one limit's numbers: those of the one closest to its end, or that refuses longest."""
    sequence = RequestSequence(FixedWindow("1000/h"), CHECKOUT, headers=Headers(wire="draft-7"))
    found = lines(fields(sequence.after(3)))
    assert found["ratelimit-policy"] == "1000;w=3600, 10;w=2"
    assert found["ratelimit"] == "limit=10, remaining=7, reset=2"


def test_a_reset_is_off_unless_its_unit_was_said():
    """X-RateLimit-Reset is seconds from now or seconds since 1970, as the policy sets it, and absent by default."""
    quarter = FixedWindow("100 per 15 minutes")
    assert "x-ratelimit-reset" not in lines(fields(RequestSequence(quarter).ask()))
    assert lines(fields(RequestSequence(quarter, headers=Headers(reset="delta")).ask()))["x-ratelimit-reset"] == "900"
    sequence = RequestSequence(quarter, headers=Headers(reset="epoch"))
    sequence.clock.advance(0.25)
    found = lines(fields(sequence.ask()))
    assert int(found["x-ratelimit-reset"]) == datetime(2026, 1, 10, 12, 15, tzinfo=UTC).timestamp()
    assert found["access-control-expose-headers"].endswith("X-RateLimit-Reset")


def test_near_has_fields_only_when_less_than_a_fifth_is_left():
    """success: near has no fields down to a fifth, and has them below it; refusals always have them."""
    sequence = RequestSequence(CHECKOUT, headers=Headers(success="near"))
    assert [bool(fields(sequence.ask())) for _ in range(11)] == [False] * 8 + [True] * 3


def test_never_has_fields_on_refusals_only():
    """success: never adds nothing to successes; a refusal still has its retry time."""
    sequence = RequestSequence(CHECKOUT, headers=Headers(success="never"))
    assert [bool(fields(sequence.ask())) for _ in range(11)] == [False] * 10 + [True]


def test_headers_off_leave_the_way_back():
    """With every field switched off, a refusal keeps Retry-After and is not stored by caches."""
    off = Headers(wire="none", x=False, success="never", cors=False)
    assert fields(RequestSequence(CHECKOUT, headers=off).after(11)) == [(b"retry-after", b"1"), (b"cache-control", b"no-store")]


def test_a_request_without_a_limit_has_no_fields():
    """A request to which no rule applies gets no field."""
    sequence = RequestSequence()
    assert fields(Evaluation(sequence.gate, sequence.compiled)) == []


def test_a_refusal_without_a_decision_has_a_retry_time():
    """A client in the penalty box gets the retry time, and no limit."""
    evaluation = RequestSequence().bare(Refusal(PENALTY_BOX, 429, 60, "…"))
    assert fields(evaluation) == [
        (b"retry-after", b"60"),
        (b"cache-control", b"no-store"),
        (b"vary", b"Origin"),
        (b"access-control-expose-headers", b"Retry-After"),
    ]


def test_a_request_that_can_never_pass_has_no_retry_time():
    """A request that costs more than the limit ever allows gets no Retry-After."""
    found = lines(fields(RequestSequence(CHECKOUT).ask(cost=11)))
    assert "retry-after" not in found
    assert found["ratelimit"] == '"checkout";r=10;t=2'


def test_a_degraded_answer_is_no_refusal():
    """Where a handler answers instead, its answer has the limits' fields, but no Retry-After and no no-store."""
    sequence = RequestSequence(CHECKOUT, on_refusal=OnRefusal(DEGRADE, handler=print))
    assert set(lines(fields(sequence.after(11)))) == {
        "ratelimit-policy",
        "ratelimit",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "access-control-expose-headers",
        "vary",
    }


def test_a_refusal_by_cost_leaves_t_out_where_it_would_not_be_true():
    """Three are left and four were requested: in one second they are available, sooner than three at 1/s take, so no t."""
    sequence = RequestSequence(TokenBucket("1/s burst 10"))
    sequence.after(7)
    found = lines(fields(sequence.ask(cost=4)))
    assert (found["ratelimit"], found["retry-after"], found["x-ratelimit-remaining"]) == ('"checkout";r=3', "1", "3")


def test_a_queue_without_end_has_its_rate():
    """A shaper without a capacity advertises its pace."""
    found = lines(fields(RequestSequence(LeakyBucketQueue("5/s")).ask()))
    assert (found["ratelimit-policy"], found["ratelimit"]) == ('"checkout";q=5;w=1', '"checkout";r=0;t=1')
    assert found["x-ratelimit-limit"] == "5"


@pytest.mark.parametrize("label", ['say "hi"', "back\\slash", "a\r\nSet-Cookie: x=1", "naïve", "x" * 10_000, "\x00", ""])
def test_no_label_leaves_its_field(label):
    """Whatever a rule's name, its fields parse, have no control characters and stay short."""
    for name, value in fields(RequestSequence(CHECKOUT, labels=[label]).after(11)):
        assert all(32 <= byte < 127 for byte in value), name
        assert len(value) < 300
        if name in (b"ratelimit", b"ratelimit-policy"):
            assert len(http_sf.parse(value, tltype="list")) == 1


def test_quotes_in_labels_are_escaped():
    """A label with quotes and backslashes comes out of a parser unchanged."""
    found = dict(fields(RequestSequence(CHECKOUT, labels=['say "hi" \\']).ask()))
    ((received, _),) = http_sf.parse(found[b"ratelimit"], tltype="list")
    assert received == 'say "hi" \\'


def test_partition_keys_are_keyed_hashes():
    """With partition, members carry pk: twelve bytes, the same for the same key, another for another, never the key itself."""
    sequence = RequestSequence(CHECKOUT, SlidingWindowLog("100/min"), headers=Headers(partition=True))

    def received(key: str) -> set[bytes]:
        found = dict(fields(sequence.ask(key=key)))
        members = [m for name in (b"ratelimit", b"ratelimit-policy") for m in http_sf.parse(found[name], tltype="list")]
        return {parameters["pk"] for _, parameters in members}

    (ann,), (bob,) = received("ann@example.com"), received("bob@example.com")
    assert received("ann@example.com") == {ann} != {bob}
    assert (len(ann), len(bob)) == (12, 12)
    assert received("\ud800")
    sequence.gate.secret = b"another secret.."
    assert received("ann@example.com") != {ann}
    alone = dict(fields(RequestSequence(CHECKOUT, headers=Headers(partition=True)).ask()))
    pk = alone[b"ratelimit-policy"].rpartition(b";pk=")[2]
    assert alone[b"ratelimit"] == b'"checkout";r=9;t=2;pk=' + pk


def test_of_very_many_limits_the_closest_to_their_end_are_named():
    """At most ten limits are named: the refusing ones, then those with the smallest part left, in the policy's order."""
    limits = [FixedWindow(f"{count}/h") for count in (*range(30, 0, -1), 500)]
    sequence = RequestSequence(*limits, labels=[f"l{i}" for i in range(31)])
    sequence.ask()
    found = dict(fields(sequence.ask()))
    names = [name for name, _ in http_sf.parse(found[b"ratelimit"], tltype="list")]
    assert names == [name for name, _ in http_sf.parse(found[b"ratelimit-policy"], tltype="list")]
    assert names == [f"l{i}" for i in range(20, 30)]
    assert len(names) == MAX_LIMITS


def test_the_smallest_part_left_is_closest_to_its_end():
    """A large limit of which a tenth is left is closer to its end than small ones that were hardly used."""
    sequence = RequestSequence(*[FixedWindow("10/h")] * 11, FixedWindow("1000/h"), labels=[f"l{i}" for i in range(12)])
    names = [name for name, _ in http_sf.parse(dict(fields(sequence.ask(costs=[1] * 11 + [900])))[b"ratelimit"], tltype="list")]
    assert names == [*[f"l{i}" for i in range(9)], "l11"]


def test_older_generations_have_the_retry_time_where_no_other_reset_is_true():
    """Drafts 6 and 7 can't omit the reset: three are left, four were requested, and in a second they are available."""
    for wire, received in (("draft-6", {"ratelimit-reset": "1"}), ("draft-7", {"ratelimit": "limit=10, remaining=3, reset=1"})):
        sequence = RequestSequence(TokenBucket("1/s burst 10"), headers=Headers(wire=wire))
        sequence.after(7)
        assert received.items() <= lines(fields(sequence.ask(cost=4))).items()


def test_a_request_that_waited_gets_the_same_reset():
    """The reset time of a limit does not depend on how long the request will have waited."""
    sequence = RequestSequence(TokenBucket("1/s burst 1"), headers=Headers(reset="epoch"))
    evaluation = sequence.ask()
    (entry,) = sequence.entries
    evaluation.decision = sequence.store.decide([Claim(entry.named, "ann", 1)], 10_000_000)
    assert evaluation.decision.wait_us == 1_000_000
    assert int(lines(fields(evaluation))["x-ratelimit-reset"]) == NOON + 2


def test_numbers_beyond_64_bits_are_still_true():
    """A million in sixty days, one of them used: the rest takes all but five seconds and a bit, rounded up."""
    found = lines(fields(RequestSequence(TokenBucket("1000000 per 60 days")).ask()))
    assert (found["ratelimit-policy"], found["ratelimit"]) == ('"checkout";q=1000000;w=5184000', '"checkout";r=999999;t=5183995')


def test_letters_that_a_field_can_not_hold_are_question_marks():
    """A label comes out of a parser with its printable ASCII; other characters become question marks."""
    ((received, _),) = http_sf.parse(
        dict(fields(RequestSequence(CHECKOUT, labels=["a b~na\u00efve\x00\x7f"]).ask()))[b"ratelimit"], tltype="list"
    )
    assert received == "a b~na?ve??"


def test_new_headers_are_followed_by_old_entries():
    """The prepared fields of a limit are made anew when the policy's headers change."""
    sequence = RequestSequence(CHECKOUT)
    assert b"x-ratelimit-limit" in dict(fields(sequence.ask()))
    sequence.compiled = CompiledPolicy(Policy(headers=Headers(x=False)), imports=False)
    assert b"x-ratelimit-limit" not in dict(fields(sequence.ask()))


def test_text_fields_are_the_same_as_text():
    """WSGI's fields have the same values as ASGI's, in title case."""
    evaluation = RequestSequence(CHECKOUT).after(11)
    assert [(name.lower().encode(), value.encode()) for name, value in text_fields(evaluation)] == fields(evaluation)


def test_policies_with_equal_headers_keep_their_templates():
    """The constant part of a limit's fields is encoded once, also where another policy has the same `headers`."""
    gates = [Gate(Policy.read("limits: [{name: api, key: ip, limit: fixed window 9/min}]")) for _ in range(2)]
    for gate in gates:
        first, second = (gate.ask(WrittenRequest("GET", "/")) for _ in range(2))
        assert fields(first)[0] == fields(second)[0]
        template = first.entries[0].field_template
        fields(second)
        assert second.entries[0].field_template is template


# Caches


@pytest.mark.parametrize("cors", [True, False])
@pytest.mark.parametrize("times", [1, 11], ids=["allowed", "refused"])
def test_fields_that_depend_on_the_origin_vary_by_it(cors, times):
    """A cache must not give the answer to a request without Origin, which exposes nothing, to a page; so both carry Vary."""
    for origin in (True, False):
        evaluation = RequestSequence(CHECKOUT, headers=Headers(cors=cors)).after(times)
        evaluation.origin = origin
        found = lines(fields(evaluation))
        assert found.get("vary") == ("Origin" if cors else None)
        assert ("access-control-expose-headers" in found) == (cors and origin)


@pytest.mark.parametrize(
    ("own", "joined"),
    [("Accept-Encoding", "Accept-Encoding, Origin"), ("origin, Cookie", "origin, Cookie"), ("*", "*"), ("", "Origin")],
)
def test_a_vary_of_the_handler_is_joined(own, joined):
    """The handler's own members stay, ours is added once."""
    added = [("Vary", "Origin"), ("RateLimit", "x")]
    for vary in ([("vary", own)], [("Vary", own), ("Date", "now")]):
        merged = append_fields(vary, added)
        assert [value for name, value in merged if name.lower() == "vary"] == [joined]
        assert ("RateLimit", "x") in merged
