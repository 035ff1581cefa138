"""Rules with `concurrent`: requests at a time, per key, each counted until its response has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gates import MODES, asked, gate, key, request, rule

from limitkeeper import MemoryStore, SlidingWindowLog
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.reading.diagnostics import PolicyError
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import RateLimitMiddleware
from stand_ins import NOON, WrappedStore

TWO = SlidingWindowLog("2/min")
UNKNOWN = 0


@pytest.mark.parametrize("mode", MODES)
def test_a_full_rule_refuses_with_503(mode):
    """The third request at a time is refused with 503, to be retried in a second; one that ends makes room at once."""
    busy = gate(rule("busy", (), concurrent=TWO))
    running = [asked(busy, request(), mode) for _ in range(2)]
    assert all(one.allowed and one.needs_settlement for one in running)
    refused = asked(busy, request(), mode)
    assert (refused.refusal.status, refused.refusal.reason, refused.refusal.retry_after) == (503, "concurrent", 1)
    assert refused.refusal.message == "Too many requests at a time. Retry after 1s."
    running[0].settle(200)
    assert asked(busy, request(), mode).allowed
    assert not asked(busy, request(), mode).allowed


def test_explained_as_it_is_answered():
    """`explain` names the status and the retry of the response."""
    busy = gate(rule("busy", (), concurrent=TWO), rule("rate", "100/h"))
    running = [asked(busy, request()) for _ in range(2)]
    assert all(running)
    text = RequestExplanation(busy.policy, request(), busy.explain(request())).text()
    assert text.endswith("→ refused by busy with 503: retry in 1 s")


@pytest.mark.parametrize("outcome", [200, 404, 500, UNKNOWN])
def test_every_outcome_ends_a_request(outcome):
    """A place is given back however its request ended, also where the client went away."""
    busy = gate(rule("busy", (), concurrent=SlidingWindowLog("1/min")))
    for _ in range(3):
        one = asked(busy, request())
        assert one.allowed
        one.settle(outcome)
        one.settle(outcome)  # once
    assert busy.snapshot().rules[0].passed == 3


def test_per_key():
    """Each key has its own places."""
    busy = gate(rule("busy", (), concurrent=TWO, key=key("user")))
    for user in ("a", "b"):
        assert asked(busy, request(user=user)).allowed
        assert asked(busy, request(user=user)).allowed
        assert not asked(busy, request(user=user)).allowed


def test_beside_a_limit():
    """A rule may have both: the rate stays charged when a request ends, its place is released."""
    both = gate(rule("both", "fixed window 3/min", concurrent=SlidingWindowLog("1/min")))
    first = asked(both, request())
    refused = asked(both, request())
    assert (refused.refusal.status, refused.refusal.violated) == (503, ("both.2",))
    first.settle(200)
    asked(both, request()).settle(200)
    asked(both, request()).settle(200)
    refused = asked(both, request())
    assert (refused.refusal.status, refused.refusal.retry_after, refused.refusal.violated) == (429, 60, ("both",))


def test_the_longer_retry_of_two_rules():
    """Where a rate refuses too, the time to retry is the rate's: how long places are held is unknown."""
    clock = ManualClock(NOON)
    two = gate(rule("rate", "fixed window 1/min"), rule("busy", (), concurrent=SlidingWindowLog("1/h")), clock=clock)
    assert asked(two, request()).allowed
    clock.advance(20)
    refused = asked(two, request())
    assert (refused.refusal.status, refused.refusal.retry_after) == (429, 40)


def test_a_lost_request_counts_until_its_hold_ends():
    """A request whose end is never known counts for the hold only."""
    clock = ManualClock(NOON)
    busy = gate(rule("busy", (), concurrent=SlidingWindowLog("1/10s")), clock=clock)
    lost = asked(busy, request())
    clock.advance(9.999_999)
    assert not asked(busy, request()).allowed
    clock.advance(0.000_001)
    second = asked(busy, request())
    assert second.allowed
    lost.settle(200)  # too late: it releases no other request's place
    assert not asked(busy, request()).allowed


def test_shadow():
    """In shadow mode requests are counted and admitted."""
    from limitkeeper.policy.model import SHADOW, OnRefusal

    busy = gate(rule("busy", (), concurrent=SlidingWindowLog("1/min"), on_refusal=OnRefusal(SHADOW)))
    first = asked(busy, request())
    assert asked(busy, request()).shadows == ("busy",)
    first.settle(200)
    assert asked(busy, request()).shadows == ()


def test_reading():
    """`concurrent: 40` and `{max: 40, hold: 10min}` are read, alone or beside a limit."""
    policy = Policy.read(
        """
limits:
  - {name: a, concurrent: 40}
  - {name: b, limit: 5/s, concurrent: {max: 3, hold: 10min}}
"""
    )
    a, b = policy.rules
    assert (a.limit, a.concurrent) == ((), SlidingWindowLog("40/min"))
    assert b.concurrent == SlidingWindowLog("3/10min")
    assert policy == Policy.of(
        limits=[{"name": "a", "concurrent": 40}, {"name": "b", "limit": "5/s", "concurrent": {"max": 3, "hold": "10min"}}]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("concurrent: 0", "at a time"),
        ("concurrent: many", "expected"),
        ("concurrent: {hold: 5s}", "missing field .max."),
        ("concurrent: {max: 5, for: 5s}", "unknown field .for."),
        ("{}", "missing field .limit. in rule"),
        ("concurrent: 4, cost: 2", ".cost. is about a rate"),
        ("concurrent: 4, once: Idempotency-Key", ".once. is about a rate"),
        ("concurrent: 4, on_refusal: wait up to 1s", ".on_refusal. is about a rate"),
    ],
)
def test_invalid_rules(fields, message):
    """A value that is no number of requests at a time is refused, with the reason."""
    inside = "" if fields == "{}" else f", {fields}"
    with pytest.raises(PolicyError, match=message):
        Policy.read(f"limits:\n  - {{name: a{inside}}}\n")


def test_over_asgi():
    """Over ASGI the places of a key are held until the response has been sent; the fields have no time."""
    policy = Policy.of(limits=[{"name": "busy", "concurrent": 2}], store="memory://")

    async def main():
        ends = [asyncio.Event() for _ in range(3)]

        async def app(scope, receive, send):
            number = int(scope["path"][1:])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await ends[number].wait()
            if number == 1:
                raise KeyError
            await send({"type": "http.response.body", "body": b"done"})

        middleware = RateLimitMiddleware(app, policy=Gate(policy, store=MemoryStore()))

        async def call(number):
            sent = []

            async def send(message):
                sent.append(message)

            scope = {"type": "http", "method": "GET", "path": f"/{number}", "raw_path": f"/{number}".encode(), "headers": []}
            scope |= {"query_string": b"", "client": ("192.0.2.1", 1), "scheme": "http", "http_version": "1.1"}
            try:
                await middleware(scope, asyncio.Event().wait, send)
            except KeyError:
                pass
            return sent[0]["status"], dict(sent[0]["headers"])

        running = [asyncio.create_task(call(number)) for number in range(2)]
        await asyncio.sleep(0.01)
        status, fields = await call(2)
        assert (status, fields[b"retry-after"]) == (503, b"1")
        assert fields[b"ratelimit-policy"] == b'"busy";q=2;qu="concurrent-requests"'
        assert fields[b"ratelimit"] == b'"busy";r=0'
        for end in ends:
            end.set()
        assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]  # one raises after its start
        assert (await call(2))[0] == 200

    asyncio.run(main())


def test_on_redis(valkey):
    """Two gates on one server share the places of a rule; one round trip takes a place, another gives it back."""
    policy = Policy.of(
        name="concurrent-on-redis", store=f"{valkey.url}?timeout=30s", budget="30s", limits=[{"name": "busy", "concurrent": 2}]
    )

    async def main():
        async with Gate(policy) as one, Gate(policy) as other:
            running = [await one.aask(request()), await other.aask(request())]
            assert [bool(each) for each in running] == [True, True]
            assert (await one.aask(request())).refusal.status == 503
            await running[1].asettle(200)
            again = await one.aask(request())
            assert again.allowed
            assert not (await other.aask(request())).allowed
            for each in (running[0], again):
                await each.asettle(UNKNOWN)
            assert (await other.aask(request())).decision.remaining == 1

    asyncio.run(main())


def test_explained(tmp_path, capsys):
    """`limitkeeper policy explain` names the number at a time."""
    from limitkeeper.cli import main

    path = tmp_path / "policy.yaml"
    path.write_text("limits: [{name: busy, limit: 5/s, concurrent: 40}]\n")
    assert main(["policy", "explain", str(path), "--request", "GET /"]) == 0
    assert "token bucket 5/s burst 5; 40 at a time" in capsys.readouterr().out


class SlowStore(WrappedStore):
    """A remote store that has decided while its reply is still under way."""

    def answers_within(self, budget_us: int) -> bool:
        return True

    async def adecide(self, *args: Any, **options: Any) -> Any:
        decision = self.decide(*args, **options)
        self.decided.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return decision


@pytest.mark.parametrize("more", ["", ", {name: smooth, limit: 1000/s, on_refusal: wait up to 1s}"])
def test_a_request_that_is_cancelled_while_the_store_decides_gives_its_place_back(more):
    """As clients of gRPC and of Django's ASGI handler can have it: otherwise its place would be taken until its `hold` ends."""

    async def main() -> None:
        store = SlowStore(MemoryStore())
        busy = Gate(Policy.read(f"limits: [{{name: busy, concurrent: 1}}{more}]"), store=store)
        for _ in range(3):
            store.decided = asyncio.Event()
            asking = asyncio.ensure_future(busy.aask(request()))
            await store.decided.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert (await busy.aask(request())).allowed
        assert not (await busy.aask(request())).allowed

    asyncio.run(main())


@pytest.mark.parametrize("pro", ["unlimited", "100/s; fixed window 1000/h", "100/s; sliding window log 1000/h"])
def test_tiers_with_different_numbers_of_limits_share_the_places(pro):
    """All requests of a key count together, however many limits the tier of each has; only those that run count."""
    text = f"""
    identify: {{plan: {{header: plan, default: free}}}}
    limits:
      - {{name: busy, key: everyone, limit: {{by: plan, free: 100/s, pro: "{pro}"}}, concurrent: {{max: 2, hold: 1min}}}}
    """
    busy = Gate(Policy.read(text), store=MemoryStore(clock=ManualClock()))
    for plans in (["free", "pro", "free", "pro"], ["pro", "pro", "free", "pro"], ["free", "free", "pro", "free"]):
        asking = [asked(busy, request(plan=plan)) for plan in plans]
        assert [one.allowed for one in asking] == [True, True, False, False]
        for one in asking:
            one.settle(200)


def test_places_outlast_a_reload_that_adds_a_limit():
    """Requests that run are counted by the new version, whose rule has one limit more."""
    text = "limits: [{name: busy, limit: 100/s, concurrent: 2}]"
    busy = Gate(Policy.read(text), store=MemoryStore(clock=ManualClock()))
    running = [asked(busy, request()) for _ in range(2)]
    busy.reload(Policy.read(text.replace("100/s", "100/s; fixed window 1000/h")))
    assert not asked(busy, request())
    running[0].settle(200)
    assert asked(busy, request())
