"""The load generator: sends the requests of a scenario's clients over HTTP, open loop, and records what they get.

Open loop: a request starts on schedule, whether earlier ones have been answered or not, and its latency counts from the schedule
until the last answer, retries included. `late` is how much later than scheduled requests were sent: this machine's own delay.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from random import Random
from time import monotonic

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from limitkeeper.plan.percentiles import LatencySamples
from limitkeeper.simulate import Scenario
from limitkeeper.simulate.arrivals import arrival_times, user_numbers
from limitkeeper.simulate.clients import ClientSettings
from limitkeeper.simulate.recorder import ClassRecorder
from limitkeeper.simulate.services import OK, REFUSED, TIMED_OUT, UNAVAILABLE

#: Requests in progress, of all clients together; more than these fail without being sent.
MAX_IN_FLIGHT = 2000


def scaled(scenario: Scenario, seconds: float) -> Scenario:
    """The same scenario within another time: the profiles are stretched or compressed, the rates stay."""
    share = seconds * 1e6 / scenario.duration_us
    clients = [replace(one, profile=[(at * share, rate) for at, rate in one.profile]) for one in scenario.clients]
    return replace(scenario, clients=tuple(clients), duration_us=round(seconds * 1e6))


class Sender:
    """One class of clients. `statuses` counts the answers to all attempts; 0 is a timeout or a broken connection."""

    def __init__(self, settings: ClientSettings, session: ClientSession, url: str, load: Load) -> None:
        self.settings, self.session, self.load = settings, session, load
        self.method, path = settings.requests[0][0].split()
        self.url = url + path
        self.record = ClassRecorder(settings.name, settings.users)
        self.statuses: Counter[int] = Counter()
        self.failed: set[str] = set()  # requests whose clients got an error
        self.first = self.last = 0.0  # when the first attempt began and the last one ended
        self.rng = Random(f"client {settings.name}")

    async def send_all(self, began: float, seconds: float) -> None:
        """Starts all requests on schedule, and returns after the last answer."""
        times = arrival_times(self.settings.profile, self.settings.spacing, self.rng, 0)
        users = user_numbers(self.settings.users, self.settings.zipf, self.rng)
        async with asyncio.TaskGroup() as tasks:
            for number, at in enumerate(takewhile(lambda us: us < seconds * 1e6, times)):
                scheduled = began + at / 1e6
                await asyncio.sleep(max(0.0, scheduled - monotonic()))
                self.load.late.add(max(0.0, monotonic() - scheduled))
                tasks.create_task(self._request(number, next(users), scheduled))

    async def _request(self, number: int, user: int, scheduled: float) -> None:
        settings, record = self.settings, self.record
        headers = {name: text.replace("{user}", str(user)) for name, text in settings.headers.items()}
        headers["X-Request-Id"] = f"{settings.name} {number}"
        record.sent += 1
        for attempt in range(1, settings.attempts + 1):
            record.attempts += 1
            status = await self._attempt(headers)
            if status in (OK, REFUSED) or attempt == settings.attempts:
                break
            record.retries += 1
            await asyncio.sleep(settings.backoff.delay_us(attempt, self.rng) / 1e6)
        if status not in (OK, REFUSED):
            self.failed.add(headers["X-Request-Id"])
        record.end(status, round((monotonic() - scheduled) * 1e6), user, "the decision service")

    async def _attempt(self, headers: dict[str, str]) -> int:
        if self.load.in_flight >= MAX_IN_FLIGHT:
            return UNAVAILABLE
        self.load.in_flight += 1
        self.first = self.first or monotonic()
        try:
            async with self.session.request(self.method, self.url, headers=headers) as answer:
                await answer.read()
                self.statuses[answer.status] += 1
                return answer.status
        except (TimeoutError, ClientError, OSError):
            self.statuses[0] += 1
            return TIMED_OUT
        finally:
            self.load.in_flight -= 1
            self.last = monotonic()


class Load:
    """All clients of a scenario against one gateway."""

    def __init__(self, scenario: Scenario, url: str) -> None:
        self.scenario, self.in_flight = scenario, 0
        self.late = LatencySamples()
        timeout = ClientTimeout(total=max(one.timeout_us for one in scenario.clients) / 1e6)
        self.session = ClientSession(connector=TCPConnector(limit=0), timeout=timeout)
        self.senders = [Sender(one, self.session, url, self) for one in scenario.clients]

    async def run(self) -> None:
        seconds, began = self.scenario.duration_us / 1e6, monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for sender in self.senders:
                    tasks.create_task(sender.send_all(began, seconds))
        finally:
            await self.session.close()
