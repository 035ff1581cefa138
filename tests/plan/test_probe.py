"""Probes against a real server on this machine: open loop, stops at the SLO, errors and refusals; bounded and loopback only."""

from __future__ import annotations

import asyncio
import threading

import pytest

from limitkeeper import ConfigurationError
from limitkeeper.plan import Probe, ProbeSettings, Slo, analyze, probe


class Server:
    """A small HTTP server. `statuses(number, in_flight)` gives (status, seconds) of a request."""

    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.served = self.flying = 0
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        self.server = self.loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1000))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/checkout"
        self.ready.set()
        self.loop.run_forever()

    async def serve(self, reader, writer):
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.served += 1
                self.flying += 1
                status, seconds = self.behaviour(self.served, self.flying)
                await asyncio.sleep(seconds)
                self.flying -= 1
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nok" % status)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(60)
        return self

    def __exit__(self, *exc):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.server.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.01))
        self.loop.close()


#: Objectives that a busy test machine does not break by itself.
EASY = Slo.of("p95=200s")


def settings(url, **changes):
    return ProbeSettings(url, **{"slo": EASY, "start": 10, "factor": 2, "max_rate": 20, "step_s": 0.5, "seconds": 200, **changes})


@pytest.mark.server
def test_a_probe_raises_the_load_to_its_bound():
    """Loads of 10 and 20 RPS are offered, and every scheduled request is sent."""
    with Server(lambda number, flying: (200, 0.0)) as server:
        run = Probe(settings(server.url))
        found = asyncio.run(run.run())
    assert [(step.load, step.requests, step.errors) for step in found.steps] == [(10, 5, 0), (20, 10, 0)]
    assert (found.requests, found.samples.count, server.served) == (15, 15, 16)  # the first one opens a connection
    assert run.stopped == "the largest load of 20 RPS is reached"
    assert found.notes == ["The probe ended: the largest load of 20 RPS is reached."]


@pytest.mark.server
def test_requests_start_on_schedule_whatever_is_unanswered():
    """Open loop: ten requests of three seconds each are in progress together, where a closed loop would send one or two."""
    most = []

    def slow(number, flying):
        most.append(flying)
        return 200, 3.0

    with Server(slow) as server:
        probe(settings(server.url, start=20, max_rate=20))
    assert max(most) >= 5


@pytest.mark.server
def test_a_probe_stops_where_the_slo_is_broken():
    """A service that takes half a second breaks p95 ≤ 100 ms in the first step; no more load is sent."""
    with Server(lambda number, flying: (200, 0.5)) as server:
        run = Probe(settings(server.url, slo=Slo.of("p95=100ms")))
        found = asyncio.run(run.run())
    assert len(found.steps) == 1
    assert "p95" in run.stopped
    assert analyze(found, slo=run.settings.slo).limit is None


@pytest.mark.server
def test_a_429_is_refused_and_no_error():
    """A limiter in front of the service ends the probe, with refusals and without errors or latencies of refusals."""
    with Server(lambda number, flying: (429 if number > 3 else 200, 0.0)) as server:
        run = Probe(settings(server.url))
        found = asyncio.run(run.run())
    assert (found.errors, found.refused, found.samples.count) == (0, 3, 2)
    assert "60% were refused with 429 at 10 RPS" in run.stopped


@pytest.mark.server
def test_a_probe_stops_at_errors():
    """Answers 503 and refused connections are errors."""
    with Server(lambda number, flying: (503, 0.0)) as server:
        run = Probe(settings(server.url))
        found = asyncio.run(run.run())
    assert (found.errors, run.stopped) == (5, "100.0% errors at 10 RPS")
    gone = Probe(settings("http://127.0.0.1:9/"))
    assert asyncio.run(gone.run()).errors == 5


@pytest.mark.server
def test_an_interrupted_probe_keeps_its_steps():
    """Cancelled in its second step, a probe has measured the first."""
    with Server(lambda number, flying: (200, 0.0)) as server:
        steps = []
        run = Probe(settings(server.url, max_rate=1000), on_step=lambda step: steps.append(step) or len(steps) == 1)

        async def interrupt():
            task = asyncio.create_task(run.run())
            while not steps:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(interrupt())
    assert run.measurements.steps == steps
    assert run.measurements.notes == ["The probe ended: it was interrupted."]


@pytest.mark.parametrize(
    ("url", "changes", "message"),
    [
        ("http://shop.example/", {}, "is not this machine.*--allow-remote"),
        ("http://10.0.0.7/", {}, "is not this machine"),
        ("ftp://127.0.0.1/", {}, "expected an HTTP URL"),
        ("127.0.0.1:8000", {}, "expected an HTTP URL"),
        ("http://127.0.0.1:99999/", {}, "expected an HTTP URL"),
        ("http://[::1/", {}, "expected an HTTP URL"),
        ("http://127.0.0.1/", {"max_rate": 50_000}, "max_rate must be above 0 and at most 10000"),
        ("http://127.0.0.1/", {"start": 0}, "start must be above 0"),
        ("http://127.0.0.1/", {"factor": 1}, "factor must be above 1"),
        ("http://127.0.0.1/", {"seconds": 1e9}, "seconds must be above 0 and at most 3600"),
    ],
)
def test_unsafe_probes_are_refused(url, changes, message):
    """Other machines need a flag; rate and time are bounded."""
    with pytest.raises(ConfigurationError, match=message):
        Probe(settings(url, **changes))


@pytest.mark.parametrize("url", ["http://localhost:1/", "http://[::1]:1/", "http://127.9.9.9/", "https://shop.example/"])
def test_loopback_and_what_is_allowed_may_be_probed(url):
    """Loopback addresses need no flag."""
    Probe(settings(url, allow_remote=url.startswith("https")))
