"""Bytes per key: how much a process grows, one process for each limiter, with keys that only the limiter references.

limitkeeper is measured during the whole growth, because its memory peaks just after its index has doubled. Then all limiters idle
for two windows, are called with one other key for a while, and are measured again: how much was released?
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers import SYNC, named
from report import Section, Table, number, spaced
from timing import Effort

SAMPLE = 4096
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
OTHERS = (
    ("limits", "fixed window"),
    ("limits", "sliding counter"),
    ("throttled-py", "token bucket"),
    ("throttled-py", "GCRA"),
    ("pyrate-limiter", "GCRA"),
    ("token-bucket", "token bucket"),
    ("rust-py-rate-limit", "fixed window, bare"),
    ("rust-py-rate-limit", "sliding counter, bare"),
)
SLOW = (("limits", "sliding counter"), ("throttled-py", "token bucket"))  # left out at a million keys: half a minute each


def resident() -> int:
    """Bytes of this process in memory now (where the system only has the peak: that)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * PAGE
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def asker(who: str, count: int, seconds: int, keys: int) -> Callable[[str], Any]:
    """A function of one key: limitkeeper's hit, a peer's, or a dict that keeps a float."""
    if who == "limitkeeper":
        from limitkeeper import Limiter, MemoryStore, TokenBucket

        return Limiter(TokenBucket(f"{count} per {seconds} seconds"), store=MemoryStore(max_keys=2 * keys)).hit
    if who == "dict":
        known: dict[str, float] = {}
        return lambda key: known.setdefault(key, time.monotonic())
    peer = SYNC[int(who)]
    names = peer.build(count, seconds)
    exec(f"def ask(k): {peer.call}", names)
    return names["ask"]  # type: ignore[no-any-return]


def grow(who: str, keys: int, seconds: int) -> list[tuple[int, int]]:
    """(keys, bytes) as it grows; at last (-hits, bytes) once it has idled, and was called with another key so many times."""
    ask = asker(who, 1, seconds, keys)
    ask("warm")
    gc.collect()
    sizes = array("q", bytes(8 * (keys // SAMPLE + 4)))  # made beforehand: small objects in between would pin the peers' memory
    empty = resident()
    for i in range(1, keys + 1):
        ask(f"user:{i}")
        if i % SAMPLE == 0:
            sizes[i // SAMPLE] = resident() - empty
    full = resident() - empty
    hits = 0
    if seconds < 60:
        time.sleep(seconds * 2 + 0.5)
        while hits < (
            8 * keys if who == "limitkeeper" else 20_000
        ):  # it sweeps a few keys per call; the peers sweep at once or never
            for _ in range(20_000):
                ask("warm")
            hits += 20_000
        gc.collect()
        time.sleep(0.5)
    left = resident() - empty
    return [*((i * SAMPLE, size) for i, size in enumerate(sizes) if size), (keys, full), (-hits, left)]


def child(who: str, keys: int, seconds: int) -> list[tuple[int, int]]:
    done = subprocess.run(
        [sys.executable, __file__, who, str(keys), str(seconds)], capture_output=True, text=True, check=False, timeout=200
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else f"exit {done.returncode}")
    return [(int(n), int(size)) for n, size in json.loads(done.stdout)]


def limitkeeper_figures(section: Section, effort: Effort, note: Callable[[str], None]) -> Table:
    million = effort.pick(1_000_000, 200_000)
    most = effort.pick(1_350_000, 350_000)
    note(f"limitkeeper, {most} keys")
    samples = [(n, size) for n, size in child("limitkeeper", most, 3600) if n > 0]
    at = dict(samples)
    near = min(at, key=lambda n: abs(n - million))
    section.figure(f"bytes a key at {spaced(million)} keys", at[near] / near, 90, "B")
    for low in (2**17, 2**18) if effort.quick else (2**19, 2**20):
        after = [(n, size) for n, size in samples if low < n <= low * 1.25]
        keys, size = max(after, key=lambda pair: pair[1] / pair[0])
        section.figure(f"bytes a key, worst just after the doubling at {spaced(low)} (at {spaced(keys)})", size / keys, 115, "B")
    table = Table(("keys", "limitkeeper, bytes a key"))
    steps = [n for n, _ in samples if n % (SAMPLE * 16) == 0]
    table.rows = [(spaced(n), number(at[n] / n, "")) for n in steps]
    return table


def given_back(section: Section, effort: Effort, note: Callable[[str], None]) -> Table:
    keys, few = effort.pick(1_000_000, 200_000), effort.pick(100_000, 20_000)
    table = Table(("idle for two windows, then asked for one other key", "keys", "bytes a key before", "after", "given back"))
    asks = [("limitkeeper, token bucket", "limitkeeper", keys, 6), ("a dict of floats", "dict", few, 3)]
    asks += [(named(*who).name, str(SYNC.index(named(*who))), few, 3) for who in OTHERS]
    for (name, _, n, _), samples in together(asks, section, note, len(asks) // 2):
        before, after = dict(samples)[n], samples[-1][1]
        share = 100 * (1 - after / before)
        table.rows.append((name, spaced(n), number(before / n, ""), number(max(0, after) / n, ""), f"{max(0.0, share):.0f} %"))
        if name.startswith("limitkeeper"):
            section.figure("given back when idle", share, None, "%")
            section.notes.append(f"limitkeeper sweeps a few keys per call: after {spaced(-samples[-1][0])} hits of one other key")
    return table


def peers_at_scale(section: Section, effort: Effort, note: Callable[[str], None]) -> Table:
    keys = effort.pick(1_000_000, 100_000)
    table = Table((f"{spaced(keys)} keys", "bytes a key"))
    asks = [("limitkeeper, token bucket", "limitkeeper", keys, 3600), ("a dict of floats", "dict", keys, 3600)]
    asks += [(named(*who).name, str(SYNC.index(named(*who))), keys, 3600) for who in OTHERS if who not in SLOW]
    for (name, *_), samples in together(asks, section, note):
        table.rows.append((name, number(dict(samples)[keys] / keys, "")))
    return table


def together(asks: list[tuple[str, str, int, int]], section: Section, note: Callable[[str], None], at_once: int = 2) -> Any:
    """Runs a few children at a time (nothing is timed here), and yields the result of each."""
    failed: dict[str, str] = {}

    def one(ask: tuple[str, str, int, int]) -> list[tuple[int, int]] | None:
        name, who, keys, seconds = ask
        try:
            return child(who, keys, seconds)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            return None

    with ThreadPoolExecutor(at_once) as pool:
        for ask, samples in zip(asks, pool.map(one, asks), strict=True):
            note(f"{ask[0]}, {ask[2]} keys")
            if samples:
                yield ask, samples
    section.fail(failed)


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Memory",
        "Growth of the resident set of a fresh process, keys `user:1` … made on the way and kept by nobody else; token bucket. "
        f"Watched every {SAMPLE} keys; the worst moment up to a quarter past a doubling of the index counts as just after it.",
    )
    growth = limitkeeper_figures(section, effort, note)
    section.details = [peers_at_scale(section, effort, note), given_back(section, effort, note), growth]
    return section


if __name__ == "__main__":
    print(json.dumps(grow(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
