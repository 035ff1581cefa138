"""The HTTP port of a running service."""

from __future__ import annotations

import json
import os
import random
import re

import jsonschema
import pytest
from running import Running, read_all

from effort import scaled


def test_a_check_is_answered_as_in_the_document(service):
    """200 with the five fields, then 429 with the time to retry."""
    answers = [service.post("/v1/check", limit="checkout", key="http:1") for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429]
    assert [one.json()["remaining"] for one in answers] == [2, 1, 0, 0]
    assert list(answers[0].json()) == ["allowed", "limit", "remaining", "retry_after", "reset_after"]
    refused = answers[3]
    assert refused.json()["allowed"] is False
    assert 0 < refused.json()["retry_after"] <= 3600
    assert int(refused.headers["retry-after"]) >= refused.json()["retry_after"]
    assert "date" in refused.headers
    assert refused.text.endswith("}\n")  # a terminal's next line begins after it


def test_white_space_around_the_body_is_allowed(service):
    """As everywhere in JSON."""
    assert service.client.post("/v1/check", content=b' {"limit": "plenty", "key": "space"}\n').status_code == 200
    assert service.client.post("/v1/check", content=b'{"limit": "plenty", "key": "space"}\r\n').status_code == 200


def test_what_can_never_pass_has_no_retry(service):
    """JSON has no infinity: null, and no Retry-After."""
    refused = service.post("/v1/check", limit="checkout", key="http:2", cost=4)
    assert (refused.status_code, refused.json()["retry_after"]) == (429, None)
    assert "retry-after" not in refused.headers


def test_many_checks_in_one_body(service):
    """Each is decided on its own, in order; the status is 200 whatever the decisions."""
    checks = [{"limit": "checkout", "key": "http:3", "cost": cost} for cost in (2, 2, 1)] + [{"limit": "plenty", "key": "a"}]
    answer = service.post("/v1/check", checks=checks)
    assert answer.status_code == 200
    assert [one["allowed"] for one in answer.json()["decisions"]] == [True, False, True, True]
    assert service.post("/v1/check", checks=[]).json() == {"decisions": []}


def test_a_request_is_matched_by_the_policy(service):
    """The policy finds the rule and the key; the answer names every checked limit."""
    request = {"method": "POST", "path": "/checkout?x=1", "headers": {"X-User": "http:4"}, "client": "203.0.113.9"}
    answers = [service.post("/v1/check", request=request) for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429]
    assert [one["name"] for one in answers[0].json()["limits"]] == ["checkout"]
    unlimited = service.post("/v1/check", request={"method": "GET", "path": "/elsewhere"})
    assert unlimited.json() == {
        "allowed": True, "limit": None, "remaining": None, "retry_after": 0.0, "reset_after": 0.0, "limits": [],
    }  # fmt: skip


def test_a_matched_request_waits_in_its_queue(service):
    """A rule that lets requests wait answers at the start; others are answered meanwhile."""
    request = {"method": "GET", "path": "/waits", "headers": {"X-User": "http:5"}}
    assert [service.post("/v1/check", request=request).status_code for _ in range(3)] == [200] * 3


def test_reserve_settle_and_refund(service):
    """The token settles once; a refund of a token gives all back; a refund of a key gives units back."""
    reserved = service.post("/v1/reserve", limit="tokens", key="http:6", cost=600).json()
    assert (reserved["remaining"], reserved["wait"]) == (400, 0.0)
    assert service.post("/v1/settle", token=reserved["token"], used=100).json() == {"settled": True}
    assert service.post("/v1/settle", token=reserved["token"], used=100).json() == {"settled": False}
    assert service.post("/v1/refund", limit="tokens", key="http:6", cost=50).json() == {"refunded": True}
    state = service.client.get("/v1/limits/tokens/http%3A6").json()
    assert state["limits"][0] | {"reset_after": 0} == {
        "name": "tokens", "limit": "token bucket 1/h burst 1000", "capacity": 1000, "remaining": 950, "reset_after": 0,
    }  # fmt: skip
    again = service.post("/v1/reserve", limit="tokens", key="http:6", cost=900).json()
    assert service.post("/v1/refund", token=again["token"]).json() == {"refunded": True}
    refused = service.post("/v1/reserve", limit="tokens", key="http:6", cost=1000)
    assert refused.status_code == 429
    assert "token" not in refused.json()


def test_reset_forgets_a_key(service):
    """The next hit finds a new key."""
    for _ in range(3):
        service.post("/v1/check", limit="checkout", key="http:7")
    assert service.post("/v1/reset", limit="checkout", key="http:7").json() == {"reset": True}
    assert service.post("/v1/check", limit="checkout", key="http:7").json()["remaining"] == 2


def test_the_limits_are_listed(service):
    """With the text of each."""
    found = service.client.get("/v1/limits").json()
    assert found["policy"] == "served"
    assert [one["name"] for one in found["limits"]] == ["checkout", "tokens", "plenty", "dark", "waits"]
    assert service.client.get("/v1/limits/tokens").json()["limits"] == ["token bucket 1/h burst 1000"]


# Gateways


def test_auth_answers_gateways(service):
    """200 with the RateLimit fields, then 429 with all of them; with deny=403 for nginx, 403."""
    headers = {
        "X-Forwarded-Method": "POST",
        "X-Forwarded-Uri": "/checkout?x=1",
        "X-User": "http:8",
        "Origin": "https://a.example",
    }
    answers = [service.client.get("/auth", headers=headers) for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429]
    assert answers[0].headers["x-ratelimit-remaining"] == "2"
    assert answers[3].headers["ratelimit"].startswith('"checkout";r=0')
    assert int(answers[3].headers["retry-after"]) > 0
    assert answers[3].headers["cache-control"] == "no-store"
    assert answers[3].json()["code"] == "RATE_LIMITED"
    assert service.client.get("/auth?deny=403", headers=headers).status_code == 403


def test_auth_takes_the_path_behind_its_own(service):
    """Envoy appends the request's path and keeps its method."""
    answers = [service.client.post("/auth/path/checkout?x=1", headers={"X-User": "http:9"}) for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429]


def test_auth_reads_the_client_from_a_trusted_gateway(service):
    """The address of X-Forwarded-For counts, because the policy trusts the gateway on loopback."""
    for address, statuses in (("203.0.113.1", [200, 200, 200, 429]), ("203.0.113.2", [200])):
        headers = {"X-Forwarded-Method": "POST", "X-Forwarded-Uri": "/checkout", "X-Forwarded-For": address}
        assert [service.client.get("/auth", headers=headers).status_code for _ in statuses] == statuses


@pytest.mark.parametrize("asks", ["/auth", "/auth/path", "/v1/check"])
def test_lines_that_a_gateway_has_joined_are_several_values(service, asks):
    """Gateways join the lines of a header that came twice, and the application takes one of them: clients with two different
    values share one key, and a value that is repeated is that value."""

    def status(user):
        headers = {"X-Forwarded-Method": "POST", "X-Forwarded-Uri": "/checkout", "X-User": user}
        if asks == "/v1/check":
            asked = {"method": "POST", "path": "/checkout", "headers": {"X-User": user}}
            return service.client.post(asks, json={"request": asked}).status_code
        if asks == "/auth/path":
            return service.client.post("/auth/path/checkout", headers=headers).status_code
        return service.client.get("/auth", headers=headers).status_code

    service.client.post("/v1/reset", json={"limit": "checkout", "key": "user:several values"})
    assert [status(f"lines, {n}") for n in range(5)] == [200, 200, 200, 429, 429]
    repeated = f"lines {asks}"
    assert [status(", ".join([repeated] * n)) for n in range(1, 6)] == [200, 200, 200, 429, 429]


def test_auth_needs_the_path(service):
    """A gateway that does not describe the request is misconfigured."""
    answer = service.client.get("/auth")
    assert (answer.status_code, "X-Forwarded-Uri" in answer.text) == (400, True)


# Errors


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body is empty"),
        (b"{}", 400, "key is missing"),
        (b"{", 400, "not JSON"),
        (b'{"limit": "checkout", "key": "a"} x', 400, "not JSON"),
        (b"[1]", 400, "expected a JSON object, got list"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"limit": "nope", "key": "a"}', 404, "unknown limit 'nope'"),
        (b'{"limit": "checkout"}', 400, "key is missing"),
        (b'{"key": "a"}', 400, "limit is missing"),
        (b'{"limit": "checkout", "key": "a", "cost": 1.5}', 400, "cost: expected a whole number"),
        (b'{"limit": "checkout", "key": "a", "cost": 1e999}', 400, "cost: expected a whole number"),
        (b'{"limit": "checkout", "key": "a", "cots": 1}', 400, "unknown field 'cots'"),
        (b'{"limit": "checkout", "key": "a", "tier": "pro"}', 400, "limit 'checkout' has no tiers"),
        (b'{"checks": {}}', 400, "checks: expected a list"),
        (b'{"checks": [{"limit": "checkout", "key": "a"}, 1]}', 400, r"checks\[1\]: expected an object"),
        (b'{"checks": [{"limit": "nope", "key": "a"}]}', 404, r"checks\[0\]: unknown limit"),
        (b'{"request": []}', 400, "request: expected an object"),
        (b'{"request": {"path": "/checkout", "client": "203.0.113.9"}}', 400, "request.method is missing"),
        (b'{"request": {"method": "POST", "client": "203.0.113.9"}}', 400, "request.path is missing"),
        (b'{"request": {"method": "POST", "path": "checkout"}}', 400, "request.path: expected a path that begins with '/'"),
        (b'{"request": {"method": "", "path": "/"}}', 400, "request.method: expected a string that is not empty"),
        (b'{"request": {"method": "POST", "path": "/", "client": "localhost"}}', 400, "request.client: expected an IP address"),
        (b'{"request": {"method": "POST", "path": "/", "client": "1.2.3.4:80"}}', 400, "request.client: .* without a port"),
        (b'{"request": {"method": "POST", "path": "/", "client": 7}}', 400, "request.client: expected an IP address"),
        (b'{"limit": "checkout", "key": "a", "cost": ' + b"9" * 10_000 + b"}", 400, "not JSON|whole number"),
        (b"\xff\xfe", 400, "not JSON"),
    ],
    ids=range(26),
)
def test_a_bad_body_is_an_error_that_names_the_field(service, body, status, message):
    """As JSON, with a code."""
    answer = service.client.post("/v1/check", content=body)
    assert answer.status_code == status
    assert re.search(message, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/settle", {"token": "forged", "used": 1}),
        ("/v1/settle", {"token": 1, "used": 1}),
        ("/v1/settle", {"token": "a", "used": -1}),
        ("/v1/refund", {"token": "forged"}),
        ("/v1/refund", {"limit": "checkout", "key": 1}),
        ("/v1/reserve", {"limit": "tokens", "key": "a", "max_wait": "1s"}),
        ("/v1/reserve", {"limit": "tokens", "key": "a", "max_wait": 1e8}),
        ("/v1/reset", {"limit": "tokens"}),
    ],
)
def test_bad_fields_are_errors(service, path, body):
    """Nothing is charged or given back."""
    assert service.post(path, **body).status_code == (404 if "forged" in body.values() else 400)


def test_unknown_paths_and_methods(service):
    """404 and 405 with what is allowed."""
    assert service.client.get("/v2").status_code == 404
    assert service.client.get("/v1/limits/nope").status_code == 404
    answer = service.client.get("/v1/check")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert service.client.post("/healthz").status_code == 405


def test_health_and_readiness(service):
    """Both answer; HEAD has no body."""
    assert service.client.get("/healthz").json() == {"status": "ok"}
    assert service.client.get("/readyz").json()["status"] == "ready"
    assert service.client.head("/healthz").content == b""


# Security


def test_requests_of_web_pages_are_refused(service):
    """A page of another site can't reset a key through a visitor's browser."""
    answer = service.client.post("/v1/reset", json={"limit": "checkout", "key": "a"}, headers={"Origin": "https://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")


def test_a_page_whose_host_resolves_to_loopback_reads_nothing(service, policy_file):
    """A GET of a page's own site has no Origin (DNS rebinding): without a token, the Host is an address or localhost."""
    for path in ("/v1/limits", "/v1/limits/checkout", "/v1/limits/checkout/a"):
        for host, status in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:7070", 403),
            ("localhost:7070", 200),
            ("[::1]", 200),
        ):
            assert service.client.get(path, headers={"Host": host}).status_code == status
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": "0123456789abcdef"}) as guarded:
        assert guarded.client.get("/v1/limits", headers={"Host": "limits.example"}).status_code == 200


def test_a_token_is_required_where_one_is_set(policy_file):
    """By header, for every call but health; a gateway has a header of its own, since Authorization is the client's."""
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": "0123456789abcdef"}) as service:
        body = {"limit": "checkout", "key": "a"}
        assert service.post("/v1/check", **body).status_code == 200
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer 0123456789abcdeX"}):
            for path in ("/v1/check", "/v1/reset"):
                answer = service.client.post(path, json=body, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert service.client.get("/v1/limits/checkout/a", headers=headers).status_code == 401
            assert service.client.get("/healthz", headers=headers).status_code == 200
        uri = {"X-Forwarded-Uri": "/checkout"}
        assert service.client.get("/auth", headers=uri).status_code == 401
        assert service.client.get("/auth", headers={**uri, "X-Limitkeeper-Token": "0123456789abcdef"}).status_code == 200


# The protocol


def test_pipelined_requests_are_answered_in_order(service):
    """Also behind one that waits in a queue."""
    body = json.dumps({"request": {"method": "GET", "path": "/waits", "headers": {"X-User": "http:10"}}}).encode()
    waiting = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with service.raw(service.http) as sock:
        sock.sendall(waiting * 2 + b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b'"status"') > answer.rindex(b'"allowed"')
    assert b"connection: close" in answer


def test_a_request_may_come_byte_by_byte(service):
    """With a fragmented path, headers and body."""
    body = b'{"limit": "plenty", "key": "bytes"}'
    with service.raw(service.http) as sock:
        for byte in b"POST /v1/check HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
            len(body),
            body,
        ):
            sock.send(bytes([byte]))
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")


def test_old_clients_and_expectations(service):
    """HTTP/1.0 is closed after the response, or kept on request; `Expect: 100-continue` is answered before the body is sent."""
    with service.raw(service.http) as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"connection: close" in read_all(sock)
    with service.raw(service.http) as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"connection: keep-alive" in sock.recv(65536)
        sock.sendall(b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(b"{}")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")


CHUNKED = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n", 413),
        (b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (CHUNKED + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 6, 413),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 9000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 900_000, 413),
        (b"HELLO\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
    ids=["length", "length overflow", "chunked", "url", "many headers", "header", "endless header", "no http", "tls"],
)
def test_what_is_too_large_or_no_http_is_refused_and_closed(service, request_bytes, status):
    """With a status for it; nothing else is read from that connection."""
    with service.raw(service.http) as sock:
        try:
            sock.sendall(request_bytes)
        except (ConnectionResetError, BrokenPipeError):
            pass
        found = read_all(sock)
    assert found.startswith(b"HTTP/1.1 %d" % status) or (not found and status == 413)
    assert service.client.get("/healthz").status_code == 200


def descriptors(service) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


def test_random_bytes_crash_nothing_and_leak_no_descriptor(service):
    """Changed requests on hundreds of connections: the service answers others, and closes what it opened."""
    chance = random.Random(12)
    body = b'{"checks": [{"limit": "plenty", "key": "fuzz", "cost": 1}]}'
    whole = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    before = descriptors(service)
    for _ in range(scaled(300)):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(data))
            data[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        with service.raw(service.http) as sock:
            sock.sendall(data)
            sock.shutdown(1)
            read_all(sock)
    assert service.client.get("/healthz").status_code == 200
    assert descriptors(service) <= before + 1
    assert service.process.poll() is None


@pytest.mark.slow
def test_slow_clients_are_closed_and_harm_no_other(policy_file):
    """A request that does not arrive in time is answered 408; one connection too many gets an error; an idle one is closed."""
    with Running("--max-connections", "3", policy=policy_file) as service:
        others = [service.raw(service.http) for _ in range(3)]
        with service.raw(service.http) as extra:
            assert read_all(extra).startswith(b"HTTP/1.1 503")
        for sock in others:
            sock.close()
    with Running("--request-timeout", "1s", "--idle-timeout", "2s", policy=policy_file) as service:
        slow = [service.raw(service.http) for _ in range(2)]
        for sock in slow:
            sock.sendall(b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Le")
        idle = service.raw(service.http)
        assert [read_all(sock).startswith(b"HTTP/1.1 408") for sock in slow] == [True, True]
        assert read_all(idle) == b""
        assert service.client.get("/healthz").status_code == 200
        with service.raw(service.resp) as sock:
            sock.sendall(b"*3\r\n$6\r\nLK.HI")
            assert read_all(sock) == b""
        for sock in (*slow, idle):
            sock.close()


# OpenAPI


def test_the_document_describes_the_answers(service):
    """Every answer of a check validates against the schema of its status."""
    document = service.client.get("/v1/openapi.json").json()
    responses = document["paths"]["/v1/check"]["post"]["responses"]
    for body in (
        {"limit": "plenty", "key": "a"},
        {"checks": [{"limit": "plenty", "key": "a"}]},
        {"limit": "nope", "key": "a"},
        {},
    ):
        answer = service.client.post("/v1/check", json=body)
        schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


@pytest.mark.slow
def test_schemathesis_finds_no_difference(service):
    """Generated requests, valid and not, are answered as in the document."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'limitkeeper[test]'")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{service.http}/v1/openapi.json")

    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(max_examples=scaled(50), deadline=None, suppress_health_check=list(HealthCheck))
        def answers_as_documented(case):
            case.call_and_validate()

        answers_as_documented()
