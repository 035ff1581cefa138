"""Mount points that a client can choose: the path with it and the path that the application routes are both limited."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import AsgiRequestContext
from limitkeeper.web.wsgi import RateLimitMiddleware, WsgiRequestContext


@pytest.fixture
def gate():
    names = {"checkout": "/checkout", "mounted": "/zz/checkout", "tenant": "/t/{tenant}"}
    limits = [{"name": name, "match": path, "limit": "9999/s"} for name, path in names.items()]
    exempt = [{"path": "/zz/healthz"}, {"path": ["/zz/livez", "/livez"]}]
    policy = Policy.of(limits=[*limits, {"name": "any", "limit": "9999/s"}], exempt=exempt)
    with Gate(policy, store=MemoryStore(clock=ManualClock())) as gate:
        yield gate


def environ(path, mount, **headers):
    return {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path,
        "SCRIPT_NAME": mount,
        "QUERY_STRING": "",
        "REMOTE_ADDR": "192.0.2.1",
        **headers,
    }


def labels(gate, context):
    return {entry.label for entry in gate.ask(context).entries}


SENT = [{"HTTP_SCRIPT_NAME": "/zz"}, {"HTTP_X_FORWARDED_PREFIX": "/zz"}, {"HTTP_X_SCRIPT_NAME": "/zz"}]


@pytest.mark.parametrize("headers", SENT)
def test_a_mount_point_from_a_header_hides_no_path(gate, headers):
    """The application routes PATH_INFO, whatever mount point a header has given: rules for both paths apply, also when cached."""
    for _ in range(2):
        assert labels(gate, WsgiRequestContext(environ("/checkout", "/zz", **headers))) == {"checkout", "mounted", "any"}
        assert labels(gate, WsgiRequestContext(environ("/checkout", "/t", **headers))) == {"checkout", "tenant", "any"}
        assert labels(gate, WsgiRequestContext(environ("checkout", "/a/../", **headers))) >= {"checkout", "any"}


@pytest.mark.parametrize("headers", SENT)
def test_a_mount_point_from_a_header_exempts_only_what_is_exempt_without_it(gate, headers):
    """An exemption holds for both paths, or not at all."""
    assert labels(gate, WsgiRequestContext(environ("/healthz", "/zz", **headers))) == {"any"}
    assert labels(gate, WsgiRequestContext(environ("/livez", "/zz", **headers))) == set()
    assert labels(gate, WsgiRequestContext(environ("/x", "/zz/healthz", **headers))) == {"any"}


def test_a_configured_mount_point_is_part_of_the_path(gate):
    """Without such a header the mount point is the deployment's own, and rules match the whole path."""
    assert labels(gate, WsgiRequestContext(environ("/checkout", "/zz"))) == {"mounted", "any"}
    assert labels(gate, WsgiRequestContext(environ("/healthz", "/zz"))) == set()
    assert labels(gate, WsgiRequestContext(environ("/checkout", "", HTTP_SCRIPT_NAME="/zz"))) == {"checkout", "any"}


@pytest.mark.parametrize(
    "target", ["~/checkout", "a/checkout", "%23/checkout", "*/check%6fut", "x:y/checkout", "\xc3\xa9/checkout"]
)
@pytest.mark.parametrize("inside", [True, False])
def test_what_precedes_the_first_slash_hides_no_path(gate, target, inside):
    """DispatcherMiddleware takes any of these for a mount point, and routes the rest: rules for the rest apply."""
    found = []

    def application(environ, start_response):
        found.append((environ["PATH_INFO"], environ["limitkeeper.evaluation"]))
        return []

    if inside:
        application = DispatcherMiddleware(RateLimitMiddleware(application, gate))
    else:
        application = RateLimitMiddleware(DispatcherMiddleware(application), gate)
    application(environ(unquote(target, "latin-1"), ""), lambda *_: None)
    ((path, evaluation),) = found
    assert path == "/checkout"
    assert {entry.label for entry in evaluation.entries} == {"checkout", "any"}


@pytest.mark.parametrize("root", ["/zz", "/zz/"])
@pytest.mark.parametrize(
    "path", ["/zz/checkout", "/checkout", "/zzcheckout", "/zz//checkout", "http://x/zz/checkout", "x:/z\nzcheckout"]
)
def test_no_spelling_of_a_root_path_hides_a_path(gate, path, root):
    """Quart removes its root path from all of these but the second, and routes checkout; rules match the whole path."""
    scope = {"type": "http", "method": "GET", "root_path": root, "query_string": b"", "headers": [], "client": None}
    assert labels(gate, AsgiRequestContext({**scope, "path": path})) == {"mounted", "any"}


@pytest.mark.parametrize("path", ["/zz/healthz", "/zzhealthz", "/zz//healthz", "http://x/zz/healthz"])
def test_an_exemption_holds_for_one_spelling_of_a_root_path(gate, path):
    """The other ones are limited: another framework may route them to another handler."""
    scope = {"type": "http", "method": "GET", "root_path": "/zz", "query_string": b"", "headers": [], "client": None}
    assert labels(gate, AsgiRequestContext({**scope, "path": path})) == (set() if path == "/zz/healthz" else {"any"})


@pytest.mark.parametrize("path", ["/zz//t/;a", "/zz//t/%0a", "/zzt/;a"])
def test_slashes_after_a_root_path_hide_no_odd_segment(path):
    """Quart ignores the slashes and takes the odd segment for a value."""
    limits = [{"name": "tenant", "match": "/zz/t/{tenant}", "limit": "9999/s"}]
    scope = {"type": "http", "method": "GET", "root_path": "/zz", "query_string": b"", "headers": [], "client": None}
    with Gate(Policy.of(limits=limits), store=MemoryStore(clock=ManualClock())) as gate:
        assert labels(gate, AsgiRequestContext({**scope, "path": path})) == {"tenant"}
