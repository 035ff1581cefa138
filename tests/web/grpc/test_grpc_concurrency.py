"""gRPC interceptors that bound the calls in progress, on real servers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent import futures
from typing import Any

import grpc
import pytest

from limitkeeper.concurrency import AIMD, AdaptiveBulkhead, Bulkhead, LoadShedder
from limitkeeper.policy import Policy
from limitkeeper.web.grpc import (
    AsyncConcurrencyInterceptor,
    AsyncRateLimitInterceptor,
    ConcurrencyInterceptor,
    RateLimitInterceptor,
)

PATIENCE = 60


class ThreadServer:
    """Its handlers wait for `go`; `Fail` ends with UNAVAILABLE."""

    def __init__(self, limit: Any, policy: Policy | None = None) -> None:
        self.policy = policy
        self.go, self.started = threading.Event(), threading.Semaphore(0)
        self.limit = limit
        self.port = 0

    def before(self, interceptor: Any) -> list[Any]:
        return [] if self.policy is None else [interceptor(self.policy)]

    def wait(self) -> None:
        self.started.release()
        assert self.go.wait(PATIENCE)

    def pay(self, request: bytes, context: Any) -> bytes:
        self.wait()
        return request

    def list(self, request: bytes, context: Any) -> Any:
        yield request
        self.wait()
        yield request

    def fail(self, request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        return b""

    def handlers(self) -> Any:
        made = {
            "Pay": grpc.unary_unary_rpc_method_handler(self.pay),
            "List": grpc.unary_stream_rpc_method_handler(self.list),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
        }
        return grpc.method_handlers_generic_handler("shop.Shop", made)

    def __enter__(self) -> ThreadServer:
        self.server = grpc.server(
            futures.ThreadPoolExecutor(8), interceptors=[*self.before(RateLimitInterceptor), ConcurrencyInterceptor(self.limit)]
        )
        self.server.add_generic_rpc_handlers([self.handlers()])
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.go.set()
        self.server.stop(None).wait(PATIENCE)


class TaskServer(ThreadServer):
    """The same with coroutines and async generators, in a thread of its own."""

    async def pay(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]
        await asyncio.to_thread(self.wait)
        return request

    async def list(self, request: bytes, context: Any) -> Any:
        yield request
        await asyncio.to_thread(self.wait)
        yield request

    async def fail(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        return b""

    def __enter__(self) -> TaskServer:
        ready = threading.Event()
        self.loop = asyncio.new_event_loop()

        async def serve() -> None:
            self.stopping = asyncio.Event()
            server = grpc.aio.server(
                interceptors=[*self.before(AsyncRateLimitInterceptor), AsyncConcurrencyInterceptor(self.limit)]
            )
            server.add_generic_rpc_handlers([self.handlers()])
            self.port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            ready.set()
            await self.stopping.wait()
            await server.stop(None)

        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(serve()))
        self.thread.start()
        assert ready.wait(PATIENCE)
        return self

    def __exit__(self, *exc: object) -> None:
        self.go.set()
        self.loop.call_soon_threadsafe(self.stopping.set)
        self.thread.join(PATIENCE)
        self.loop.close()


@pytest.mark.parametrize("server", [ThreadServer, TaskServer])
def test_a_call_beyond_the_bulkhead_is_unavailable(server):
    """A call holds its place until its last response; the next one is served when it has ended."""
    bulkhead = Bulkhead(2, 0)
    with server(bulkhead) as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        pay, listed = channel.unary_unary("/shop.Shop/Pay"), channel.unary_stream("/shop.Shop/List")
        paying, listing = pay.future(b"a", timeout=PATIENCE), listed(b"b", timeout=PATIENCE)
        assert next(listing) == b"b"
        for _ in range(2):
            assert running.started.acquire(timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as refused:
            pay(b"c", timeout=PATIENCE)
        assert (refused.value.code(), "capacity" in refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, True)
        running.go.set()
        assert (paying.result(PATIENCE), list(listing)) == (b"a", [b"b"])
        assert pay(b"d", timeout=PATIENCE) == b"d"
    assert bulkhead.in_use == 0


@pytest.mark.parametrize("server", [ThreadServer, TaskServer])
def test_the_class_of_a_call_is_the_criticality_of_its_rule(server):
    """Where the policy's interceptor comes first; streams too."""
    rules = [
        {"name": name, "match": f"/shop.Shop/{method}", "limit": "100/s", "criticality": "background"}
        for name, method in (("pay", "Pay"), ("list", "List"))
    ]
    shedder = LoadShedder(Bulkhead(1, 0))
    with (
        server(shedder, Policy.of(limits=rules)) as running,
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        shedder.bulkhead,
    ):
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/shop.Shop/Pay")(b"", timeout=PATIENCE)
        with pytest.raises(grpc.RpcError):
            next(channel.unary_stream("/shop.Shop/List")(b"", timeout=PATIENCE))
    assert shedder.shed == {"critical": 0, "normal": 0, "background": 2}


@pytest.mark.parametrize("server", [ThreadServer, TaskServer])
def test_a_call_that_ends_unavailable_lowers_an_adaptive_limit(server):
    """And one that succeeds raises it."""
    adaptive = AdaptiveBulkhead(AIMD(initial=4, minimum=1, maximum=10, backoff=0.5))
    with server(adaptive) as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/shop.Shop/Fail")(b"", timeout=PATIENCE)
        assert adaptive.bulkhead.max_concurrent == 2
        running.go.set()
        channel.unary_unary("/shop.Shop/Pay")(b"", timeout=PATIENCE)
        assert adaptive.bulkhead.max_concurrent == 3


def test_clients_that_cancel_their_calls_do_not_lower_an_adaptive_limit():
    """The clients decide when: a hostile one would bring it to its minimum for all."""
    adaptive = AdaptiveBulkhead(AIMD(initial=4, minimum=1, maximum=10, backoff=0.5))
    with TaskServer(adaptive) as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        call = channel.unary_unary("/shop.Shop/Pay").future(b"", timeout=PATIENCE)
        assert running.started.acquire(timeout=PATIENCE)
        call.cancel()
        end = time.monotonic() + PATIENCE
        while adaptive.bulkhead.in_use:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert adaptive.bulkhead.max_concurrent == 4


class LateServer(ThreadServer):
    """Its stream begins when the client has disconnected."""

    def list(self, request: bytes, context: Any) -> Any:
        self.started.release()
        while context.is_active():
            time.sleep(0.002)
        yield request


def test_a_stream_whose_client_has_disconnected_leaves_its_place_at_once(eventually):
    """Not when its generator is collected: gRPC keeps the error of the call, and with it the frames that it passed."""
    bulkhead = Bulkhead(1, 0)
    policy = Policy.of(limits=[{"name": "api", "limit": "100/s"}])
    gc.disable()
    try:
        with LateServer(bulkhead, policy) as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            listing = channel.unary_stream("/shop.Shop/List")(b"", timeout=PATIENCE)
            assert running.started.acquire(timeout=PATIENCE)
            listing.cancel()
            eventually(lambda: bulkhead.in_use == 0)
    finally:
        gc.enable()
