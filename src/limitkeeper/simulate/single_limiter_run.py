"""A trace through one limiter: every arrival is a `hit` of the real Limiter under the key of its user, at its simulated time.

Nothing waits for anything here, so there are no events: the arrivals of an interval are decided in the order of their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ..algorithms import Limit
from ..limiter import Limiter
from ..stores import MemoryStore
from .arrivals import arrival_times, user_numbers
from .clients import ClientSettings
from .event_loop import EventLoop
from .over_admission import OverAdmission
from .recorder import ClassRecorder


class Source:
    """The arrivals of one class of clients."""

    def __init__(self, settings: ClientSettings, rng: Random, record: ClassRecorder, start_us: int) -> None:
        self.record = record
        self.keys = [f"{settings.name}:{number}" for number in range(settings.users)]
        self.users = user_numbers(settings.users, settings.zipf, Random(rng.random()))
        self._times = arrival_times(settings.profile, settings.spacing, Random(rng.random()), start_us + settings.start_us)
        self._next = next(self._times, None)

    def until(self, end_us: int) -> Iterator[tuple[int, int]]:
        """The times before `end_us`, and the users."""
        time_us, times, users = self._next, self._times, self.users
        while time_us is not None and time_us < end_us:
            yield time_us, next(users)
            time_us = next(times, None)
        self._next = time_us


class Trace:
    """All classes of clients through one limiter."""

    def __init__(self, limit: Limit, loop: EventLoop) -> None:
        self.loop = loop
        self.limiter = Limiter(limit, MemoryStore(clock=loop))
        self.admissions = OverAdmission(limit)
        self._sources: list[Source] = []

    def add(self, settings: ClientSettings, rng: Random, record: ClassRecorder) -> None:
        self._sources.append(Source(settings, rng, record, self.loop.now))

    def run(self, end_us: int) -> None:
        """Decides all arrivals before `end_us`."""
        if len(self._sources) == 1:
            self._decide(self._sources[0], self._sources[0].until(end_us))
        else:
            arrivals = [(time, n, user) for n, one in enumerate(self._sources) for time, user in one.until(end_us)]
            for time, n, user in sorted(arrivals):
                self._decide(self._sources[n], iter([(time, user)]))
        self.loop.now = end_us

    def _decide(self, source: Source, arrivals: Iterator[tuple[int, int]]) -> None:
        loop, hit, admit = self.loop, self.limiter.hit, self.admissions.add
        keys, record = source.keys, source.record
        users_ok, users_ended = record.users_ok, record.users_ended
        sent = ok = 0
        for time_us, user in arrivals:
            loop.now = time_us
            sent += 1
            users_ended[user] += 1
            if hit(keys[user]):
                ok += 1
                users_ok[user] += 1
                admit(keys[user], 1, time_us)
        record.sent += sent
        record.attempts += sent
        record.ok += ok
        record.refused += sent - ok
        record.rules[str(self.limiter)] += sent - ok
