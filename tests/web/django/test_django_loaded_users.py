"""Functions of the application that load something from the database, such as `request.user`, under ASGI."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from django.test.utils import override_settings
from django.urls import path
from django.utils.asyncio import async_unsafe
from django_asgi import Urls, configure

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.django import RateLimitMiddleware, limit
from limitkeeper.web.django.settings import site_gates
from stand_ins import WrappedStore

configure()


@async_unsafe("the database can't be used in an event loop")
def user_of(request):
    """A query, as `request.user` makes one."""
    return request.headers["X-User"]


async def view(request):
    return HttpResponse(",".join(request.limitkeeper.keys))


async def keys(respond, *users):
    """The keys under which requests of these users were counted; or the statuses of refusals."""
    answers = [await respond(RequestFactory().get("/", headers={"X-User": user})) for user in users]
    return [answer.content.decode() if answer.status_code == 200 else answer.status_code for answer in answers]


def ask(respond, *users):
    return asyncio.run(keys(respond, *users))


@pytest.mark.parametrize("local", [True, False])
def test_a_policy_counts_by_the_user(store: MemoryStore, local: bool) -> None:
    """An identity that is loaded from the database identifies users under ASGI too, with a local store or a remote one."""
    identify = {"user": {"call": lambda context: user_of(context.raw)}}
    policy = Policy.of(identify=identify, limits=[{"name": "api", "key": "user | ip", "limit": "fixed window 1/min"}])
    with override_settings(LIMITKEEPER={"POLICY": Gate(policy, store=WrappedStore(store, local))}):
        assert ask(RateLimitMiddleware(view), "ann", "bob", "ann") == ["user:ann", "user:bob", 429]


@pytest.mark.parametrize("local", [True, False])
def test_a_cost_is_loaded(store: MemoryStore, local: bool) -> None:
    """A cost that is loaded from the database is charged, not its default, with a store near by or far away."""
    policy = Policy.of(
        limits=[{"name": "api", "limit": "fixed window 9/min", "cost": {"call": lambda context: int(user_of(context.raw))}}]
    )
    gate = Gate(policy, store=WrappedStore(store, local))
    with override_settings(LIMITKEEPER={"POLICY": gate}):
        assert ask(RateLimitMiddleware(view), "5", "4", "1") == ["*", "*", 429]


def test_a_client_that_disconnects_while_a_user_is_loaded_holds_no_place(store: MemoryStore, eventually) -> None:
    """Django cancels the task, and the thread goes on: it evaluates a request that has no handler."""
    loading, loaded = threading.Event(), threading.Event()

    def loads(context):
        user = user_of(context.raw)
        loading.set()
        loaded.wait(60)
        return user

    policy = Policy.of(identify={"user": {"call": loads}}, limits=[{"name": "running", "key": "user", "concurrent": 1}])

    async def disconnects():
        task = asyncio.ensure_future(RateLimitMiddleware(view)(RequestFactory().get("/", headers={"X-User": "ann"})))
        await asyncio.to_thread(loading.wait, 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        loaded.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    with override_settings(LIMITKEEPER={"POLICY": Gate(policy, store=store)}):
        asyncio.run(disconnects())
        assert ask(RateLimitMiddleware(view), "ann") == ["ann"]


def test_views_are_limited_by_what_is_loaded(store: MemoryStore) -> None:
    """The key, the limit and the exemption of an async view may be loaded from the database."""

    def plan(request):
        return "fixed window 2/min" if user_of(request) == "pro" else "fixed window 1/min"

    @limit(plan, key=user_of, exempt_when=lambda request: user_of(request) == "staff", name="view")
    async def limited(request):
        return await view(request)

    with override_settings(LIMITKEEPER={"STORE": store}):
        found = ask(limited, "ann", "ann", "pro", "pro", "pro", "staff", "staff")
        assert found == ["caller:ann", 429, "caller:pro", "caller:pro", 429, "", ""]


def test_a_default_limit_is_loaded(store: MemoryStore) -> None:
    """The default limit of async views may be chosen by values loaded from the database."""
    default = {"limit": lambda request: user_of(request) + "/min", "key": user_of}
    urls = Urls([path("", view)])

    async def respond(request):
        request.urlconf = urls
        return await RateLimitMiddleware(view)(request)

    with override_settings(LIMITKEEPER={"STORE": store, "DEFAULT": default}):
        assert site_gates().gate is None
        assert ask(respond, "1", "1", "2", "2") == ["caller:1", 429, "caller:2", "caller:2"]


def test_attempts_by_user_are_charged_once(store: MemoryStore) -> None:
    """A user who is loaded only to count attempts costs no request a second charge."""
    identify = {"user": {"call": lambda context: user_of(context.raw)}}
    policy = Policy.of(
        identify=identify, retry_amplification={"key": "user"}, limits=[{"name": "api", "limit": "fixed window 3/min"}]
    )
    gate = Gate(policy, store=store)
    with override_settings(LIMITKEEPER={"POLICY": gate}):
        assert ask(RateLimitMiddleware(view), "ann", "bob", "cas", "dan") == ["*", "*", "*", 429]
    assert gate.snapshot().attempts == 4
