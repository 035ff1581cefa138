"""Bodies that settle the charge of their response: once, at their end, in whatever way."""

from __future__ import annotations

import asyncio
import gc
from io import BytesIO
from typing import Any

import pytest
from app_under_test import until

from limitkeeper import MemoryStore
from limitkeeper.policy import Evaluation, Gate, Policy, WrittenRequest
from limitkeeper.web.response_settlement import (
    AsyncSettlingBody,
    Settlement,
    SettlingBody,
    WatchedInput,
    byte_length,
    detach_request,
)
from stand_ins import driven

BYTES = "{name: bytes, key: ip, limit: fixed window 100/min, cost: {response: 1B, estimate: 1}}"
GOOD = "{name: good, key: ip, limit: fixed window 9/min, charge: {status: [2xx]}}"


@pytest.fixture
def gate(store: MemoryStore) -> Gate:
    return Gate(Policy.read(f"limits: [{BYTES}, {GOOD}]"), store=store)


def used(gate: Gate) -> tuple[int, ...]:
    """Bytes, and good responses."""
    said = [one.decision for one in gate.explain(WrittenRequest("GET", "/"))]
    return tuple(decision.limit - decision.remaining for decision in said)


class Chunks:
    """A body, sync or async, that may break, and counts how often it was closed."""

    def __init__(self, *chunks: Any, error: BaseException | None = None) -> None:
        self.chunks = chunks
        self.error = error
        self.closed = 0

    def __iter__(self) -> Any:
        yield from self.chunks
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> Any:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.closed += 1


def read(body: Any) -> list[Any]:
    """All chunks of a body, sync or async."""

    async def main() -> list[Any]:
        return [chunk async for chunk in body]

    return driven(main()) if isinstance(body, AsyncSettlingBody) else list(body)


@pytest.fixture(params=[SettlingBody, AsyncSettlingBody])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_body_is_counted_to_its_end(gate, kind):
    """The passed bytes are the cost, text in encoded form; it is settled at the end of the body."""
    body = kind(Chunks(b"1234", "é", b""), Settlement([gate.ask(WrittenRequest("GET", "/"))], 200))
    assert used(gate) == (1, 1)
    assert read(body) == [b"1234", "é", b""]
    assert used(gate) == (6, 1)


@pytest.mark.parametrize("status", [0, 404])
def test_a_body_without_a_good_status_is_no_good_response(gate, kind, status):
    """A response that never got a status is a failure; any other one counts by its status."""
    read(kind(Chunks(b"12"), Settlement([gate.ask(WrittenRequest("GET", "/"))], status)))
    assert used(gate) == (2, 0)


def test_a_response_that_never_came_is_a_500(store):
    """Where failures count, a response without a status is one."""
    text = "limits: [{name: failures, key: ip, limit: fixed window 9/min, charge: {status: [5xx]}}]"
    gate = Gate(Policy.read(text), store=store)
    Settlement([gate.ask(WrittenRequest("GET", "/"))]).settle()
    Settlement([gate.ask(WrittenRequest("GET", "/"))], 200).settle()
    assert used(gate) == (1,)


def test_an_exception_without_a_response_costs_the_estimate(gate, kind):
    """The server makes the response, of a size that is not known here."""
    body = kind(Chunks(error=ValueError("mine")), Settlement([gate.ask(WrittenRequest("GET", "/"))]))
    with pytest.raises(ValueError, match="mine"):
        read(body)
    assert used(gate) == (1, 0)

    async def application() -> None:
        raise ValueError("mine")

    settlement = Settlement([gate.ask(WrittenRequest("GET", "/"))])
    with pytest.raises(ValueError, match="mine"):
        asyncio.run(settlement.run(application, 500, lambda: False))
    assert used(gate) == (2, 0)


def test_a_body_that_breaks_is_a_failure(gate, kind):
    """An exception of the application propagates, and the response counts as a 500, with the sent bytes."""
    body = kind(Chunks(b"12", error=ValueError("mine")), Settlement([gate.ask(WrittenRequest("GET", "/"))], 200))
    with pytest.raises(ValueError, match="mine"):
        read(body)
    assert used(gate) == (2, 0)


def test_a_body_is_closed_once_and_settled_with_it(gate, kind):
    """Closing closes the application's body, once, and settles the bytes sent so far."""
    chunks = Chunks(b"12")
    body = kind(chunks, Settlement([gate.ask(WrittenRequest("GET", "/"))], 200))
    for _ in range(2):
        body.close()
        assert (chunks.closed, used(gate)) == (1, (0, 1))
    kind([], Settlement([gate.ask(WrittenRequest("GET", "/"))], 200)).close()
    assert used(gate) == (0, 2)


def test_closing_an_awaited_body_settles_it(gate):
    """`aclose` is the end of a body, too."""
    body = AsyncSettlingBody(Chunks(b"12"), Settlement([gate.ask(WrittenRequest("GET", "/"))], 200))
    driven(body.aclose())
    assert used(gate) == (0, 1)


def test_nothing_goes_to_head(gate, kind):
    """A body that is made for HEAD is not sent, and costs nothing."""
    read(kind(Chunks(b"1234"), Settlement([gate.ask(WrittenRequest("HEAD", "/"))], 200, head=True)))
    assert used(gate) == (0, 1)


@pytest.mark.parametrize(
    ("chunk", "bytes_"), [(b"abc", 3), ("abc", 3), ("é", 2), ("\ud800", 1), (memoryview(b"abcd").cast("H"), 4)]
)
def test_a_chunk_has_a_length(chunk, bytes_):
    """Text counts as the bytes it becomes."""
    assert byte_length(chunk) == bytes_


def test_a_passage_that_owes_keeps_its_facts(gate):
    """Facts are needed to settle; without a debt, or refused, an evaluation releases them."""
    owing = gate.ask(WrittenRequest("GET", "/"))
    assert detach_request(owing, False).context is not None
    owing.allowed = False
    assert detach_request(owing, False).context is None
    free = Evaluation(gate, gate.compiled)
    free.context = WrittenRequest("GET", "/")
    assert detach_request(free, True).context is None


def test_a_body_that_is_garbage_settles_before_its_store_is_closed(tmp_path):
    """A reload has changed the store, and the last request of the old version is in an unreachable reference cycle."""

    def policy(name: str) -> Policy:
        return Policy.of(store=f"shared://{tmp_path}/{name}", limits=[{"name": "running", "concurrent": 1}])

    with Gate(policy("old")) as gate, Gate(policy("old")) as other:
        body = SettlingBody(Chunks(), Settlement([gate.ask(WrittenRequest())]))
        cycle: list[Any] = [body]
        cycle.append(cycle)
        gate.reload(policy("new"))
        del body, cycle
        gc.collect()
        until(lambda: other.ask(WrittenRequest()), "the place was not given back")


@pytest.mark.parametrize(("sent", "gone"), [(b"one\ntwo\nthree", False), (b"one\ntwo\n", True), (b"one\ntw", True), (b"", True)])
@pytest.mark.parametrize("size", [None, -1, 64])
def test_a_body_that_is_read_by_lines_has_ended_with_its_last_byte(sent, gone, size):
    """A complete line does not show that the client has disconnected; a part of one does, and an early end."""
    settlement = Settlement([])
    body = WatchedInput(BytesIO(sent), "13", settlement)
    assert body.readline(0) == b""
    assert (body.readline(size), settlement.gone) == (sent[:4], not sent)
    assert b"".join(body) == sent[4:]
    assert settlement.gone == gone
