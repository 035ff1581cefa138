"""The watch over one store: what is known of its health, who is told of it, and who looks whether it is back.

It turns failures and probes into steps of the breaker, under a lock; events are told after the lock is let go. A probe asks
again, without charging, what failed last: the same key goes to the same shard, the same slot, the same dead server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from ...algorithms.claim import Claim
from ...errors import StoreError, StoreTimeout
from ...observe.events import BREAKER_CLOSED, HALF_OPENED, OPENED, PROBE_FAILED, STORE_KINDS, Publisher
from .breaker import OPEN, Breaker
from .prober import Prober

log = logging.getLogger("limitkeeper")


class Probed(Protocol):
    """Whoever is watched: asks its store again, and raises when that fails."""

    def ask_again(self, claims: Sequence[Claim]) -> None: ...

    async def aask_again(self, claims: Sequence[Claim]) -> None: ...


class StoreHealth:
    """One for each guard."""

    def __init__(self, breaker: Breaker, clock: Any, name: str, guard: Probed, background: bool) -> None:
        self.breaker = breaker
        self.clock = clock
        self.name = name
        self.events = Publisher(kinds=STORE_KINDS)
        self._guard = weakref.ref(guard)
        self._background = background
        self._asked: Sequence[Claim] = ()
        self.failures = self.timeouts = self.opened = self.probes = self.turned_away = 0
        self.over = False  # a store that was closed is no store that fails
        self.renew(None)

    def renew(self, rng: Random | None) -> None:
        """In a new process: a lock that nobody holds, nobody in the background, and a chance of its own."""
        self.lock = threading.RLock()
        self.lookout: Prober | None = None
        self.breaker.probing = False
        if rng is not None:
            self.breaker.rng = rng

    # What callers see ------------------------------------------------------------------------------------------

    def may_ask(self) -> bool:
        """Whether a caller may ask the store, when the breaker is not closed."""
        if self.over:
            return True
        if self.breaker.state is OPEN:
            self.turned_away += 1  # no call and no jump back inside: threads do not lose a count here
            lookout = self.lookout
            if self._background and (lookout is None or lookout.over or (not self.turned_away & 255 and not lookout.alive)):
                self._post()
            return False
        now_us = self.clock.now_us()
        with self.lock:
            recovered = self.breaker.recovered(now_us)
            through = self.breaker.lets_through(now_us)
        if recovered:
            self._tell(BREAKER_CLOSED)
        elif self._background and (self.lookout is None or not self.lookout.alive):
            self._post()
        return through

    def failed(self, error: StoreError, claims: Sequence[Claim]) -> None:
        """A caller's call failed."""
        if self.over:
            raise error
        now_us = self.clock.now_us()
        with self.lock:
            self.failures += 1
            self.timeouts += isinstance(error, StoreTimeout)
            self._asked = [Claim(claim.limit, claim.key, 1) for claim in claims]
            opens = self.breaker.failed(now_us)
            self.opened += opens
        if opens:
            log.warning("%s fails, and is asked no more until a probe is answered: %s", self.name, str(error))
            self._tell(OPENED, error)
            if self._background:
                self._post()

    def until_probe_us(self) -> int:
        return self.breaker.until_probe_us(self.clock.now_us())

    def _tell(self, kind: str, error: BaseException | None = None) -> None:
        self.events.publish(kind, self.name, error=error)

    # Probing ---------------------------------------------------------------------------------------------------

    def probe(self) -> bool:
        """Asks the store once, when the breaker is open and nobody else does; whether it may be asked by others now."""
        if self._begin():
            try:
                if (guard := self._guard()) is not None:
                    guard.ask_again(self._asked)
            except Exception as error:
                self._probed(error)
            except BaseException:
                self.breaker.probing = False
                raise
            else:
                self._probed(None)
        return self.breaker.state != OPEN

    async def aprobe(self) -> bool:
        if self._begin():
            try:
                if (guard := self._guard()) is not None:
                    await guard.aask_again(self._asked)
            except Exception as error:
                self._probed(error)
            except BaseException:
                self.breaker.probing = False
                raise
            else:
                self._probed(None)
        return self.breaker.state != OPEN

    def _begin(self) -> bool:
        with self.lock:
            begins = self.breaker.begin_probe()
            self.probes += begins
            return begins

    def _probed(self, error: Exception | None) -> None:
        now_us = self.clock.now_us()
        with self.lock:
            if error is not None:
                self.breaker.probe_failed(now_us)
            else:
                self.breaker.probe_answered(now_us)
        if error is None:
            self._tell(HALF_OPENED)
            return
        if not isinstance(error, StoreError):
            log.error("probing %s failed in a way that a store should not: %r", self.name, error)
        self._tell(PROBE_FAILED, error)

    # In the background -----------------------------------------------------------------------------------------

    def _post(self) -> None:
        """Posts a lookout, if there is none."""
        loop: asyncio.AbstractEventLoop | None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self.lock:
            if self.lookout is None or not self.lookout.alive:
                self.lookout = Prober(self)
                self.lookout.post(loop)

    def pause_us(self, lookout: Prober) -> int | None:
        """How long a lookout sleeps before it looks again; None when it is needed no more."""
        breaker = self.breaker
        now_us: int = self.clock.now_us()
        with self.lock:
            if breaker.closed or self.lookout is not lookout:
                if self.lookout is lookout:
                    self.lookout = None
                return None
            if breaker.state == OPEN:
                return breaker.until_probe_us(now_us)
            return max(1, breaker.since_us + breaker.ramp_us - now_us)

    def look(self) -> None:
        """One look: a probe when it is due, or the end of being half open."""
        if self._due():
            self.probe()

    async def alook(self) -> None:
        if self._due():
            await self.aprobe()

    def _due(self) -> bool:
        now_us = self.clock.now_us()
        with self.lock:
            recovered = self.breaker.recovered(now_us)
            due = self.breaker.state == OPEN and self.breaker.probe_at_us <= now_us
        if recovered:
            log.warning("%s answers again", self.name)
            self._tell(BREAKER_CLOSED)
        return due

    def end(self) -> None:
        """Ends whoever looks."""
        with self.lock:
            self._background, self.over = False, True
            lookout, self.lookout = self.lookout, None
        if lookout is not None:
            lookout.end()
