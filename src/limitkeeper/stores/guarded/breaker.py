"""The circuit breaker: when to stop asking a store that fails, when to look again, and how to come back without a rush.

    closed ──(5 failures in a row, or half of the last ones)──▶ open ──(a probe is answered)──▶ half open ──(a second)──▶ closed
                                                                 ▲  └─ a probe fails: wait longer ─┘ └─ any failure: open again

Closed, everybody asks. Open, nobody does; somebody in the background probes, with one call, at

    next probe = now + random · min(most, first · 2^attempt)             full jitter: a thousand processes never look together

Half open, a caller is let through with the chance `elapsed / ramp`: a server that has just come back feels its load rise over
a second, not in one blow. The ratio of failures is a moving one, brought up to date only when something fails:
p ← p · (15/16)^(successes since + 1) + 1/16, so that a success costs one addition and no lock.

A pure state machine: time and chance are arguments, it sleeps and asks nobody. Whoever changes it holds a lock meanwhile.
Rejected: a window of outcomes in a ring (a write per call), probing with callers' own calls (somebody pays the budget each time),
a fixed delay between probes (all processes that saw the server die find it alive together).
"""

from __future__ import annotations

from random import Random

from ...errors import ConfigurationError

CLOSED = "closed"
OPEN = "open"
HALF_OPEN = "half open"
#: The weight of one call in the moving ratio of failures.
WEIGHT = 1 / 16
#: No two probes are closer than this, whatever the chance says.
LEAST_US = 1_000


class Breaker:
    """The state of one guard. Times are microseconds of one clock, whichever."""

    __slots__ = (
        "attempt",
        "closed",
        "failures",
        "first_us",
        "in_a_row",
        "most_us",
        "probe_at_us",
        "probing",
        "ramp_us",
        "ratio",
        "recent",
        "rng",
        "since_us",
        "state",
        "streak",
    )

    def __init__(self, rng: Random, failures: int, ratio: float, first_us: int, most_us: int, ramp_us: int) -> None:
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise ConfigurationError(f"failures must be a whole number, at least 1, not {failures!r}")
        if not 0 < ratio <= 1:
            raise ConfigurationError(f"ratio must be between 0 and 1, not {ratio!r}; 0.5 opens when half of the calls fail")
        self.rng = rng
        self.failures = failures
        self.ratio = ratio
        self.first_us = first_us
        self.most_us = most_us
        self.ramp_us = ramp_us
        self.state = CLOSED
        self.closed = True  # the same in one look, for the hot path
        self.since_us = 0
        self.in_a_row = 0
        self.recent = 0.0
        self.streak = 0  # successes since the last failure: the one thing that a success writes
        self.attempt = 0
        self.probe_at_us = 0
        self.probing = False

    def failed(self, now_us: int) -> bool:
        """A caller's call failed; True when that opens the breaker."""
        if self.state == OPEN:
            return False
        succeeded, self.streak = self.streak, 0
        self.in_a_row = 1 if succeeded else self.in_a_row + 1
        self.recent = self.recent * (1 - WEIGHT) ** (succeeded + 1) + WEIGHT
        if self.state == CLOSED and self.in_a_row < self.failures and self.recent < self.ratio:
            return False
        if self.state == CLOSED:
            self.attempt = 0
        self._open(now_us)
        return True

    def _open(self, now_us: int) -> None:
        self._become(OPEN, now_us)
        self._wait(now_us)

    def _wait(self, now_us: int) -> None:
        """Sets the next probe: full jitter under a bound that doubles each time."""
        bound = min(self.most_us, self.first_us << min(self.attempt, 40))
        self.attempt += 1
        self.probe_at_us = now_us + max(LEAST_US, int(self.rng.random() * bound))

    def _become(self, state: str, now_us: int) -> None:
        self.state = state
        self.closed = state == CLOSED
        self.since_us = now_us
        self.probing = False

    def begin_probe(self) -> bool:
        """Takes the one place for a probe; False when there is nothing to probe, or somebody does already."""
        if self.state != OPEN or self.probing:
            return False
        self.probing = True
        return True

    def probe_failed(self, now_us: int) -> None:
        self.probing = False
        if self.state == OPEN:
            self._wait(now_us)

    def probe_answered(self, now_us: int) -> None:
        if self.state == OPEN:
            self._become(HALF_OPEN, now_us)

    def lets_through(self, now_us: int) -> bool:
        """Whether a caller may ask, when it is not closed: a growing part of them, while it is half open."""
        if self.state != HALF_OPEN:
            return self.closed
        return self.rng.random() * self.ramp_us < now_us - self.since_us

    def recovered(self, now_us: int) -> bool:
        """True when the time of being half open is over: from here on it is closed."""
        if self.state != HALF_OPEN or now_us - self.since_us < self.ramp_us:
            return False
        self._become(CLOSED, now_us)
        self.in_a_row = self.streak = self.attempt = 0
        self.recent = 0.0
        return True

    def until_probe_us(self, now_us: int) -> int:
        """Microseconds to the next probe, at least 1: what a refused caller is told."""
        return max(1, self.probe_at_us - now_us) if self.state == OPEN else LEAST_US
