"""The commands `limitkeeper plan` (from numbers, `analyze` files, `probe` a URL, `suggest` changes of a policy) and `replay`."""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from ..errors import ConfigurationError
from ..observe.key_hash import KeyHash
from ..policy import Policy
from ..policy.key_inspection import key_text
from .capacity_formula import Capacity, capacity
from .limit_plan import IDENTITIES, make_plan
from .limit_shares import parse_amounts
from .load_latency_curve import LoadStep
from .log_replay import MAX_REQUESTS, decided
from .measured_capacity import Analysis, analyze
from .measurement_files import LogReader, read_measurements
from .policy_writer import policy_text
from .probe import Probe, ProbeSettings
from .quantities import duration_text, number_of, rps, seconds_of
from .replay_report import CSV_HEADER, READ_AHEAD, ReplayReport
from .report import Report
from .request_log import LogEntry
from .slo import Slo
from .suggest import Suggestions, suggest_from_log, suggest_from_metrics

OK, ERRORS, INTERRUPTED = 0, 1, 130
BAR = 24


def run_numbers(args: argparse.Namespace) -> int:
    if args.p95 is None:
        raise ConfigurationError("--p95 is missing; write it like --pods 10 --concurrency 40 --p95 800ms, or see --help")
    sizes = {"threads": args.threads, "db_pool": args.db_pool, "mean": args.mean}
    dependencies = parse_amounts(",".join(args.dependency)) if args.dependency else {}
    found = capacity(
        pods=args.pods or 1,
        concurrency=args.concurrency,
        p95=args.p95,
        margin=args.margin,
        dependencies=dependencies,
        **sizes,
    )
    return publish(found, args)


def run_analyze(args: argparse.Namespace) -> int:
    window = float(seconds_of(args.window, "window"))
    files = [read_measurements(file, unit=args.unit, window=window) for file in args.files]
    return publish(analyze(files, slo=Slo.of(args.slo), margin=args.margin, total_concurrency=total_of(args)), args)


def total_of(args: argparse.Namespace) -> int | None:
    """Pods × concurrency, where the concurrency is given."""
    if args.concurrency is None:
        return None
    return capacity(pods=args.pods or 1, concurrency=args.concurrency, p95=1).total_concurrency


def run_probe(args: argparse.Namespace) -> int:
    settings = ProbeSettings(
        args.url,
        Slo.of(args.slo),
        args.start,
        args.factor,
        args.max_rate,
        float(seconds_of(args.step, "step")),
        float(seconds_of(args.time, "time")),
        args.method,
        headers_of(args.header),
        args.data.encode(),
        args.allow_remote,
    )
    bar = ProgressBar(sys.stderr)
    probe = Probe(settings, on_step=bar.step, on_progress=bar.progress)
    code = OK
    try:
        asyncio.run(probe.run())
    except KeyboardInterrupt:
        code = INTERRUPTED
    if not probe.measurements.steps:
        raise ConfigurationError(f"the probe ended before its first step: {probe.stopped}")
    found = analyze(probe.measurements, slo=settings.slo, margin=args.margin, total_concurrency=total_of(args))
    return max(code, publish(found, args))


def headers_of(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    wrong = [word for word, (_, equals, _) in zip(words, pairs, strict=True) if not equals]
    if wrong:
        raise ConfigurationError(f"{wrong[0]!r} is no header; write NAME=VALUE")
    return {name.strip(): value for name, _, value in pairs}


class ProgressBar:
    """A bar on a terminal, and a line per step anywhere."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.terminal = out, out.isatty()
        self._shown = -1

    def progress(self, share: float, rate: float) -> None:
        filled = min(BAR, int(share * BAR))
        if self.terminal and filled != self._shown:
            self._shown = filled
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r[{bar}] {share:4.0%} of the time, {rps(rate)} ", end="", file=self.out, flush=True)

    def step(self, step: LoadStep) -> None:
        p95 = duration_text(step.percentiles[95.0]) if 95.0 in step.percentiles else "–"
        text = f"{rps(step.load)}: p95 {p95}, {step.error_share:.1%} errors, {step.refused_share:.1%} refused"
        print(f"\r{text:<60}" if self.terminal else text, file=self.out, flush=True)
        self._shown = -1


def publish(source: Capacity | Analysis, args: argparse.Namespace) -> int:
    """Prints and writes the report; the policy file comes last, so that an error in it loses nothing."""
    keys = {name: getattr(args, f"per_{name}") for name in IDENTITIES if getattr(args, f"per_{name}") is not None}
    plan = None
    if source.limit is None:
        print(Report(source).text(), file=sys.stderr if args.json else sys.stdout)
    if source.limit is not None or keys or args.split or args.endpoints or args.write_policy:
        plan = make_plan(
            source,
            split_by=args.split,
            endpoints=args.endpoints,
            per_key=keys,
            internal=args.internal,
            burst=args.burst,
            oversubscription=args.oversubscribe,
            match=args.match,
            name=args.name,
        )
    report = Report(source, plan)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    elif plan is not None:
        print(report.text())
    if args.html:
        write(args.html, report.html(args.name), args.overwrite)
    if args.write_policy and plan is not None:
        write(args.write_policy, policy_text(plan), args.overwrite)
    broken = isinstance(source, Analysis) and any(not check.met for check in source.checks)
    return ERRORS if broken else OK


def write(path: str, text: str, overwrite: bool) -> None:
    try:
        with Path(path).open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(f"{path} exists; choose another name, or add --overwrite") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: can't write the file: {(error.strerror or str(error)).lower()}") from None
    print(f"wrote {path}", file=sys.stderr)


def run_suggest(args: argparse.Namespace) -> int:
    if args.write_policy and os.path.realpath(args.write_policy) == os.path.realpath(args.policy):
        raise ConfigurationError("the policy in force is never changed by this command; write the proposal to another file")
    given, notes = args.ceiling, list[str]()
    ceiling = None if given is None else float(number_of(given, "ceiling", "write measured RPS, as in 350"))
    if args.log is not None:
        reader = LogReader(args.log)
        found = suggest_from_log(args.policy, collected(reader), ceiling=ceiling, stage=args.stage)
        notes = reader.notes()
    else:
        from .prometheus_text import read_metrics

        metrics = read_metrics(args.metrics)
        found = suggest_from_metrics(args.policy, metrics, slo=Slo.of(args.slo), ceiling=ceiling, stage=args.stage)
    print(suggestions_json(found, args.hash_keys) if args.json else suggestions_text(found, args.hash_keys, args.stage, notes))
    if args.write_policy:
        write(args.write_policy, found.after, args.overwrite)
    return OK


def suggestions_text(found: Suggestions, hashed: bool, stage: str, notes: Sequence[str]) -> str:
    lines = []
    for one in found.suggestions:
        change = f" to {one.new}" if one.new and one.new != one.old else ""
        lines.append(f"{one.rule}: {one.action}{change}: {one.reason}.")
        lines += [f"    would have refused {key_text(name)}: {count} requests" for name, count in shown(one.refused, hashed)]
    lines += [*notes, "", (found.diff or "No change is proposed.").rstrip("\n")]
    if found.diff and stage == "shadow":
        lines.append("\nNothing was changed. Lowered limits begin in shadow; use --stage force once they refuse as intended.")
    return "\n".join(lines)


def collected(reader: LogReader) -> list[LogEntry]:
    """The requests of a log, at most MAX_REQUESTS; Ctrl-C ends reading, and what was read is used."""
    found: list[LogEntry] = []
    try:
        found.extend(islice(reader, MAX_REQUESTS))
    except KeyboardInterrupt:
        reader.interrupted = True
    if len(found) == MAX_REQUESTS:
        print(f"limitkeeper: the first {MAX_REQUESTS:,} requests of the log are used", file=sys.stderr)
    return found


def suggestions_json(found: Suggestions, hashed: bool) -> str:
    rows = [
        {"rule": one.rule, "action": one.action, "old": one.old, "new": one.new, "reason": one.reason}
        | {"refused": [{"key": key, "requests": count} for key, count in shown(one.refused, hashed)]}
        for one in found.suggestions
    ]
    return json.dumps({"suggestions": rows, "diff": found.diff, "policy": found.after}, indent=2)


def shown(refused: Sequence[tuple[str, int]], hashed: bool) -> list[tuple[str, int]]:
    """The keys, or their keyed hashes: keys may identify people."""
    digest = KeyHash()
    return [(digest(key) if hashed else key or "all keys together", count) for key, count in refused]


# replay ------------------------------------------------------------------------------------------------------------------------


def run_replay(args: argparse.Namespace) -> int:
    """Replays a log with bounded memory. What was replayed before Ctrl-C is reported."""
    policy, reader, code = Policy.load(args.policy), LogReader(args.log), OK
    report, progress = ReplayReport(policy, KeyHash() if args.hash_keys else str), ReplayProgress(sys.stderr)
    rows = csv.writer(sys.stdout, lineterminator="\n") if args.csv else None
    if rows is not None:
        rows.writerow(CSV_HEADER)
    try:
        for one in decided(reader, policy, READ_AHEAD):
            for row in report.add(one):
                if rows is not None:
                    rows.writerow(row)
            progress.show(report.requests, report.refused)
    except KeyboardInterrupt:
        reader.interrupted, code = True, INTERRUPTED
    progress.end()
    notes = reader.notes()
    if args.json:
        print(json.dumps(report.as_dict(args.top) | {"lines": reader.lines, "skipped": reader.skipped, "notes": notes}, indent=2))
    elif rows is None:
        print("\n".join([report.text(args.log, args.top), *notes]))
    else:
        print("\n".join([report.summary(args.log), *notes]), file=sys.stderr)
    return code


class ReplayProgress:
    """A line on a terminal that counts, every 10 000 requests; elsewhere one every million."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.terminal = out, out.isatty()
        self.every = 10_000 if self.terminal else 1_000_000

    def show(self, requests: int, refused: int) -> None:
        if requests % self.every == 0:
            text = f"replayed {requests:,} requests, {refused:,} refused"
            print(f"\r{text:<60}" if self.terminal else text, end="" if self.terminal else "\n", file=self.out, flush=True)

    def end(self) -> None:
        if self.terminal:
            print(f"\r{'':<60}\r", end="", file=self.out, flush=True)
