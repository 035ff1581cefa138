# cython: annotation_typing=False
"""Clients: who sends what, and how they behave when they are refused, get an error, or wait too long.

A client class sends requests on arrivals of its own, each for one of its users. Every request is sent up to `attempts` times:
after a timeout or a 5xx, and after a 429 where `retry_refused`, then not before Retry-After where the client obeys it. `workers`
makes a closed loop instead: so many senders, each of which sends again as soon as it is answered (a stuck retry loop).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..policy.request_context import RequestContext
from .arrivals import POISSON, Profile, arrival_times, user_numbers
from .calls import Backoff
from .event_loop import AwaitedReply, EventLoop
from .services import OK, REFUSED, TIMED_OUT

if TYPE_CHECKING:
    from .recorder import ClassRecorder

#: `send(request, reply)` of the gateway.
Send = Callable[["Request", Callable[[int], object]], object]


CLIENT_BACKOFF = Backoff(100_000, 2.0, 10_000_000)


@dataclass(frozen=True)
class ClientSettings:
    """One class of clients. `requests` are (endpoint, weight); in `identities` and `headers` {user} is the number of the user."""

    name: str
    profile: Profile = ()
    spacing: str = POISSON
    workers: int = 0
    pause_us: int = 0
    start_us: int = 0
    requests: tuple[tuple[str, float], ...] = (("GET /", 1.0),)
    identities: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    users: int = 1
    zipf: float = 0.0
    timeout_us: int = 10_000_000
    attempts: int = 1
    backoff: Backoff = CLIENT_BACKOFF
    obey_retry_after: bool = True
    retry_refused: bool = False
    idempotency_key: bool = False


@cython.cclass
class SimulatedRequest(RequestContext):
    """What the policy reads of a simulated request."""

    __slots__ = ("headers",)

    def __init__(self, method: str, path: str, identities: Mapping[str, str], headers: Mapping[str, str]) -> None:
        self.method, self.path, self.raw, self.routed = method, path, None, None
        self.identities = dict(identities)
        self.captured: Mapping[str, str] = {}
        self.headers = headers

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    def peer(self) -> str | None:
        return self.identities.get("ip")

    given_address = peer


@cython.cclass
class Request:
    """A request of a client with all its attempts."""

    __slots__ = ("began_us", "client", "commits", "context", "endpoint", "failed", "retry_us", "rule", "tries", "user")

    def __init__(self, client: Client, user: int, endpoint: str, context: SimulatedRequest) -> None:
        self.client, self.user, self.endpoint, self.context = client, user, endpoint, context
        self.began_us = client.loop.now
        self.tries = self.commits = self.retry_us = 0
        self.failed = False  # and the client knows
        self.rule = ""  # that refused the last attempt

    @property
    def idempotent(self) -> bool:
        return self.client.settings.idempotency_key

    def commit(self) -> None:
        """The order of this request was written. Without an idempotency key another attempt may write it again."""
        if self.commits and self.idempotent:
            return
        self.commits += 1
        record = self.client.record
        record.duplicates += self.commits > 1
        record.inconsistent += self.failed and self.commits == 1

    def send(self, _: object = None) -> None:
        client, sent = self.client, AwaitedReply(self)
        self.tries += 1
        client.record.attempts += 1
        client.loop.start_timeout(client.settings.timeout_us, sent)
        client.send(self, sent.reply)

    def timed_out(self) -> None:
        self.answered(TIMED_OUT)

    def answered(self, status: int) -> None:
        client = self.client
        settings = client.settings
        if status == OK or self.tries >= settings.attempts or (status == REFUSED and not settings.retry_refused):
            self._end(status)
            return
        delay_us = settings.backoff.delay_us(self.tries, client.rng)
        if status == REFUSED and settings.obey_retry_after:
            delay_us = max(delay_us, self.retry_us)
        client.record.retries += 1
        client.loop.after(delay_us, self.send)

    def _end(self, status: int) -> None:
        client = self.client
        if status != OK:
            self.failed = True
            client.record.inconsistent += self.commits > 0
        client.record.end(status, client.loop.now - self.began_us, self.user, self.rule)
        if client.settings.workers:
            client.loop.after(client.settings.pause_us, client.send_next)


@cython.cclass
class Client:
    """Sends the requests of one class of clients to the gateway."""

    def __init__(self, settings: ClientSettings, loop: EventLoop, rng: Random, send: Send, record: ClassRecorder) -> None:
        self.settings, self.loop, self.rng, self.send, self.record = settings, loop, rng, send, record
        self._users = user_numbers(settings.users, settings.zipf, Random(rng.random()))
        self._endpoints = weighted(settings.requests, Random(rng.random()))
        parts = [(endpoint, *endpoint.partition(" ")[::2]) for endpoint, _ in settings.requests]
        self._lines = {endpoint: (method, path) for endpoint, method, path in parts}
        self._varying = [name for name, text in settings.identities.items() if "{user}" in text]
        self._headers = {name.lower(): value for name, value in settings.headers.items()}
        self._arrivals: Iterator[int] = iter(())
        self._idempotency = 0

    def begin(self, start_us: int) -> None:
        """Schedules the first request."""
        settings, first_us = self.settings, start_us + self.settings.start_us
        if settings.workers:
            for _ in range(settings.workers):
                self.loop.at(first_us, self.send_next)
            return
        self._arrivals = arrival_times(settings.profile, settings.spacing, Random(self.rng.random()), first_us)
        self._schedule()

    def _schedule(self) -> None:
        time_us = next(self._arrivals, None)
        if time_us is not None:
            self.loop.at(time_us, self._arrive)

    def _arrive(self, _: object) -> None:
        self._schedule()
        self.send_next()

    def send_next(self, _: object = None) -> None:
        """Sends a new request of the next user."""
        user, endpoint = next(self._users), next(self._endpoints)
        self.record.sent += 1
        Request(self, user, endpoint, self.context(user, endpoint)).send()

    def context(self, user: int, endpoint: str) -> SimulatedRequest:
        identities, headers = self.settings.identities, self._headers
        if self._varying:
            identities = {**identities, **{name: identities[name].replace("{user}", str(user)) for name in self._varying}}
        if self.settings.idempotency_key:
            self._idempotency += 1
            headers = {**headers, "idempotency-key": f"{self.settings.name}-{self._idempotency}"}
        return SimulatedRequest(*self._lines[endpoint], identities, headers)


def weighted(requests: tuple[tuple[str, float], ...], rng: Random) -> Iterator[str]:
    """Endpoints by their weights."""
    names = [name for name, _ in requests]
    weights = [weight for _, weight in requests]
    while True:
        yield from names if len(names) == 1 else rng.choices(names, weights, k=1024)
