"""The registry among threads, and the events of its changes."""

import os
import threading
import time

import pytest

from limitkeeper import ConfigurationError, Limiter, MemoryStore
from limitkeeper.registry import Change, Registry
from limitkeeper.testing import ManualClock


@pytest.fixture
def registry():
    return Registry("5/s", store=MemoryStore(clock=ManualClock()))


def run(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_fifty_threads_get_one_object_and_the_factory_runs_once(registry):
    """Get-or-create is atomic for a name, even when making takes long."""
    made, got = [], []
    ready = threading.Barrier(50)

    def factory():
        time.sleep(0.02)
        made.append(Limiter("5/s", registry.store, "api"))
        return made[-1]

    def ask():
        ready.wait(60)
        got.append(registry.get_or_create("api", factory))

    run([threading.Thread(target=ask) for _ in range(50)])
    assert len(made) == 1
    assert len(got) == 50
    assert all(one is made[0] for one in got)


def test_making_one_name_does_not_hold_up_another(registry):
    """While the factory of one name is stuck, other names are made and read."""
    stuck, go = threading.Event(), threading.Event()

    def slow():
        stuck.set()
        assert go.wait(60)
        return "5/s"

    maker = threading.Thread(target=registry.limiter, args=("slow", slow))
    maker.start()
    assert stuck.wait(60)
    assert registry.limiter("quick") is registry["quick"]
    assert registry.find("slow") is None
    assert list(registry) == ["quick"]
    go.set()
    maker.join(60)
    assert "slow" in registry


def test_a_factory_that_fails_leaves_the_name_free(registry):
    """The error goes to the caller; the next one may make it."""

    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        registry.limiter("api", broken)
    assert registry.find("api") is None
    assert registry.limiter("api", "7/s").limits["api"].capacity == 7


def test_a_factory_may_ask_for_others_but_not_for_itself(registry):
    """A call that would wait for itself for ever is an error instead."""
    assert registry.limiter("a", lambda: registry.limiter("b", "3/s").limits["b"]).limits["a"].capacity == 3
    with pytest.raises(ConfigurationError, match="the factory of 'c' asks the registry for 'c'"):
        registry.limiter("c", lambda: registry.limiter("c").limits["c"])
    with pytest.raises(ConfigurationError, match="the factory of 'c'"):
        registry.limiter("c", lambda: registry.add("c", "5/s"))
    assert registry.limiter("c")


def test_what_happens_to_a_name_happens_one_after_the_other(registry):
    """Many threads add, replace and remove one name: each event is consistent with the previous one."""
    received = []
    registry.events.on("*", lambda change: received.append((change.kind, change.entry, change.replaced)))

    def mix(first):
        for step in range(60):
            if (step + first) % 3 == 0:
                registry.limiter("api")
            elif (step + first) % 3 == 1:
                registry.replace("api", f"{step + 1}/s")
            else:
                registry.remove("api")

    run([threading.Thread(target=mix, args=(first,)) for first in range(6)])
    standing = None
    for kind, entry, replaced in received:
        if kind == "added":
            assert standing is None
        elif kind == "replaced":
            assert replaced is standing
        else:
            assert entry is standing
        standing = None if kind == "removed" else entry
    assert registry.find("api") is standing
    assert len(received) > 3


def test_changes_are_events_with_the_old_and_the_new_limiter(registry):
    """Added, replaced and removed carry the limiters themselves."""
    received = []
    registry.events.on("*", received.append)
    first = registry.limiter("api")
    registry.replace("api", "9/s")
    second = registry["api"]
    registry.remove("api")
    assert received == [
        Change("added", "api", entry=first),
        Change("replaced", "api", entry=second, replaced=first),
        Change("removed", "api", entry=second),
    ]


def test_without_a_change_there_is_no_event(registry):
    """Reading, and changes that do not happen, publish nothing."""
    registry.limiter("api")
    received = []
    registry.events.on("*", received.append)
    registry.limiter("api")
    registry.remove("other")
    registry.replace("other", "9/s")
    with pytest.raises(ConfigurationError):
        registry.add("api", "9/s")
    assert received == []


def test_one_kind_can_be_listened_to_and_left(registry):
    """A listener for a kind gets that kind, until it is stopped."""
    received = []
    stop = registry.events.on("removed", lambda change: received.append(change.limiter))
    registry.limiter("a"), registry.remove("a")
    stop()
    registry.limiter("b"), registry.remove("b")
    assert received == ["a"]
    with pytest.raises(ValueError, match="added, replaced, removed"):
        registry.events.on("refused", received.append)


def test_a_listener_that_fails_breaks_nothing(registry, caplog):
    """The caller gets its limiter, the next listener its event; the failure is logged and counted."""
    received = []

    def broken(change):
        raise RuntimeError("listener")

    registry.events.on("added", broken)
    registry.events.on("added", received.append)
    assert registry.limiter("api") is registry["api"]
    assert [change.limiter for change in received] == ["api"]
    assert registry.events.failures == 1
    assert "a listener for 'added' of 'api' failed" in caplog.text


def test_a_listener_may_use_the_registry(registry):
    """Even change the very name of its event."""
    registry.events.on("added", lambda change: registry.replace(change.limiter, "8/s"))
    registry.limiter("api")
    assert registry["api"].limits["api"].capacity == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_use_a_registry_whose_parent_was_busy(registry):
    """Locks that were held at the fork are free in the child."""
    stuck, go = threading.Event(), threading.Event()

    def slow():
        stuck.set()
        assert go.wait(60)
        return "5/s"

    maker = threading.Thread(target=registry.limiter, args=("api", slow))
    maker.start()
    assert stuck.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if registry.limiter("api", "6/s").limits["api"].capacity == 6 else 1)
    deadline = time.monotonic() + 30
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    go.set()
    maker.join(60)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done
    assert os.waitstatus_to_exitcode(status) == 0
