"""How a figure is timed: in short batches, all cases taking turns; the smallest batch of a repeat, the median of the repeats.

A batch lasts about 0.2 ms, shorter than most disturbances of a shared machine, and a slow moment affects every case alike. The
cost of the loop is in every figure, in the floors too. The process keeps to one core while it times.

Rejected: one long loop per case (other load on the machine affects one of them), and the mean (it measures the neighbours).
"""

from __future__ import annotations

import gc
import os
import timeit
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

BATCH_NS = 200_000


@dataclass
class Case:
    """`call` is a statement, written as a user would: the limiter a global of the module, the key `k` a local variable.

    `before` runs before each batch and gives that batch's key.
    """

    name: str
    call: str
    names: dict[str, Any]
    before: Callable[[], Any] | None = None
    most: int = 5000
    size: int = 1
    best: list[float] = field(default_factory=list)

    def timer(self) -> timeit.Timer:
        known = self.names | {"before": self.before or (lambda: self.names["k"])}
        return timeit.Timer(self.call, "k = before()", globals=known)

    def calibrate(self, timer: timeit.Timer) -> None:
        """How many calls make a batch."""
        timer.timeit(1 if self.most == 1 else 10)
        if self.most == 1:
            return
        each = max(1.0, min(timer.timeit(20) for _ in range(3)) / 20 * 1e9)
        self.size = max(1, min(self.most, int(BATCH_NS / each)))


@dataclass
class Effort:
    """The amount of work of a run; --quick does less."""

    quick: bool = False

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def measure(
    cases: Iterable[Case], effort: Effort, note: Callable[[str], None], most: int = 25
) -> tuple[dict[str, float], dict[str, str]]:
    """Nanoseconds per call of every case, and the errors of those that failed; `most` batches to a repeat."""
    failed: dict[str, str] = {}
    timers: list[tuple[Case, timeit.Timer]] = []
    for case in cases:
        try:
            timer = case.timer()
            case.calibrate(timer)
            timers.append((case, timer))
        except Exception as error:  # a peer that fails is reported, and stops nothing
            failed[case.name] = f"{type(error).__name__}: {error}"
    repeats, batches = effort.pick(9, 3), effort.pick(most, min(most, 6))
    for repeat in range(repeats):
        note(f"repeat {repeat + 1} of {repeats}, {len(timers)} cases")
        smallest = {case.name: float("inf") for case, _ in timers}
        for _ in range(batches):
            for case, timer in timers:
                smallest[case.name] = min(smallest[case.name], timer.timeit(case.size) / case.size)
        for case, _ in timers:
            case.best.append(smallest[case.name] * 1e9)
    return {case.name: median(case.best) for case, _ in timers}, failed


@contextmanager
def one_core() -> Any:
    """Keeps this process to one core where the system allows it, and the garbage collector out of the way."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if allowed:
        os.sched_setaffinity(0, {max(allowed)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if allowed:
            os.sched_setaffinity(0, allowed)
