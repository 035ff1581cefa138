"""The command that runs fault schedules by their seeds, and shrinks and prints those that fail.

python -m limitkeeper.simulate.faults --count 1000              every mode in turn, seeds from 0
python -m limitkeeper.simulate.faults --mode leased --seed 7    one schedule, with what it did
python -m limitkeeper.simulate.faults … --only 2,5              the same with only these of its faults
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence

from .fault_run import MODES, History, run_schedule, schedule_of
from .fault_schedule import Schedule, shrink
from .history_check import broken_promises

OK, ERRORS = 0, 1


def check_schedule(schedule: Schedule) -> tuple[History, list[str]]:
    """Runs a schedule; what it did, and which promises were broken."""
    history = run_schedule(schedule)
    return history, broken_promises(history)


def failures(schedules: Iterable[Schedule]) -> Iterator[tuple[Schedule, list[str]]]:
    """The schedules that fail, shrunken, with what they break."""
    for schedule in schedules:
        if check_schedule(schedule)[1]:
            small = shrink(schedule, lambda one: bool(check_schedule(one)[1]))
            yield small, check_schedule(small)[1]


def seeds(modes: Sequence[str], first: int, count: int) -> Iterator[Schedule]:
    """So many schedules, the modes in turn."""
    for number in range(count):
        yield schedule_of(modes[number % len(modes)], first + number // len(modes))


def describe(schedule: Schedule, broken: Sequence[str]) -> str:
    faults = [f"    {fault}" for fault in schedule.active()] or ["    no faults"]
    return "\n".join([schedule.command, *faults, *[f"  broken: {one}" for one in broken]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m limitkeeper.simulate.faults", description="Run fault schedules by seed.")
    parser.add_argument("--mode", action="append", choices=sorted(MODES), help="default: all in turn")
    parser.add_argument("--seed", type=int, help="one seed of one mode: print what it did")
    parser.add_argument("--only", metavar="NUMBERS", help="with --seed: only these of its faults, as in 0,3; or none")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=200, help="schedules to run (default: 200)")
    args = parser.parse_args(arguments)
    if args.seed is not None:
        return replay(args, parser)
    found = 0
    for number, schedule in enumerate(seeds(args.mode or list(MODES), args.first, args.count), 1):
        for small, broken in failures([schedule]):
            found += 1
            print(describe(small, broken), flush=True)
        if number % 100 == 0 or number == args.count:
            print(f"faults: {number} of {args.count} schedules, {found} broken", file=sys.stderr, flush=True)
    return ERRORS if found else OK


def replay(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if len(args.mode or ()) != 1:
        parser.error("--seed needs one --mode")
    schedule = schedule_of(args.mode[0], args.seed)
    if args.only is not None:
        words = [] if args.only == "none" else args.only.split(",")
        if not all(word.isdigit() and int(word) < len(schedule.faults) for word in words):
            parser.error(f"--only {args.only}: expected numbers from 0 to {len(schedule.faults) - 1}, or none")
        schedule = schedule.only([int(word) for word in words])
    history, broken = check_schedule(schedule)
    limits = ", ".join(f"{name} {named.limit}" for name, named in history.limits.items())
    print(f"{len(schedule.nodes)} nodes, {len(schedule.servers)} servers; {limits}")
    print(f"{history.calls} calls, {len(history.admitted)} admitted, {history.failed_calls} network calls failed")
    print(describe(schedule, broken), "" if broken else "\nall promises kept", sep="")
    return ERRORS if broken else OK


if __name__ == "__main__":
    logging.getLogger("limitkeeper").setLevel(logging.CRITICAL)  # every fault would be a warning
    sys.exit(main())
