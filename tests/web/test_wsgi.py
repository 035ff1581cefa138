"""Plain WSGI, Flask and Django pass the table of cases, in process and behind real servers."""

from __future__ import annotations

import pytest
from cases import CASES, REAL
from served import play, play_real
from servers_wsgi import Waitress
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
