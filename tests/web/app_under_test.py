"""The interface of an app under test, and how a case is played on it, independent of any framework.

A framework's test file writes an `App`, and parametrizes over the table:

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_flask(case): play(FlaskApp(), case)

    @pytest.mark.parametrize("case", REAL, ids=str)
    def test_flask_served(case, valkey): play_real(FlaskApp(server="waitress"), case, valkey.url)

Every app has the same handlers, each of which appends "METHOD /path" to `calls` when it runs:

    any path     200, JSON {"path": …, "remaining": evaluation.decision.remaining or null}
    /status/{n}  that status           /raise    raises ValueError (the client sees 500)
    /stream      "one", "two", "three" in three chunks
    /big?n=…     n bytes               /body     JSON {"length": how many bytes of the request's body were read}

and one degrade handler, `handlers["cached"]`, in the framework's own shape: 200, JSON {"cached": true}; it is no call.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from case_steps import Advance, Ask, Begin, Case, Fail, Join, Settled, Step, WaitThenPass

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.stores import RedisStore
from limitkeeper.testing import ManualClock
from stand_ins import NOON, HeldClock, WrappedStore


@dataclass(frozen=True)
class Response:
    """The response. `read` is how many bytes of the request's body the app took; None: unknown (a real server)."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    read: int | None = None

    def field(self, name: str) -> str | None:
        found = [value for given, value in self.headers if given.lower() == name.lower()]
        assert len(found) < 2, f"{name} came {len(found)} times: {found}"
        return found[0] if found else None


class Running(Protocol):
    """An app that answers. `request` is called from several threads; `target` is the raw path with its query."""

    calls: list[str]

    def request(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, peer: str) -> Response: ...

    def close(self) -> None: ...


class App(Protocol):
    """Makes one with a gate in front of it. `handlers` goes to the gate: {"cached": …}."""

    kinds: frozenset[str]
    handlers: Mapping[str, Any]

    def make(self, gate: Gate) -> Running: ...


class Stage:
    """One case being played: the app, its gate, its time."""

    def __init__(self, app: App, gate: Gate, clock: Any, store: Any) -> None:
        self.app = app.make(gate)
        self.gate = gate
        self.clock = clock
        self.store = store
        self.begun: list[tuple[threading.Thread, Ask, list[Response]]] = []
        self.opened = time.monotonic()

    def play(self, step: Step) -> None:
        if isinstance(step, Ask):
            for number in range(1, step.times + 1):
                self.ask(step, f"{step.method} {step.target}, {number} of {step.times}")
        elif isinstance(step, Advance):
            self.clock.advance(step.seconds)
        elif isinstance(step, Begin):
            self.begin(step)
        elif isinstance(step, Join):
            self.join()
        elif isinstance(step, Fail):
            self.store.failing = {"decide", "decide_many", "give_back"} if step.failing else set()
        elif isinstance(step, Settled):
            self.settled(step)
        else:
            self.wait_then_pass(step)

    def send(self, ask: Ask) -> Response:
        return self.app.request(ask.method, ask.target, list(ask.headers), ask.content, ask.peer)

    def ask(self, ask: Ask, where: str) -> None:
        before = len(self.app.calls)
        response = self.send(ask)
        check(ask, response, where, time.monotonic() - self.opened if isinstance(self.clock, RealTime) else 0.0)
        assert len(self.app.calls) - before == ask.ran, f"{where}: the handler ran {len(self.app.calls) - before} times"

    def begin(self, step: Begin) -> None:
        came: list[Response] = []
        before, slept = self.waiting(step.rule), len(getattr(self.clock, "sleeps", ()))
        thread = threading.Thread(target=lambda: came.append(self.send(step.ask)))
        thread.start()
        self.begun.append((thread, step.ask, came))
        until(lambda: self.waiting(step.rule) > before, f"{step.ask.target} did not begin to wait")
        if hasattr(self.clock, "sleeps"):  # asleep, so that an advance of the clock wakes it
            until(lambda: len(self.clock.sleeps) > slept, f"{step.ask.target} did not fall asleep")

    def waiting(self, rule: str) -> int:
        return next(tally.waiting for tally in self.gate.snapshot().rules if tally.name == rule)

    def join(self) -> None:
        for thread, ask, came in self.begun:
            thread.join(60)
            assert came, f"{ask.method} {ask.target} never ended"
            check(ask, came[0], f"{ask.method} {ask.target}, begun earlier")
        self.begun.clear()

    def settled(self, step: Settled) -> None:
        """Servers may settle just after the last byte has gone: a moment is allowed."""

        def counts() -> dict[str, int]:
            tally = next(tally for tally in self.gate.snapshot().rules if tally.name == step.rule)
            return {name: getattr(tally, name) for name in step.counts}

        until(lambda: counts() == dict(step.counts), f"{step.rule} counted {counts()}, not {dict(step.counts)}")

    def wait_then_pass(self, step: WaitThenPass) -> None:
        for _ in range(step.rounds):
            refusal = next((r for r in (self.send(step.ask) for _ in range(step.most)) if r.status != 200), None)
            assert refusal is not None, f"{step.most} requests and no refusal"
            assert refusal.status == 429
            hint = refusal.field("Retry-After")
            assert hint is not None
            assert hint.isdigit()
            self.clock.advance(int(hint))
            assert self.send(step.ask).status == 200, f"waiting {hint} s was not enough"

    def close(self) -> None:
        self.app.close()
        self.gate.close()


def check(ask: Ask, response: Response, where: str, passed: float = 0.0) -> None:
    """Checks all expectations of a response, and the facts that hold for every response. `passed` are seconds of real time since
    the case began, by which waiting times may have become shorter."""
    assert response.status == ask.status, (
        f"{where}: {response.status}, not {ask.status}: {response.headers} {response.body[:300]!r}"
    )
    for name, value in ask.fields.items():
        received = response.field(name)
        if passed and name == "Retry-After" and value is not None and received is not None and received.isdigit():
            assert int(value) - math.ceil(passed) <= int(received) <= int(value), (
                f"{where}: {received}, not {value}, after {passed:.1f} s"
            )
        else:
            assert received == value, f"{where}: {name} is {received!r}, not {value!r}"
    if ask.body is not None:
        assert response.body == ask.body.encode(), f"{where}: {response.body!r}"
    if ask.json:
        found = json.loads(response.body)
        assert {name: found.get(name) for name in ask.json} == dict(ask.json), f"{where}: {found}"
    shown = response.body.decode("latin-1") + "".join(f"{name}: {value}\n" for name, value in response.headers)
    for secret in ask.lacks:
        assert secret not in shown, f"{where}: {secret!r} is shown"
    if not ask.ran:
        assert response.read in (0, None), f"{where}: {response.read} bytes of the body were read"
    if ask.status == 200:
        assert response.field("Retry-After") is None, f"{where}: Retry-After on a 200"


def until(true: Any, otherwise: str) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.002)


class RealTime:
    """Time as it is: advancing it is sleeping."""

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


def play(app: App, case: Case) -> None:
    """The case in process: a memory store and a manual clock."""
    clock = HeldClock(NOON) if case.held else ManualClock(NOON)
    store: Any = MemoryStore(clock=clock)
    policy = case.policy
    if case.far:
        store = WrappedStore(store, local=False)
        policy = f"budget: 60s\n{policy}"  # a busy machine is no failing store
    _play(app, case, Gate(Policy.read(policy), store=store, handlers=app.handlers), clock, store)


def play_real(app: App, case: Case, url: str) -> None:
    """The case against a real server, a real Valkey, and real time. State is kept apart by the policy's name."""
    store = RedisStore(url, timeout="60s")
    policy = Policy.read(f"name: web-{uuid.uuid4().hex}\nbudget: 60s\n{case.policy}")
    try:
        _play(app, case, Gate(policy, store=store, handlers=app.handlers), RealTime(), store)
    finally:
        store.close()


def _play(app: App, case: Case, gate: Gate, clock: Any, store: Any) -> None:
    stage = Stage(app, gate, clock, store)
    try:
        for step in case.steps:
            stage.play(step)
    finally:
        if stage.begun:  # a step failed while others were waiting: let them go
            clock.advance(math.ceil(3600))
        stage.close()
