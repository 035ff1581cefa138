"""Identities from a field of the body, and from host, method and route."""

from __future__ import annotations

import json

import pytest

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.policy.identity.body import MAX_BODY, UNREADABLE, BodyField
from limitkeeper.policy.identity.identify import SEVERAL, UNREADABLE_HOST, RequestPart
from limitkeeper.policy.reading.diagnostics import PolicyError

FORM = "application/x-www-form-urlencoded"
JSON = "application/json; charset=utf-8"


class WithBody(WrittenRequest):
    """A written request with a body."""

    def __init__(self, body: bytes, kind: str, method: str = "POST", **headers: str) -> None:
        super().__init__(method, "/login", headers={"Content-Type": kind, "Content-Length": str(len(body)), **headers})
        self.content = body

    def body(self) -> bytes | None:
        return self.content if len(self.content) <= MAX_BODY else None


def email(body: bytes, kind: str = JSON, default: str | None = None, **headers: str) -> str | None:
    return BodyField("email", default).of(WithBody(body, kind, **headers))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"email": "ann@example.org"}', "ann@example.org"),
        (b'{"email": 7}', "7"),
        (b'{"email": " ann "}', "ann"),
        (b'{"email": "ann", "email": "ann"}', "ann"),
        (b'{"email": "ann", "email": "ben"}', SEVERAL),
        (b'{"email": "ann", "x": ";email=ben;"}', SEVERAL),
        (b'{"email": "ann", "x": "' + b"&nbsp;" * 5000 + b'"}', "ann"),
        (b'{"inner": {"email": "ann"}}', None),
        (b'{"email": null}', None),
        (b'{"email": ""}', None),
        (b"", None),
        (b'{"email": ["ann"]}', UNREADABLE),
        (b'{"email": true}', UNREADABLE),
        (b'{"email": 7.0}', UNREADABLE),
        (b'[{"email": "ann"}]', UNREADABLE),
        (b'{"email": "ann"', UNREADABLE),
        (b'{"email":' + b"[" * 50_000, UNREADABLE),
        (b'{"email": %b, "email": %b}' % ((b'{"a":' * 600 + b"1" + b"}" * 600,) * 2), UNREADABLE),
        (b"\xff\xfe", UNREADABLE),
    ],
)
def test_a_field_of_a_json_object(body, expected):
    """A string or an integer is the value; a missing field, null and an empty body are absent; all else shares one key."""
    assert email(body) == expected
    assert email(body, "application/vnd.shop+json", "nobody") == (expected or "nobody")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"email=ann%40example.org&x=1", "ann@example.org"),
        (b"e%6Dail=ann", "ann"),
        (b"email=ann&email=ben", SEVERAL),
        (b"other=1", None),
        (b"&" * 2000, SEVERAL),
        (b"x=" + b"y" * 20_000 + b"&email=ann", "ann"),
    ],
)
def test_a_field_of_a_form(body, expected):
    """A form is read as a query is, up to the size of a body."""
    assert email(body, FORM) == expected


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"email=ann;x=1", SEVERAL),
        (b"email=ann;", SEVERAL),
        (b";email=ann", SEVERAL),
        (b"x=1;email=ben&email=ann", SEVERAL),
        (b"email=ann&email;x=1", SEVERAL),
        (b"email=ann&note=a;b", "ann"),
        (b"email=ann%3Bx", "ann;x"),
    ],
)
def test_a_form_whose_fields_a_semicolon_may_separate_has_one_reading_or_shares_a_key(body, value):
    """python-multipart before 0.0.30, which Starlette and FastAPI use, splits forms at `;` too; others do not."""
    assert email(body, FORM) == value


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"email=jos%C3%A9", "jos\u00e9"),
        (b"email=jos\xe9", SEVERAL),
        (b"email=jos\xc3\xa9", SEVERAL),
        (b"email=jos%C3%A9&email=jos\xe9", SEVERAL),
        (b"email=ann&note=\xe9", "ann"),
    ],
)
def test_bytes_of_a_form_that_are_not_encoded_have_one_reading_or_share_a_key(body, value):
    """Django reads `jos\\xe9` as Latin-1 and so does Starlette; others read UTF-8: no spelling of an account is a new client."""
    assert email(body, FORM) == value


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        (b'{"email": "ann"}', FORM, UNREADABLE),
        (b'\n {"email": "ann", "x": "&email=ben&"}', FORM, UNREADABLE),
        ('{"email": "ann"}'.encode("utf-16"), FORM, UNREADABLE),
        ('{"email": "ann"}'.encode("utf-16-be"), FORM, UNREADABLE),
        ('{"email": "ann"}'.encode("utf-8-sig"), FORM, UNREADABLE),
        (b'[{"email": "ann"}]', FORM, UNREADABLE),
        (b"email={ann}", FORM, "{ann}"),
        (b'{"email": "ann", "x": "&email=ben&"}', JSON, SEVERAL),
        (b'{"email": "ann", "x": "&e%6Dail=ben"}', JSON, SEVERAL),
        (b'{"email": "ann", "x": "%bemail=ben"}' % (b"&" * 1000), JSON, SEVERAL),
        (b'{"email": "ann", "x": "a&b=c"}', JSON, "ann"),
    ],
)
def test_a_body_that_another_parser_reads_otherwise_shares_a_key(body, kind, value):
    """Applications parse JSON of any Content-Type (`json.loads(request.body)`), or as forms (Bottle): no type hides a field."""
    assert email(body, kind) == value


@pytest.mark.parametrize("charset", ["utf-7", '"UTF-16"', "iso2022_jp", "utf-8; charset*0=utf-7", "x; Charset=utf-8"])
@pytest.mark.parametrize("kind", [FORM, "application/json"])
def test_bodies_in_another_charset_share_one_key(kind, charset):
    """An application that uses the charset (Django REST framework) reads many spellings of one text: `+AGE-nn` is `ann`."""
    assert email(b'{"email": "+AGE-nn"}', f"{kind}; charset={charset}") == UNREADABLE
    assert email(b"", f"{kind}; charset={charset}") is None
    assert email(b'{"email": "ann"}', 'application/json; Charset="UTF-8"; version=1') == "ann"


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", "", "application/json, text/plain"])
def test_other_types_share_one_key(kind):
    """A body that is not read here, which the application may read, does not evade the limit; no body is no identity."""
    assert email(b"email=ann", kind) == UNREADABLE
    assert email(b"", kind) is None
    chunked = {"Transfer-Encoding": "chunked", "Content-Length": ""}
    assert email(b"", kind, **chunked) == UNREADABLE


def test_compressed_and_large_bodies_share_one_key():
    """A compressed body and one above MAX_BODY are not read."""
    assert email(b'{"email": "ann"}', **{"Content-Encoding": "gzip"}) == UNREADABLE
    body = json.dumps({"email": "ann", "padding": ""}).encode()
    fits = body.replace(b'""', b'"%b"' % (b"x" * (MAX_BODY - len(body))))
    assert (len(fits), email(fits), email(fits + b" ")) == (MAX_BODY, "ann", UNREADABLE)


def test_parts_of_the_request():
    """Unusual methods are one, unreadable hosts are one, and only a framework knows the route."""
    request = WrittenRequest("GET", "/", headers={"Host": "Shop.Example:8080"})
    assert [RequestPart(part).of(request) for part in ("host", "method", "route")] == ["shop.example", "GET", None]
    odd = WrittenRequest("BREW", "/", headers={"Host": "a b"})
    assert [RequestPart(part).of(odd) for part in ("host", "method")] == [UNREADABLE_HOST, "other"]
    assert RequestPart("host", "none").of(WrittenRequest()) == "none"


def test_a_policy_counts_by_them():
    """`body:` and `request:` are kinds of identities in a policy."""
    policy = Policy.read("""
identify: {account: {body: email}, site: {request: host}, verb: {request: method}}
limits: [{name: login, key: [account, site, verb], limit: fixed window 1/min}]
""")
    gate = Gate(policy, store=MemoryStore())
    ann = b'{"email": "ann"}'
    asked = [
        gate.ask(WithBody(ann, JSON)).allowed,
        gate.ask(WithBody(ann, JSON)).allowed,
        gate.ask(WithBody(b'{"email": "ben"}', JSON)).allowed,
        gate.ask(WithBody(ann, JSON, Host="other.example")).allowed,
        gate.ask(WithBody(ann, JSON, method="PUT")).allowed,
    ]
    assert asked == [True, False, True, True, True]


def test_retries_are_not_counted_by_the_body():
    """retry_amplification counts every request, and not every request's body is read."""
    with pytest.raises(PolicyError, match="'account' is read from the body"):
        Policy.of(identify={"account": {"body": "email"}}, retry_amplification={"key": "account"}, limits=[])


def test_a_rule_by_route_alone_gets_a_note(tmp_path):
    """A middleware does not know the route, so a rule with only that key limits nothing there."""
    from limitkeeper.policy.reading.load import examine

    path = tmp_path / "policy.yaml"
    path.write_text("identify: {route: {request: route}}\nlimits: [{name: api, key: route, limit: 1/s}]\n")
    assert any("known only in limits on handlers" in one.message for one in examine(path)[1].diagnostics())
