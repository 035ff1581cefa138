"""The WSGI middleware's behaviour towards applications and servers: bodies, files, errors, and the unchanged environ."""

from __future__ import annotations

import io
import sys
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest
from wsgi_apps import InProcess, chunks_of, environ_of

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy, WrittenRequest
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.request_context import PARAMETERS
from limitkeeper.web.wsgi import RateLimitMiddleware, WsgiRequestContext

TWO = "limits: [{name: api, key: ip, limit: token bucket 1/min burst 2}]"
BYTES = "limits: [{name: bytes, key: ip, limit: fixed window 1000/min, cost: {response: 1B, estimate: 1}}]"
LOGIN = "limits: [{name: login, key: ip, limit: fixed window 9/min, charge: {status: [401]}}]"
FAILURES = "limits: [{name: failures, key: ip, limit: fixed window 9/min, charge: {status: [5xx]}}]"


@pytest.fixture
def gate(store: MemoryStore):
    """Makes the gate of a policy, on a manual clock."""
    return lambda policy: Gate(Policy.read(policy), store=store)


def left(gate: Gate) -> int:
    """The remaining part for this client, without a charge."""
    return gate.explain(WrittenRequest("GET", "/"))[0].decision.remaining


def ok(body):
    def app(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain")])
        return body

    return app


def call(app, environ=None, **more):
    """The first results for a server: (status, headers, what the application returned), before any of it is read."""
    seen = []
    returned = app(environ or environ_of("GET", "/", **more), lambda *said: seen.append(said) or (lambda data: None))
    return seen, returned


def test_what_the_application_returns_reaches_the_server_untouched(gate):
    """Without anything to settle, the application's return value is passed on: nothing is wrapped, nothing buffered."""
    body = chunks_of(b"one", b"two")
    _, returned = call(RateLimitMiddleware(ok(body), gate(TWO)))
    assert returned is body


def test_a_file_wrapper_stays_one(gate):
    """A server that recognises its own file wrapper can send the file in its own way."""
    file = FileWrapper(io.BytesIO(b"x" * 10))
    assert call(RateLimitMiddleware(ok(file), gate(TWO)), **{"wsgi.file_wrapper": FileWrapper})[1] is file


def test_a_file_whose_length_is_announced_is_settled_and_stays_one(gate):
    """Where bytes cost, an announced length is enough, and the file wrapper is passed on unchanged."""
    file = FileWrapper(io.BytesIO(b"x" * 10))

    def app(environ, start_response):
        start_response("200 OK", [("Content-Length", "10")])
        return file

    bytes_gate = gate(BYTES)
    assert call(RateLimitMiddleware(app, bytes_gate), **{"wsgi.file_wrapper": FileWrapper})[1] is file
    assert left(bytes_gate) == 990


def test_a_file_of_unknown_length_is_counted(gate):
    """Where bytes cost and no length is announced, they are counted as they are sent, and the file is closed."""
    opened = io.BytesIO(b"x" * 10)
    bytes_gate = gate(BYTES)
    _, returned = call(RateLimitMiddleware(ok(FileWrapper(opened)), bytes_gate), **{"wsgi.file_wrapper": FileWrapper})
    assert b"".join(returned) == b"x" * 10
    returned.close()
    assert opened.closed
    assert left(bytes_gate) == 990


class Closing:
    """A body that counts how often it was closed."""

    def __init__(self, *chunks: bytes, error: Exception | None = None) -> None:
        self.chunks = iter(chunks)
        self.error = error
        self.closed = 0

    def __iter__(self):
        yield from self.chunks
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


def test_a_counted_body_comes_chunk_by_chunk(gate):
    """Where bytes cost, a chunk is passed on before the next one is made."""
    made = []

    def chunks():
        for piece in (b"one", b"two"):
            made.append(piece)
            yield piece

    _, returned = call(RateLimitMiddleware(ok(chunks()), gate(BYTES)))
    assert made == []
    assert next(returned) == b"one"
    assert made == [b"one"]
    returned.close()


def test_a_body_is_closed_once_and_settled_once(gate):
    """Exhausted, closed, and closed again: the application's body is closed once, its bytes are charged once."""
    bytes_gate, body = gate(BYTES), Closing(b"four", b"four")
    _, returned = call(RateLimitMiddleware(ok(body), bytes_gate))
    assert list(returned) == [b"four", b"four"]
    returned.close()
    returned.close()
    assert body.closed == 1
    assert left(bytes_gate) == 992


def test_a_client_that_goes_pays_what_it_got(gate):
    """A body that is closed early costs the bytes that were passed on."""
    bytes_gate, body = gate(BYTES), Closing(b"four", b"four")
    _, returned = call(RateLimitMiddleware(ok(body), bytes_gate))
    next(returned)
    returned.close()
    assert body.closed == 1
    assert left(bytes_gate) == 996


def test_a_body_that_breaks_is_a_failure(gate):
    """An exception in the middle of a body is the outcome 500, and reaches the server."""
    failures, body = gate(FAILURES), Closing(b"one", error=OSError("gone"))
    _, returned = call(RateLimitMiddleware(ok(body), failures))
    with pytest.raises(OSError, match="gone"):
        list(returned)
    returned.close()
    assert body.closed == 1
    assert left(failures) == 8


def test_an_application_that_raises_is_a_failure(gate):
    """An exception instead of a response is the outcome 500, and reaches the server."""

    def app(environ, start_response):
        raise RuntimeError("no")

    failures = gate(FAILURES)
    with pytest.raises(RuntimeError, match="no"):
        call(RateLimitMiddleware(app, failures))
    assert left(failures) == 8
    assert failures.snapshot().rules[0].statuses == {"5xx": 1}


def test_the_written_bytes_count(gate):
    """Bytes that are sent through the write callable cost like those that are returned."""

    def app(environ, start_response):
        write = start_response("200 OK", [])
        write(b"four")
        return [b"more"]

    bytes_gate = gate(BYTES)
    call(RateLimitMiddleware(app, bytes_gate))
    assert left(bytes_gate) == 992


def test_an_error_page_takes_the_place_of_the_answer(gate):
    """Before anything is sent, a second start_response with exc_info replaces the first; the outcome is the last status."""

    def app(environ, start_response):
        start_response("200 OK", [])
        try:
            raise RuntimeError("late")
        except RuntimeError:
            start_response("500 Internal Server Error", [], sys.exc_info())
        return [b"sorry"]

    failures = gate(FAILURES)
    seen, _ = call(RateLimitMiddleware(app, failures))
    assert [said[0] for said in seen] == ["500 Internal Server Error"]
    assert seen[0][2][0] is RuntimeError
    assert left(failures) == 8
    assert failures.snapshot().rules[0].statuses == {"5xx": 1}


def test_the_applications_header_list_is_not_changed(gate):
    """An application may use the same list for every response: nothing accumulates in it."""
    headers = [("Content-Type", "text/plain")]

    def app(environ, start_response):
        start_response("200 OK", headers)
        return []

    middleware = RateLimitMiddleware(app, gate(TWO))
    first, _ = call(middleware)
    second, _ = call(middleware)
    assert headers == [("Content-Type", "text/plain")]
    assert len(first[0][1]) == len(second[0][1]) > 1


def test_the_passage_is_in_the_environ(gate):
    """The decision is in the environ of the application, and of a refused request too."""
    found = []

    def app(environ, start_response):
        found.append(environ["limitkeeper.evaluation"])
        start_response("200 OK", [])
        return []

    middleware = RateLimitMiddleware(app, gate(TWO))
    for _ in range(3):
        environ = environ_of("GET", "/")
        call(middleware, environ)
    assert [evaluation.decision.remaining for evaluation in found] == [1, 0]
    assert not environ["limitkeeper.evaluation"]


@pytest.mark.parametrize("policy", [TWO, BYTES], ids=["plain", "counted"])
def test_the_middleware_keeps_the_wsgi_contract(gate, policy):
    """The standard library's validator reports nothing, on either side of the middleware, for responses and refusals."""

    def app(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain")])
        return chunks_of(b"one", b"two")

    whole = InProcess(validator(RateLimitMiddleware(validator(app), gate(policy))), [])
    answers = [whole.request("GET", "/", [], b"", "127.0.0.1") for _ in range(3)]
    assert [answer.status for answer in answers] == ([200, 200, 429] if policy is TWO else [200, 200, 200])


# Facts


def test_a_path_is_read_as_the_utf8_it_was():
    """Servers put a path's bytes into the environ as Latin-1; the policy sees the text, mount point included."""
    assert WsgiRequestContext(environ_of("GET", "/caf%C3%A9", SCRIPT_NAME="/shop")).path == "/shop/café"
    assert "�" in WsgiRequestContext(environ_of("GET", "/caf%E9")).path


def test_headers_are_found_by_their_names():
    """Headers are looked up in lower case; the two that have keys of their own too."""
    facts = WsgiRequestContext(environ_of("POST", "/", [("X-Tenant", "acme")], b"body", CONTENT_TYPE="text/plain"))
    assert facts.header("x-tenant") == "acme"
    assert facts.header("content-length") == "4"
    assert facts.header("content-type") == "text/plain"
    assert facts.header("x-nothing") is None


def test_two_spellings_of_a_header_are_one_key():
    """An environ can't distinguish X_Tenant from X-Tenant: a header that a server lets through counts as the same one."""
    assert WsgiRequestContext(environ_of("GET", "/", [("X_Tenant", "mallory")])).header("x-tenant") == "mallory"


def test_a_query_gives_its_first_value():
    """The first of several values counts, names may be encoded, and a missing one is None."""
    facts = WsgiRequestContext(environ_of("GET", "/?a=1&a=2&%62=3&empty="))
    assert [facts.query(name) for name in ("a", "b", "empty", "c")] == ["1", "3", "", None]
    assert WsgiRequestContext(environ_of("GET", "/")).query("a") is None
    assert WsgiRequestContext(environ_of("GET", "/?a=%FF")).query("a") == "\ufffd"
    many = WsgiRequestContext(environ_of("GET", "/?" + "x=1&" * (PARAMETERS - 1) + "y=2&z=3"))
    assert (many.query("y"), many.query("z")) == ("2", None)


def test_an_environ_may_leave_things_out():
    """No path, no mount point, no query, no address: it is still a request, for the root, of an unknown client."""
    environ = {"REQUEST_METHOD": "GET"}
    facts = WsgiRequestContext(environ)
    assert (facts.path, facts.query("a"), facts.peer(), facts.certificate(), facts.header("x")) == ("", None, None, None, None)
    assert (facts.raw, facts.environ, facts.identities, facts.captured) == (environ, environ, {}, {})
    assert facts.differs("query", "a") is facts.differs("header", "a") is False
    assert WsgiRequestContext(environ_of("GET", "/?n=1&n=2")).differs("header", "n") is False


def test_a_unix_socket_has_no_peer():
    """Where the server has no address, none is invented."""
    assert WsgiRequestContext(environ_of("GET", "/", REMOTE_ADDR="")).peer() is None


def test_only_the_server_vouches_for_a_certificate():
    """A certificate counts when the server declares it verified; headers that resemble it do not."""
    received = {"SSL_CLIENT_S_DN": "CN=billing", "SSL_CLIENT_SAN_DNS_0": "billing.test"}
    assert WsgiRequestContext(environ_of("GET", "/", **received)).certificate() is None
    verified = WsgiRequestContext(environ_of("GET", "/", SSL_CLIENT_VERIFY="SUCCESS", **received)).certificate()
    assert verified == {"subject": "CN=billing", "san": ["billing.test"]}
    forged = [("SSL-Client-S-DN", "CN=billing"), ("SSL-Client-Verify", "SUCCESS")]
    assert WsgiRequestContext(environ_of("GET", "/", forged)).certificate() is None


def test_a_certificate_has_all_its_names():
    """Every kind of name in a certificate counts, in the order of the kinds; what is empty or beyond the tenth does not."""
    received = {
        "SSL_CLIENT_S_DN": "CN=x",
        "SSL_CLIENT_VERIFY": "SUCCESS",
        "SSL_CLIENT_SAN_Email_9": "a@b",
        "SSL_CLIENT_SAN_DNS_1": "",
    }
    received |= {"SSL_CLIENT_SAN_DNS_0": "x.test", "SSL_CLIENT_SAN_URI_0": "spiffe://x", "SSL_CLIENT_SAN_DNS_10": "y.test"}
    assert WsgiRequestContext(environ_of("GET", "/", **received)).certificate() == {
        "subject": "CN=x",
        "san": ["spiffe://x", "x.test", "a@b"],
    }
    assert WsgiRequestContext(environ_of("GET", "/", **{**received, "SSL_CLIENT_S_DN": ""})).certificate() is None
    assert WsgiRequestContext(environ_of("GET", "/", **{**received, "SSL_CLIENT_VERIFY": "FAILED:x"})).certificate() is None


def test_a_refusal_to_head_has_no_body(gate):
    """HEAD is refused with the fields of the response, its length among them, and without a byte of it."""
    app = RateLimitMiddleware(ok([]), gate(TWO.replace("burst 2", "burst 1")))
    call(app)
    ((status, headers),), text = call(app)
    assert (status, dict(headers)["Content-Length"]) == ("429 Too Many Requests", str(len(b"".join(text))))
    ((status, same),), nothing = call(app, environ_of("HEAD", "/"))
    assert (status, same, list(nothing)) == ("429 Too Many Requests", headers, [])


def test_a_status_without_a_name_is_a_status(gate):
    """A rule may refuse with a status that has no phrase."""
    app = RateLimitMiddleware(ok([]), gate(TWO.replace("burst 2", "burst 1, status: 499")))
    call(app)
    assert call(app)[0][0][0] == "499 Refused"


@pytest.mark.parametrize(
    ("status", "headers", "charged"),
    [
        ("200 OK", [("X-Number", "900"), ("CONTENT-LENGTH", "70"), ("Age", "5")], 70),
        ("200 OK", [("Content-Length", "many")], 4),
        ("200 OK", [], 4),
        ("204 No Content", [], 0),
        ("304 Not Modified", [], 0),
    ],
)
def test_a_length_that_is_announced_is_the_cost(gate, status, headers, charged):
    """Where bytes cost, a Content-Length is trusted, a 204 or 304 has none, and otherwise they are counted."""

    def app(environ, start_response):
        start_response(status, headers)
        return chunks_of(b"1234")

    bytes_gate = gate(BYTES)
    _, returned = call(RateLimitMiddleware(app, bytes_gate))
    for _ in returned:
        pass
    assert left(bytes_gate) == 1000 - charged


def test_what_is_written_is_handed_on(gate):
    """`write` returns what the server's own returns."""

    def app(environ, start_response):
        assert start_response("200 OK", [])(b"12345") == 5
        return []

    bytes_gate = gate(BYTES)
    list(RateLimitMiddleware(app, bytes_gate)(environ_of("GET", "/"), lambda *said: len))
    assert left(bytes_gate) == 995


def test_an_application_that_raises_gives_back_what_it_owes(gate):
    """A request that fails is settled at once, as a failure, whether its response had begun or not."""
    text = "limits: [{name: good, key: ip, limit: fixed window 9/min, charge: {status: [2xx]}}]"

    def app(environ, start_response):
        if environ["PATH_INFO"] == "/begun":
            start_response("200 OK", [])
        raise ValueError("mine")

    good = gate(text)
    for path in ("/", "/begun"):
        with pytest.raises(ValueError, match="mine"):
            call(RateLimitMiddleware(app, good), environ_of("GET", path))
    assert left(good) == 9
    assert good.snapshot().rules[0].statuses == {"5xx": 2}


def test_a_response_that_is_closed_before_it_began_stays_charged(gate):
    """A server closes the body of a client that has disconnected; without a status, the outcome is unknown."""

    def app(environ, start_response):
        start_response("401 Unauthorized", [])
        yield b"no"

    login = gate(LOGIN)
    _, returned = call(RateLimitMiddleware(app, login))
    returned.close()
    assert (left(login), login.snapshot().rules[0].statuses) == (8, {"4xx": 1})


@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_that_is_killed_stays_charged(gate, streamed):
    """A server that ends a request by an exception of its own (GreenletExit, SystemExit) leaves the outcome unknown."""

    def killed(environ, start_response):
        raise SystemExit

    def late(environ, start_response):
        yield killed(environ, start_response)

    login = gate(LOGIN)
    with pytest.raises(SystemExit):
        list(call(RateLimitMiddleware(late if streamed else killed, login))[1])
    assert left(login) == 8


def test_a_status_stands_when_it_can_not_be_written(gate):
    """A failed login whose client disconnects while the response is written is a failed login, not a 500."""

    def app(environ, start_response):
        start_response("401 Unauthorized", [])(b"no")
        return []

    def write(data):
        raise BrokenPipeError

    login = gate(LOGIN)
    with pytest.raises(BrokenPipeError):
        RateLimitMiddleware(app, login)(environ_of("GET", "/"), lambda *said: write)
    assert left(login) == 8


def test_an_application_that_raises_is_counted_once(gate):
    """Without a settlement it is the same: a response that never began is a 500, one that had begun keeps its status."""

    def app(environ, start_response):
        if environ["PATH_INFO"] == "/begun":
            start_response("404 Not Found", [])
        raise ValueError("mine")

    two = gate(TWO)
    for path, statuses in (("/", {"5xx": 1}), ("/begun", {"5xx": 1, "4xx": 1})):
        with pytest.raises(ValueError, match="mine"):
            call(RateLimitMiddleware(app, two), environ_of("GET", path))
        assert two.snapshot().rules[0].statuses == statuses


def test_what_answers_instead_is_no_response_of_the_application(store):
    """The response of a degrade handler belongs to a refusal, and is not counted among the responses."""
    policy = Policy.read("limits: [{name: api, key: ip, limit: 1/h, on_refusal: degrade cheap}]")
    cheap = Gate(policy, store=store, handlers={"cheap": ok([b"stale"])})
    app = RateLimitMiddleware(ok([]), cheap)
    assert [call(app)[0][0][0] for _ in range(2)] == ["200 OK"] * 2
    assert (cheap.snapshot().rules[0].statuses, cheap.snapshot().rules[0].degraded) == ({"2xx": 1}, 1)


class Table:
    """Overrides that record whether they were closed."""

    closed = 0

    def get(self, key):
        return None

    def close(self):
        self.closed += 1


def test_a_gate_of_its_own_is_closed():
    """A middleware that made its gate closes it."""
    policy = Policy.read(TWO)
    table = Table()
    object.__setattr__(policy.rules[0], "overrides", table)
    RateLimitMiddleware(ok([]), Gate(policy)).close()
    assert table.closed == 0
    RateLimitMiddleware(ok([]), policy).close()
    assert table.closed == 1


def test_a_given_gate_is_not_closed(gate):
    """The gate is closed by its owner."""
    given = gate(TWO)
    middleware = RateLimitMiddleware(ok([]), given)
    middleware.close()
    assert call(middleware)[0][0][0] == "200 OK"


def test_an_application_that_breaks_late_is_counted(gate):
    """An application that is a generator raises when its first chunk is read: before its status was set that is a 500."""

    def breaks(environ, start_response):
        raise RuntimeError("no database")
        yield b""

    failures = gate(FAILURES)
    with pytest.raises(RuntimeError):
        call(RateLimitMiddleware(breaks, failures))
    assert failures.snapshot().rules[0].statuses == {"5xx": 1}
    assert left(failures) == 8
