"""A small gRPC service of bytes, served by real servers on loopback: by threads, and by grpc.aio in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from limitkeeper import MemoryStore
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import Match, Policy, Rule
from limitkeeper.web.grpc import AsyncRateLimitInterceptor, RateLimitInterceptor, current

SERVICE = "shop.Shop"


class Shop:
    """The service's records: deserialised messages, calls that reached a handler, and their evaluations."""

    def __init__(self) -> None:
        self.read: list[bytes] = []
        self.calls: list[str] = []
        self.evaluations: list[Any] = []

    def deserialise(self, raw: bytes) -> str:
        self.read.append(raw)
        if raw == b"rubbish":
            raise ValueError("rubbish")
        return raw.decode()

    def serialise(self, text: str) -> bytes:
        return text.encode()

    def note(self, name: str) -> None:
        self.calls.append(name)
        self.evaluations.append(current())

    def handlers(self, behaviours: dict[str, Any]) -> Any:
        made = {}
        for name, behaviour in behaviours.items():
            make = getattr(grpc, f"{SHAPES[name]}_rpc_method_handler")
            made[name] = make(behaviour, request_deserializer=self.deserialise, response_serializer=self.serialise)
        return grpc.method_handlers_generic_handler(SERVICE, made)


SHAPES = {
    "Pay": "unary_unary",
    "List": "unary_stream",
    "Upload": "stream_unary",
    "Chat": "stream_stream",
}


def threads(shop: Shop) -> dict[str, Any]:
    """Handlers for threads."""

    def pay(request: str, context: Any) -> str:
        shop.note("Pay")
        if request == "fail":
            raise RuntimeError("out of order")
        if request == "stranger":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        if request == "nothing":
            context.set_code(grpc.StatusCode.NOT_FOUND)
        if request == "metadata":
            context.send_initial_metadata((("x-shop", "open"),))
            context.set_trailing_metadata((("x-till", "7"),))
        return f"paid {request}"

    def list_(request: str, context: Any) -> Iterator[str]:
        shop.note("List")
        for i in range(int(request)):
            shop.evaluations.append(current())
            yield f"item {i}"

    def upload(requests: Iterator[str], context: Any) -> str:
        shop.note("Upload")
        return "+".join(requests)

    def chat(requests: Iterator[str], context: Any) -> Iterator[str]:
        shop.note("Chat")
        for request in requests:
            yield f"you said {request}"

    return {"Pay": pay, "List": list_, "Upload": upload, "Chat": chat}


def tasks(shop: Shop) -> dict[str, Any]:
    """The same for grpc.aio."""

    async def pay(request: str, context: Any) -> str:
        shop.note("Pay")
        if request == "fail":
            raise RuntimeError("out of order")
        if request == "stranger":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        if request == "nothing":
            context.set_code(grpc.StatusCode.NOT_FOUND)
        if request == "metadata":
            await context.send_initial_metadata((("x-shop", "open"),))
            context.set_trailing_metadata((("x-till", "7"),))
        return f"paid {request}"

    async def list_(request: str, context: Any) -> Any:
        shop.note("List")
        for i in range(int(request)):
            shop.evaluations.append(current())
            yield f"item {i}"

    async def upload(requests: Any, context: Any) -> str:
        shop.note("Upload")
        return "+".join([request async for request in requests])

    async def chat(requests: Any, context: Any) -> Any:
        shop.note("Chat")
        async for request in requests:
            yield f"you said {request}"

    return {"Pay": pay, "List": list_, "Upload": upload, "Chat": chat}


def writing(shop: Shop) -> dict[str, Any]:
    """The same for grpc.aio, by reading and writing messages one by one."""

    async def list_(request: str, context: Any) -> None:
        shop.note("List")
        for i in range(int(request)):
            shop.evaluations.append(current())
            await context.write(f"item {i}")

    async def upload(requests: Any, context: Any) -> str:
        shop.note("Upload")
        found = []
        while (request := await context.read()) is not grpc.aio.EOF:
            found.append(request)
        return "+".join(found)

    async def chat(requests: Any, context: Any) -> None:
        shop.note("Chat")
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(f"you said {request}")

    return {**tasks(shop), "List": list_, "Upload": upload, "Chat": chat}


class Client:
    """A channel to the service; texts in, texts out."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def method(self, name: str) -> Any:
        make = getattr(self.channel, SHAPES.get(name, "unary_unary"))
        return make(f"/{SERVICE}/{name}", request_serializer=str.encode, response_deserializer=bytes.decode)

    def pay(self, request: str = "1", **options: Any) -> str:
        return self.method("Pay")(request, timeout=options.pop("timeout", 60), **options)

    def list(self, number: int, **options: Any) -> list[str]:
        return list(self.method("List")(str(number), timeout=60, **options))

    def upload(self, *requests: str, **options: Any) -> str:
        return self.method("Upload")(iter(requests), timeout=60, **options)

    def chat(self, *requests: str, **options: Any) -> list[str]:
        return list(self.method("Chat")(iter(requests), timeout=60, **options))

    def all_shapes(self) -> list[Any]:
        return [lambda: self.pay("1"), lambda: self.list(2), lambda: self.upload("a", "b"), lambda: self.chat("a", "b")]


def refusal(call: Any) -> grpc.RpcError:
    """The error that a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("it was let pass")


def details(error: Any) -> dict[str, Any]:
    """The details of a status, by the name of their message."""
    status = rpc_status.from_call(error)
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(kind)
        found[type(kind).__name__] = kind
    return found


def trailing(error: Any) -> dict[str, Any]:
    return dict(error.trailing_metadata())


def rule(limit: Any, name: str = "api", match: str = "", methods: Any = (), **more: Any) -> Rule:
    matches = (Match(frozenset(methods), match),) if match or methods else ()
    return Rule(name, (limit,), match=matches, **more)


def gate(*rules: Rule, clock: Any = None, store: Any = None, **said: Any) -> Gate:
    return Gate(Policy(rules=rules, **said), store=store or MemoryStore(clock=clock))


@contextmanager
def serving(kind: str, shop: Shop, gate: Any, address: str = "127.0.0.1:0", credentials: Any = None) -> Iterator[str]:
    """A real server; the address that it listens at."""
    if kind == "threads":
        yield from in_threads(shop, gate, address, credentials)
    else:
        yield from in_tasks(kind, shop, gate, address, credentials)


def listen(server: Any, address: str, credentials: Any) -> str:
    if credentials is not None:
        return f"localhost:{server.add_secure_port(address, credentials)}"
    port = server.add_insecure_port(address)
    return address if address.startswith("unix") else f"127.0.0.1:{port}"


def in_threads(shop: Shop, gate: Any, address: str, credentials: Any) -> Iterator[str]:
    pool = futures.ThreadPoolExecutor(8)
    server = grpc.server(pool, interceptors=[RateLimitInterceptor(gate)])
    server.add_generic_rpc_handlers((shop.handlers(threads(shop)),))
    place = listen(server, address, credentials)
    server.start()
    try:
        yield place
    finally:
        server.stop(None).wait(60)
        pool.shutdown()


def in_tasks(kind: str, shop: Shop, gate: Any, address: str, credentials: Any) -> Iterator[str]:
    behaviours = {"tasks": tasks, "writing": writing, "mixed": threads}[kind]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Any, str]:
        pool = futures.ThreadPoolExecutor(8) if kind == "mixed" else None
        server = grpc.aio.server(pool, interceptors=[AsyncRateLimitInterceptor(gate)])
        server.add_generic_rpc_handlers((shop.handlers(behaviours(shop)),))
        place = listen(server, address, credentials)
        await server.start()
        return server, place

    server, place = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield place
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
