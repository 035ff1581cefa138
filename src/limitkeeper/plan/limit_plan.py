"""Plan: the limits of a service: a total from capacity or measurements, split into shares of client classes, endpoints and keys.

A share is one bucket for a whole class, so that the sum of the shares bounds the rate. Limits per key (`per_user=5`) bound what
one key may take of its share; they protect fairness, not capacity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from ..errors import ConfigurationError
from ..policy.reading.diagnostics import ParseError
from ..policy.reading.value_parsers import parse_match
from .capacity_formula import Capacity
from .limit_shares import Split, parse_amounts, split
from .measured_capacity import Analysis
from .quantities import Number, number_of, round_down, rps

#: Keys that a limit may be given for, with the header that the policy file reads; a verified source should replace it.
IDENTITIES = {"user": "X-User", "tenant": "X-Tenant", "partner": "X-Api-Key"}
#: A key's burst is so many seconds of its rate.
BURST_S = 2


@dataclass(frozen=True, slots=True)
class KeyLimit:
    """A limit of every single key of an identity, in RPS: one (tier ""), or one per plan."""

    identity: str
    tiers: tuple[tuple[str, Fraction], ...]

    @staticmethod
    def parse(identity: str, value: Number) -> KeyLimit:
        """`5`, or tiers by plan: "free=5,pro=20"."""
        text = str(value)
        given = parse_amounts(text) if "=" in text else {"": text}
        remedy = "write RPS for one key, as in 5, or by plan, as in free=5,pro=20"
        invalid = [tier for tier in given if not re.fullmatch(r"[\w-]*", tier)]
        if invalid:
            raise ConfigurationError(f"{invalid[0]!r} is no name of a plan; {remedy}")
        rates = {tier: round_down(number_of(rate, f"the limit per {identity}", remedy)) for tier, rate in given.items()}
        if not all(rates.values()):
            raise ConfigurationError(f"the limit per {identity} is below one request per hour; {remedy}")
        return KeyLimit(identity, tuple(rates.items()))


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits to enforce. `burst` is that of the limit for all clients together; `internal` is kept for internal jobs."""

    source: Capacity | Analysis
    limit: Fraction
    burst: int
    internal: Fraction = Fraction(0)
    match: tuple[str, ...] = ()
    classes: Split | None = None
    endpoints: Split | None = None
    per_key: tuple[KeyLimit, ...] = ()
    name: str = "planned"

    @property
    def external(self) -> Fraction:
        """The limit without the share of internal jobs."""
        return self.limit - self.internal

    @property
    def capacity(self) -> Capacity | None:
        return self.source if isinstance(self.source, Capacity) else None

    @property
    def internal_burst(self) -> int:
        return max(1, int(self.burst * self.internal / self.limit))

    def key_burst(self, rate: Fraction) -> int:
        """Two seconds of a key's rate, at most the burst of all clients."""
        return max(1, min(ceil(rate * BURST_S), self.burst))

    def reasons(self) -> list[str]:
        kept = [f"{rps(self.internal)} are kept for internal jobs: {rps(self.external)} for clients."] if self.internal else []
        shares = [reason for one in (self.classes, self.endpoints) if one is not None for reason in one.reasons()]
        return [*self.source.reasons(), *kept, *shares, f"The burst is {self.burst}: the slots that are free at the limit."]

    def warnings(self) -> list[str]:
        found = self.source.warnings()
        capacity = self.capacity
        bursts = [(self.burst, "the limit")] + [
            (one.burst_of(share, self.burst), share.name) for one in (self.classes, self.endpoints) if one for share in one.shares
        ]
        if capacity is not None:
            total = capacity.total_concurrency
            product = f"{capacity.pods} × {capacity.concurrency} = {total}"
            for burst, name in bursts:
                if burst > total:
                    found.append(f"a burst of {burst} for {name} exceeds the safe concurrency of all pods, {product}; lower it")
        for key in self.per_key:
            for tier, rate in key.tiers:
                if rate > self.external:
                    found.append(f"one {key.identity}{f' of {tier}' if tier else ''} may take {rps(rate)}, more than the limit")
        return found


def make_plan(
    source: Capacity | Analysis,
    *,
    split_by: str | Mapping[str, Number] | None = None,
    endpoints: str | Mapping[str, Number] | None = None,
    per_key: Mapping[str, Number] | None = None,
    internal: Number | None = None,
    burst: int | None = None,
    oversubscription: Number = 1,
    match: Sequence[str] = (),
    name: str = "planned",
) -> Plan:
    """Splits the limit of a source. ConfigurationError when shares exceed it, or when no limit follows from the source."""
    limit = source.limit
    if limit is None or limit <= 0:
        raise ConfigurationError("the measurements give no limit; add --pods and --concurrency, or measure several loads")
    kept = Fraction(0)
    if internal is not None:
        amount = str(internal)
        kept = split(limit, {"internal": amount}).shares[0].rate
        if kept >= limit:
            raise ConfigurationError(f"internal jobs take the whole limit of {rps(limit)}; lower their share")
    unknown = [identity for identity in per_key or {} if identity not in IDENTITIES]
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r}; write one of {', '.join(IDENTITIES)}")
    if burst is not None and burst < 1:
        raise ConfigurationError(f"burst must be at least 1, got {burst}; leave it out for the free slots")
    external = limit - kept
    by_endpoint = None if endpoints is None else split(external, endpoints, oversubscription)
    for one in (*match, *([] if by_endpoint is None else [share.name for share in by_endpoint.shares])):
        check_match(one)
    return Plan(
        source,
        limit,
        source.burst if burst is None else burst,
        kept,
        tuple(match),
        None if split_by is None else split(external, split_by, oversubscription),
        by_endpoint,
        tuple(KeyLimit.parse(identity, value) for identity, value in (per_key or {}).items()),
        name,
    )


def check_match(text: str) -> None:
    """ConfigurationError for a text that a policy does not accept as a match."""
    try:
        parse_match(text)
    except ParseError as error:
        remedy = error.suggestion or "write it like POST /checkout"
        raise ConfigurationError(f"{text!r:.80} does not match requests: {error.message}; {remedy}") from None
