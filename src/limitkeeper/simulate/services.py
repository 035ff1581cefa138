# cython: annotation_typing=False
"""Services: pods with a bounded number of requests at a time, a queue, their own work, and calls to other services.

A request holds its place in the pod from its begin until the last call has been answered, as a thread of a blocking server does.
A caller that has given up does not stop it: what waits in a queue or runs is worked off for nobody. With that and retries,
cascades appear by themselves. A pool that slows with concurrency follows the universal scalability law (plan/scalability_law.py):

    time = drawn time · (1 + σ(n − 1) + κn(n − 1))                     n: requests in this pod at the begin of the work
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from .distributions import ServiceTime
from .event_loop import EventLoop

if TYPE_CHECKING:
    from .calls import ServiceCall
    from .clients import Request

#: Statuses of simulated responses.
OK, REFUSED, UNAVAILABLE, TIMED_OUT = 200, 429, 503, 504
Reply = Callable[[int], object]


@cython.cclass
class Pod:
    """One instance: the requests that run in it, and those that wait."""

    __slots__ = ("in_use", "number", "queue")

    def __init__(self, number: int) -> None:
        self.number, self.in_use = number, 0
        self.queue: deque[Work] = deque()


@cython.cclass
class Work:
    """A request in a service: which of the calls is next, and who is answered."""

    __slots__ = ("pod", "reply", "request", "service", "step")

    def __init__(self, service: Service, pod: Pod, request: Request, reply: Reply) -> None:
        self.service, self.pod, self.request, self.reply = service, pod, request, reply
        self.step = 0

    def answered(self, status: int) -> None:
        """The reply to the call before `step`."""
        if status == OK or self.service.calls[self.step - 1].optional:
            self.service.proceed(self)
        else:
            self.service.end(self, UNAVAILABLE)


@cython.cclass
class Service:
    """A service, a database or a broker. Requests go to its pods in turn; `calls` are made one after the other."""

    def __init__(
        self,
        name: str,
        loop: EventLoop,
        rng: Random,
        time: ServiceTime,
        pods: int = 1,
        concurrency: int = 1,
        max_queue: int | None = None,
        contention: float = 0.0,
        coherency: float = 0.0,
    ) -> None:
        self.name, self.loop, self.rng = name, loop, rng
        self.pods = [Pod(number) for number in range(pods)]
        self.concurrency = concurrency
        self.max_queue = 1 << 60 if max_queue is None else max_queue
        self.contention, self.coherency = contention, coherency
        self.slows = bool(contention or coherency)
        self.draw = time.sampler(rng)
        self.calls: list[ServiceCall] = []
        self._next_pod = 0
        self.in_use = self.waiting = self.most_in_use = self.requests = self.rejected = self.failed = 0

    def submit(self, request: Request, reply: Reply) -> None:
        """Takes a request, or answers UNAVAILABLE when the queue of the pod is full."""
        number = self._next_pod
        pod = self.pods[number]
        number += 1
        self._next_pod = 0 if number == len(self.pods) else number
        self.requests += 1
        if pod.in_use < self.concurrency:
            self._begin(Work(self, pod, request, reply))
        elif len(pod.queue) < self.max_queue:
            pod.queue.append(Work(self, pod, request, reply))
            self.waiting += 1
        else:
            self.rejected += 1
            reply(UNAVAILABLE)

    def _begin(self, work: Work) -> None:
        pod = work.pod
        pod.in_use += 1
        self.in_use += 1
        if self.in_use > self.most_in_use:
            self.most_in_use = self.in_use
        time = self.draw()
        if self.slows:
            n = pod.in_use
            time = int(time * (1 + self.contention * (n - 1) + self.coherency * n * (n - 1)))
        self.loop.after(time, self.proceed, work)

    def proceed(self, work: Work) -> None:
        """Makes the next call, or answers after the last."""
        calls, request = self.calls, work.request
        while work.step < len(calls):
            call = calls[work.step]
            work.step += 1
            if call.endpoints and request.endpoint not in call.endpoints:
                continue
            if call.probability < 1 and self.rng.random() >= call.probability:
                continue
            if call.background:
                call.start(request, work.pod.number, ignore)
                continue
            call.start(request, work.pod.number, work.answered)
            return
        self.end(work, OK)

    def end(self, work: Work, status: int) -> None:
        """Frees the place for the next in the queue, and answers."""
        pod = work.pod
        pod.in_use -= 1
        self.in_use -= 1
        self.failed += status != OK
        if pod.queue and pod.in_use < self.concurrency:
            self.waiting -= 1
            self._begin(pod.queue.popleft())
        work.reply(status)


def ignore(status: int) -> None:
    """The reply to a call that no response waits for."""
