"""Pictures of limits on what runs at the same time: a bulkhead, an adaptive limit, dependency caps, tasks that are put back,
three protections of one call, and degraded responses. All from real runs, on virtual clocks."""

from __future__ import annotations

import asyncio
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from draw.chart import mark

from limitkeeper import BulkheadFull, Limiter, MemoryStore, RateLimited
from limitkeeper.charts.frame import Frame, time_axis
from limitkeeper.charts.line_chart import Line, Mark, line_chart
from limitkeeper.charts.svg import Drawing
from limitkeeper.concurrency import AdaptiveBulkhead, Bulkhead, Gradient2
from limitkeeper.testing import ManualClock

from .sheet import sheet

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests" / "concurrency"))

#: Arrival and duration of calls, in seconds.
CALLS = ((0, 4), (0.5, 2), (1, 5), (1.5, 2), (2, 3), (3.4, 2), (3.8, 1), (5.2, 3))


async def bulkhead_run() -> list[tuple[float | None, float | None]]:
    """The start and the end of each call under Bulkhead(2, max_waiting=2); None: refused."""
    bulkhead, now = Bulkhead(2, max_waiting=2), 0.0
    ends = [asyncio.Event() for _ in CALLS]
    found: list[tuple[float | None, float | None]] = [(None, None)] * len(CALLS)
    events = [(arrival, 0, number) for number, (arrival, _) in enumerate(CALLS)]

    async def call(number: int) -> None:
        try:
            async with bulkhead:
                found[number] = now, now + CALLS[number][1]
                events.append((now + CALLS[number][1], 1, number))
                await ends[number].wait()
        except BulkheadFull:
            pass

    tasks = []
    while events:
        now, is_end, number = min(events)
        events.remove((now, is_end, number))
        if is_end:
            ends[number].set()
        else:
            tasks.append(asyncio.create_task(call(number)))
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return found


def bulkhead_queue() -> Drawing:
    """Calls as bars: the wait for a place, and the work."""
    drawing = sheet(
        "Bulkhead(2, max_waiting=2)", "Two calls run, two more wait in order of arrival, and the next one is refused."
    )
    frame = Frame(96, 78, 620, 24 * len(CALLS), 0, 12)
    time_axis(drawing, frame, [(second, f"{second} s") for second in range(0, 13, 2)])
    for row, ((arrival, _), (start, end)) in enumerate(zip(CALLS, asyncio.run(bulkhead_run()), strict=True)):
        y = frame.y + 24 * row
        drawing.text(frame.x - 12, y + 16, f"call {row + 1}", "soft small", "end")
        if start is None or end is None:
            mark(drawing, frame.px(arrival), y + 12, "refused")
            continue
        if start > arrival:
            drawing.line(frame.px(arrival), y + 12, frame.px(start) - 3, y + 12, "amber-line bold")
        drawing.rect(frame.px(start), y + 5, frame.px(end) - frame.px(start), 14, "green veil", round=4)
    bottom = frame.bottom + 44
    drawing.line(96, bottom - 4, 116, bottom - 4, "amber-line bold")
    drawing.text(122, bottom, "waits", "soft small")
    drawing.rect(190, bottom - 11, 22, 14, "green veil", round=4)
    drawing.text(218, bottom, "runs", "soft small")
    mark(drawing, 290, bottom - 4, "refused")
    drawing.text(300, bottom, "refused", "soft small")
    drawing.height = bottom + 20
    return drawing


def adaptive_limit() -> Drawing:
    """The limit, and the calls in time, of an overloaded server that loses half of its workers for ten seconds."""
    from closed_loop import ClosedLoop

    clock = ManualClock(0.0)
    adaptive = AdaptiveBulkhead(Gradient2(initial=20, minimum=5, window="100ms"), clock=clock)
    server = ClosedLoop(adaptive, clock, every_us=500)
    limit, goodput = [], []
    for step in range(1, 121):
        server.workers = 20 if 40 < step <= 80 else 40
        server.run(0.25)
        limit.append((step / 4, adaptive.algorithm.limit))
        goodput.append((step / 4, server.goodput(0.25, 100_000) / 10))
    lines = [Line("limit (calls at a time)", limit), Line("calls answered within 100 ms, in 10/s", goodput, "green")]
    marks = [Mark("20 of 40 workers fail", 10.0), Mark("they are back", 20.0, "green")]
    drawing = line_chart("Gradient2 in front of a server that loses half of its capacity", "seconds", "", lines, marks)
    drawing.card = True
    return drawing


CAPS = {"sliding window log 300/s": "green", "token bucket 300/s burst 300": "amber", "fixed window 300/s": "red"}


def dependency_caps() -> Drawing:
    """Calls that started within the last second, under three rules of 300/s, while a service asks 2000 times a second."""
    lines = []
    for rule, colour in CAPS.items():
        clock = ManualClock(1000.0)
        limiter = Limiter(rule, MemoryStore(clock=clock))
        starts: list[int] = []
        for moment in range(700_000, 3_700_000, 500):  # from 0.7 s of a second of the clock on
            clock.advance((1_000_000_000 + moment - clock.now_us()) / 1e6)
            if limiter.hit("inventory"):
                starts.append(moment)
        counts = [(at, bisect_right(starts, at) - bisect_left(starts, at - 999_999)) for at in range(700_000, 3_700_000, 10_000)]
        lines.append(Line(rule, [((at - 700_000) / 1e6, float(count)) for at, count in counts], colour))
    title = "Starts within the last second: 300/s as a log, a bucket and a fixed window"
    drawing = line_chart(title, "seconds", "calls", lines, [Mark("cap", 300.0, "blue", level=True)])
    drawing.card = True
    return drawing


def tasks_put_back(reserves: bool, tasks: int = 50) -> list[tuple[float, float]]:
    """(time, deliveries so far) of tasks that come at once, at 10/s: put back until their start, or until `retry_after`."""
    clock = ManualClock(0.0)
    limiter = Limiter("leaky bucket queue 10/s", MemoryStore(clock=clock))
    waiting, deliveries, points = [(0.0, False)] * tasks, 0, [(0.0, 0.0)]
    while waiting:
        due = min(waiting)[0]
        clock.advance(due - clock.now_us() / 1e6)
        now, later = [one for one in waiting if one[0] <= due + 1e-9], [one for one in waiting if one[0] > due + 1e-9]
        for _, has_start in now:
            deliveries += 1
            if reserves:
                wait = 0.0 if has_start else limiter.reserve("mail").wait
            else:
                wait = limiter.hit("mail").retry_after
            if wait:
                later.append((round(due + wait, 6), reserves))
        waiting = later
        points.append((due, float(deliveries)))
    return points


def task_deliveries() -> Drawing:
    lines = [
        Line("put back until retry_after", tasks_put_back(False), "red"),
        Line("put back until its reserved start (limit_task)", tasks_put_back(True), "green"),
    ]
    drawing = line_chart("50 tasks at 10/s: how often workers take one", "seconds", "deliveries", lines)
    drawing.card = True
    return drawing


async def outcomes_of_breaker() -> dict[str, list[str]]:
    """What became of the calls of three bad moments, under a breaker, a limit of 8/s and a bulkhead of 4 with no queue."""
    from purgatory import AsyncCircuitBreakerFactory
    from purgatory.domain.model import OpenedState

    from limitkeeper.concurrency import Dependencies, DependencyCap

    clock = ManualClock(1000.0)
    cap = DependencyCap("8/s", concurrent=4, max_waiting=0, timeout=0)
    caps = Dependencies({"payment": cap}, MemoryStore(clock=clock))
    breakers = AsyncCircuitBreakerFactory(default_threshold=3, default_ttl=1000, exclude=[RateLimited, BulkheadFull])

    async def pay(charge: Callable[[], Awaitable[object]]) -> str:
        try:
            async with await breakers.get_breaker("payment"), caps["payment"]:
                await charge()
            return "paid"
        except (RateLimited, BulkheadFull, OpenedState, ConnectionError) as error:
            return type(error).__name__

    async def fast() -> None:
        pass

    async def slow() -> None:
        await asyncio.sleep(0.01)

    async def down() -> None:
        raise ConnectionError

    found = {"12 in a row": [await pay(fast) for _ in range(12)]}
    clock.advance(1)
    found["12 at once, slow"] = list(await asyncio.gather(*(pay(slow) for _ in range(12))))
    clock.advance(1)
    found["12 in a row, the service is down"] = [await pay(down) for _ in range(12)]
    return found


def outcome_mark(drawing: Drawing, x: float, y: float, colour: str) -> None:
    """Red and violet are failures, drawn as crosses; blue is a ring, so that shapes differ as well as colours."""
    if colour in ("red", "violet"):
        drawing.cross(x, y, 4.5, f"{colour}-line bold")
    else:
        drawing.circle(x, y, 5, f"{colour}-line bold" if colour == "blue" else colour)


def outcome_lanes(drawing: Drawing, lanes: dict[str, Sequence[str]], styles: dict[str, tuple[str, str]], y: float = 92) -> None:
    """A row of marks for each lane, and the legend of `styles`: outcome -> (colour, words)."""
    for name, outcomes in lanes.items():
        drawing.text(24, y + 4, name, "small strong")
        for number, outcome in enumerate(outcomes):
            outcome_mark(drawing, 300 + 24 * number, y, styles[outcome][0])
        y += 40
    for number, (colour, words) in enumerate(styles.values()):
        x, row = 24 + number % 3 * 240, y + 6 + number // 3 * 22
        outcome_mark(drawing, x + 4, row - 4, colour)
        drawing.text(x + 16, row, words, "soft small")
    drawing.height = y + 12 + (len(styles) + 2) // 3 * 22


def three_protections() -> Drawing:
    drawing = sheet(
        "One call, three protections", "A breaker around a limit of 8 per second and a bulkhead of 4. Each mark is a call."
    )
    styles = {
        "paid": ("green", "paid"),
        "RateLimited": ("amber", "RateLimited: the limit"),
        "BulkheadFull": ("blue", "BulkheadFull: the bulkhead"),
        "ConnectionError": ("red", "ConnectionError: the service"),
        "OpenedState": ("violet", "OpenedState: the breaker, at once"),
    }
    outcome_lanes(drawing, asyncio.run(outcomes_of_breaker()), styles)
    return drawing


def degraded_run(handler: str) -> list[str]:
    """The outcomes of 16 requests, one a second, under 3 per 10 s; the last eight have another query."""
    from limitkeeper.concurrency import Shaper
    from limitkeeper.policy import Policy
    from limitkeeper.policy.gate import Gate
    from limitkeeper.web.degrade import DeferredRequests, StaleCache, is_reduced
    from limitkeeper.web.wsgi import RateLimitMiddleware

    clock = ManualClock(1000.0)
    degrade = f", on_refusal: degrade {handler}" if handler else ""
    policy = Policy.read(f"limits: [{{name: search, key: ip, limit: sliding window log 3/10s{degrade}}}]")
    shaper = Shaper("1/h", capacity=24)  # of which one client has six
    cache, deferred = StaleCache(clock=clock), DeferredRequests(shaper)

    def view(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"less" if is_reduced(environ) else b"whole"]

    handlers = {"cached": cache.wsgi_handler, "later": deferred.wsgi_handler(view), "less": view}
    app = RateLimitMiddleware(cache.wsgi(view), Gate(policy, store=MemoryStore(clock=clock), handlers=handlers))
    outcomes = []
    for number in range(16):
        said: dict[str, str] = {}
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": "/",
            "REMOTE_ADDR": "192.0.2.1",
            "QUERY_STRING": f"q={'ab'[number // 8]}",
        }
        environ |= {"wsgi.input": None, "SERVER_NAME": "shop", "SERVER_PORT": "80", "wsgi.url_scheme": "http"}

        def start_response(status: str, headers: Any, _: Any = None, said: dict[str, str] = said) -> Any:
            said |= {"status": status[:3], **{name.lower(): value for name, value in headers}}

        body = b"".join(app(environ, start_response))
        outcomes.append({b"less": "less"}.get(body) or ("stale" if "age" in said else said["status"]))
        clock.advance(1)
    shaper.shutdown(wait=False, cancel_futures=True)
    return outcomes


def degraded_responses() -> Drawing:
    drawing = sheet(
        "Above the limit: four answers", "16 requests, one a second, 3 per 10 s are admitted. The last eight ask something new."
    )
    lanes = {
        "reject": degraded_run(""),
        "degrade cached (StaleCache)": degraded_run("cached"),
        "degrade later (DeferredRequests)": degraded_run("later"),
        "degrade less (is_reduced)": degraded_run("less"),
    }
    styles = {
        "200": ("green", "200, the whole response"),
        "stale": ("blue", "200, the recorded response"),
        "202": ("blue", "202, the response comes later"),
        "less": ("amber", "200, a smaller response"),
        "429": ("red", "429, refused"),
    }
    outcome_lanes(drawing, lanes, styles)
    return drawing
