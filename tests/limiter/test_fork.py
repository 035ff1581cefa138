"""Objects and modules that register with `limitkeeper.fork` are reset in a forked child."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from contextlib import suppress

import pytest

from limitkeeper import AsyncLimiter, Limiter, MemoryStore, SharedStore, fork
from limitkeeper.testing import ManualClock

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


class Recorder:
    def __init__(self, calls, name, error=None):
        self.calls, self.name, self.error = calls, name, error
        self.lock = threading.Lock()
        fork.reset_after_fork(self)

    def _reset_after_fork(self):
        self.lock = threading.Lock()
        self.calls.append(self.name)
        if self.error is not None:
            raise self.error


def in_child(question):
    """The text that a forked child writes."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, str(question()).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(pid, 0)
    return text


def test_objects_are_reset_in_the_order_of_creation():
    """Each live object is reset once, after the objects that are older; the parent is left alone."""
    calls = []
    kept = [Recorder(calls, "store"), Recorder(calls, "wrapper")]
    kept[0].lock.acquire()
    dead = Recorder(calls, "dead")
    del dead
    gc.collect()
    assert in_child(lambda: (calls, kept[0].lock.locked())) == "(['store', 'wrapper'], False)"
    assert calls == []
    assert kept[0].lock.locked()


def test_module_functions_run_before_the_objects(monkeypatch):
    """In a forked child, functions of modules run before the resets of objects."""
    calls = []
    monkeypatch.setattr(fork, "_functions", [])
    kept = Recorder(calls, "object")
    fork.call_after_fork(lambda: calls.append("module"))
    assert in_child(lambda: calls) == "['module', 'object']"
    assert kept.calls is calls


def test_an_error_of_one_reset_does_not_stop_the_others(capfd, monkeypatch):
    """The error is printed by the interpreter; every other object is reset."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    calls = []
    kept = [Recorder(calls, "first", ValueError("broken reset")), Recorder(calls, "second")]
    assert in_child(lambda: calls) == "['first', 'second']"
    assert "broken reset" in capfd.readouterr().err
    assert len(kept) == 2


class BlockingClock(ManualClock):
    """Reading it in another thread than the first waits for `go_on`."""

    def __init__(self):
        super().__init__(1000)
        self.thread, self.read, self.go_on = threading.get_ident(), threading.Event(), threading.Event()

    def now_us(self):
        if threading.get_ident() != self.thread:
            self.read.set()
            self.go_on.wait(30)
        return super().now_us()


@pytest.mark.parametrize("collects", [True, False], ids=["collector on", "collector off"])
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_child_collects_garbage_as_its_parent_did(kind, collects, tmp_path):
    """A fork in the middle of a change of another thread, during which the collector is off, leaves it as it was before."""
    clock = BlockingClock()
    store = MemoryStore(clock=clock) if kind == "memory" else SharedStore(tmp_path / "limits", clock=clock)
    limiter = Limiter("1/h", store=store)
    thread = threading.Thread(target=limiter.reset, args=["u"])
    try:
        if not collects:
            gc.disable()
        thread.start()
        assert clock.read.wait(30)
        assert not gc.isenabled()
        assert in_child(gc.isenabled) == str(collects)
    finally:
        clock.go_on.set()
        thread.join()
        assert gc.isenabled() == collects
        gc.enable()


def test_a_reservation_belongs_to_the_process_that_made_it(tmp_path):
    """In a forked child a reservation of the parent can be neither settled nor cancelled, also where `sys.exit` leaves its
    block: the parent is using it."""
    limiter = Limiter("fixed window 100/400d", store=SharedStore(tmp_path / "limits"))
    with limiter.reserve("u", cost=60) as reservation:

        def leave():
            with suppress(SystemExit), reservation:
                sys.exit()
            return reservation.settle(1), reservation.cancel(), limiter.peek("u").remaining

        assert in_child(leave) == "(False, False, 40)"
        assert limiter.peek("u").remaining == 40
        assert reservation.settle(30)
    assert limiter.peek("u").remaining == 70


def test_a_waiting_call_belongs_to_the_process_that_made_it(tmp_path):
    """In a forked child that ends with `sys.exit`, copies of the parent's waiting tasks and calls give no start back."""
    store = SharedStore(tmp_path / "limits")
    sync, later = Limiter("1/h burst 1", store=store), AsyncLimiter("1/h burst 1", store=store)

    def charged():
        return round(sync.peek("u").reset_after / 3600)

    def leave(task):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        return charged()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        assert sync.hit("u")
        tasks = [loop.create_task(later.acquire("u")) for _ in range(3)]
        loop.run_until_complete(asyncio.sleep(0.01))
        assert charged() == 4
        assert in_child(lambda: leave(tasks[2])) == "4"
        assert charged() == 4
        assert leave(tasks[2]) == 3
