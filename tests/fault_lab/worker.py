"""One process of a soak: makes traffic on one store, round after round, and reports its answers.

It reads lines: `round NAME` begins a round with limiters of that name, `stop` ends it, and the end of input ends the process. It
writes lines of JSON: a progress every fifth of a second, so that what a killed worker had been admitted is known, and a total.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from .modes import MODES
from .traffic import LIMITS, Tally, Traffic

SAY = threading.Lock()


def say(kind: str, round_name: str, tally: Tally) -> None:
    with SAY:
        print(json.dumps({"kind": kind, "round": round_name, **vars(tally)}), flush=True)


def report(traffic: Traffic, round_name: str, ended: threading.Event) -> None:
    while not ended.wait(0.2):
        say("progress", round_name, traffic.seen())


def one_round(store: Any, name: str, pause: float) -> None:
    traffic = Traffic(store, LIMITS, name, threads=2, tasks=2, pause=pause).start()
    ended = threading.Event()
    reporting = threading.Thread(target=report, args=(traffic, name, ended), daemon=True)
    reporting.start()
    sys.stdin.readline()
    ended.set()
    reporting.join()
    say("total", name, traffic.stop())


def main() -> None:
    mode, places, pause = MODES[sys.argv[1]], json.loads(sys.argv[2]), float(sys.argv[3])
    store = mode.make(places)
    say("ready", "", Tally())
    while line := sys.stdin.readline():
        one_round(store, line.split(maxsplit=1)[1].strip(), pause)
    store.close()


if __name__ == "__main__":
    main()
