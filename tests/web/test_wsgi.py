"""Plain WSGI, Flask and Django pass the table of cases, in process and behind real servers."""

from __future__ import annotations

import pytest
from cases import CASES, REAL
from served import play, play_real
from servers_wsgi import GunicornApp, Waitress
from wsgi_apps import BUILDERS, WsgiApp


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


@pytest.mark.parametrize("case", REAL, ids=str)
def test_behind_gunicorn(case, valkey, tmp_path):
    """The case holds behind gunicorn, whichever of its two workers is asked."""
    play_real(GunicornApp("plain", valkey.url, tmp_path), case, valkey.url)


@pytest.mark.parametrize("case", [case for case in REAL if case.name == "refusal-served"], ids=str)
@pytest.mark.parametrize("framework", ["flask", "django"])
def test_frameworks_behind_gunicorn(framework, case, valkey, tmp_path):
    """Frameworks refuse behind gunicorn as they do elsewhere."""
    play_real(GunicornApp(framework, valkey.url, tmp_path), case, valkey.url)
