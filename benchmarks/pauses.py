"""The longest single call, while a million keys come and while they go.

On a shared machine the longest call of one run belongs to the machine. So the same growth is run several times, each in a fresh
process, and every call above 50 µs is noted with its number: a pause that belongs to the library comes back at the same number.
The figure is the largest, over the numbers, of the smallest, over the runs. Beside it the raw longest, and a plain dict under
the same rule.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from memory import asker
from report import Section, Table, spaced
from timing import Effort

NOTED_NS = 50_000
NEAR = 16  # calls that count as the same number
WINDOW = 4


def timed_calls(ask: Callable[[str], Any], keys: Any) -> list[tuple[int, int]]:
    """(number, nanoseconds) of every call that took long."""
    clock, noted = time.perf_counter_ns, []
    for i, key in enumerate(keys):
        begun = clock()
        ask(key)
        took = clock() - begun
        if took > NOTED_NS:
            noted.append((i, took))
    return noted


def come_and_go(who: str, keys: int) -> dict[str, list[tuple[int, int]]]:
    """One run: the keys come; then, for limitkeeper, they idle and are swept by hits of one other key."""
    ask = asker(who, 1, WINDOW, keys)
    ask("warm")
    gc.collect()
    gc.disable()
    found = {"growing": timed_calls(ask, (f"user:{i}" for i in range(keys)))}
    if who == "limitkeeper":
        time.sleep(WINDOW + 0.2)
        found["sweeping"] = swept(ask, keys)
    return found


def swept(ask: Any, keys: int) -> list[tuple[int, int]]:
    """Hits of one key until nearly all the others are gone."""
    noted: list[tuple[int, int]] = []
    for turn in range(20):
        if len(ask.__self__.store) <= keys // 100:
            return noted
        noted += [(turn * keys + i, took) for i, took in timed_calls(ask, ("warm" for _ in range(keys)))]
    raise AssertionError(f"{len(ask.__self__.store)} of {keys} idle keys are still there after {20 * keys} hits")


def child(who: str, keys: int) -> dict[str, list[tuple[int, int]]]:
    done = subprocess.run([sys.executable, __file__, who, str(keys)], capture_output=True, text=True, check=False, timeout=200)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else f"exit {done.returncode}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def comes_back(runs: list[list[tuple[int, int]]]) -> tuple[float, int]:
    """The longest pause that every run had at the same number, in ms, and that number; 0 when none comes back."""
    by_number: list[dict[int, int]] = []
    for noted in runs:
        longest: dict[int, int] = {}
        for i, took in noted:
            longest[i // NEAR] = max(took, longest.get(i // NEAR, 0))
        by_number.append(longest)
    shared = set(by_number[0]).intersection(*by_number[1:])
    worst = max(((min(longest[i] for longest in by_number), i * NEAR) for i in shared), default=(0, 0))
    return worst[0] / 1e6, worst[1]


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    keys, runs = effort.pick(1_000_000, 200_000), effort.pick(5, 3)
    section = Section(
        "Pauses",
        f"Every call timed while {spaced(keys)} keys come, and while they are swept by hits of one other key; {runs} fresh "
        "processes. "
        "What comes back at the same call in every run is the library's; the raw longest is the machine's as well.",
    )
    table = Table(("longest single call", "comes back, ms", "at call", "raw longest, ms", "calls over 50 µs, per run"))
    found: dict[str, list[list[tuple[int, int]]]] = {}
    for who in ("limitkeeper", "dict"):
        for i in range(runs):
            note(f"{who}, run {i + 1} of {runs}")
            for phase, noted in child(who, keys).items():
                found.setdefault(f"{who} {phase}", []).append(noted)
    for name, noted_runs in found.items():
        pause, at = comes_back(noted_runs)
        raw = max((took for noted in noted_runs for _, took in noted), default=0) / 1e6
        many = ", ".join(str(len(noted)) for noted in noted_runs)
        goal = 0.2 if name.startswith("limitkeeper") else None
        section.figure(f"longest call, {name}", pause, goal, "ms", shown=None if pause else "under 0.05 ms")
        table.rows.append((name, f"{pause:.3f}" if pause else "none over 0.05", spaced(at) if pause else "", f"{raw:.3f}", many))
    section.details = [table]
    return section


if __name__ == "__main__":
    print(json.dumps(come_and_go(sys.argv[1], int(sys.argv[2]))))
