"""The protections of a dependency in a simulation: caps, bulkheads, adaptive bulkheads and breakers."""

from __future__ import annotations

from limitkeeper.concurrency import AdaptiveBulkhead
from limitkeeper.simulate import Result, Scenario, Simulation


def play(rate: str, target: dict[str, object], **call: object) -> Result:
    """Ten seconds of arrivals at one service that calls another."""
    scenario = Scenario.of(
        duration="10s",
        clients={"all": {"arrivals": rate, "timeout": "20s"}},
        gateway={"concurrency": 100_000, "calls": [{"to": "db", "timeout": "1s", **call}]},
        services={"db": target},
    )
    return Simulation(scenario).run()


def test_a_cap_bounds_the_calls_of_every_second():
    """A cap of 50/s lets at most 50 calls start in every second, whatever arrives."""
    result = play("200/s", {"concurrency": 100, "time": "10ms"}, cap="50/s", cap_wait="100ms")
    assert 490 <= result.services["db"].requests <= 500 + 50
    assert result.calls[0].refused > 1000


def test_a_bulkhead_bounds_the_calls_at_a_time():
    """With 5 places and 10 that wait, 5 calls run at a time, and the others are refused."""
    bulkhead = {"concurrent": 5, "max_waiting": 10, "timeout": "500ms"}
    result = play("200/s", {"concurrency": 100, "time": "100ms"}, bulkhead=bulkhead)
    assert result.services["db"].most_in_use == 5
    assert result.peak("gateway → db.waiting") == 10
    assert result.calls[0].refused > 1000


def test_a_breaker_spares_a_dependency_that_times_out():
    """A dependency that never answers in time is called by few probes once the breaker is open."""
    slow = {"concurrency": 10_000, "time": "5s"}
    plain, guarded = play("100/s", slow), play("100/s", slow, breaker={"failures": 5})
    assert plain.services["db"].requests > 900
    assert guarded.services["db"].requests < 200
    assert guarded.calls[0].breaker_state == "open"


def test_an_adaptive_bulkhead_shrinks_when_calls_time_out():
    """AIMD lowers its limit while calls are dropped, and so fewer are in progress than at its first size."""
    bulkhead = {"concurrent": 100, "max_waiting": 0, "adaptive": "aimd"}
    result = play("500/s", {"concurrency": 10, "time": "50ms"}, timeout="200ms", bulkhead=bulkhead)
    adaptive = result.calls[0].bulkheads[0]
    assert isinstance(adaptive, AdaptiveBulkhead)
    assert adaptive.bulkhead.max_concurrent < 60
