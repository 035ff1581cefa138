"""Plain WSGI, Flask and Django pass the table of cases, in process and behind real servers."""

from __future__ import annotations

import gc
import logging

import pytest
from app_under_test import play, play_real
from cases import CASES, REAL
from servers_wsgi import GunicornApp, Waitress
from wsgi_apps import BUILDERS, WsgiApp

from limitkeeper.policy import Policy, RequestContext
from limitkeeper.policy.evaluation import Evaluation
from limitkeeper.policy.gate import Gate


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("framework", BUILDERS)
def test_in_process(framework, case):
    """The case holds in this framework."""
    play(WsgiApp(framework), case)


@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("framework", ["plain", "flask", "django"])
def test_behind_waitress(framework, case, valkey):
    """The case holds over the wire: waitress, a real Valkey, real time."""
    play_real(WsgiApp(framework, Waitress), case, valkey.url)


@pytest.mark.parametrize("framework", ["plain", "flask", "django"])
def test_a_refused_head_leaves_the_connection_whole(framework, store):
    """A refusal of HEAD announces a length and sends no body: the next request on the same connection is understood."""
    gate = Gate(Policy.read("limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]"), store=store)
    running = WsgiApp(framework, Waitress).make(gate)
    try:
        answers = [running.request(method, "/a", [], b"", "") for method in ("GET", "HEAD", "GET")]
        assert len(running.opened) == 1
    finally:
        running.close()
    assert [answer.status for answer in answers] == [200, 429, 429]
    assert answers[1].body == b""
    assert answers[1].field("Content-Length") == str(len(answers[2].body))


def ours():
    """All evaluations and facts of requests that are still referenced."""
    return [one for one in gc.get_objects() if issubclass(type(one), (Evaluation, RequestContext))]


@pytest.mark.parametrize("framework", BUILDERS)
def test_requests_leave_nothing_to_the_garbage_collector(framework, store, caplog):
    """Neither an admitted nor a refused request leaves a reference cycle that contains our evaluation."""
    caplog.set_level(logging.CRITICAL, "django.request")  # a record of a refusal holds its request
    gate = Gate(Policy.read("limits: [{name: api, key: ip, limit: token bucket 1/min burst 20}]"), store=store)
    running = WsgiApp(framework).make(gate)
    running.request("GET", "/a", [], b"", "127.0.0.1")
    gc.collect()
    before = ours()  # of other tests, kept alive by their remains
    gc.disable()
    try:
        for _ in range(15 if framework == "flask-late" else 40):  # Flask itself ties an exception of a request to a frame
            running.request("GET", "/a", [], b"", "127.0.0.1")
        assert [one for one in ours() if not any(one is other for other in before)] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("case", REAL, ids=str)
def test_behind_gunicorn(case, valkey, tmp_path):
    """The case holds behind gunicorn, whichever of its two workers answers."""
    play_real(GunicornApp("plain", valkey.url, tmp_path), case, valkey.url)


@pytest.mark.parametrize("case", [case for case in REAL if case.name == "refusal-served"], ids=str)
@pytest.mark.parametrize("framework", ["flask", "django"])
def test_frameworks_behind_gunicorn(framework, case, valkey, tmp_path):
    """Frameworks refuse behind gunicorn as they do elsewhere."""
    play_real(GunicornApp(framework, valkey.url, tmp_path), case, valkey.url)
