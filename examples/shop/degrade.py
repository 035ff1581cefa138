"""What the shop serves above a limit instead of a refusal: the handlers of `on_refusal: degrade NAME` in its policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitkeeper.concurrency import Shaper
from limitkeeper.web.degrade import DeferredRequests, StaleCache

#: Invoices that were put off are made at this pace; more than so many are refused.
PACE, MOST_WAITING = "20/s", 100


class Degradation:
    """`cached`: the last response to the same client. `later`: 202 with a ticket, and the response at GET /deferred/TICKET.
    `less`: the view itself, which asks `is_reduced(request)`. It is a middleware below that of the limits."""

    def __init__(self) -> None:
        self.shaper = Shaper(PACE, capacity=MOST_WAITING, name="invoices")
        self.cache, self.deferred = StaleCache(max_stale="10min"), DeferredRequests(self.shaper)
        later = self.deferred.asgi_handler(self.inner)
        self.handlers: Mapping[str, Any] = {"cached": self.cache.asgi_handler, "later": later, "less": self.inner}

    def __call__(self, app: Any) -> Any:
        self._app = self.cache.asgi(self.deferred.asgi(app))
        return self.inner

    async def inner(self, scope: Any, receive: Any, send: Any) -> None:
        """The application below the limits."""
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Requests that still wait are lost; their tickets end with the process."""
        self.shaper.shutdown(wait=False, cancel_futures=True)
