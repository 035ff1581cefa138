"""AdaptiveThrottle: refuses calls in the client while the server rejects most of them (Google SRE, "Handling Overload").

    p(refuse) = max(0, (requests − K · accepts) / (requests + 1))        both counted over the last two minutes

With K = 2 a server that rejects everything still sees about as many calls as it accepts: enough to notice that it has recovered.
The window is 12 slots of ten seconds. Calls that are refused here count as requests, as in the original.
"""

from __future__ import annotations

import threading
from collections import deque

from ..errors import ConfigurationError
from ..fork import reset_after_fork

SLOT_US = 10_000_000
SLOTS = 12


class AdaptiveThrottle:
    """The counts of one host."""

    def __init__(self, k: float = 2.0) -> None:
        if isinstance(k, bool) or not isinstance(k, (int, float)) or not k >= 1:
            raise ConfigurationError(f"throttle is K, a number of at least 1, got {k!r}; 2 is usual")
        self.k = k
        self._slots: deque[tuple[int, int, int]] = deque(maxlen=SLOTS)  # (slot number, requests, accepts)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def probability(self, now_us: int) -> float:
        """The share of calls to refuse now."""
        with self._lock:
            first = now_us // SLOT_US - SLOTS
            counted = [one for one in self._slots if one[0] > first]
        requests, accepts = sum(one[1] for one in counted), sum(one[2] for one in counted)
        return max(0.0, (requests - self.k * accepts) / (requests + 1))

    def refuses(self, now_us: int, draw: float) -> bool:
        """Decides one call; a refused one is counted."""
        if draw >= self.probability(now_us):
            return False
        self.count(now_us, accepted=False)
        return True

    def count(self, now_us: int, accepted: bool) -> None:
        """Counts a call that ended, or was refused here."""
        number = now_us // SLOT_US
        with self._lock:
            _, requests, accepts = self._slots.pop() if self._slots and self._slots[-1][0] >= number else (0, 0, 0)
            self._slots.append((number, requests + 1, accepts + accepted))
