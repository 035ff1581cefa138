"""The steps of a case: requests, advances of the clock, and failures of the store, independent of any framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One request (or `times` of them, all alike) and the expected response.

    fields    header fields by name: the exact value, or None for "not there"
    body      the exact text; None: any
    json      parts of a JSON body
    ran       whether the handler must have run; a handler that did not run must not have read a byte of the body either
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes = b""
    peer: str = "127.0.0.1"
    times: int = 1
    status: int = 200
    fields: Mapping[str, str | None] = field(default_factory=dict)
    body: str | None = None
    json: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    ran: bool = True


@dataclass(frozen=True)
class Advance:
    """Time passes: the manual clock's, or (served, on a real store) real time."""

    seconds: float


@dataclass(frozen=True)
class Begin:
    """A request that is sent from a thread of its own, without waiting for it: the next step comes when `rule` has it waiting."""

    ask: Ask
    rule: str


@dataclass(frozen=True)
class Join:
    """The requests that were begun have ended, each with its expected response."""


@dataclass(frozen=True)
class Fail:
    """From here on the store fails (`failing`), or works again."""

    failing: bool = True


@dataclass(frozen=True)
class Settled:
    """The counters of a rule so far, by the names of `RuleTally`."""

    rule: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class WaitThenPass:
    """Sends until refused, waits exactly Retry-After, sends again: that one passes. Real time is allowed."""

    ask: Ask
    rounds: int = 2
    most: int = 200


Step = Ask | Advance | Begin | Join | Fail | Settled | WaitThenPass


@dataclass(frozen=True)
class Case:
    """One fact about a policy, played on every framework.

    held    the clock's sleepers stay asleep until the next Advance
    far     the store is remote, and may fail
    real    also played against the framework's real server, a real Valkey and real time
    only    kinds of app this makes sense for; empty: all. "http" is every framework that speaks HTTP
    """

    name: str
    truth: str
    policy: str
    steps: tuple[Step, ...]
    held: bool = False
    far: bool = False
    real: bool = False
    only: frozenset[str] = frozenset({"http"})

    def __str__(self) -> str:
        return self.name


def ask(line: str, *, user: str | None = None, **said: Any) -> Ask:
    """`ask("POST /checkout", user="42", status=429)`: the user goes into X-User."""
    method, target = line.split(" ", 1)
    headers = tuple((said.pop("headers", None) or {}).items())
    if user is not None:
        headers = (("X-User", user), *headers)
    said.setdefault("ran", said.get("status", 200) == 200)
    return Ask(method, target, headers, **said)


def refused(line: str, **said: Any) -> Ask:
    """A request that is refused: 429 by default, and no handler runs."""
    return ask(line, **{"status": 429, "ran": False, **said})


def again(one: Ask, **said: Any) -> Ask:
    return replace(one, **said)


def case(name: str, truth: str, policy: str, *steps: Step, **said: Any) -> Case:
    return Case(name, truth, policy, steps, **said)
