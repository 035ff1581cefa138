"""Splits a limit into shares, of client classes (`partner=200,public=rest`) or of endpoints.

The sum of the shares never exceeds the limit. Over-subscription (shares that are rarely
used in full at the same time) has to be asked for by a factor: the sum then never exceeds factor × limit, and the report and the
policy file name it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ConfigurationError
from .quantities import Number, number_of, round_down, rps

REST = "rest"
_AMOUNT = re.compile(r"(?P<amount>rest|[\d.]+)\s*(?P<percent>%)?(?:\s+burst\s+(?P<burst>\d+))?", re.I)
REMEDY = "write name=RPS, name=30% or name=rest, as in partner=200,public=rest"


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a limit, in requests per second. `burst` None: a part of the planned burst."""

    name: str
    rate: Fraction
    burst: int | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """The shares of a limit. `oversubscription` is the factor that was asked for, 1 by default."""

    limit: Fraction
    shares: tuple[Share, ...]
    oversubscription: Fraction = Fraction(1)

    @property
    def total(self) -> Fraction:
        return sum((share.rate for share in self.shares), Fraction(0))

    @property
    def unassigned(self) -> Fraction:
        return max(Fraction(0), self.limit - self.total)

    @property
    def oversubscribed(self) -> bool:
        return self.total > self.limit

    def burst_of(self, share: Share, burst: int) -> int:
        """The burst of a share: its own, or its part of the planned burst, at least 1."""
        return share.burst or max(1, int(burst * share.rate / max(self.limit, self.total)))

    def reasons(self) -> list[str]:
        names = ", ".join(f"{share.name} {rps(share.rate)}" for share in self.shares)
        found = [f"The limit of {rps(self.limit)} is split into {names}."]
        if self.oversubscribed:
            found.append(
                f"Over-subscribed on request: the shares add up to {rps(self.total)}, {float(self.total / self.limit):.3g} × the "
                f"limit (at most {float(self.oversubscription):g} ×); the limit for all clients together still holds."
            )
        elif self.unassigned:
            found.append(f"{rps(self.unassigned)} are assigned to no share.")
        return found


def parse_amounts(text: str) -> dict[str, str]:
    """ "partner=200,public=rest" as a mapping; the last "=" of a part separates, since a path may hold one."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, amount = (word.strip() for word in part.rpartition("="))
        if not equals or not name:
            raise ConfigurationError(f"{part!r} is no share; {REMEDY}")
        if name in found:
            raise ConfigurationError(f"the share {name!r} is given twice; give it once")
        found[name] = amount
    if not found:
        raise ConfigurationError(f"expected shares, got {text!r}; {REMEDY}")
    return found


def split(limit: Number, shares: str | Mapping[str, Number], oversubscription: Number = 1) -> Split:
    """Splits a limit: `split(350, "partner=200,public=rest")`. ConfigurationError when the shares exceed it."""
    whole = number_of(limit, "the limit", "write requests per second, as in 350")
    factor = number_of(oversubscription, "oversubscription", "write a factor of at least 1, as in 1.2")
    if factor < 1:
        raise ConfigurationError(f"oversubscription must be at least 1, got {oversubscription!r}; lower the margin instead")
    budget = whole * factor
    amounts = parse_amounts(shares) if isinstance(shares, str) else {name: str(amount) for name, amount in shares.items()}
    read = {name: _read(name, amount, whole) for name, amount in amounts.items()}
    taken = sum((rate for rate, _ in read.values() if rate is not None), Fraction(0))
    rest = [name for name, (rate, _) in read.items() if rate is None]
    if len(rest) > 1:
        raise ConfigurationError(f"{' and '.join(rest)} both take the rest; give one of them an amount")
    if taken > budget or (rest and round_down(budget - taken) <= 0):
        raise ConfigurationError(_too_much(taken, budget, whole, rest))
    left = round_down(budget - taken)
    found = tuple(Share(name, left if rate is None else rate, burst) for name, (rate, burst) in read.items())
    return Split(whole, found, factor)


def _read(name: str, amount: str, limit: Fraction) -> tuple[Fraction | None, int | None]:
    """The rate (None: the rest) and the burst of a share."""
    found = _AMOUNT.fullmatch(amount.strip())
    if found is None:
        raise ConfigurationError(f"the share {name!r} has no amount: {amount!r}; {REMEDY}")
    burst = int(found["burst"]) if found["burst"] else None
    if found["amount"].lower() == REST:
        return None, burst
    value = number_of(found["amount"], f"the share {name!r}", REMEDY)
    rate = round_down(value * limit / 100 if found["percent"] else value)
    if rate <= 0:
        raise ConfigurationError(f"the share {name!r} is below one request per hour; {REMEDY}")
    return rate, burst


def _too_much(taken: Fraction, budget: Fraction, limit: Fraction, rest: list[str]) -> str:
    needed = float(taken / limit)
    left = f", so nothing is left for {rest[0]!r}" if rest else ""
    bound = f"the limit of {rps(limit)}" if budget == limit else f"the {rps(budget)} that over-subscription allows"
    relation = "exceed" if taken > budget else "use up"
    return (
        f"the shares add up to {rps(taken)} and {relation} {bound}{left}; lower a share, or ask for over-subscription by a "
        f"factor above {needed:.3g}"
    )
