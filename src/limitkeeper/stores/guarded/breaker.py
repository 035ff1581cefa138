"""Circuit breaker: when to stop calling a store that fails, when to probe it, and how to return without a rush.

    closed ──(5 failures in a row, or half of the last ones)──▶ open ──(a probe succeeds)──▶ half open ──(a second)──▶ closed
                                                                 ▲  └─ a probe fails: wait longer ┘ └─ still failing: open again

    next probe = now + random · min(most, first · 2^attempt)           full jitter: a thousand processes never probe together

Half open, a caller is let through with the probability `elapsed / ramp`. The row and the ratio of failures go on, so the first
failure opens it again, unless callers have succeeded since: on a busy machine a few calls time out while most are answered. The
ratio of failures is a moving one, updated only when a call fails: p ← p · (15/16)^(successes since + 1) + 1/16, so that a success
costs one addition and no lock.

A pure state machine: time and randomness are arguments. Callers hold a lock while they change it. Rejected: a window of outcomes
in a ring (a write per call), probing with callers' own calls (a caller pays the budget each time), a fixed delay between probes.
"""

from __future__ import annotations

from random import Random

from ...errors import ConfigurationError

CLOSED = "closed"
OPEN = "open"
HALF_OPEN = "half open"
#: The weight of one call in the moving ratio of failures.
WEIGHT = 1 / 16
#: The shortest time between two probes.
LEAST_US = 1_000


class Breaker:
    """The state of one guard. Times are microseconds of the guard's clock."""

    def __init__(self, rng: Random, failures: int, ratio: float, first_us: int, most_us: int, ramp_us: int) -> None:
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise ConfigurationError(f"failures must be a whole number of at least 1, got {failures!r}")
        if not 0 < ratio <= 1:
            raise ConfigurationError(f"ratio must be above 0 and at most 1, got {ratio!r}; 0.5 opens when half of the calls fail")
        self.rng = rng
        self.failures = failures
        self.ratio = ratio
        self.first_us = first_us
        self.most_us = most_us
        self.ramp_us = ramp_us
        self.state = CLOSED
        self.closed = True  # the same as one attribute, for the hot path
        self.since_us = 0
        self.in_a_row = 0
        self.recent = 0.0
        self.streak = 0  # successes since the last failure; a success writes nothing else
        self.attempt = 0
        self.probe_at_us = 0
        self.probing = False

    def record_failure(self, now_us: int) -> bool:
        """Records a failed call; True when it opens the breaker."""
        if self.state == OPEN:
            return False
        succeeded, self.streak = self.streak, 0
        self.in_a_row = 1 if succeeded else self.in_a_row + 1
        self.recent = self.recent * (1 - WEIGHT) ** (succeeded + 1) + WEIGHT
        if self.in_a_row < self.failures and self.recent < self.ratio:
            return False
        self._enter(OPEN, now_us)
        self._schedule_probe(now_us)
        return True

    def _schedule_probe(self, now_us: int) -> None:
        """Sets the time of the next probe: full jitter under a bound that doubles each time."""
        bound = min(self.most_us, self.first_us << min(self.attempt, 40))
        self.attempt += 1
        self.probe_at_us = now_us + max(LEAST_US, int(self.rng.random() * bound))

    def _enter(self, state: str, now_us: int) -> None:
        self.state = state
        self.closed = state == CLOSED
        self.since_us = now_us
        self.probing = False

    def begin_probe(self) -> bool:
        """Starts the one probe at a time; False when the breaker is not open, or a probe is in progress."""
        if self.state != OPEN or self.probing:
            return False
        self.probing = True
        return True

    def probe_failed(self, now_us: int) -> None:
        self.probing = False
        if self.state == OPEN:
            self._schedule_probe(now_us)

    def probe_succeeded(self, now_us: int) -> None:
        if self.state == OPEN:
            self._enter(HALF_OPEN, now_us)

    def lets_through(self, now_us: int) -> bool:
        """Whether a caller may call the store: a growing part of them while half open."""
        if self.state != HALF_OPEN:
            return self.closed
        return self.rng.random() * self.ramp_us < now_us - self.since_us

    def close_after_ramp(self, now_us: int) -> bool:
        """Closes the breaker when the ramp has ended; True when it did."""
        if self.state != HALF_OPEN or now_us - self.since_us < self.ramp_us:
            return False
        self._enter(CLOSED, now_us)
        self.in_a_row = self.streak = self.attempt = 0
        self.recent = 0.0
        return True

    def until_probe_us(self, now_us: int) -> int:
        """Microseconds to the next probe, at least LEAST_US: the retry time of a refused caller, which may ask again then."""
        return max(LEAST_US, self.probe_at_us - now_us) if self.state == OPEN else LEAST_US
