"""What a policy says, as values: who is limited by what. Nothing here runs; `Gate` does.

A policy is identities (facts about a request that have a name), exemptions, and rules. A rule matches requests, makes a key of
identities, and asks one or several limits for it. The YAML file and the Python twin make the same values, so `==` holds
between them. Words that users may write as text (`key: user | ip`, `on_refusal: wait up to 200ms`) are read in `words.py`;
the values here are what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..algorithms.limit import Limit

#: One rule's limits: several are charged together; none is "unlimited".
Limits = tuple[Limit, ...]
#: Parts joined to one key; each part is a tuple of alternatives, the first one present. () is one key for everybody.
Key = tuple[tuple[str, ...], ...]

REJECT, WAIT, DEGRADE, SHADOW = "reject", "wait", "degrade", "shadow"
OPEN, CLOSED, LOCAL = "open", "closed", "local"
SKIP, SHARE = "skip", "share"


@dataclass(frozen=True, slots=True)
class Match:
    """Requests of these methods (none: any), under this path template, for this host (both "": any).

    A template's segments are literal, `{name}` (one segment, captured), `*` (one segment) or, at the end, `**` (any rest).
    """

    methods: frozenset[str] = frozenset()
    path: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class When:
    """Identities that must be there, must not be, or must have one of these values; all of it holds, or the rule is not meant."""

    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    equals: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Tiers:
    """Limits by the value of an identity. `otherwise` is for values that are not listed."""

    by: str
    limits: tuple[tuple[str, Limits], ...]
    otherwise: Limits


class Overrides(Protocol):
    """Where limits of single keys come from while the program runs. `get` is called for every request: it never waits."""

    def get(self, key: str) -> Limits | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request costs. `source` is "constant", "header", "query", "response" or "call".

    constant: `units`. header, query: the whole number found under `name`; `units` when it is missing or no number; never more
    than `most`, nor less than 1 unless `units` is 0. call: what `call(facts)` returns; `units` when it raises. response: one unit
    for each `per` bytes begun; `units` are charged when the request comes, the rest (or what was too much) is settled when the
    response has gone.
    """

    source: str = "constant"
    units: int = 1
    name: str = ""
    most: int = 1_000_000_000
    per: int = 1
    call: Callable[[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """Which outcomes count. Charged when the request comes, given back when its response is not one of these.

    `statuses` (low, high) inclusive ranges that count; none: every one. `call(status, facts)` decides instead when there.
    """

    statuses: tuple[tuple[int, int], ...] = ()
    call: Callable[[int, Any], bool] | None = None


@dataclass(frozen=True, slots=True)
class Once:
    """Charge once for all requests that carry the same value in a header, for `keep_us`, up to `replays` repetitions."""

    header: str = "idempotency-key"
    keep_us: int = 86_400_000_000
    replays: int = 10


@dataclass(frozen=True, slots=True)
class OnRefusal:
    """`action` is REJECT, WAIT (up to `wait_us`, at most `queue` requests of the rule at a time in this process), DEGRADE (to
    `handler`, whose shape is the framework's) or SHADOW (counted, let pass)."""

    action: str = REJECT
    wait_us: int = 0
    queue: int = 100
    handler: Any = None


@dataclass(frozen=True, slots=True)
class OnFailure:
    """What a rule answers when its store fails: OPEN lets pass, CLOSED refuses with 503, LOCAL decides on `share` in memory."""

    action: str = OPEN
    share: str = "1"


@dataclass(frozen=True, slots=True)
class Answer:
    """How a refusal is told. None: the default. `status` 429 for a quota, 503 where the queue is full or the store failed.

    `message` and the texts in `body` may hold {retry_after}, {limit}, {remaining}, {rule}. `body` is a mapping or text to send
    instead of {"code": "RATE_LIMITED", "message": …}; `problem` sends application/problem+json.
    """

    status: int | None = None
    message: str | None = None
    body: Any = None
    problem: bool | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a policy: which requests, by which key, under which limit, and what happens beyond it."""

    name: str
    limit: Limits | Tiers
    match: tuple[Match, ...] = ()
    when: When = field(default_factory=When)
    key: Key = ()
    override: tuple[tuple[str, Limits], ...] = ()
    overrides: Overrides | None = field(default=None, compare=False)
    cost: Cost = field(default_factory=Cost)
    charge: Charge = field(default_factory=Charge)
    once: Once | None = None
    on_refusal: OnRefusal = field(default_factory=OnRefusal)
    on_failure: OnFailure = field(default_factory=OnFailure)
    answer: Answer = field(default_factory=Answer)
    priority: int = 0
    alert: float | None = None
    unidentified: str = SKIP
    description: str = ""


@dataclass(frozen=True, slots=True)
class Exemption:
    """Requests that no rule (or none of `rules`) limits. Everything that is said must hold. `headers` are (name, value)."""

    match: tuple[Match, ...] = ()
    networks: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # secrets
    when: When = field(default_factory=When)
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PenaltyBoxConfig:
    """Who is refused more often than `limit` is shut out for `for_us`, without asking the store."""

    limit: Limit
    for_us: int
    key: Key = (("ip",),)


@dataclass(frozen=True, slots=True)
class Headers:
    """Which header fields answers carry. `success`: "always", "near" (less than a fifth left) or "never".

    `wire` "draft-11" (RateLimit, RateLimit-Policy), "draft-6", "draft-7" or "none". `x` the X-RateLimit-Limit and -Remaining;
    `reset` "off", "delta" (seconds from now) or "epoch" adds X-RateLimit-Reset. `partition` adds pk=, a keyed hash of the key.
    `cors` names the fields in Access-Control-Expose-Headers.
    """

    wire: str = "draft-11"
    x: bool = True
    reset: str = "off"
    success: str = "always"
    partition: bool = False
    cors: bool = True


class Identity(Protocol):
    """A fact with a name: `of(facts)` is its value for one request, None when it is not there (or can't be trusted)."""

    def of(self, facts: Any) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Who is limited by what. `Policy.load("limitkeeper.yaml")`, `Policy.read(text)`, or `Policy.of(limits=[…])` from Python."""

    name: str = "limitkeeper"
    store: str = field(default="memory://", repr=False)  # may hold a password
    identify: Mapping[str, Identity] = field(default_factory=dict)
    exempt: tuple[Exemption, ...] = ()
    rules: tuple[Rule, ...] = ()
    penalty_box: PenaltyBoxConfig | None = None
    headers: Headers = field(default_factory=Headers)
    budget_us: int = 20_000
    safe_concurrency: int | None = None
    problem: bool = False
    source: Path | None = field(default=None, compare=False)
    #: Other files that were read for it (keys): watched together with `source`.
    files: tuple[Path, ...] = field(default=(), compare=False)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Reads a policy file. Raises `PolicyError` with every mistake, its line and column, and what to write instead."""
        return _reader().load(path)  # type: ignore[no-any-return]

    @staticmethod
    def read(text: str) -> Policy:
        """The same, from the text of a file."""
        return _reader().read(text)  # type: ignore[no-any-return]

    @staticmethod
    def of(**said: Any) -> Policy:
        """The Python twin: the words of the file as keyword arguments, texts or values.

        Policy.of(limits=[{"name": "api", "key": "user | ip", "limit": TokenBucket("5/s burst 10")}])
        """
        return _reader().of(said)  # type: ignore[no-any-return]


def _reader() -> Any:
    """Who reads policies makes these values, so that it is asked for by its name, when it is needed."""
    return import_module(".reading.load", __package__)
