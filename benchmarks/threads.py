"""Threads on one key: how many decisions a second, and whether exactly the limit is admitted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from statistics import median
from typing import Any

from peers import named
from report import Section, Table, spaced
from timing import Effort

from limitkeeper import FixedWindow, Limiter, TokenBucket

KEY = "user:123456"
LIMIT, THREADS, ATTEMPTS = 1000, 8, 400
OTHERS = (
    ("limits", "fixed window"),
    ("limits", "sliding counter"),
    ("throttled-py", "token bucket"),
    ("pyrate-limiter", "GCRA"),
    ("token-bucket", "token bucket"),
    ("rust-py-rate-limit", "fixed window, bare"),
)
Ask = Callable[[], Any]


def limitkeeper_asker(rule: Callable[[str], Any]) -> Callable[[int], Ask]:
    def made(count: int) -> Ask:
        limiter = Limiter(rule(f"{count}/h"))
        return lambda: limiter.hit(KEY)

    return made


def peer_asker(package: str, rule: str) -> Callable[[int], Ask]:
    def made(count: int) -> Ask:
        peer = named(package, rule)
        names = peer.build(count, 3600) | {"k": KEY}
        exec(f"def ask(): return {peer.call}", names)
        return names["ask"]  # type: ignore[no-any-return]

    return made


def admitted(answer: Any) -> bool:
    """Peers return a bool, or an object with `limited`."""
    return not answer.limited if hasattr(answer, "limited") else bool(answer)


def together(work: Callable[[], Any], threads: int) -> float:
    """Runs `work` in so many threads at once; the seconds until the last is done."""
    gate = threading.Barrier(threads + 1)

    def runner() -> None:
        gate.wait()
        work()

    crew = [threading.Thread(target=runner) for _ in range(threads)]
    for one in crew:
        one.start()
    gate.wait()
    begun = time.perf_counter()
    for one in crew:
        one.join()
    return time.perf_counter() - begun


def rate(ask: Ask, threads: int, seconds: float) -> float:
    """Decisions a second of all threads together."""
    begun = time.perf_counter()
    for _ in range(200):
        ask()
    each = max(200, int(seconds / ((time.perf_counter() - begun) / 200) / threads))

    def work() -> None:
        for _ in range(each):
            ask()

    return each * threads / together(work, threads)


@contextmanager
def switching_often() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def off_by(made: Callable[[int], Ask], trials: int) -> tuple[int, int, set[str]]:
    """(most admitted above the limit, most refused below it, kinds of error) over the trials."""
    over = under = 0
    errors: set[str] = set()
    with switching_often():
        for _ in range(trials):
            ask = made(LIMIT)
            passed: list[int] = []

            def work(ask: Ask = ask, passed: list[int] = passed) -> None:
                try:
                    passed.append(sum(admitted(ask()) for _ in range(ATTEMPTS)))
                except Exception as error:
                    errors.add(type(error).__name__)

            together(work, THREADS)
            over, under = max(over, sum(passed) - LIMIT), max(under, LIMIT - sum(passed))
    return over, under, errors


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Threads",
        f"One key, all cores. Exactness: {THREADS} threads with {ATTEMPTS} attempts each at a limit of {LIMIT}, switching every "
        "microsecond; the most admitted above the limit and below it in any trial.",
    )
    head = ("limiter", "1 thread, decisions/s", "2 threads", "8 threads", "admitted above", "below", "errors")
    table = Table(head)
    makers = {
        "limitkeeper, token bucket": limitkeeper_asker(TokenBucket),
        "limitkeeper, fixed window": limitkeeper_asker(FixedWindow),
    }
    makers |= {named(*who).name: peer_asker(*who) for who in OTHERS}
    for name, made in makers.items():
        note(name)
        try:
            row = [median(rate(made(10**9), threads, effort.pick(300, 50) / 1000) for _ in range(3)) for threads in (1, 2, 8)]
            over, under, errors = off_by(made, effort.pick(15, 3))
        except Exception as error:  # not installed, or changed
            section.fail({name: f"{type(error).__name__}: {error}"})
            continue
        table.rows.append((name, *(spaced(int(value)) for value in row), str(over), str(under), ", ".join(sorted(errors))))
        if name.startswith("limitkeeper"):
            section.figure(f"{name}: admitted off the limit", float(over + under), 0, "calls")
    section.details = [table]
    return section
