"""Django under ASGI, with its own middleware, passes the table of cases, in process and behind uvicorn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from app_under_test import play, play_real
from asgi_loop import InProcess
from cases import CASES, REAL
from django_site import asgi
from servers_asgi import Uvicorn
from wsgi_apps import cached_django


async def cached_async(request):
    """The degrade handler as a coroutine."""
    return cached_django(request)


class AfterTheBody(InProcess):
    """Django's ASGI handler reads the whole body before any middleware: its reads are not ours."""

    def request(self, *asked):
        return replace(super().request(*asked), read=None)


class DjangoApp:
    """Django's ASGI handler and its server."""

    kinds = frozenset({"http", "asgi"})

    def __init__(self, server=AfterTheBody, cached=cached_async):
        self.server = server
        self.handlers = {"cached": cached}

    def make(self, gate):
        calls: list[str] = []
        return self.server(asgi(gate, calls), calls)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_django_asgi_in_process(case):
    """The case holds in Django's ASGI handler."""
    play(DjangoApp(), case)


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "degrade"], ids=str)
def test_a_plain_degrade_view_answers_too(case):
    """A degrade view that is no coroutine runs in a thread."""
    play(DjangoApp(cached=cached_django), case)


@pytest.mark.parametrize("case", REAL, ids=str)
def test_django_asgi_behind_uvicorn(case, valkey):
    """The case holds over the wire: uvicorn, a real Valkey, real time."""
    play_real(DjangoApp(Uvicorn), case, valkey.url)
