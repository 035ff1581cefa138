"""What threads share of a RedisStore: the map of a cluster, the list of Sentinels, registered limits, the batchers of loops.

Another thread may change it at any moment. Here it does so at the worst one, from within what the tested call reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from limitkeeper import RedisStore, StoreTimeout, TokenBucket
from limitkeeper.algorithms.claim import NamedLimit
from limitkeeper.clock import SYSTEM
from limitkeeper.stores.redis.async_connection import AsyncConnections
from limitkeeper.stores.redis.cluster import SLOTS, Cluster
from limitkeeper.stores.redis.command_routing import RoutedCommand
from limitkeeper.stores.redis.limit_and_state_codec import LimitEntry, entry_of
from limitkeeper.stores.redis.resp import ReplyError
from limitkeeper.stores.redis.sentinel import Sentinels
from limitkeeper.stores.redis.sync_connection import SyncPool
from limitkeeper.stores.sans_io import run


class Meanwhile(list[Any]):
    """A list, before whose first item another thread does something."""

    def __init__(self, items: list[Any], act: Any) -> None:
        super().__init__(items)
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        self.act()
        return super().__iter__()


@pytest.fixture
def cluster() -> Cluster:
    route = RedisStore("redis+cluster://127.0.0.1:1").route
    assert isinstance(route, Cluster)
    route._slots = [route.address.endpoints[0]] * SLOTS
    return route


def test_a_map_that_another_thread_drops_is_used_to_the_end(cluster: Cluster) -> None:
    """A node is lost for another thread while this one locates its commands."""
    (node,) = cluster.address.endpoints
    command = RoutedCommand(["GET", "k"], b"k")
    run(cluster.locate(Meanwhile([command], lambda: cluster.on_unreachable(node))))
    assert command.endpoint == node


def test_a_redirection_after_another_thread_has_dropped_the_map_is_followed(cluster: Cluster) -> None:
    """Between looking for a map and noting the node in it, the map is gone."""
    command = RoutedCommand(["GET", "k"], b"k")

    class Dropped(list[Any]):
        def __bool__(self) -> bool:
            cluster.on_unreachable(None)
            return len(self) > 0

    cluster._slots = Dropped(cluster._slots)
    assert cluster.on_error(command, ReplyError("MOVED 7629 127.0.0.1:7001")) == "again"
    assert command.endpoint is not None
    assert command.endpoint.port == 7001


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_call_whose_own_budget_is_over_drops_no_map(cluster: Cluster, mode: str) -> None:
    """It has learnt nothing about the server, and the other callers go on with the map they have."""
    command = RoutedCommand(["GET", "k"], b"k")

    async def send() -> None:
        loop = asyncio.get_running_loop()
        await AsyncConnections(loop).run(cluster.send([command]), loop.time() - 1)

    if mode == "sync":
        SyncPool(SYSTEM).run(cluster.send([command]), SYSTEM.now_us() - 1)
    else:
        asyncio.run(send())
    assert isinstance(command.error, StoreTimeout)
    assert len(cluster._slots) == SLOTS


def test_the_list_of_sentinels_is_complete_at_every_moment() -> None:
    """A thread moves the Sentinel that did not answer to the end while others read the list."""
    route = RedisStore("redis+sentinel://127.0.0.1:1/service").route
    assert isinstance(route, Sentinels)
    known = route._sentinels
    route._ask_last(known[0])
    assert len(known) == len(route._sentinels) == 1
    assert known is not route._sentinels


def test_limits_that_other_threads_add_while_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has lost its data: every limit is registered again, and one that is added meanwhile is no error."""
    names = RedisStore("redis://127.0.0.1:1").names
    limits = [NamedLimit("n", str(rate), TokenBucket(f"{rate}/s")) for rate in (1, 2, 3)]
    for limit in limits[:2]:
        entry_of(names, limit).since_us = 1
    third = LimitEntry(names, limits[2])

    def added(entry: LimitEntry, name: str, value: object) -> None:
        names.entries.setdefault(limits[2], third)
        object.__setattr__(entry, name, value)

    monkeypatch.setattr(LimitEntry, "__setattr__", added)
    names.forget()
    assert [entry.since_us for entry in names.entries.values()] == [None] * 3


def test_a_loop_that_two_threads_find_closed() -> None:
    """Two threads begin loops of their own after one has ended: both drop its batcher."""
    store = RedisStore("redis://127.0.0.1:1")

    async def current() -> object:
        return store.batchers.current()

    asyncio.run(current())
    (ended,) = store.batchers._batchers

    class Dropped(type(ended)):  # type: ignore[misc]
        def is_closed(self) -> bool:
            store.batchers._batchers.clear()
            return True

    ended.__class__ = Dropped
    asyncio.run(current())
    assert len(store.batchers._batchers) == 1
