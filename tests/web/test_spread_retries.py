"""A spread of retries in every framework: the same client is sent the same wait, whichever framework sends it."""

from __future__ import annotations

from contextlib import closing

import asgi_apps
import pytest
import wsgi_apps

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.testing import ManualClock
from stand_ins import NOON

APPS = {f"asgi {name}": asgi_apps.AsgiApp(name) for name in asgi_apps.BUILDERS}
APPS |= {f"wsgi {name}": wsgi_apps.WsgiApp(name) for name in wsgi_apps.BUILDERS}
TEXT = "limits: [{name: api, limit: fixed window 1/min, retry_after: spread 60s}]"


def gate() -> Gate:
    return Gate(Policy.read(TEXT), store=MemoryStore(clock=ManualClock(NOON)), secret=b"sixteen bytes...")


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_every_framework_sends_the_same_wait(app):
    """Retry-After, the RateLimit field and the message of each of 20 clients are those of a bare gate."""
    bare = gate()
    bare.ask(WrittenRequest("GET", "/a", peer="10.0.0.0"))
    waits = []
    with closing(app.make(gate())) as running:
        running.request("GET", "/a", [], b"", "10.0.0.0")
        for n in range(20):
            wait = bare.ask(WrittenRequest("GET", "/a", peer=f"10.0.0.{n}")).refusal.retry_after
            answer = running.request("GET", "/a", [], b"", f"10.0.0.{n}")
            assert answer.field("Retry-After") == str(wait)
            assert answer.field("RateLimit") == f'"api";r=0;t={wait}'
            assert f"Retry after {wait}s." in answer.body.decode()
            waits.append(wait)
    assert min(waits) >= 60
    assert len(set(waits)) > 5
