"""`make soak`: worker processes make traffic in every mode while faults strike in random order, for minutes; then a table.

    LIMITKEEPER_SOAK_SECONDS=120 LIMITKEEPER_SOAK_SEED=7 LIMITKEEPER_SOAK_FAULT=killed python tests/soak.py

A round is one fault in the middle of some seconds of traffic, on limiters of its own name, so that each round has its own bound.
It exits with 1 when more than the mode's bound was admitted, a call took longer than its budget, a call never returned, an error
was not limitkeeper's own, or a mode did not recover. The printed seed gives the same order again; with a part of a name only
those faults strike.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from fault_lab.faults import FAULTS, MORE_FAULTS, Fault, Laboratory
from fault_lab.modes import MODES
from fault_lab.round_result import Record, as_data, judged, markdown, plain, table
from fault_lab.traffic import Tally
from fault_lab.workers import Worker
from servers.faketime import Skew, faketime_library

OUT = Path(__file__).resolve().parents[1] / "out"
WORKERS = 2


class Soak:
    """The whole soak: a fault lab, worker processes, and the results so far."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self.seed = seconds, seed
        self.dice = random.Random(seed)
        self.by_fault: dict[str, Record] = defaultdict(Record)
        self.by_mode: dict[str, Record] = defaultdict(Record)
        self.stack = ExitStack()
        self.lab = self.stack.enter_context(Laboratory(houses=True))
        self.skew = Skew() if faketime_library() else None
        self.lab.skew = self.skew
        self.crew: list[Worker] = []
        OUT.mkdir(exist_ok=True)
        self.log = self.stack.enter_context((OUT / "soak.log").open("w"))

    def order(self) -> Iterator[Fault]:
        """Every fault once in random order, again and again."""
        known = [fault for fault in (*FAULTS, *MORE_FAULTS) if self.lab.fakes_time or not fault.fakes_time]
        known = [fault for fault in known if os.environ.get("LIMITKEEPER_SOAK_FAULT", "") in fault.name]
        while True:
            yield from self.dice.sample(known, len(known))

    def gather(self) -> None:
        for mode in MODES.values():
            for number in range(WORKERS):
                self.crew.append(Worker(mode, self.lab.places, self.skew if number else None, self.log))
        self.lab.crew = self.crew

    def round(self, number: int, fault: Fault) -> list[str]:
        """One fault during traffic; returns the broken promises."""
        names = {worker: f"{worker.mode.name}:{number}" for worker in self.crew}
        begun = time.monotonic()
        for worker, name in names.items():
            worker.tell(f"round {name}")
        time.sleep(self.dice.uniform(0.4, 0.8))
        try:
            fault.strike(self.lab)
            time.sleep(self.dice.uniform(0.3, 1.2))
        finally:
            fault.heal(self.lab)
        healed = time.monotonic()
        time.sleep(max(mode.recovery for mode in MODES.values()) + 1)
        for worker in names:
            worker.tell("stop")
        return self.judge(fault, names, begun, healed)

    def judge(self, fault: Fault, names: dict[Worker, str], begun: float, healed: float) -> list[str]:
        tallies: dict[str, Tally] = defaultdict(Tally)
        for worker, name in names.items():
            alive = worker.process.poll() is None
            if alive and not worker.wait_for("total", name, 15):
                tallies[worker.mode.name].hung += 1
            tallies[worker.mode.name].add(worker.tally(name))
        seconds, broken = time.monotonic() - begun, []
        for name, tally in tallies.items():
            record = judged(MODES[name], fault, tally, seconds, WORKERS, healed)
            broken += [f"{fault} / {name}: {what}" for what in record.broken]
            self.by_fault[fault.name].add(record)
            self.by_mode[name].add(record)
        self.by_fault[fault.name].rounds -= len(tallies) - 1
        for worker in names:
            if worker.process.poll() is not None:
                worker.start()
        return broken

    def run(self) -> int:
        end, number, broken = time.monotonic() + self.seconds, 0, []
        print(f"soak: {self.seconds:.0f} s, seed {self.seed}, {len(MODES)} modes with {WORKERS} processes each", flush=True)
        self.gather()
        for fault in self.order():
            if time.monotonic() > end:
                break
            number += 1
            found = self.round(number, fault)
            left = max(0, end - time.monotonic())
            print(f"soak: round {number:3}  {fault.name:34} {'BROKEN' if found else 'ok':7} {left:4.0f} s left", flush=True)
            for what in found:
                print(f"      {what}", flush=True)
            broken += found
        self.write(number, broken)
        return 1 if broken else 0

    def write(self, rounds: int, broken: list[str]) -> None:
        tables = [table("fault", dict(sorted(self.by_fault.items()))), table("mode", self.by_mode)]
        print("\n" + "\n\n".join(plain(rows) for rows in tables))
        total = sum(record.calls for record in self.by_mode.values())
        words = f"{rounds} faults survived" if not broken else f"{rounds} faults, {len(broken)} promises BROKEN"
        summary = f"{words}, {total:,} decisions made, seed {self.seed}"
        if any(record.restless for record in self.by_mode.values()):
            summary += "; restless: the machine woke threads so late that recovery could not be judged"
        print(f"\nsoak: {summary}")
        text = "\n\n".join(["# The last soak", summary, *(markdown(rows) for rows in tables), *broken])
        (OUT / "soak.md").write_text(text + "\n")
        data = {
            "seed": self.seed,
            "rounds": rounds,
            "broken": broken,
            "faults": as_data(self.by_fault),
            "modes": as_data(self.by_mode),
        }
        (OUT / "soak.json").write_text(json.dumps(data, indent=1))

    def close(self) -> None:
        for worker in self.crew:
            worker.close()
        if self.skew is not None:
            self.skew.close()
        self.stack.close()


def main() -> int:
    seconds = float(os.environ.get("LIMITKEEPER_SOAK_SECONDS", "120"))
    soak = Soak(seconds, int(os.environ.get("LIMITKEEPER_SOAK_SEED", secrets.randbelow(10**6))))
    try:
        return soak.run()
    finally:
        soak.close()


if __name__ == "__main__":
    sys.exit(main())
