"""Translator of Envoy's rate limit service v3, without a transport: descriptors -> limits -> one decision -> response.

The limits of a request are charged together or not at all, so a refused request costs nothing (the reference server charges each
descriptor, also when another one refuses). Shadow limits are charged on their own, and so are those in quota mode, which refuse
a request only if all of them do: they are asked first, and charged after the others. An amount of 0 (`hits_addend`) charges
nothing and asks whether 1 would pass. A store that can't be asked is an error: Envoy's failure mode then decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..algorithms import FixedWindow
from ..algorithms.claim import Claim, NamedLimit
from ..decision import Decision
from ..limiter_base import checked_cost
from ..policy.identity.key_and_cache_bounds import hash_long, remember
from ..rate import MAX_COUNT, Rate
from ..stores.sans_io import Call, Plan
from .app import INVALID, MAX_CHECKS, MAX_RATES, Application, RequestError, available
from .envoy_config import NUMBERS, PERIODS, Domain, RateLimit, join_key
from .envoy_messages import RateLimitResponse

OK, OVER_LIMIT = 1, 2
MAX_UINT32 = 2**32 - 1
#: Requests of one plain limit whose match is remembered: their number, and their longest bytes.
MAX_KNOWN, LONGEST_KNOWN = 4096, 512


@dataclass(eq=False)
class Match:
    """The rate limit of one descriptor of a request. `named` None: nothing is counted."""

    rate: RateLimit
    named: NamedLimit | None
    key: str
    hits: int
    shadow: bool = False
    quota: bool = False
    decision: Decision | None = None

    @property
    def place(self) -> tuple[Any, str]:
        """Where its state is."""
        return self.named.identity, self.key  # type: ignore[union-attr]

    @property
    def refuses(self) -> bool:
        return not (self.shadow or (self.decision.allowed if self.decision is not None else self.rate.unlimited))


class EnvoyTranslator:
    """Answers requests for the limits of `domains`, on the store of an Application."""

    def __init__(self, app: Application, domains: Mapping[str, Domain]) -> None:
        self.app = app
        self.domains: Mapping[str, Domain] = {}
        self._known: dict[bytes, tuple[Match, NamedLimit, bool]] = {}
        self._overrides: dict[tuple[str, str, int, int], NamedLimit | None] = {}
        self.replace(domains)

    def replace(self, domains: Mapping[str, Domain]) -> None:
        """Puts other domains in force; a limit that keeps its place keeps its state."""
        before, after = ({one for domain in some.values() for one in domain.limits} for some in (self.domains, domains))
        for one in after - before:
            self.app.store.register(one)
        self.domains, self._known = domains, {}
        for one in before - after:
            self.app.store.unregister(one)

    def answer_known(self, data: bytes) -> bytes | None:
        """The response to the bytes of a request that is remembered, on a local store; otherwise None."""
        known = self._known.get(data)
        if known is None or not self.app.local:
            return None
        one, named, headers = known
        one.decision = available(self.app.store.decide_one(named, one.key, one.hits, 0, True))
        return response([one], headers).SerializeToString()  # type: ignore[no-any-return]

    def should_rate_limit(self, request: Any, data: bytes = b"") -> Plan[Any]:
        """A RateLimitRequest's RateLimitResponse; with its bytes it is remembered where it asks for one plain limit."""
        if not request.domain:
            raise RequestError(INVALID, "domain: expected a string, got an empty one; set `domain` in Envoy's filter")
        if not 0 < len(request.descriptors) <= MAX_CHECKS:
            raise RequestError(INVALID, f"descriptors: expected 1 to {MAX_CHECKS}, got {len(request.descriptors)}")
        known = self._known  # before the domains: a thread may replace both
        domain = self.domains.get(request.domain)
        if domain is None:
            return response([None] * len(request.descriptors), False)
        found = [self._match(domain, one, request.hits_addend) for one in request.descriptors]
        replaced = {name for one in found if one is not None for name in one.rate.replaces}
        found = [None if one is None or one.rate.name in replaced else one for one in found]
        one = found[0]
        plain = len(found) == 1 and 0 < len(data) <= LONGEST_KNOWN and not request.descriptors[0].HasField("limit")
        if plain and one is not None and one.named is not None and one.hits:
            remember(known, data, (one, one.named, domain.headers), MAX_KNOWN)
        yield from self._decide([one for one in found if one is not None])
        return response(found, domain.headers)

    def _match(self, domain: Domain, descriptor: Any, hits_addend: int) -> Match | None:
        entries = [(text(one.key), text(one.value)) for one in descriptor.entries]
        found, key = domain.match(entries)
        hits = descriptor.hits_addend.value if descriptor.HasField("hits_addend") else max(1, hits_addend)
        hits, key = checked_cost(hits), hash_long(key)
        if descriptor.HasField("limit"):
            label = found.label if found is not None else hash_long("override " + join_key([name for name, _ in entries]))
            count, period = min(descriptor.limit.requests_per_unit, MAX_COUNT), PERIODS.get(descriptor.limit.unit)
            if period is None:
                raise RequestError(INVALID, f"limit.unit: expected 1 (SECOND) to 7 (WEEK), got {descriptor.limit.unit}")
            named = self._override(domain.limiter, label, count, period)
            name = found.rate.name if found is not None and found.rate is not None else ""
            return Match(RateLimit(count, period, None, name), named, key, hits)
        if found is None or found.rate is None:
            return None
        return Match(found.rate, found.named, key, hits, found.shadow, found.quota)

    def _override(self, limiter: str, label: str, count: int, period: int) -> NamedLimit | None:
        """The limit that a request brings with it; None where it refuses everything."""
        known = (limiter, label, count, period)
        if known not in self._overrides:
            if len(self._overrides) >= MAX_RATES:
                raise RequestError(INVALID, f"limit: expected at most {MAX_RATES} different overrides; write them as descriptors")
            named = NamedLimit(limiter, label, FixedWindow(Rate(count, period))) if count else None
            self._overrides[known] = named
            if named is not None:
                self.app.store.register(named)
        return self._overrides[known]

    def _decide(self, found: Sequence[Match]) -> Plan[None]:
        """Sets the decision of each match that has a limit."""
        if len(found) == 1 and found[0].named is not None and found[0].hits:  # nearly every request
            claim = (found[0].named, found[0].key, found[0].hits, 0, True)
            found[0].decision = available((yield Call(self.app.store, "decide_one", claim)))
            return
        quota = [[one] for one in found if one.named is not None and one.hits and one.quota and not one.shadow]
        charged = [one for one in found if one.named is not None and one.hits and [one] not in quota]
        yield from self._ask([[one for one in found if one.named is not None and not one.hits], *quota], False)
        if refusing([one for one in found if one not in charged]):
            yield from self._ask([charged], False)  # the request is refused already, so nothing is charged
            return
        shadow = [[one] for one in charged if one.shadow]
        yield from self._ask([[one for one in charged if not one.shadow], *shadow], True)
        if not refusing(charged):
            yield from self._ask(quota, True)

    def _ask(self, groups: list[list[Match]], commit: bool) -> Plan[None]:
        """Decides each group on its own: one claim for each limit and key, with the sum of the costs; 0 asks for 1. Of several
        rates of one limit and key (overrides in the request) the lowest is asked."""
        groups = [group for group in groups if group]
        costs: list[dict[Any, Claim]] = [{} for _ in groups]
        for group, cost in zip(groups, costs, strict=True):
            for one in group:
                before = cost.get(one.place)
                named, units = (one.named, 0) if before is None else (min(before.limit, one.named, key=rate_of), before.cost)
                cost[one.place] = Claim(named, one.key, checked_cost(units + (one.hits or 1)))  # type: ignore[arg-type]
        asks = [list(cost.values()) for cost in costs]
        decisions: list[Decision] = []
        if commit and asks:
            decisions = yield Call(self.app.store, "decide_many", (asks, 0))
        for claims in () if commit else asks:
            decisions.append((yield Call(self.app.store, "decide", (claims, 0), {"commit": False})))
        for group, cost, decision in zip(groups, costs, decisions, strict=True):
            parts = dict(zip(cost, available(decision).decisions, strict=True))
            for one in group:
                one.decision = parts[one.place]


def rate_of(named: Any) -> float:
    return named.limit.count / named.limit.period  # type: ignore[no-any-return]


def refusing(found: Sequence[Match]) -> list[Match]:
    """The limits because of which a request is refused: those in quota mode only if all of them are over."""
    enforced = [one for one in found if not one.shadow]
    within = any(one.quota and not one.refuses for one in enforced)
    return [one for one in enforced if one.refuses and not (one.quota and within)]


def text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def seconds(us: int) -> int:
    """Rounded up: Envoy shows whole seconds."""
    return -(-us // 1_000_000)


def response(found: Sequence[Match | None], headers: bool) -> Any:
    enforced = [one for one in found if one is not None and not one.shadow]
    over = refusing(enforced)
    made = RateLimitResponse(overall_code=OVER_LIMIT if over else OK)
    for one in found:
        status = made.statuses.add(code=OVER_LIMIT if one is not None and one.refuses else OK)
        if one is not None:
            add_limit(status, one)
    for name, value in header_fields(enforced, over) if headers else ():
        made.response_headers_to_add.add(key=name, value=str(value))
    return made


def add_limit(status: Any, one: Match) -> None:
    if one.rate.unlimited:
        status.limit_remaining = MAX_UINT32
        return
    status.current_limit.requests_per_unit, status.current_limit.name = one.rate.count, one.rate.name
    status.current_limit.unit = NUMBERS.get(one.rate.period, 0)
    if one.decision is not None:
        status.limit_remaining = one.decision.remaining
        status.duration_until_reset.seconds = seconds(one.decision.reset_us)


def header_fields(enforced: Sequence[Match], over: Sequence[Match]) -> list[tuple[str, int]]:
    """Those of the limit with the least remaining, and how long to wait if that is known."""
    shown = [one.decision for one in enforced if one.decision is not None]
    least = min(shown, key=lambda one: one.remaining, default=None)
    fields = [] if least is None else [("ratelimit-limit", least.limit), ("ratelimit-remaining", least.remaining)]
    fields += [] if least is None else [("ratelimit-reset", seconds(least.reset_us))]
    waits = [-1 if one.decision is None else one.decision.retry_us for one in over]
    return [*fields, ("retry-after", seconds(max(waits)))] if waits and min(waits) >= 0 else fields
