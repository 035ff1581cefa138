"""The universal scalability law (USL, Gunther): throughput as a function of concurrency, fitted to measured steps.

    X(N) = λN / (1 + σ(N − 1) + κN(N − 1))        X: throughput in RPS, N: requests in progress
                                                  λ: RPS of one, σ: contention (queues), κ: coherency (crosstalk)
    peak:  N* = √((1 − σ) / κ)                    more concurrency lowers the throughput
    knee:  the N of the largest X(N) / R(N), where R = N / X is the response time (Kleinrock's power)

N/X is linear in the three unknowns: N/X = a + b(N − 1) + cN(N − 1) with λ = 1/a, σ = b/a, κ = c/a. Weighted by (X/N)² the least
squares minimise relative errors, and three equations solve them: no numpy or scipy is needed. b and c are not negative; where the
unconstrained solution is, the best one with that coefficient at 0 is taken. Rejected: scipy.optimize, 100 MB for a 3 × 3 system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, sqrt

from ..errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Scalability:
    """The fitted law. `error` is the root mean square of the relative residuals of the throughput."""

    rate_of_one: float
    contention: float
    coherency: float
    error: float

    def throughput(self, concurrency: float) -> float:
        n = concurrency
        return self.rate_of_one * n / (1 + self.contention * (n - 1) + self.coherency * n * (n - 1))

    @property
    def peak_concurrency(self) -> float:
        """The concurrency of the largest throughput; inf where it only approaches a bound."""
        return inf if self.coherency == 0 else sqrt(max(0.0, 1 - self.contention) / self.coherency)

    @property
    def peak_throughput(self) -> float:
        """The largest throughput that the law allows; inf where it grows without bound."""
        if self.coherency:
            return self.throughput(max(1.0, self.peak_concurrency))
        return self.rate_of_one / self.contention if self.contention else inf

    @property
    def knee_concurrency(self) -> float:
        """The concurrency of the best ratio of throughput to response time; inf for a system without contention."""
        sigma, kappa = self.contention, self.coherency
        if kappa == 0:
            return inf if sigma == 0 else max(1.0, (1 - sigma) / sigma)
        slope = sigma - kappa
        return max(1.0, (sqrt(slope * slope + 12 * kappa * max(0.0, 1 - sigma)) - slope) / (6 * kappa))

    @property
    def knee_throughput(self) -> float:
        return inf if self.knee_concurrency == inf else self.throughput(self.knee_concurrency)


def fit_scalability(points: Sequence[tuple[float, float]]) -> Scalability:
    """Fits the law to (concurrency, throughput); ConfigurationError for fewer than three different concurrencies."""
    if any(n <= 0 or x <= 0 for n, x in points) or len({n for n, _ in points}) < 3:
        raise ConfigurationError("the scalability law needs at least three loads with different, positive concurrencies")
    rows = [((x / n), (x / n) * (n - 1), x * (n - 1)) for n, x in points]  # divided by N/X: every right side is 1
    candidates = []
    for size in (3, 2, 1):
        for columns in combinations(range(3), size):
            found = least_squares(rows, columns) if 0 in columns else None
            if found is not None and found[0] > 0 and min(found) >= 0:
                residuals = sum((sum(c * v for c, v in zip(found, row, strict=True)) - 1) ** 2 for row in rows)
                candidates.append((residuals, found))
    _, (a, b, c) = min(candidates)
    law = Scalability(1 / a, b / a, c / a, 0.0)
    error = sqrt(sum((law.throughput(n) / x - 1) ** 2 for n, x in points) / len(points))
    return Scalability(law.rate_of_one, law.contention, law.coherency, error)


def least_squares(rows: Sequence[tuple[float, ...]], columns: tuple[int, ...]) -> tuple[float, float, float] | None:
    """The coefficients (0 outside `columns`) that make Σ cᵢ·rowᵢ nearest to 1; None for a singular system. Columns are scaled to
    length 1 first, or those of N² would drown the others."""
    scale = [sqrt(sum(row[i] ** 2 for row in rows)) or 1.0 for i in columns]
    size = len(columns)
    table = [
        [sum(row[i] * row[j] for row in rows) / (scale[p] * scale[q]) for q, j in enumerate(columns)]
        + [sum(row[i] for row in rows) / scale[p]]
        for p, i in enumerate(columns)
    ]
    for k in range(size):
        pivot = max(range(k, size), key=lambda r: abs(table[r][k]))
        if abs(table[pivot][k]) < 1e-13:
            return None
        table[k], table[pivot] = table[pivot], table[k]
        for r in range(size):
            if r != k:
                factor = table[r][k] / table[k][k]
                table[r] = [v - factor * w for v, w in zip(table[r], table[k], strict=True)]
    found = [0.0, 0.0, 0.0]
    for p, i in enumerate(columns):
        found[i] = table[p][size] / table[p][p] / scale[p]
    return found[0], found[1], found[2]
