"""The bodies of refusals, and how our fields are added to those of a response."""

from __future__ import annotations

import json
from datetime import date

import pytest
from evaluations import RequestSequence
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import FixedWindow, TokenBucket
from limitkeeper.policy.model import Answer, Rule
from limitkeeper.policy.refusal import PENALTY_BOX, QUEUE_FULL, QUOTA, STORE, Refusal
from limitkeeper.web.headers import body, fields, merge, text_fields
from limitkeeper.web.refusal_body import default_body, prefers_problem

CHECKOUT = TokenBucket("5/s burst 10")
WORDS = Answer(message="Too many checkout attempts. Retry after {retry_after}s.")
IANA = "https://iana.org/assignments/http-problem-types#"


def refused(**options):
    return RequestSequence(CHECKOUT, **options).after(11)


def received(answer, accept=None, **options):
    kind, text = body(refused(answer=answer, **options), accept)
    return kind, json.loads(text)


def test_the_eleventh_checkout_byte_for_byte():
    """The body of the seed: code and message, compact, {retry_after} the header's integer."""
    evaluation = refused(answer=WORDS)
    expected = b'{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}'
    assert body(evaluation, None) == (b"application/json", expected)
    assert dict(fields(evaluation))[b"retry-after"] == b"1"


def test_a_request_that_can_never_pass_has_no_message_about_retrying():
    """A message about retrying is replaced by one that names the cause; any other message stays."""
    for words, expected in (
        (WORDS.message, "This request costs more than its limit ever allows."),
        ("At most {limit} at once.", "At most 10 at once."),
    ):
        evaluation = RequestSequence(CHECKOUT, answer=Answer(message=words)).ask(cost=11)
        assert json.loads(body(evaluation, None)[1])["message"] == expected


def test_problem_details_byte_for_byte():
    """RFC 9457 members in their order, the type that the draft registers, and the policies that were violated."""
    sequence = RequestSequence(FixedWindow("1/s"), labels=["burst"], problem=True, answer=Answer(message="Slow down."))
    assert body(sequence.after(2), None) == (
        b"application/problem+json",
        b'{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded",'
        b'"title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,'
        b'"detail":"Slow down.","violated-policies":["burst"]}',
    )


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (QUOTA, 429, "quota-exceeded"),
        (QUOTA, 503, "temporary-reduced-capacity"),
        (QUEUE_FULL, 503, "temporary-reduced-capacity"),
        (STORE, 503, "temporary-reduced-capacity"),
        (PENALTY_BOX, 429, "abnormal-usage-detected"),
    ],
)
def test_a_problem_has_the_type_of_its_reason(reason, status, kind):
    """A quota, a full queue, a failed store and the penalty box are different problems; 503 is never the client's quota."""
    evaluation = RequestSequence(problem=True).bare(Refusal(reason, status, 5, "No."))
    problem = json.loads(body(evaluation, None)[1])
    assert (problem["type"], problem["status"], problem["detail"]) == (IANA + kind, status, "No.")
    assert "violated-policies" not in problem


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/problem+json", True),
        ("application/problem+json, application/json", True),
        ("application/json, application/problem+json", False),
        ("application/json;q=0.5, application/problem+json;q=0.9", True),
        ("application/problem+json;q=0.4, application/json;q=0.5", False),
        ("application/problem+json;q=0", False),
        ("application/problem+json; charset=utf-8", True),
        ("application/json;q=1, application/problem+json", False),
        ("application/json;q=0, application/problem+json;q=0.001", True),
        ("Application/Problem+JSON ; Q=0.3", True),
        ("text/html, application/problem+json;q=0.1", True),
        ("*/*", False),
        ("application/*", False),
        ("", False),
        ("application/problem+json;q=banana", False),
        ("application/problem+json;q=9", False),
        ("x," * 5000 + "application/problem+json", False),
    ],
)
def test_clients_that_prefer_problem_details_get_them(accept, wanted):
    """Named with the higher weight, or first among equals: problem+json. A wildcard requests nothing."""
    assert prefers_problem(accept) is wanted
    kind, text = body(refused(), accept)
    assert (kind == b"application/problem+json") is wanted
    assert wanted or (kind, text) == body(refused(), None)


@given(st.text())
def test_no_accept_breaks_an_answer(accept):
    """Whatever a client sends as Accept, it gets an answer."""
    assert prefers_problem(accept) in (True, False)


def test_a_rule_writes_its_own_body():
    """Places in a rule's body are filled in, however deep; values other than text stay unchanged."""
    own = {"code": "SLOW_DOWN", "message": "{message}", "more": [{"in": "{retry_after} s", "of": "{limit}/{remaining}"}, 7, None]}
    assert received(Answer(message="Easy, {rule}.", body=own)) == (
        b"application/json",
        {"code": "SLOW_DOWN", "message": "Easy, checkout.", "more": [{"in": "1 s", "of": "10/0"}, 7, None]},
    )


def test_a_text_is_sent_as_text():
    """A body that is text goes out as plain text, in UTF-8."""
    kind, text = body(refused(answer=Answer(body="Später: {retry_after} s")), "application/problem+json")
    assert (kind, text) == (b"text/plain; charset=utf-8", "Später: 1 s".encode())


def test_what_yaml_makes_of_dates_can_be_sent():
    """A value that JSON can't encode is sent as its text, rather than failing while refusing."""
    assert received(Answer(body={"since": date(2026, 1, 10)}))[1] == {"since": "2026-01-10"}


@pytest.mark.parametrize(
    ("answer", "policy", "accept", "problem"),
    [
        (Answer(), False, None, False),
        (Answer(), True, None, True),
        (Answer(problem=False), True, None, False),
        (Answer(problem=True), False, None, True),
        (Answer(problem=False), True, "application/problem+json", True),
        (Answer(body={"a": "b"}), True, "application/problem+json", False),
        (Answer(body={"a": "b"}, problem=True), False, None, True),
    ],
)
def test_the_choice_between_problem_details_and_json(answer, policy, accept, problem):
    """The rule, then (unless it has a body of its own) the policy or the client; a rule's body adds members to a problem."""
    kind, said = received(answer, accept, problem=policy)
    assert (kind == b"application/problem+json") is problem
    assert said.get("a") == ("b" if answer.body else None)


def test_places_reach_into_nothing():
    """Only the five places are filled in; anything else in braces is plain text."""
    tricks = "{0} {limit.__class__} {rule!r} {message:>10} {} {{limit}} {retry_after"
    assert received(Answer(body={"m": tricks}))[1] == {"m": tricks.replace("{limit}}", "10}")}


@given(st.text(), st.text())
def test_no_message_breaks_a_body(message, name):
    """For any message of a policy and any name of a rule, the body is JSON in UTF-8, and the message is in it."""
    refusal = Refusal(QUOTA, 429, 1, message, Rule(name, (CHECKOUT,), answer=Answer(body={"said": "{rule}: {message}"})))
    said = json.loads(body(RequestSequence().bare(refusal), None)[1].decode())
    assert said == {"said": f"{name}: {message}"}


def test_lone_surrogates_are_replaced():
    """A text that has no bytes in UTF-8 is sent with question marks."""
    assert body(RequestSequence().bare(Refusal(QUOTA, 429, 1, "\ud800")), None)[1] == b'{"code":"RATE_LIMITED","message":"?"}'


def test_an_allowed_passage_has_no_body():
    """Requesting the body for an admitted request is an error with the reason."""
    with pytest.raises(ValueError, match="only a refusal"):
        body(RequestSequence(CHECKOUT).ask(), None)


def test_a_key_is_in_no_answer():
    """Neither fields nor bodies contain the limited key."""
    sequence = RequestSequence(CHECKOUT, answer=Answer(body={"all": "{retry_after}{limit}{remaining}{rule}{message}{key}"}))
    for _ in range(11):
        evaluation = sequence.ask(key="ann@example.com")
    everything = repr(fields(evaluation)) + repr(body(evaluation, None)) + repr(body(evaluation, "application/problem+json"))
    assert "ann@" not in everything


def test_a_body_without_a_retry_time_has_an_empty_place():
    """In a body of the policy, {retry_after} of a request that can never pass is empty."""
    evaluation = RequestSequence(CHECKOUT, answer=Answer(body="wait {retry_after}s, {rule}: {limit}")).ask(cost=11)
    assert body(evaluation, None)[1] == b"wait s, checkout: 10"


def test_a_capacity_that_is_used_up_is_not_the_clients_quota():
    """A rule with status 503 has a message about the service; the penalty box has its own, whatever the status."""
    for reason, status, kind in (
        (QUOTA, 503, "temporary-reduced-capacity"),
        (QUOTA, 429, "quota-exceeded"),
        (PENALTY_BOX, 503, "abnormal-usage-detected"),
    ):
        evaluation = RequestSequence(problem=True).bare(Refusal(reason, status, 60, "…"))
        assert json.loads(body(evaluation, None)[1])["type"] == IANA + kind


def test_bodies_of_many_messages_fill_no_memory():
    """A message that changes every second is cached for a while, among a bounded number."""
    for n in range(3000):
        assert json.loads(default_body(f"message {n}"))["message"] == f"message {n}"
        assert default_body.cache_info().currsize <= 1024


# Merging -----------------------------------------------------------------------------------------------------------


def test_fields_are_put_behind_those_of_the_response():
    """A response without fields about limits gets all fields, behind its own."""
    own = [(b"content-type", b"text/plain"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
    added = fields(RequestSequence(CHECKOUT).ask())
    assert merge(own, added) == own + added
    assert own == [(b"content-type", b"text/plain"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]


def test_a_handlers_own_quota_fields_stay():
    """A response that has RateLimit fields keeps them and gets no second line of them; the X- family is another."""
    own = [(b"RateLimit", b'"inner";r=1;t=1')]
    names = [name for name, _ in merge(own, fields(RequestSequence(CHECKOUT).ask()))]
    assert names == [b"RateLimit", b"x-ratelimit-limit", b"x-ratelimit-remaining", b"vary", b"access-control-expose-headers"]
    own = [("X-RateLimit-Remaining", "3"), ("Retry-After", "7"), ("Cache-Control", "private")]
    found = merge(own, text_fields(RequestSequence(CHECKOUT).after(11)))
    assert [name for name, _ in found[3:]] == ["RateLimit-Policy", "RateLimit", "Vary", "Access-Control-Expose-Headers"]


def test_exposed_names_are_joined():
    """Access-Control-Expose-Headers is one line: the response's names, then ours, each once."""
    own = [(b"access-control-expose-headers", b"X-Request-Id, ratelimit"), (b"x-request-id", b"7")]
    found = merge(own, fields(RequestSequence(CHECKOUT).ask()))
    lines = [value for name, value in found if name.lower() == b"access-control-expose-headers"]
    assert lines == [b"X-Request-Id, ratelimit, RateLimit-Policy, X-RateLimit-Limit, X-RateLimit-Remaining"]
    given = [("Access-Control-Expose-Headers", "A"), ("Access-Control-Expose-Headers", "B")]
    found = merge(given, text_fields(RequestSequence(CHECKOUT).ask()))
    assert found[-1] == (
        "Access-Control-Expose-Headers",
        "A, B, RateLimit-Policy, RateLimit, X-RateLimit-Limit, X-RateLimit-Remaining",
    )


def test_a_star_exposes_everything_already():
    """A response that exposes * stays as it is."""
    found = merge([(b"access-control-expose-headers", b"*")], fields(RequestSequence(CHECKOUT).ask()))
    assert found[-1] == (b"access-control-expose-headers", b"*")
    found = merge([("Access-Control-Expose-Headers", "*")], text_fields(RequestSequence(CHECKOUT).ask()))
    assert [value for name, value in found if name == "Access-Control-Expose-Headers"] == ["*"]


def test_empty_names_are_not_joined():
    """What a response exposes between two commas is nothing; spaces around a name are no part of it."""
    found = merge([("access-control-expose-headers", " A ,, a,B ,")], [("Access-Control-Expose-Headers", "A, C")])
    assert found == [("access-control-expose-headers", "A, B, C")]


def test_a_field_of_the_response_needs_no_names_to_be_joined():
    """Where neither side exposes anything, a response that has one of our fields keeps it and gets the others."""
    own, added = [(b"cache-control", b"private")], [(b"retry-after", b"1"), (b"cache-control", b"no-store")]
    assert merge(own, added) == [(b"cache-control", b"private"), (b"retry-after", b"1")]


def test_nothing_to_add_changes_nothing():
    """Without fields to add, a response keeps its own, its exposed names too."""
    own = [(b"access-control-expose-headers", b"A"), (b"ratelimit", b'"x";r=1')]
    assert sorted(merge(own, [])) == sorted(own)
