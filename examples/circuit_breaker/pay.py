"""A breaker, a limit and a bulkhead around the calls to a payment service: `python examples/circuit_breaker/pay.py`.

The limit acts on volume (200 calls per second), the bulkhead on calls at the same time (4), the breaker on failures (3 in a row).
The breaker is the outermost: while it is open, a call takes neither a start nor a place. It must not count refusals as failures
(`exclude`), or a busy hour would look like an outage. The breaker is purgatory's; limitkeeper has none for calls.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from purgatory import AsyncCircuitBreakerFactory
from purgatory.domain.model import OpenedState

from limitkeeper import BulkheadFull, RateLimited
from limitkeeper.concurrency import Dependencies, DependencyCap

TTL = 2.0  # seconds after which an open breaker tries one call
caps = Dependencies({"payment": DependencyCap("200/s", concurrent=4, max_waiting=4, timeout="50ms")})
breakers = AsyncCircuitBreakerFactory(default_threshold=3, default_ttl=TTL, exclude=[RateLimited, BulkheadFull])


class PaymentService:
    """Replaces a remote service; `down` makes it fail."""

    def __init__(self) -> None:
        self.down = False
        self.calls = self.running = self.most_running = 0

    async def charge(self) -> str:
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.005)
            if self.down:
                raise ConnectionError("the payment service does not answer")
            return "paid"
        finally:
            self.running -= 1


async def pay(service: PaymentService) -> str:
    """One payment, and its result."""
    try:
        async with await breakers.get_breaker("payment"), caps["payment"]:
            return await service.charge()
    except OpenedState:
        return "breaker open"  # fails fast: the service is not called
    except (RateLimited, BulkheadFull) as refused:
        return type(refused).__name__  # too much at once: the caller may try again
    except ConnectionError:
        return "failed"


async def main() -> dict[str, object]:
    service, found = PaymentService(), {}
    found["100 at once, healthy"] = Counter(await asyncio.gather(*(pay(service) for _ in range(100))))
    service.down = True
    found["10 in a row, down"] = Counter([await pay(service) for _ in range(10)])
    service.down, before = False, service.calls
    found["100 at once, open"] = Counter(await asyncio.gather(*(pay(service) for _ in range(100))))
    found["calls while open"] = service.calls - before
    await asyncio.sleep(TTL + 0.1)
    found["one after the pause"] = Counter([await pay(service)])
    found["most at the same time"] = service.most_running
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main()), indent=1))
