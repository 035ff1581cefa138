"""What fault tests share: a server behind a network, and the other servers of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from servers.proxy import Proxy
from servers.valkey import Valkey
from servers.versions import KNOWN, program_of


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A server of its own, to be killed and frozen."""
    with Valkey() as own:
        yield own


@pytest.fixture
def network(valkey: Valkey) -> Iterator[Proxy]:
    """The way to the server of the whole run, which only this test uses."""
    with Proxy(valkey.port) as own:
        yield own


@pytest.fixture(params=sorted(KNOWN))
def other_server(request: pytest.FixtureRequest) -> Iterator[Valkey]:
    """Each other version of the server that is installed here."""
    program = program_of(request.param)
    if program is None:
        pytest.skip(KNOWN[request.param])
    with Valkey(program=program) as own:
        yield own
