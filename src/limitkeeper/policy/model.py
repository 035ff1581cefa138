"""Data model of a policy: identities, exemptions, rules and their options, as immutable values. `Gate` enforces them.

Identities are named properties of a request. A rule matches requests, makes a key from identities, and charges one or several
limits under it. A YAML file and `Policy.of` give the same values, so `==` holds between them. Short texts (`key: user | ip`,
`on_refusal: wait up to 200ms`) are parsed in `reading/value_parsers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..algorithms.fixed_window import FixedWindow
from ..algorithms.limit import Limit
from ..rate import Rate

if TYPE_CHECKING:
    from ..concurrency.dependency_rate_caps import DependencyCap
    from .request_context import RequestContext

#: The limits of one rule, charged together; () is "unlimited".
Limits = tuple[Limit, ...]
#: Parts that are joined to one key; each is a tuple of alternatives, of which the first present one counts. () is one shared key.
Key = tuple[tuple[str, ...], ...]

REJECT, WAIT, DEGRADE, SHADOW = "reject", "wait", "degrade", "shadow"
OPEN, CLOSED, LOCAL = "open", "closed", "local"
SKIP, SHARE = "skip", "share"


class Blocked(FixedWindow):
    """Admits nothing. No store is asked about it: a blocked key is refused before."""

    __slots__ = ()
    kind = "blocked"

    def __str__(self) -> str:
        return self.kind


#: The default time limit of a remote store: longer than a busy host delays a reply.
BUDGET_US = 100_000
#: The limits of a blocked key. Every request is refused, and none is charged.
BLOCKED: Limits = (Blocked("1/s"),)
#: The texts of this limit: a count of 0 in any rate.
BLOCKED_TEXT = re.compile(r"\s*(?:blocked|0|(?:[a-z ]+ )?0+ ?(?:/|per ) ?[a-z0-9 ]+)\s*", re.I)


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
    """Condition: identities that must be present, must be absent, or must have one of these values; all of it must hold."""

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
    """A source of limits of single keys at run time. `get` is called for every request and must not block."""

    def get(self, key: str) -> Limits | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a request. `source` is "constant", "header", "query", "response" or "call".

    constant: `units`. header, query: the integer found under `name`; `units` when it is missing, `most` when it can't be read; at
    most `most`, and at least 1 unless `units` is 0. call: the result of `call(request)`; `units` when it raises. response: one
    unit per `per` bytes, rounded up; `units` are charged when the request arrives, and the difference is settled after it.
    """

    source: str = "constant"
    units: int = 1
    name: str = ""
    most: int = 1_000_000_000
    per: int = 1
    call: Callable[[RequestContext], int] | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """Which responses are charged. A request is charged when it arrives and refunded when its response is not one of these.

    `statuses` are inclusive ranges (low, high); none: all. `call(status, request)` decides instead where it is given.
    """

    statuses: tuple[tuple[int, int], ...] = ()
    call: Callable[[int, RequestContext], bool] | None = None


@dataclass(frozen=True, slots=True)
class Once:
    """Charge once for all requests of one method and path that carry the same value in a header, and the same values of the
    identities `bind`, for `keep_us`, up to `replays` repetitions of each and as many of all as the rule's limit admits."""

    header: str = "idempotency-key"
    keep_us: int = 86_400_000_000
    replays: int = 10
    bind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OnRefusal:
    """`action` is REJECT, WAIT (up to `wait_us`; in this process at most `queue` requests of the rule at a time, and `per_client`
    of one key, or of one address where the rule has no key), DEGRADE (call `handler`, whose signature is the framework's) or
    SHADOW (count, but let pass). `per_client` 0 is a quarter of the queue, at least 1."""

    action: str = REJECT
    wait_us: int = 0
    queue: int = 100
    handler: Any = None
    per_client: int = 0


@dataclass(frozen=True, slots=True)
class OnFailure:
    """Decision of a failed store: OPEN allows, CLOSED refuses with 503, LOCAL decides in memory on `share` of the limit."""

    action: str = OPEN
    share: str = "1"


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a refusal. None: the default. `status` 429 for a quota, 503 where the queue is full or the store failed.

    `message` and the strings in `body` may hold {retry_after}, {limit}, {remaining}, {rule}; or `message(refusal, request)`
    returns the text, where `request` is the RequestContext (None: a hit of a rule by name). `body` is a JSON value to send
    instead of {"code": "RATE_LIMITED", "message": …}; `problem` sends application/problem+json.
    """

    status: int | None = None
    message: str | Callable[..., object] | None = None
    body: object = None
    problem: bool | None = None


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """How Retry-After is sent: later than the earliest moment by a part of `spread_us` that depends on the client."""

    spread_us: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """A rate for all keys of a rule together, divided among those that ask. `guarantees` are the rates that single keys get
    whatever the others send; `shares` are the weights of single keys in the division of the rest, otherwise 1. At most
    `window_us` of the capacity, and of each guarantee, is saved up."""

    rate: Rate
    window_us: int = 1_000_000
    guarantees: tuple[tuple[str, Rate], ...] = ()
    shares: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: which requests, by which key, under which limit, and what happens on a refusal."""

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
    retry_after: RetryAfter = field(default_factory=RetryAfter)
    priority: int = 0
    alert: float | None = None
    unidentified: str | None = None  # SKIP, but SHARE where the key has an address: it is absent on an unknown UNIX socket
    description: str = ""
    #: The class of its requests for a load shedder (web/concurrency_middleware.py).
    criticality: str | None = None
    #: At most so many requests of a key at a time: a log of places, each given back at the end of its response or after its hold.
    concurrent: Limit | None = None
    #: One rate for all keys together, in the place of a limit.
    capacity: Capacity | None = None
    #: The concurrent requests that all instances together can handle: instances × safe_concurrency. Larger bursts give a warning.
    total_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Exemption:
    """Requests that no rule (or none of `rules`) limits. All given conditions must hold. `headers` are (name, value)."""

    match: tuple[Match, ...] = ()
    networks: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # secrets
    when: When = field(default_factory=When)
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PenaltyBoxConfig:
    """A client that is refused more often than `limit` is refused for `for_us`, without asking the store.

    A client that gets there again is refused for the next of `then_us`, each longer than the one before; the last one repeats.
    """

    limit: Limit
    for_us: int
    key: Key = (("ip",),)
    then_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RetryAmplification:
    """Counts attempts and distinct requests (client, method, path) in windows of `window_us`; `key` identifies a client."""

    key: Key = (("ip",),)
    window_us: int = 60_000_000


@dataclass(frozen=True, slots=True)
class Headers:
    """Header fields of responses. `success`: "always", "near" (less than a fifth left) or "never".

    `wire` "draft-11" (RateLimit, RateLimit-Policy), "draft-6", "draft-7" or "none". `x` the X-RateLimit-Limit and -Remaining;
    `reset` "off", "delta" (seconds from now) or "epoch" adds X-RateLimit-Reset. `partition` adds pk=, a keyed hash of the key.
    `cors` lists the fields in Access-Control-Expose-Headers. `names` are other names of X-RateLimit-* and Retry-After, as pairs
    such as ("remaining", "X-Quota-Remaining").
    """

    wire: str = "draft-11"
    x: bool = True
    reset: str = "off"
    success: str = "always"
    partition: bool = False
    cors: bool = True
    names: tuple[tuple[str, str], ...] = ()


class Identity(Protocol):
    """A named property of a request: `of(request)` is its value, None when it is absent or can't be trusted."""

    def of(self, request: RequestContext, /) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A rate limit policy. `Policy.load("limitkeeper.yaml")`, `Policy.read(text)`, or `Policy.of(limits=[…])` from Python."""

    name: str = "limitkeeper"
    store: str = field(default="memory://", repr=False)  # may hold a password
    identify: Mapping[str, Identity] = field(default_factory=dict)
    exempt: tuple[Exemption, ...] = ()
    rules: tuple[Rule, ...] = ()
    penalty_box: PenaltyBoxConfig | None = None
    retry_amplification: RetryAmplification | None = None
    headers: Headers = field(default_factory=Headers)
    budget_us: int = BUDGET_US
    instances: int | None = None
    safe_concurrency: int | None = None
    #: How many threads of this process may be held by waiting requests; tasks of an event loop hold none.
    waiting_threads: int = 1
    problem: bool = False
    #: Caps on the calls that the service makes; `limitkeeper.concurrency.Dependencies.of_policy` enforces them.
    dependencies: Mapping[str, DependencyCap] = field(default_factory=dict)
    source: Path | None = field(default=None, compare=False)
    #: The first 12 hexadecimal digits of the SHA-256 of the text it was read from; "": it was made in Python.
    version: str = field(default="", compare=False)
    #: Key files that were read for it; they are watched together with `source`.
    files: tuple[Path, ...] = field(default=(), compare=False)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Reads a policy file. Raises `PolicyError` with every error, its line and column, and what to write instead."""
        from .reading.load import load

        return load(path)

    @staticmethod
    def read(text: str) -> Policy:
        """Reads the text of a policy file."""
        from .reading.load import read

        return read(text)

    @staticmethod
    def of(
        *,
        limits: Sequence[object] | None = None,
        name: str | None = None,
        store: str | None = None,
        identify: Mapping[str, object] | None = None,
        exempt: Sequence[object] | None = None,
        penalty_box: Mapping[str, object] | None = None,
        retry_amplification: Mapping[str, object] | bool | None = None,
        headers: Headers | Mapping[str, object] | str | bool | None = None,
        budget: str | float | timedelta | None = None,
        on_failure: OnFailure | str | None = None,
        instances: int | None = None,
        safe_concurrency: int | None = None,
        waiting_threads: int | None = None,
        problem: bool | None = None,
        dependencies: Mapping[str, object] | None = None,
    ) -> Policy:
        """Makes a policy in Python: the fields of the file as keyword arguments, as text or as values. None means "not given".

        Policy.of(limits=[{"name": "api", "key": "user | ip", "limit": TokenBucket("5/s burst 10")}])
        """
        fields = dict(locals())
        from .reading.load import from_fields

        return from_fields(fields)
